"""Moves of several tenants at once: which steps overlap, which have an order, and the host memory that the
moves order.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tests import clock
from tests.node.test_move_suspended import NODE, OWNER, Driver, uuid
from tests.node.world import ROOT, FakeGateway, Remembering, World, request, world
from vgpud import clock as daemon_clock
from vgpud import daemon
from vgpud.hardware.suspender import SESSIONS_MAX, ProcessState, Suspender
from vgpud.lease import LeaseActivity, Meter, ProcessSwap, SwapPhase
from vgpud.model.device import Link
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.move_view import DefragView, RoomWanted, TenantMove
from vgpud.model.quantity import GIB, MIB
from vgpud.model.tenancy import Allocation, Mode, Owner, Selector, State, SuspendedProcess, Way
from vgpud.modes.preload import Preload
from vgpud.node.tenants import relocate
from vgpud.planner.places import devices_of

HELD = 512 * MIB
MADE_SECONDS, OUT_SECONDS, DRIVER_SECONDS, IN_SECONDS = 7.0, 2.0, 3.0, 4.0
NEAR = replace(
    NODE, links={(one.uuid, other.uuid): Link.NVLINK for one, other in permutations(NODE.devices, 2)}
)
POLICY = """version = 1
[[device]]
mode = "preload"
[pool]
host_memory_reserve = "1MiB"
"""


@dataclass(frozen=True)
class Span:
    """What a tenant did, and when."""

    what: str
    name: str
    began: float
    ended: float


class Spans:
    def __init__(self) -> None:
        self.all: list[Span] = []

    def add(self, what: str, name: str, seconds: float) -> None:
        now = daemon_clock.now()
        self.all.append(Span(what, name, now, now + seconds))

    def of(self, what: str) -> list[Span]:
        return [span for span in self.all if span.what == what]


class Leases(Remembering, Preload):
    """Leases of tenants that hold HELD bytes each. libvgpu makes a buffer in MADE_SECONDS, evicts in
    OUT_SECONDS, and brings the memory back in IN_SECONDS.
    """

    def __init__(self, spans: Spans) -> None:
        Remembering.__init__(self, Mode.PRELOAD, pids=(os.getpid(),))
        self.spans = spans
        self.made: dict[str, int] = {}
        self.phase: dict[str, SwapPhase] = {}
        self.parking: set[str] = set()
        self.hangs: set[str] = set()  # tenants whose memory does not come back
        self.lists: dict[str, int] = {}  # of parked memory, by tenant
        self.behind: dict[str, int] = {}  # blocks on the device that the tenant has left

    def _later(self, seconds: float, name: str, phase: SwapPhase) -> None:
        asyncio.get_running_loop().call_later(seconds, self.phase.__setitem__, name, phase)

    def expect(self, allocation_id: str, soon: bool) -> None:
        if soon:
            self.spans.add("made", allocation_id, MADE_SECONDS)
            loop = asyncio.get_running_loop()
            loop.call_later(MADE_SECONDS / 2, self.made.__setitem__, allocation_id, HELD // 2)
            loop.call_later(MADE_SECONDS, self.made.__setitem__, allocation_id, HELD)

    async def resize(self, allocation: Allocation) -> None:
        name, phase = allocation.id, self.phase.get(allocation.id, SwapPhase.HERE)
        is_out = allocation.is_deep or (allocation.is_swapped and allocation.state is State.SUSPENDING)
        if is_out and phase is SwapPhase.HERE:
            self.spans.add("out", name, OUT_SECONDS)
            self.made[name] = HELD
            self.phase[name] = SwapPhase.GOING
            self._later(OUT_SECONDS, name, SwapPhase.OUT)
        elif not is_out and phase is SwapPhase.OUT:
            self.spans.add("in", name, IN_SECONDS)
            self.phase[name] = SwapPhase.COMING
            if name not in self.hangs:
                self._later(IN_SECONDS, name, SwapPhase.HERE)

    def keep(self, allocation_id: str, share_hundredths: int) -> None: ...

    async def look(self, allocation_id: str) -> None: ...

    def swaps(self, allocation_id: str) -> tuple[ProcessSwap, ...]:
        phase = self.phase.get(allocation_id, SwapPhase.HERE)
        parked = self.lists.get(allocation_id, 0) if phase is SwapPhase.COMING else 0
        behind = self.behind.get(allocation_id, 0)
        return (ProcessSwap(phase, 0, HELD, self.made.get(allocation_id, 0), 0, parked, behind),)

    def held(self, allocation_id: str) -> Meter:
        return Meter(used_bytes=HELD)

    def activity(self, allocation_id: str) -> LeaseActivity:
        return LeaseActivity(quiet=True)

    async def restore_wall(self, allocation: Allocation) -> None: ...


@dataclass
class Turns(Driver):
    """A fake driver whose saves take DRIVER_SECONDS each."""

    spans: Spans = field(default_factory=Spans)
    fails: int = 0  # number of restores to fail
    reached: int = 0  # how often direct copies between devices were prepared

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(SESSIONS_MAX)

    @asynccontextmanager
    async def session(self, user: int, tenant: str) -> AsyncIterator["Turns"]:
        async with self.free:
            began = daemon_clock.now()
            yield self
            self.spans.all.append(Span("driver", tenant, began, daemon_clock.now()))

    @property
    def is_busy(self) -> bool:
        return False

    async def reach(self, process: Any, old: str, new: str) -> bool:
        self.reached += 1
        return True

    async def save(self, process: Any, seconds: float) -> None:
        await asyncio.sleep(DRIVER_SECONDS)
        await super().save(process, seconds)

    async def restore(self, process: Any, seconds: float, moved: Any = None) -> None:
        if self.fails:
            self.fails -= 1
            raise VgpuError(ErrorCode.SUSPEND_FAILED, "the driver refuses", "")
        await super().restore(process, seconds, moved)


@dataclass
class Node:
    world: World
    leases: Leases
    driver: Turns
    spans: Spans

    async def add(self, name: str, device: int, user: int = 7, gib: int = 1) -> Allocation:
        asked = request(
            name,
            gib,
            owner=Owner(OWNER.uid, OWNER.gid),
            quota_owner=Owner(user, user),
            selector=Selector(uuids=(uuid(device),)),
        )
        return await self.world.keeper.allocate(asked, name)

    def move(self, name: str, to: int) -> Coroutine[Any, Any, Allocation]:
        return self.world.keeper.moves.move(name, ROOT, [uuid(to)], "")

    def places(self) -> dict[str, str]:
        return {one.id: "".join(devices_of(one)) for one in self.world.keeper.book}


@asynccontextmanager
async def node(folder: Path, policy: str = POLICY, is_near: bool = False) -> AsyncIterator[Node]:
    spans = Spans()
    leases, driver = Leases(spans), Turns({os.getpid(): ProcessState.RUNNING}, spans=spans)
    async with world(
        folder, FakeGateway(NEAR if is_near else NODE), cast(Suspender, driver), leases, policy
    ) as w:
        yield Node(w, leases, driver, spans)


def disjoint(spans: Sequence[Span]) -> bool:
    ordered = sorted(spans, key=lambda span: span.began)
    return all(one.ended <= next_.began for one, next_ in pairwise(ordered))


def overlap(one: Span, other: Span) -> bool:
    return one.began < other.ended and other.began < one.ended


def test_the_moves_of_three_tenants_overlap_in_the_driver_the_link_and_the_host_buffer(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            names = ["first", "second", "third"]
            for name in names:
                await n.add(name, 0)
            began = daemon_clock.now()
            gone = await n.world.keeper.relocations.evacuate(uuid(0), ROOT)
            seconds = daemon_clock.now() - began
            assert [one.allocation_id for one in gone.moved] == names
            assert not gone.staying
            assert set(n.places().values()) == {uuid(1)}
            out, driver, into = (n.spans.of(what) for what in ("out", "driver", "in"))
            assert disjoint(out)
            assert all(overlap(out[i + 1], driver[i]) and overlap(driver[i], driver[i + 1]) for i in range(2))
            assert all(overlap(into[i], into[i + 1]) for i in range(2))
            assert {span.began for span in n.spans.of("made")} == {began}, "all while all tenants run"
            # three moves one after the other, without host buffers made in advance, would take 27 s
            assert seconds < MADE_SECONDS + 3 * OUT_SECONDS + DRIVER_SECONDS + IN_SECONDS + 1

    clock.run(work())


def test_a_moving_tenant_is_stopped_only_when_its_host_buffer_is_made(tmp_path: Path) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            await n.add("first", 0)
            await n.move("first", 1)
            (made,), (out,) = n.spans.of("made"), n.spans.of("out")
            assert made.ended <= out.began

    clock.run(work())


def test_a_move_goes_on_if_the_host_buffer_is_not_made_in_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            monkeypatch.setattr(n.leases, "expect", lambda name, soon: None)
            await n.add("first", 0)
            await n.move("first", 1)
            assert n.places() == {"first": uuid(1)}

    clock.run(work())


def test_a_drain_moves_at_most_four_tenants_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            for number in range(6):
                await n.add(f"t{number}", 0)
            most = 0
            drains = asyncio.ensure_future(n.world.keeper.relocations.evacuate(uuid(0), ROOT))
            while not drains.done():
                most = max(most, sum(one.moves for one in n.world.keeper.book))
                await asyncio.sleep(0.01)
            assert len((await drains).moved) == 6
            assert most == relocate.AT_ONCE

    clock.run(work())


def test_a_user_with_many_moves_delays_the_move_of_another_user_by_at_most_one(tmp_path: Path) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            many = [f"t{number}" for number in range(5)]
            for name in many:
                await n.add(name, 0, user=7)
            await n.add("other", 0, user=8)
            await asyncio.gather(*(n.move(name, 1) for name in [*many, "other"]))
            order = [span.name for span in n.spans.of("out")]
            assert order.index("other") <= 1

    clock.run(work())


def test_a_failed_move_is_undone_while_others_continue(tmp_path: Path) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            for name in ("first", "second", "third"):
                await n.add(name, 0)
            n.driver.fails = 1
            gone = await n.world.keeper.relocations.evacuate(uuid(0), ROOT)
            ((stays, why),) = gone.staying
            assert why == "the driver refuses"
            places = n.places()
            assert places.pop(stays) == uuid(0)
            assert places == {one.allocation_id: uuid(1) for one in gone.moved}
            assert len(places) == 2
            assert {one.state for one in n.world.keeper.book} == {State.ACTIVE}
            assert set(n.leases.phase.values()) == {SwapPhase.HERE}

    clock.run(work())


def test_a_move_that_hangs_delays_no_other_move(tmp_path: Path) -> None:
    """The process of `stopped` is stopped by its user on the new device."""

    async def work() -> None:
        async with node(tmp_path) as n:
            for name, device in (("stopped", 0), ("next", 1), ("other", 2)):
                await n.add(name, device)
            n.leases.hangs.add("stopped")
            stopped = asyncio.ensure_future(n.move("stopped", 3))
            await clock.passed(MADE_SECONDS + OUT_SECONDS + DRIVER_SECONDS + 1)
            for name, to in (("next", 3), ("other", 0)):
                n.leases.made[name] = HELD
                await n.move(name, to)
                assert not stopped.done()
            with pytest.raises(VgpuError, match="was not moved within 21 seconds"):
                await stopped
            assert n.places() == {"stopped": uuid(0), "next": uuid(3), "other": uuid(0)}

    clock.run(work())


@pytest.mark.parametrize("hangs", ["leaving", "arriving"])
def test_a_stopped_tenant_whose_move_goes_between_devices_occupies_the_driver_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    async def work() -> None:
        async with node(tmp_path, is_near=True) as n:
            await n.add("stopped", 0)
            await n.add("other", 2)
            if hangs == "arriving":
                n.leases.hangs.add("stopped")
            else:
                later = n.leases._later

                def never(seconds: float, name: str, phase: SwapPhase) -> None:
                    if name != "stopped":
                        later(seconds, name, phase)

                monkeypatch.setattr(n.leases, "_later", never)
            stopped = asyncio.ensure_future(n.move("stopped", 3))
            await clock.passed(1)
            await n.move("other", 1)
            assert not stopped.done()
            assert not n.spans.of("made"), "no memory of the host is used"
            with pytest.raises(VgpuError):
                await stopped
            held = [span.ended - span.began for span in n.spans.of("driver") if span.name == "stopped"]
            assert held and max(held) < 21, "10 s to park the memory, and 10 s to bring it back"

    clock.run(work())


def test_the_next_move_after_memory_was_not_parked_in_time_goes_through_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path, is_near=True) as n:
            await n.add("first", 0)
            with monkeypatch.context() as patch:
                later = n.leases._later
                patch.setattr(n.leases, "_later", lambda _, name, phase: later(15, name, SwapPhase.HERE))
                with pytest.raises(VgpuError, match=r"did not park the memory of .* within 10 s"):
                    await n.move("first", 1)
            assert n.places() == {"first": uuid(0)}
            n.leases.made.clear()
            for to, reached, made in ((1, 1, 1), (0, 2, 1)):
                await n.move("first", to)
                assert (n.driver.reached, len(n.spans.of("made"))) == (reached, made)

    clock.run(work())


def test_the_program_that_copied_a_tenants_memory_ends_after_the_tenant_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path, is_near=True) as n:
            await n.add("first", 0)
            n.leases.hangs.add("first")
            n.leases.lists["first"] = 5

            async def copy(process: Any, parked_list: int, seconds: float) -> None:
                assert n.leases.lists.pop("first") == parked_list
                n.leases._later(IN_SECONDS, "first", SwapPhase.HERE)

            monkeypatch.setattr(n.driver, "copy", copy, raising=False)
            await n.move("first", 1)
            (driver,), (into,) = n.spans.of("driver"), n.spans.of("in")
            assert driver.ended >= into.ended, "the end of its contexts slows the driver down"
            assert n.places() == {"first": uuid(1)}

    clock.run(work())


@pytest.mark.parametrize(("takes", "waits"), [(1, 1), (60, 2)])
def test_a_move_ends_when_the_memory_on_the_old_device_is_free_or_after_two_seconds(
    tmp_path: Path, takes: float, waits: float
) -> None:
    async def work() -> None:
        async with node(tmp_path, is_near=True) as n:
            await n.add("first", 0)
            n.leases.behind["first"] = 16
            move = asyncio.ensure_future(n.move("first", 1))
            while not (into := n.spans.of("in")):
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(IN_SECONDS + takes, n.leases.behind.clear)
            await move
            assert daemon_clock.now() == pytest.approx(into[0].ended + waits, abs=0.1)
            (driver,) = n.spans.of("driver")
            assert driver.ended == pytest.approx(into[0].ended, abs=0.1)

    clock.run(work())


@pytest.mark.parametrize("fails", [0, 1])
def test_a_move_whose_copy_between_devices_fails_is_tried_once_through_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    async def work() -> None:
        async with node(tmp_path, is_near=True) as n:
            await n.add("first", 0)
            n.leases.lists["first"] = 5
            expect, tries = n.leases.expect, 0

            async def copy(process: Any, parked_list: int, seconds: float) -> None:
                nonlocal tries
                tries += 1
                n.leases.lists.clear()
                n.leases.phase["first"] = SwapPhase.OUT
                raise VgpuError(ErrorCode.SUSPEND_FAILED, "the link fails", "")

            def by_host(name: str, soon: bool) -> None:
                n.driver.fails = fails
                expect(name, soon)

            monkeypatch.setattr(n.driver, "copy", copy, raising=False)
            monkeypatch.setattr(n.leases, "expect", by_host)
            if fails:
                with pytest.raises(VgpuError, match="the driver refuses"):
                    await n.move("first", 1)
            else:
                await n.move("first", 1)
            assert n.places() == {"first": uuid(0 if fails else 1)}
            assert (tries, len(n.spans.of("made"))) == (1, 1)
            assert n.world.keeper.book.get("first").state is State.ACTIVE

    clock.run(work())


def test_a_tenant_whose_memory_does_not_fit_beside_that_of_another_move_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            for name in ("first", "second"):
                await n.add(name, 0)
            used = NODE.devices[1].memory_usable_bytes - HELD * 3 // 2
            full = replace(NODE.devices[1], memory_used_bytes=used)
            n.world.gateway.node = replace(NODE, devices=(NODE.devices[0], full, *NODE.devices[2:]))
            plain = n.world.keeper.suspends.swaps.processes

            async def processes(allocation: Allocation) -> tuple[SuspendedProcess, ...]:
                return tuple([replace(one, memory_bytes=HELD) for one in await plain(allocation)])

            monkeypatch.setattr(n.world.keeper.suspends.swaps, "processes", processes)
            await asyncio.gather(n.move("first", 1), n.move("second", 1))
            first, second = n.spans.of("in")
            assert first.ended <= second.began
            assert set(n.places().values()) == {uuid(1)}

    clock.run(work())


def test_a_direct_move_is_refused_if_the_host_lacks_memory_for_what_cannot_be_parked(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with node(tmp_path, POLICY.replace('"1MiB"', '"1000TiB"'), is_near=True) as n:
            await n.add("first", 0)
            with pytest.raises(VgpuError) as error:
                await n.move("first", 1)
            assert error.value.code is ErrorCode.NO_CAPACITY
            assert not n.spans.of("out")

    clock.run(work())


def test_an_open_move_is_ended_when_its_memory_is_back_and_retried_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            await n.add("stopped", 0)
            moves, tried = n.world.keeper.moves, list[float]()
            watch = asyncio.ensure_future(moves.watch())
            with monkeypatch.context() as patch:
                patch.setattr(n.leases, "_later", lambda seconds, name, phase: None)
                with pytest.raises(VgpuError, match="was not moved within"):
                    await n.move("stopped", 3)

            async def recover(allocation: Allocation) -> None:
                tried.append(daemon_clock.now())
                raise VgpuError(ErrorCode.SUSPEND_FAILED, "the driver refuses", "")

            monkeypatch.setattr(moves, "recover", recover)
            await clock.passed(60)
            assert not tried, "its memory is on the way"
            n.leases.phase["stopped"] = SwapPhase.HERE
            held = n.world.keeper.book.get("stopped")
            assert moves._is_left_open(held)
            change = moves._context.changes.begin("stopped", asyncio.sleep(0.1))
            assert not moves._is_left_open(held), "an operation has it"
            await change
            for other in (
                replace(held, state=State.ACTIVE),
                replace(held, slices=tuple([replace(part, other_uuid="") for part in held.slices])),
                replace(held, suspended=tuple([replace(one, way=Way.CHECKPOINT) for one in held.suspended])),
            ):
                assert not moves._is_left_open(other)
            await clock.passed(65)
            assert [round(later - one) for one, later in pairwise(tried)] == [30, 30]
            watch.cancel()

    clock.run(work())


def test_the_daemon_runs_the_loops_that_watch_suspended_and_moved_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            monkeypatch.setattr(daemon, "dra_door", Mock())
            keeper = n.world.keeper
            run = daemon.loops(Mock(), keeper, Mock(), asyncio.Event())
            assert {keeper.suspends.watch, keeper.moves.watch} <= set(run)

    clock.run(work())


def test_a_move_of_a_stopped_tenant_is_undone_when_the_tenant_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            await n.add("stopped", 0)
            monkeypatch.setattr(n.leases, "_later", lambda seconds, name, phase: None)
            with pytest.raises(VgpuError, match="was not moved within"):
                await n.move("stopped", 3)
            watch = asyncio.ensure_future(n.world.keeper.moves.watch())
            await clock.passed(60)
            held = n.world.keeper.book.get("stopped")
            assert (held.state, held.moves) == (State.SUSPENDING, True), "its memory is on the way"
            n.leases.phase["stopped"] = SwapPhase.HERE
            await clock.passed(3)
            held = n.world.keeper.book.get("stopped")
            assert (held.state, held.moves, held.suspended) == (State.ACTIVE, False, ())
            assert n.places() == {"stopped": uuid(0)}
            watch.cancel()

    clock.run(work())


def test_a_move_that_needs_the_room_of_an_earlier_one_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant moves to the device that another tenant leaves, and needs its room there. A third tenant
    moves to a device with room, and does not wait for the two others.
    """

    async def work() -> None:
        async with node(tmp_path) as n:
            ways = {"first": (0, 1, 60), "second": (2, 0, 50), "third": (2, 3, 1)}
            for name, (source, _, gib) in ways.items():
                await n.add(name, source, gib=gib)
            moves = [
                TenantMove(name, uuid(source), uuid(target), gib * GIB)
                for name, (source, target, gib) in ways.items()
            ]

            async def plan(_: RoomWanted) -> DefragView:
                return DefragView(uuid(2), tuple(moves))

            monkeypatch.setattr(n.world.keeper.relocations, "plan", plan)
            done = await n.world.keeper.relocations.defrag(RoomWanted(), ROOT)
            assert done.moves == tuple(replace(one, done=True) for one in moves)
            made = {span.name: span for span in n.spans.of("made")}
            into = {span.name: span for span in n.spans.of("in")}
            assert made["second"].began >= into["first"].ended
            assert overlap(made["second"], made["third"])

    clock.run(work())


