"""How long a resuming tenant waits for room."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import clock
from vgpud.lease import ProcessSwap, SwapPhase
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Allocation, State
from vgpud.node.tenants import swaps
from vgpud.node.tenants.checkpoints import TenantServices

GPU = "GPU-0"


def tenant(name: str, state: State) -> Allocation:
    part = SimpleNamespace(device_uuid=GPU)
    return cast(Allocation, SimpleNamespace(id=name, state=state, slices=(part,), suspended=()))


class Finds(swaps.Swaps):
    """A device that stays full."""

    def __init__(self, beside: list[Allocation]) -> None:
        self.forbidden: list[str] = []

        async def ask(_: str) -> None: ...

        kept = SimpleNamespace(forbid_beside=lambda one: self.forbidden.append(one.id))
        services = SimpleNamespace(activities=SimpleNamespace(ask=ask), kept=kept)
        self._services = cast(TenantServices, services)
        self._book = cast(Any, SimpleNamespace(allocations_on=lambda _: beside))

    def _read(self, _: Allocation) -> tuple[ProcessSwap, ...]:
        return (ProcessSwap(SwapPhase.COMING, 2, 1 << 30, 1 << 30),)


def test_a_resume_waits_while_another_tenant_of_the_device_is_suspended() -> None:
    """The resume waits until the other tenant's memory is on the host: 23 s for 69 GiB on an H200."""
    beside = [tenant("b", State.SUSPENDING)]
    finds = Finds(beside)

    async def comes() -> None:
        waits = asyncio.ensure_future(finds.until(tenant("a", State.RESUMING), SwapPhase.HERE))
        await clock.passed(60)
        assert not waits.done() and not finds.forbidden
        beside[0] = tenant("b", State.SUSPENDED)
        with pytest.raises(VgpuError, match="has no room"):
            await waits
        assert set(finds.forbidden) == {"a"}

    clock.run(comes())
