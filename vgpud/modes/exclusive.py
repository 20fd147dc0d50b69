"""Mode `exclusive`: one tenant has the whole card, and vgpud puts no library into its processes."""

from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.model.device import Device
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice
from vgpud.modes.base import Paths
from vgpud.modes.edits import cuda_env
from vgpud.modes.gpu_use import GpuUse, foreign_processes


class Exclusive(GpuUse):
    """The effector of mode `exclusive`. It changes nothing on the device; the edits alone give access."""

    mode = Mode.EXCLUSIVE
    suspendable = None

    def __init__(self, gateway: Gateway, paths: Paths) -> None:
        super().__init__(gateway)
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
