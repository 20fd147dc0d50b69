"""Gives claims with admin access what NVML needs to watch cards, in a CDI spec for each claim.

Such a claim consumes nothing, and only namespaces with the label resource.kubernetes.io/admin-access may have
one (KEP-5018). CUDA does not start with these device nodes, so a monitor cannot take memory from tenants.
"""

from collections.abc import Callable, Sequence

from vgpud.inject.cdi import MONITOR_KIND
from vgpud.inject.specs import Specs
from vgpud.model.device import Device
from vgpud.model.tenancy import DeviceNode
from vgpud.serve.dra.prepared import Monitor


class Monitors:
    """`devices` returns the node's devices, `nodes` the device nodes by which NVML reads one. Methods raise
    VgpuError(CDI_FAILED).
    """

    def __init__(
        self,
        specs: Specs,
        devices: Callable[[], tuple[Device, ...]],
        nodes: Callable[[Device], Sequence[DeviceNode]],
    ) -> None:
        self._specs = specs
        self._devices = devices
        self._nodes = nodes

    async def write(self, claim: str, monitors: Sequence[Monitor]) -> None:
        """Makes the claim's spec current. A card that is gone is left out."""
        there = {device.uuid: device for device in self._devices()}
        named = {
            one.name: dict.fromkeys(
                node for uuid in one.uuids if uuid in there for node in self._nodes(there[uuid])
            )
            for one in monitors
        }
        if named:
            await self._specs.write_monitors(claim, {name: tuple(nodes) for name, nodes in named.items()})

    async def remove(self, claim: str) -> None:
        await self._specs.remove_monitors(claim)


def cdi_name(monitor: Monitor) -> str:
    return f"{MONITOR_KIND}={monitor.name}"
