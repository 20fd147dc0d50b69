"""On a device with turns, a new tenant that does not fit now is suspended until its turn comes."""

from pathlib import Path
from typing import cast

from tests import clock
from tests.node.test_move_suspended import Driver
from tests.node.world import FakeGateway, device, request, world
from vgpud.hardware.suspender import Suspender
from vgpud.model.device import Node
from vgpud.model.tenancy import Cause, State


def test_the_event_of_a_suspension_without_a_process_does_not_mention_turns(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path, FakeGateway(Node((device(0),))), cast(Suspender, Driver())) as w:
            held = await w.keeper.allocate(request("r1"))
            away = await w.keeper.suspends.suspend(held, Cause.TURN)
            assert away.state is State.SUSPENDED
            (*_, last) = await w.keeper.store.last_events(1)
            assert last.sentence.endswith("suspended without a process, because other tenants use its room")

    clock.run(work())
