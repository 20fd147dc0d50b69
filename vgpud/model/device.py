"""Immutable snapshots of a node's devices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ComputeMode(StrEnum):
    """Which programs may use a device: nvmlComputeMode_t of nvml.h."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive_thread"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive_process"


class Virtualisation(StrEnum):
    """Whether a device is virtual: nvmlGpuVirtualizationMode_t of nvml.h."""

    NONE = "none"
    PASSTHROUGH = "passthrough"
    VGPU_GUEST = "vgpu"
    HOST_VGPU = "host_vgpu"
    HOST_VSGA = "host_vsga"


class Health(StrEnum):
    OK = "ok"
    LOST = "lost"  # NVML reports GPU_IS_LOST: only a reset or a reboot helps
    SILENT = "silent"  # NVML calls on the device time out
    FAILED = "failed"  # another NVML error makes the device unusable
    # NVML reads the device but asks for a repair, and the policy (on_sick) gives such devices no new
    # allocations
    SICK = "sick"

    @property
    def answers(self) -> bool:
        return self in (Health.OK, Health.SICK)


class Link(StrEnum):
    """How two devices are connected, nearest first."""

    NVLINK = "nvlink"
    INTERNAL = "internal"  # two GPUs on one board
    SINGLE = "single"  # across one PCIe switch
    MULTIPLE = "multiple"  # across several PCIe switches
    HOSTBRIDGE = "hostbridge"
    NODE = "node"  # within one NUMA node
    SYSTEM = "system"  # across NUMA nodes
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The place of an instance, slices [start, start + size): memory slices of the device for a GPU instance,
    compute slices of the GPU instance for a compute instance.
    """

    start: int
    size: int


# Profile id and placement. The pair identifies an instance even after it is destroyed and created again, when
# NVML's ids of the instance change.
PlaceKey = tuple[int, Placement]


_PART = re.compile(r"([1-9][0-9]?)c\.(.+)")


def split_name(text: str) -> tuple[int, str] | None:
    """Splits NVIDIA's name of a compute instance profile, such as 1c.3g.71gb, into the compute slices and the
    name of the GPU instance's profile. None for any other name.
    """
    found = _PART.fullmatch(text.strip().lower().removeprefix("mig "))
    return None if found is None else (int(found[1]), found[2])


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One GPU instance profile as NVML lists it. `id` is the profile id, never NVML's loop index.

    `compute` has the compute instance profiles of such a GPU instance, in the same form: their placements are
    compute slices of the GPU instance, and their memory is its whole memory, which they share.
    """

    id: int
    name: str
    slice_count: int
    instance_count: int
    sm_count: int
    memory_bytes: int
    placements: tuple[Placement, ...]
    compute: tuple["MigProfile", ...] = ()

    def compute_profile(self, profile_id: int) -> "MigProfile | None":
        return next((p for p in self.compute if p.id == profile_id), None)


@dataclass(frozen=True, slots=True)
class ComputeInstance:
    """A compute instance. `placement` is the range of compute slices in the GPU instance."""

    id: int
    profile_id: int
    uuid: str  # UUID of the MIG device, "MIG-..."; empty if NVML does not report it
    placement: Placement | None = None

    @property
    def key(self) -> PlaceKey | None:
        """Profile id and placement of the compute instance; None if NVML does not report its placement."""
        return None if self.placement is None else (self.profile_id, self.placement)


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """An existing GPU instance; `slice_count` is its number of compute slices."""

    id: int
    profile_id: int
    placement: Placement
    compute_instances: tuple[ComputeInstance, ...]
    slice_count: int | None = None

    @property
    def key(self) -> PlaceKey:
        return self.profile_id, self.placement

    def compute(self, key: PlaceKey) -> ComputeInstance | None:
        """The compute instance with this key, or None."""
        return next((one for one in self.compute_instances if one.key == key), None)

    @property
    def is_divided(self) -> bool:
        """Is the GPU instance divided? It is, if it has several compute instances or one that does not take
        all of it.
        """
        if len(self.compute_instances) != 1:
            return len(self.compute_instances) > 1
        place = self.compute_instances[0].placement
        return place is not None and self.slice_count is not None and place.size < self.slice_count


@dataclass(frozen=True, slots=True)
class Mig:
    """MIG mode and instances of a device. If `pending` differs from `current`, a reset or a reboot is due."""

    capable: bool = False
    current: bool = False
    pending: bool = False
    profiles: tuple[MigProfile, ...] = ()
    instances: tuple[GpuInstance, ...] = ()

    def profile(self, profile_id: int) -> MigProfile | None:
        return next((p for p in self.profiles if p.id == profile_id), None)


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device. `memory_bytes` is None if NVML does not report it."""

    pid: int
    memory_bytes: int | None
    kind: str  # "compute", "graphics" or "mps"
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU. A field that can be None is None if its value is not known."""

    uuid: str
    index: int
    name: str = ""
    minor: int | None = None
    pci_bus_id: str = ""
    pcie_root: str = ""  # the PCIe root complex above the device, for example pci0000:16
    pci_device_id: int | None = None  # device id, and vendor id in the low half: 0x233510DE is an H200
    memory_total_bytes: int = 0
    memory_reserved_bytes: int = 0
    memory_used_bytes: int = 0
    sm_count: int | None = None
    compute_capability: tuple[int, int] | None = None
    mig: Mig = field(default_factory=Mig)
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    mps_capable: bool = False
    numa_node: int | None = None
    virtualisation: Virtualisation = Virtualisation.NONE
    processes: tuple[DeviceProcess, ...] = ()
    health: Health = Health.OK
    health_reason: str = ""
    ailment: str = ""  # the repair that NVML asks for; empty if none

    @property
    def memory_usable_bytes(self) -> int:
        """The memory for allocations: the total minus the driver's reserve."""
        return self.memory_total_bytes - self.memory_reserved_bytes


@dataclass(frozen=True)
class Node:
    """All devices at one moment. `links` has a key (uuid, uuid) for each pair of devices in both orders, or
    none if the pair's link could not be read.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    nvml_version: str = ""
    cuda_version: str = ""
    simulated: bool = False
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def device(self, uuid: str) -> Device | None:
        return next((d for d in self.devices if d.uuid == uuid), None)