# --- the host's memory


def bounded(bytes_: int) -> str:
    return f'{POLICY}host_memory = "{bytes_ // MIB}MiB"\n'


def test_the_host_buffer_of_one_move_serves_the_tenants_next_moves(tmp_path: Path) -> None:

    async def work() -> None:
        async with node(tmp_path, bounded(HELD)) as n:
            await n.add("first", 0)
            for to in (1, 0, 1):
                await n.move("first", to)
                assert n.places() == {"first": uuid(to)}

    clock.run(work())


def test_of_two_moves_at_once_with_room_for_one_the_second_is_refused_and_leaves_no_buffer(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with node(tmp_path, bounded(HELD + HELD // 2)) as n:
            for name in ("first", "second"):
                await n.add(name, 0)
            names = ("first", "second")
            results = await asyncio.gather(*(n.move(name, 1) for name in names), return_exceptions=True)
            ((stays, refused),) = [
                (name, error)
                for name, error in zip(names, results, strict=True)
                if isinstance(error, VgpuError)
            ]
            (goes,) = {*names} - {stays}
            assert refused.code is ErrorCode.NO_CAPACITY
            assert "exceed the host memory for suspended tenants: 512MiB of 768MiB are taken" in str(refused)
            assert n.leases.made == {goes: HELD}
            assert n.places() == {goes: uuid(1), stays: uuid(0)}
            assert n.world.parts.book.use_of(uuid(1)).count == 1, "its room is free again"

    clock.run(work())


def test_a_drain_gives_scarce_host_memory_to_the_first_tenant_of_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before vgpud orders host memory for a tenant, it reads how much memory the tenant holds. For `large`
    this takes longer.
    """

    async def work() -> None:
        async with node(tmp_path, bounded(HELD + HELD // 2)) as n:
            await n.add("small", 0)
            await n.add("large", 0, gib=2)
            swaps = n.world.keeper.suspends.swaps
            plain = swaps.processes

            async def processes(allocation: Allocation) -> tuple[SuspendedProcess, ...]:
                if allocation.id == "large":
                    await clock.passed(1)
                return await plain(allocation)

            monkeypatch.setattr(swaps, "processes", processes)
            gone = await n.world.keeper.relocations.evacuate(uuid(0), ROOT)
            assert [one.allocation_id for one in gone.moved] == ["large"]
            assert [name for name, _ in gone.staying] == ["small"]

    clock.run(work())


def test_a_tenant_that_grew_during_a_drain_is_moved_again_after_the_other_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the buffer of the tenant that grew is made, host memory for the tenant is ordered anew, and there
    is too little. The memory ordered for `second`, which began later, is free again when `second` has moved.
    """

    async def work() -> None:
        async with node(tmp_path, bounded(3 * HELD)) as n:
            for name in ("first", "second"):
                await n.add(name, 0)
            swaps = n.world.keeper.suspends.swaps
            plain, calls = swaps.processes, list[str]()

            async def processes(allocation: Allocation) -> tuple[SuspendedProcess, ...]:
                calls.append(allocation.id)
                grown = HELD // 4 if calls.count("first") > 1 and allocation.id == "first" else 0
                found = await plain(allocation)
                return tuple(replace(one, memory_bytes=HELD + HELD // 2 + grown) for one in found)

            monkeypatch.setattr(swaps, "processes", processes)
            gone = await n.world.keeper.relocations.evacuate(uuid(0), ROOT)
            assert not gone.staying
            assert calls.count("first") == 4, "it was refused after its buffer was made, and tried again"
            assert set(n.places().values()) == {uuid(1)}

    clock.run(work())


def test_a_drain_reports_that_all_other_devices_are_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            await n.add("first", 0)
            relocations = n.world.keeper.relocations
            monkeypatch.setattr(relocations, "_is_drained", {uuid(i) for i in range(4)}.__contains__)
            ((_, why),) = (await relocations.evacuate(uuid(0), ROOT)).staying
            assert why == "all other devices (3) are drained; 'vgpuctl undrain DEVICE' opens one"

    clock.run(work())


def test_a_defrag_for_more_memory_than_any_card_has_is_refused_with_that_reason(tmp_path: Path) -> None:
    async def work() -> None:
        async with node(tmp_path) as n:
            await n.add("first", 0)
            with pytest.raises(VgpuError, match=r"no device can hold 2TiB .* the most is ") as refused:
                await n.world.keeper.relocations.plan(RoomWanted(memory_bytes=2048 * GIB))
            assert refused.value.code is ErrorCode.IMPOSSIBLE

    clock.run(work())


def test_a_refused_move_leaves_no_host_buffer(tmp_path: Path) -> None:
    async def work() -> None:
        async with node(tmp_path, bounded(HELD // 2)) as n:
            await n.add("first", 0)
            with pytest.raises(VgpuError, match="exceed the host memory"):
                await n.move("first", 1)
            assert n.leases.made == {}
            assert n.places() == {"first": uuid(0)}
            gone = await n.world.keeper.relocations.evacuate(uuid(0), ROOT)
            assert [name for name, _ in gone.staying] == ["first"]
            assert n.leases.made == {}

    clock.run(work())
