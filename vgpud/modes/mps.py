"""Mode `mps`: one control daemon for the device, sized per tenant through its environment.

The daemon is a unit of its own, so no restart of vgpud touches it. A client may only lower what
the daemon's defaults allow, so the defaults follow the largest tenant: what a tenant drops from
its environment gives it at most that. A control daemon that dies takes its clients with it, and
later clients would run without any limit (measured on an H200, driver 580): its allocations are
marked failed at once. Guards inside the tenant are not here yet; docs/modes.md says so.
"""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable

from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.model.device import Device, DeviceProcess
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MIB, WHOLE
from vgpud.model.tenancy import Allocation, Edits, Mode, Mount, Slice
from vgpud.model.view import SliceUse
from vgpud.modes.base import Paths
from vgpud.modes.edits import cuda_env
from vgpud.modes.gpu_use import allocation_of, foreign_processes, pids_of, slice_processes, use_of
from vgpud.modes.mps_control import MpsControl
from vgpud.units import Units, UnitSpec

CONTAINER_PIPE = "/run/vgpu/mps"

# the mps slices now on a device, by its uuid: the keeper's book
SlicesOn = Callable[[str], Iterable[Slice]]
# told the device's uuid, in the event loop, when its control daemon has ended by itself
Died = Callable[[str], None]


class MpsMode:
    mode = Mode.MPS

    def __init__(self, gateway: Gateway, units: Units, slices_on: SlicesOn, died: Died, paths: Paths) -> None:
        self._gateway = gateway
        self._units = units
        self._slices_on = slices_on
        self._died = died
        self._paths = paths
        self._notices: dict[str, Callable[[], None]] = {}

    def control(self, device_uuid: str) -> MpsControl:
        """In a short folder: the pipes are Unix sockets, whose paths have room for 108 bytes."""
        short = hashlib.sha256(device_uuid.encode()).hexdigest()[:12]
        return MpsControl(self._paths.mps_control, self._paths.run_dir / "mps" / short)

    async def verify(self, device: Device) -> str | None:
        if not device.mps_capable:
            return "it does not support MPS"
        if self._units.running(unit_name(device.uuid)) is not None:
            return None
        return await foreign_processes(self._gateway, device)

    async def apply(self, device: Device) -> None:
        control = self.control(device.uuid)
        control.prepare()
        spec = UnitSpec(
            name=unit_name(device.uuid),
            argv=(shutil.which(self._paths.mps_control) or self._paths.mps_control, "-f"),
            env={**_driver_environment(), "CUDA_VISIBLE_DEVICES": device.uuid, **control.environment()},
            ready=control.answers,
        )
        await asyncio.to_thread(self._units.start, spec)
        self.watch(device.uuid)

    def watch(self, device_uuid: str) -> None:
        """Tells `died` when the device's control daemon ends otherwise than by `unapply`."""
        self._unwatch(device_uuid)

        def ended(_: str) -> None:
            self._notices.pop(device_uuid, None)
            self._died(device_uuid)

        self._notices[device_uuid] = self._units.on_exit(unit_name(device_uuid), ended)

    def _unwatch(self, device_uuid: str) -> None:
        notice = self._notices.pop(device_uuid, None)
        if notice is not None:
            notice()

    async def resume(self, device: Device) -> None:
        self.watch(device.uuid)

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        control = self.control(part.device_uuid)
        await self._follow_largest(control, part.device_uuid)
        limit = f"{part.memory_bytes // MIB}M"
        share = part.share or WHOLE
        env = (
            *cuda_env(allocation),
            ("CUDA_MPS_PIPE_DIRECTORY", CONTAINER_PIPE),
            # keyed by ordinal: the tenant sees this one device
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", f"0={limit}"),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", f"{share.value:g}"),
        )
        edits = Edits(
            env=env,
            host_env=(("CUDA_MPS_PIPE_DIRECTORY", str(control.pipe)),),
            mounts=(
                Mount(str(control.pipe), CONTAINER_PIPE, read_only=False),
                Mount("/dev/shm", "/dev/shm", read_only=False),
            ),
            device_nodes=device_nodes(device, None, self._paths.host_root),
        )
        return part, edits

    async def _follow_largest(self, control: MpsControl, device_uuid: str) -> None:
        slices = tuple(self._slices_on(device_uuid))
        if not slices:
            return
        await asyncio.to_thread(control.set_default_memory, max(s.memory_bytes for s in slices))
        await asyncio.to_thread(control.set_default_share, max(s.share or WHOLE for s in slices))

    async def resize(self, allocation: Allocation) -> None:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} is held by MPS, whose limits are fixed when a process starts",
            "allocate anew with the other size and release this one",
        )

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        control = self.control(part.device_uuid)
        if self._units.running(unit_name(part.device_uuid)) is not None:
            await self._follow_largest(control, part.device_uuid)

    async def unapply(self, device_uuid: str) -> None:
        self._unwatch(device_uuid)
        await asyncio.to_thread(self._units.stop, unit_name(device_uuid), 5.0)

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        return use_of(part, await self._processes(allocation, part))

    async def tenants(self, allocation: Allocation, part: Slice) -> tuple[int, ...]:
        return pids_of(await self._processes(allocation, part))

    async def _processes(self, allocation: Allocation, part: Slice) -> tuple[DeviceProcess, ...]:
        """Several tenants share the device's list; each process names its own in its environment."""
        listed = await slice_processes(self._gateway, part)
        return tuple(p for p in listed if allocation_of(p.pid) == allocation.id)


def _driver_environment() -> dict[str, str]:
    """What says where the driver's libraries are: helpers otherwise start with an empty environment."""
    named = ("PATH", "LD_LIBRARY_PATH", "VGPU_SIM_STATE")
    return {name: os.environ[name] for name in named if name in os.environ}


def unit_name(device_uuid: str) -> str:
    return f"vgpud-mps@{device_uuid}"
