"""Measures the use of a device by its processes, from NVML, for modes without a meter of their own."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from vgpud import proc
from vgpud.hardware.gateway import Gateway
from vgpud.model.device import Device, DeviceProcess
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, Slice
from vgpud.model.view import SliceMeter, SliceUse


class GpuUse:
    """The part of an effector (modes/base.py) that reports use, for modes that measure by NVML."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        return use_of(part, await self._processes(allocation, part))

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        pairs = zip(allocation.slices, devices, strict=True)
        return tuple(meter_of(part, device.processes) for part, device in pairs)

    async def tenants(self, allocation: Allocation, part: Slice, soon: bool = False) -> tuple[int, ...]:
        return pids_of(await self._processes(allocation, part))

    async def _processes(self, allocation: Allocation, part: Slice) -> tuple[DeviceProcess, ...]:
        return await slice_processes(self._gateway, part)


async def slice_processes(gateway: Gateway, part: Slice) -> tuple[DeviceProcess, ...]:
    """The processes on the slice's device or GPU instance; none if the device is lost."""
    try:
        processes = await asyncio.to_thread(gateway.processes, part.device_uuid)
    except VgpuError as error:
        if error.code is not ErrorCode.GPU_LOST:
            raise
        return ()
    return tuple(p for p in processes if is_in(p, part))


def meter_of(part: Slice, processes: Iterable[DeviceProcess]) -> SliceMeter:
    """The meter of a slice, from the processes that a snapshot lists on its device."""
    own = [p for p in processes if is_in(p, part)]
    return SliceMeter(
        part.device_uuid, sum(p.memory_bytes or 0 for p in own), processes=len({p.pid for p in own})
    )


def is_in(process: DeviceProcess, part: Slice) -> bool:
    """Is the process in the slice's GPU instance, and in its compute instance if there are several? Always
    True for a slice outside MIG.
    """
    mig = part.mig
    if mig is None:
        return True
    if process.gpu_instance_id != mig.gpu_instance_id:
        return False
    return mig.compute_key is None or process.compute_instance_id == mig.compute_instance_id


def pids_of(processes: tuple[DeviceProcess, ...]) -> tuple[int, ...]:
    return tuple(sorted({p.pid for p in processes}))


def use_of(part: Slice, processes: tuple[DeviceProcess, ...]) -> SliceUse:
    """The use of a slice, from NVML's figure for each process. NVML has no peaks, no refusals and no part of
    the driver.
    """
    return SliceUse(
        device_uuid=part.device_uuid,
        memory_used_bytes=sum(p.memory_bytes or 0 for p in processes),
        pids=pids_of(processes),
    )


def allocation_of(pid: int) -> str | None:
    """The allocation id in the environment of a process. It is a label, not a proof, because a process can
    change its environment.
    """
    prefix = b"VGPU_ALLOCATION="
    entries = proc.environment(pid)
    return next((e[len(prefix) :].decode(errors="replace") for e in entries if e.startswith(prefix)), None)


class AllocationNames:
    """Caches `allocation_of` for one second, so that a pass over all tenants reads each process once."""

    def __init__(self) -> None:
        self._known: dict[int, str | None] = {}
        self._since = 0.0

    def of(self, pid: int) -> str | None:
        now = time.monotonic()
        if now - self._since > 1.0:
            self._known, self._since = {}, now
        if pid not in self._known:
            self._known[pid] = allocation_of(pid)
        return self._known[pid]


async def foreign_processes(gateway: Gateway, device: Device) -> str | None:
    """Returns a sentence that names the processes on a device that should be idle; None if there are none."""
    processes = await asyncio.to_thread(gateway.processes, device.uuid)
    if not processes:
        return None
    pids = ", ".join(str(p.pid) for p in processes[:5])
    return f"it is used by {counted(len(processes), 'process')} outside vgpud (pid {pids})"
