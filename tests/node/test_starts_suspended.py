"""On a device with turns, a new tenant that does not fit beside the others starts suspended, as the answer of
`plan` says.
"""

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from tests.node.world import World, request, world
from vgpud.model.event import EventKind
from vgpud.model.plan import StepKind
from vgpud.model.tenancy import Cause, Mode, State

POLICY = """version = 1
[[device]]
mode = "preload"
[device.preload]
memory_overcommit = 2.0
turn = "30s"
"""


async def kinds_of(node: World, allocation_id: str) -> list[EventKind]:
    return [event.kind for event in await node.ledger.last_events(100) if event.subject == allocation_id]


def test_a_new_tenant_that_does_not_fit_starts_suspended_and_has_one_event(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, policy=POLICY) as node:
            large = node.parts.inventory.node.devices[0].memory_usable_bytes // 2**30 - 8
            first = await node.keeper.allocate(request("first", large))
            assert first.state is State.ACTIVE
            calls = node.effectors[Mode.PRELOAD].calls
            calls.clear()
            _, steps = await node.keeper.allocates.plan(request("late", large))
            assert [step.kind for step in steps][-1] is StepKind.COMMIT_SUSPENDED
            assert not calls
            with capture_logs() as lines:
                late = await node.keeper.allocate(request("late", large))
            told = [(one["audit"], one["starts"]) for one in lines if "audit" in one]
            assert told == [("allocate", "suspended")]
            assert (late.state, late.cause) == (State.SUSPENDED, Cause.TURN)
            assert calls == ["attach"], "the limits are written once, with the state"
            assert (
                node.effectors[Mode.PRELOAD].attached[late.id, late.slices[0].device_uuid].cause is Cause.TURN
            )
            assert await kinds_of(node, late.id) == [EventKind.ALLOCATION_SUSPENDED]
            assert node.parts.store.account.tally.made["preload"] == 2
            assert late in (await node.ledger.load()).allocations

    asyncio.run(story())


def test_a_new_tenant_that_fits_starts_active(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, policy=POLICY) as node:
            _, steps = await node.keeper.allocates.plan(request("r", 4))
            assert [step.kind for step in steps][-1] is StepKind.COMMIT
            made = await node.keeper.allocate(request("r", 4))
            assert made.state is State.ACTIVE

    asyncio.run(story())


def test_a_new_tenant_that_does_not_fit_starts_active_on_a_device_without_turns(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, policy=POLICY.replace('turn = "30s"\n', "")) as node:
            large = node.parts.inventory.node.devices[0].memory_usable_bytes // 2**30 - 8
            made = [await node.keeper.allocate(request(f"r{n}", large)) for n in range(3)]
            assert {one.state for one in made} == {State.ACTIVE}

    asyncio.run(story())
