"""Mode `exclusive`: one tenant has the whole card, and vgpud puts no library into its processes."""

from collections.abc import Sequence

from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.model.device import Device, DeviceProcess
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice
from vgpud.model.view import SliceMeter, SliceUse
from vgpud.modes.base import Paths
from vgpud.modes.edits import cuda_env
from vgpud.modes.gpu_use import foreign_processes, meter_of, pids_of, slice_processes, use_of


class Exclusive:
    """The effector of mode `exclusive`. It changes nothing on the device; the edits alone give access."""

    mode = Mode.EXCLUSIVE

    def __init__(self, gateway: Gateway, paths: Paths) -> None:
        self._gateway = gateway
        self._paths = paths

    async def verify(self, device: Device) -> str | None:
        return await foreign_processes(self._gateway, device)

    async def apply(self, device: Device) -> None:
        return None

    async def resume(self, device: Device, part: Slice) -> None:
        return None

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        nodes = device_nodes(device, None, self._paths.host_root)
        return part, Edits(env=cuda_env(allocation), device_nodes=nodes)

    async def resize(self, allocation: Allocation) -> None:
        return None

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        return None

    async def unapply(self, device_uuid: str) -> None:
        return None

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        return use_of(part, await self._processes(allocation, part))

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        pairs = zip(allocation.slices, devices, strict=True)
        return tuple(meter_of(part, device.processes) for part, device in pairs)

    async def tenants(self, allocation: Allocation, part: Slice, soon: bool = False) -> tuple[int, ...]:
        return pids_of(await self._processes(allocation, part))

    async def _processes(self, allocation: Allocation, part: Slice) -> tuple[DeviceProcess, ...]:
        return await slice_processes(self._gateway, part)
