"""Memory that a tenant keeps on its device after its turn is evicted for a tenant that needs the room."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from tests import clock
from tests.node.test_move_suspended import NODE, OWNER, Driver, uuid
from tests.node.world import FakeGateway, Remembering, World, request, world
from vgpud import clock as daemon_clock
from vgpud.hardware.suspender import ProcessState, Suspender
from vgpud.lease import LeaseActivity, Meter, ProcessSwap, SwapPhase
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Cause, Mode, Owner, Selector, State, SuspendedProcess
from vgpud.modes.preload import Preload
from vgpud.node.tenants.activities import seconds_to_move
from vgpud.planner.kept import MARGIN_BYTES, SHARE_ALL

TURNS = """version = 1
[[device]]
mode = "preload"
[device.preload]
memory_overcommit = 2.0
turn = "1h"
"""
CARD_GIB, HELD_GIB, OTHER_GIB, SMALL_GIB = 80, 60, 40, 4
EVICTION_SECONDS = 5.0


class Leases(Remembering, Preload):
    """The leases of tenants that use all their memory. A process swaps out at once. It evicts kept memory
    EVICTION_SECONDS after the arbiter's request, unless it is `stuck`. It is ready for the driver as long
    after the order. The leases of `liars` claim that a pebibyte is movable and on the device.
    """

    def __init__(self) -> None:
        Remembering.__init__(self, Mode.PRELOAD, pids=(os.getpid(),))
        self.stuck = False
        self.liars: set[str] = set()
        self.memory: dict[str, int] = {}  # bytes of movable memory
        self.kept: dict[str, int] = {}  # the bytes that each swapped-out tenant keeps on the device
        self.shares: dict[str, int] = {}
        # Does the lease say that the driver saves the tenant next? Is the tenant ready for that?
        self.saves: dict[str, bool] = {}
        self.ready: set[str] = set()
        # the tenants whose limits were put in force before there was room for them
        self.crowded: list[str] = []

    async def resize(self, allocation: Allocation) -> None:
        name, (part,) = allocation.id, allocation.slices
        self.memory[name] = part.memory_bytes
        self.saves[name] = allocation.is_deep
        if allocation.is_deep:
            asyncio.get_running_loop().call_later(EVICTION_SECONDS, self.ready.add, name)
        if allocation.state in (State.SUSPENDING, State.SUSPENDED):
            self.kept[name] = self._allowed(name)
            return
        self.kept.pop(name, None)
        if part.memory_bytes + sum(self.kept.values()) > CARD_GIB * GIB:
            self.crowded.append(name)

    def expect(self, allocation_id: str, soon: bool) -> None: ...

    def keep(self, allocation_id: str, share_hundredths: int) -> None:
        self.shares[allocation_id] = share_hundredths

    async def look(self, allocation_id: str) -> None:
        if not self.stuck:
            asyncio.get_running_loop().call_later(EVICTION_SECONDS, self._evict, allocation_id)

    def _evict(self, name: str) -> None:
        if name in self.kept:
            self.kept[name] = min(self.kept[name], self._allowed(name))

    def _allowed(self, name: str) -> int:
        return self.memory[name] * self.shares.get(name, 0) // SHARE_ALL

    def swaps(self, allocation_id: str) -> tuple[ProcessSwap, ...]:
        held = self.memory.get(allocation_id, GIB)
        phase = SwapPhase.OUT if allocation_id in self.kept else SwapPhase.HERE
        is_ready = allocation_id in self.ready
        if allocation_id in self.liars:
            return (ProcessSwap(phase, 0, 1 << 50, 1 << 50, 1 << 50),)
        return (ProcessSwap(phase, 0, held, held, self.kept.get(allocation_id, 0), is_ready=is_ready),)

    def held(self, allocation_id: str) -> Meter:
        return Meter(used_bytes=self.memory.get(allocation_id, GIB))

    def stays(self, allocation_id: str) -> tuple[int, ...]:
        return (0, 0, 0, 0)

    def activity(self, allocation_id: str) -> LeaseActivity:
        return LeaseActivity()

    async def restore_wall(self, allocation: Allocation) -> None: ...


async def add(w: World, name: str, gib: int, device: int = 0) -> Allocation:
    owner, place = Owner(OWNER.uid, OWNER.gid), Selector(uuids=(uuid(device),))
    return await w.keeper.allocate(request(name, gib, owner=owner, selector=place), name)


# Each of these changes begins before the turn of "first" ends, and then lets "second" need OTHER_GIB of the
# device.


async def allocated(w: World) -> AsyncIterator[None]:
    yield
    await add(w, "second", OTHER_GIB)


async def resized(w: World) -> AsyncIterator[None]:
    await add(w, "second", SMALL_GIB)
    yield
    await w.keeper.resize("second", OWNER, OTHER_GIB * GIB, None)


async def resumed(w: World) -> AsyncIterator[None]:
    await add(w, "second", OTHER_GIB)
    await w.keeper.suspend("second", OWNER)
    yield
    await w.keeper.resume("second", OWNER)


async def moved(w: World) -> AsyncIterator[None]:
    await add(w, "second", OTHER_GIB, device=1)
    yield
    await w.keeper.moves.move("second", OWNER, [uuid(0)], "")


Way = Callable[[World], AsyncIterator[None]]


async def needs_room(folder: Path, leases: Leases, way: Way) -> float:
    """Lets "first" keep all its memory, and "second" need part of that room. Returns the seconds that the
    change of "second" took.
    """
    driver = Driver({os.getpid(): ProcessState.RUNNING})
    async with world(folder, FakeGateway(NODE), cast(Suspender, driver), leases, TURNS) as w:
        change = way(w)
        await anext(change)
        await w.keeper.suspends.suspend(await add(w, "first", HELD_GIB), Cause.TURN)
        assert leases.kept["first"] == HELD_GIB * GIB
        began = daemon_clock.now()
        await anext(change, None)
        seconds = daemon_clock.now() - began
        (part,) = w.keeper.book.get("second").slices
        assert (w.keeper.book.get("second").state, part.memory_bytes) == (State.ACTIVE, OTHER_GIB * GIB)
        assert part.device_uuid == uuid(0)
        return seconds


@pytest.mark.parametrize("way", [allocated, resized, resumed, moved])
def test_memory_that_a_suspended_tenant_keeps_is_evicted_before_another_gets_its_room(
    tmp_path: Path, way: Way
) -> None:
    leases = Leases()
    clock.run(needs_room(tmp_path, leases, way))
    room = (CARD_GIB - OTHER_GIB) * GIB - MARGIN_BYTES
    assert room - HELD_GIB * GIB // SHARE_ALL <= leases.kept["first"] <= room, (
        "no more than the room is evicted"
    )
    assert not leases.crowded


@pytest.mark.parametrize("liars", [set(), {"first"}])
def test_a_change_that_needs_the_room_of_kept_memory_waits_a_bounded_time_for_its_eviction(
    tmp_path: Path, liars: set[str]
) -> None:
    leases = Leases()
    leases.stuck, leases.liars = True, liars
    with capture_logs() as lines:
        seconds = clock.run(needs_room(tmp_path, leases, resized))
    limit = seconds_to_move(HELD_GIB * GIB)
    assert limit <= seconds < limit + 1
    assert "suspended_tenant_memory_eviction_timeout" in [line["event"] for line in lines]


class Refuses(Driver):
    """A driver that locks no process."""

    leases: Leases

    async def lock(self, process: SuspendedProcess, seconds: float) -> None:
        assert self.leases.saves == {"first": True}
        assert self.leases.ready == {"first"}, "the driver is asked after that"
        raise VgpuError(ErrorCode.SUSPEND_FAILED, "the driver refuses", "")


def test_the_lease_of_an_evicted_tenant_orders_no_save_after_a_failed_deep_suspension(tmp_path: Path) -> None:
    """Otherwise libvgpu would evict no more of it, because it would wait for the driver."""

    async def fails() -> None:
        leases, driver = Leases(), Refuses({os.getpid(): ProcessState.RUNNING})
        driver.leases = leases
        async with world(tmp_path, FakeGateway(NODE), cast(Suspender, driver), leases, TURNS) as w:
            evicted = await w.keeper.suspends.suspend(await add(w, "first", HELD_GIB), Cause.TURN)
            with pytest.raises(VgpuError, match="the driver refuses"):
                await w.keeper.suspends.deepen(evicted)
            assert w.keeper.book.get("first").is_swapped
            assert leases.saves == {"first": False}

    clock.run(fails())
