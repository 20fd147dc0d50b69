"""Reads one device from NVML. Constant facts are read once, all others each time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from vgpud.hardware.compute import Handle, with_compute
from vgpud.hardware.mig import read_division, read_instances, read_profiles
from vgpud.hardware.nvml import Nvml
from vgpud.hardware.repair import read_repair
from vgpud.model.device import (
    ComputeMode,
    Device,
    DeviceProcess,
    Link,
    Mig,
    MigProfile,
    Virtualisation,
)
from vgpud.model.view import Vitals
from vgpud.proc import has_ended

# FP32 cores of one multiprocessor (SM) by compute capability. Source: CUDA C++ Programming Guide, "Arithmetic
# Instructions", throughput of 32-bit floating-point add per clock cycle per SM.
_CORES_PER_SM: dict[tuple[int, int], int] = {
    (3, 0): 192,
    (3, 5): 192,
    (3, 7): 192,
    (5, 0): 128,
    (5, 2): 128,
    (5, 3): 128,
    (6, 0): 64,
    (6, 1): 128,
    (6, 2): 128,
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
    (12, 1): 128,
}


def sm_count(
    cores: int | None, capability: tuple[int, int] | None, largest_profile: int | None
) -> int | None:
    """Number of SMs of the whole card, or None if it cannot be determined: NVML reports CUDA cores, not SMs.

    The number of CUDA cores is used first, because the largest MIG profile can be smaller than the card
    (A100: 98 of 108 SMs).
    """
    per_sm = _CORES_PER_SM.get(capability) if capability is not None else None
    if cores and per_sm and cores % per_sm == 0:
        return cores // per_sm
    return largest_profile


# numbers of nvmlGpuTopologyLevel_t in nvml.h
_LEVELS: dict[int, Link] = {
    0: Link.INTERNAL,
    10: Link.SINGLE,
    20: Link.MULTIPLE,
    30: Link.HOSTBRIDGE,
    40: Link.NODE,
    50: Link.SYSTEM,
}
_NVLINK = 2  # value of NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0  # value of NVML_P2P_STATUS_OK


def read_links(nvml: Nvml, handles: Mapping[str, Handle]) -> dict[tuple[str, str], Link]:
    """The link of every pair of devices (by UUID); each pair is in the result in both orders."""
    links: dict[tuple[str, str], Link] = {}
    for (one, first), (other, second) in combinations(handles.items(), 2):
        links[one, other] = links[other, one] = _link(nvml, first, second)
    return links


def _link(nvml: Nvml, first: Handle, second: Handle) -> Link:
    if nvml.call("nvmlDeviceGetP2PStatus", first, second, _NVLINK) == _P2P_OK:
        return Link.NVLINK
    level = nvml.call("nvmlDeviceGetTopologyCommonAncestor", first, second)
    return _LEVELS.get(level, Link.UNKNOWN)


# numbers of nvmlComputeMode_t and nvmlGpuVirtualizationMode_t in nvml.h
COMPUTE_MODES: dict[int, ComputeMode] = {
    0: ComputeMode.DEFAULT,
    1: ComputeMode.EXCLUSIVE_THREAD,
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}
_VIRTUALISATION: dict[int, Virtualisation] = {
    0: Virtualisation.NONE,
    1: Virtualisation.PASSTHROUGH,
    2: Virtualisation.VGPU_GUEST,
    3: Virtualisation.HOST_VGPU,
    4: Virtualisation.HOST_VSGA,
}
_NO_INSTANCE = 0xFFFFFFFF  # gpuInstanceId of a process outside MIG, as in nvml.h
_LARGEST_PID = 2**31 - 1  # largest number that a pid_t can hold
_MEMORY_V2 = 0x02000028  # version word of nvmlMemory_v2: the size of the struct, and 2 in the top byte
_MPS_SINCE = (3, 5)  # least compute capability for MPS: CUDA MPS documentation, "Limitations"
_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NODE_SCOPE = 0  # value of NVML_AFFINITY_SCOPE_NODE
_TEMPERATURE_GPU = 0  # value of NVML_TEMPERATURE_GPU in nvmlTemperatureSensors_t of nvml.h
_NODE_WORDS = 16  # length of the memory affinity mask in words: 1024 NUMA nodes


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Static:
    """Cached facts of a device. They are valid while `version` is unchanged."""

    version: tuple[object, ...]
    name: str
    pci_bus_id: str
    pcie_root: str
    pci_device_id: int | None
    capability: tuple[int, int] | None
    sm_count: int | None
    numa_node: int | None
    virtualisation: Virtualisation
    profiles: tuple[MigProfile, ...]

    @property
    def mps_capable(self) -> bool:
        """Can the device run MPS? MPS needs compute capability 3.5, and does not work inside a vGPU guest."""
        enough = self.capability is not None and self.capability >= _MPS_SINCE
        return enough and self.virtualisation is not Virtualisation.VGPU_GUEST


class Reader:
    """Reads devices. Its methods run inside workers only."""

    def __init__(self, nvml: Nvml, host_root: Path) -> None:
        self._nvml = nvml
        self._host_root = host_root
        # the compute instance profiles by (driver, device, profile id), as read from the first existing
        # instance
        self._divisions: dict[tuple[str, str, int], tuple[MigProfile, ...]] = {}

    def device(
        self, handle: Handle, blank: Device, cached: Static | None, driver: str
    ) -> tuple[Device, Static]:
        """Reads a device and returns `blank` (with uuid and index) filled in. Raises NvmlRefusal if the
        device does not work.
        """
        call = self._nvml.call
        memory = read_memory(self._nvml, handle)
        mode = call("nvmlDeviceGetMigMode", handle)
        version = (driver, memory.total_bytes, tuple(mode) if mode is not None else None)
        if cached is None or cached.version != version:
            profiles = read_profiles(self._nvml, handle, memory.total_bytes) if mode is not None else ()
            cached = self._static(handle, version, profiles)
        mig = _read_mig(self._nvml, handle, mode, cached.profiles)
        profiles = self._divided(handle, (driver, blank.uuid), mig)
        if profiles is not cached.profiles:
            cached, mig = replace(cached, profiles=profiles), replace(mig, profiles=profiles)
        repair = read_repair(self._nvml, handle, blank.uuid)
        device = replace(
            blank,
            name=cached.name,
            minor=call("nvmlDeviceGetMinorNumber", handle),
            pci_bus_id=cached.pci_bus_id,
            pcie_root=cached.pcie_root,
            pci_device_id=cached.pci_device_id,
            memory_total_bytes=memory.total_bytes,
            memory_reserved_bytes=memory.reserved_bytes,
            memory_used_bytes=memory.used_bytes,
            sm_count=cached.sm_count,
            compute_capability=cached.capability,
            mig=mig,
            compute_mode=COMPUTE_MODES.get(call("nvmlDeviceGetComputeMode", handle), ComputeMode.DEFAULT),
            mps_capable=cached.mps_capable,
            numa_node=cached.numa_node,
            virtualisation=cached.virtualisation,
            processes=read_processes(self._nvml, handle),
            health_reason=repair.ailment or repair.notice,
            ailment=repair.ailment,
        )
        return device, cached

    def _divided(self, handle: Handle, card: tuple[str, str], mig: Mig) -> tuple[MigProfile, ...]:
        """The GPU instance profiles with the compute instance profiles that are known for each. If nothing is
        new, the same tuple is returned.
        """
        for instance in mig.instances:
            profile = mig.profile(instance.profile_id)
            if profile is not None and (*card, profile.id) not in self._divisions:
                read = read_division(self._nvml, handle, instance, profile)
                self._divisions[*card, profile.id] = read.compute
        known = [with_compute(p, self._divisions.get((*card, p.id), p.compute)) for p in mig.profiles]
        if all(new is old for new, old in zip(known, mig.profiles, strict=True)):
            return mig.profiles
        return tuple(known)

    def _static(
        self, handle: Handle, version: tuple[object, ...], profiles: tuple[MigProfile, ...]
    ) -> Static:
        call = self._nvml.call
        capability = call("nvmlDeviceGetCudaComputeCapability", handle)
        capability = (int(capability[0]), int(capability[1])) if capability is not None else None
        largest = max((p.sm_count for p in profiles), default=None)
        pci = call("nvmlDeviceGetPciInfo", handle)
        bus_id = pci.busId if pci is not None else ""
        bus_id = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
        virtualisation = call("nvmlDeviceGetVirtualizationMode", handle)
        return Static(
            version=version,
            name=call("nvmlDeviceGetName", handle) or "",
            pci_bus_id=bus_id,
            pcie_root="" if self._nvml.simulated else _pcie_root(bus_id, self._host_root),
            pci_device_id=int(pci.pciDeviceId) if pci is not None else None,
            capability=capability,
            sm_count=sm_count(call("nvmlDeviceGetNumGpuCores", handle), capability, largest),
            numa_node=_numa_node(self._nvml, handle, bus_id, self._host_root),
            virtualisation=_VIRTUALISATION.get(virtualisation, Virtualisation.NONE),
            profiles=profiles,
        )


def read_memory(nvml: Nvml, handle: Handle) -> Memory:
    """The device's memory. The struct nvmlMemory_v2 separates the driver's reserve; older drivers count the
    reserve as used.
    """
    version = nvml.constant("nvmlMemory_v2", _MEMORY_V2)
    info = nvml.call("nvmlDeviceGetMemoryInfo", handle, version)
    if info is not None:
        return Memory(int(info.total), int(info.reserved), int(info.used))
    info = nvml.call("nvmlDeviceGetMemoryInfo", handle)
    if info is not None:
        return Memory(int(info.total), 0, int(info.used))
    return Memory()


def read_vitals(nvml: Nvml, handle: Handle) -> Vitals:
    utilisation = nvml.call("nvmlDeviceGetUtilizationRates", handle)
    return Vitals(
        temperature_celsius=nvml.call("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
        power_milliwatts=nvml.call("nvmlDeviceGetPowerUsage", handle),
        power_limit_milliwatts=nvml.call("nvmlDeviceGetEnforcedPowerLimit", handle),
        busy_percent=None if utilisation is None else int(utilisation.gpu),
    )


def _read_mig(nvml: Nvml, handle: Handle, mode: list[int] | None, profiles: tuple[MigProfile, ...]) -> Mig:
    if mode is None:
        return Mig()
    current, pending = bool(mode[0]), bool(mode[1])
    instances = read_instances(nvml, handle, profiles) if current else ()
    return Mig(capable=True, current=current, pending=pending, profiles=profiles, instances=instances)


def read_processes(nvml: Nvml, handle: Handle) -> tuple[DeviceProcess, ...]:
    """The running processes on a device, each once for each MIG instance: as an MPS client if it is one, else
    as a compute process if it is one, else as a graphics process. A row whose number is no process id is left
    out.
    """
    found: dict[tuple[int, int | None, int | None], DeviceProcess] = {}
    for kind, name in (
        ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ):
        for entry in _process_list(nvml, handle, name):
            # NVML's field for the pid is an unsigned 32-bit number, which may be larger than any pid
            if not 0 < entry.pid <= _LARGEST_PID:
                continue
            instance, compute = _instance_id(entry.gpuInstanceId), _instance_id(entry.computeInstanceId)
            process = DeviceProcess(entry.pid, entry.usedGpuMemory, kind, instance, compute)
            found.setdefault((process.pid, instance, compute), process)
    running = (process for process in found.values() if not has_ended(process.pid))
    return tuple(sorted(running, key=lambda p: (p.pid, p.gpu_instance_id or 0, p.compute_instance_id or 0)))


def _instance_id(number: int) -> int | None:
    return number if number != _NO_INSTANCE else None


def _process_list(nvml: Nvml, handle: Handle, name: str) -> list[Any]:
    """Lists processes with the newest NVML call that the driver has: `_v3`, or `_v2` before driver 510. The
    binding uses the struct that belongs to each call.
    """
    for version in ("_v3", "_v2"):
        listed = nvml.call(name + version, handle)
        if listed is not None:
            return list(listed)
    return []


def _numa_node(nvml: Nvml, handle: Handle, bus_id: str, host_root: Path) -> int | None:
    """The host's NUMA node next to the device.

    nvmlDeviceGetNumaNodeId returns something else: the node that a GPU's own memory forms. The memory
    affinity gives the node; if it is not exactly one node, the kernel's file gives it.
    """
    words = nvml.call("nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _NODE_SCOPE)
    if words is not None:
        nodes = sum(int(word) << (64 * at) for at, word in enumerate(words))
        if nodes.bit_count() == 1:
            return nodes.bit_length() - 1
    # The bus id of a simulated device can equal that of a real device of this host. The files of the real
    # device would be wrong for the simulated one.
    if nvml.simulated:
        return None
    return _kernel_numa_node(bus_id, host_root)


def _pcie_root(bus_id: str, host_root: Path) -> str:
    """The PCIe root complex of the device, for example pci0000:16, from the path of its folder in sysfs; ""
    if there is none.
    """
    try:
        steps = _sysfs_folder(bus_id, host_root).readlink().parts
    except (OSError, ValueError):  # ValueError: a broken NVML gave a bus id with a NUL byte
        return ""
    return next((step for step in steps if _PCIE_ROOT.fullmatch(step)), "")


def _kernel_numa_node(bus_id: str, host_root: Path) -> int | None:
    """The NUMA node from the kernel's file; the file's -1 (no node) becomes None."""
    try:
        text = (_sysfs_folder(bus_id, host_root) / "numa_node").read_text()
        return int(text) if int(text) >= 0 else None
    except (OSError, ValueError):
        return None


def _sysfs_folder(bus_id: str, host_root: Path) -> Path:
    """The folder of a PCI device in sysfs. The kernel writes the domain with four digits, NVML with eight."""
    name = bus_id.lower()
    name = name[4:] if len(name) == len("00000000:00:00.0") and name.startswith("0000") else name
    return host_root / "sys/bus/pci/devices" / name
