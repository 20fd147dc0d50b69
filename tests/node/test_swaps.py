"""The time that a resuming tenant waits for room, and the host buffers that are ordered before an
eviction.
"""

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests import clock
from tests.node.world import request
from vgpud import clock as daemon_clock
from vgpud.lease import LeaseActivity, ProcessSwap, SwapPhase
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Cause, Mode, Slice, State, SuspendedProcess, Way
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
from vgpud.node.tenants import swaps
from vgpud.node.tenants.activities import Activities
from vgpud.node.tenants.changes import Changes
from vgpud.node.tenants.checkpoints import Checkpoints
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.host_table import HostTable
from vgpud.node.tenants.suspends import Suspends
from vgpud.planner.suspend import HostMemory
from vgpud.proc import start_ticks

GPU = "GPU-0"


def tenant(name: str, state: State, gpu: str = GPU) -> Allocation:
    part = SimpleNamespace(device_uuid=gpu, memory_bytes=69 * GIB)
    return cast(Allocation, SimpleNamespace(id=name, state=state, slices=(part,), suspended=()))


class Silent(Activities):
    """The activity of tenants that do not answer, and whose last report says `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(None)
        self._report = LeaseActivity(quiet=quiet)

    def read(self, _: Allocation) -> LeaseActivity:
        return self._report


class Finds(swaps.Swaps):
    """Swaps on a device that stays full."""

    def __init__(self, beside: list[Allocation]) -> None:
        self.forbidden: list[str] = []
        kept = SimpleNamespace(forbid_beside=lambda one: self.forbidden.append(one.id))
        services = SimpleNamespace(activities=Silent(), kept=kept)
        self._context = cast(NodeContext, services)
        self._book = cast(Any, SimpleNamespace(allocations_on=lambda _: beside))

    def _read(self, _: Allocation) -> tuple[ProcessSwap, ...]:
        return (ProcessSwap(SwapPhase.COMING, 2, 1 << 30, 1 << 30),)


def test_a_resume_waits_for_the_suspension_of_another_tenant_of_its_device() -> None:
    """The resume waits until the memory of the other tenant is on the host, for 23 s for 69 GiB on an
    H200.
    """
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


@pytest.mark.parametrize(
    ("gpu", "seconds"),
    [
        # the other tenant leaves this device, so the wait lasts as long as 69 GiB may take
        (GPU, 192.5 + 10),
        ("GPU-1", 10),  # the other tenant is about to move here, and takes no room yet
    ],
)
def test_a_resume_waits_a_bounded_time_for_the_suspension_of_another_tenant(gpu: str, seconds: float) -> None:
    finds = Finds([tenant("b", State.SUSPENDING, gpu)])

    async def comes() -> float:
        began = daemon_clock.now()
        with pytest.raises(VgpuError, match="has no room"):
            await finds.until(tenant("a", State.RESUMING), SwapPhase.HERE)
        return daemon_clock.now() - began

    assert clock.run(comes()) == pytest.approx(seconds, abs=1)


class Goes(swaps.Swaps):
    """Swaps of a tenant whose process reports `phase`, and whose work has ended if `quiet` is set."""

    def __init__(self, phase: SwapPhase, quiet: bool) -> None:
        self.phase = phase
        self._context = cast(NodeContext, SimpleNamespace(activities=Silent(quiet)))
        self._book = cast(Any, SimpleNamespace(allocations_on=lambda _: []))

    def _read(self, _: Allocation) -> tuple[ProcessSwap, ...]:
        return (ProcessSwap(self.phase, 0, 1 << 30, 0),)


def test_a_swap_out_waits_for_a_swap_thread_that_begins_late() -> None:
    """The swap thread of libvgpu begins late while it allocates its host buffer, or on a loaded host."""
    goes = Goes(SwapPhase.HERE, quiet=True)

    async def goes_out() -> None:
        waits = asyncio.ensure_future(goes.until(tenant("a", State.SUSPENDING), SwapPhase.OUT))
        await clock.passed(10)
        assert not waits.done()
        goes.phase = SwapPhase.OUT
        await waits

    clock.run(goes_out())


@pytest.mark.parametrize(
    ("phase", "quiet", "why"),
    [
        (SwapPhase.HERE, False, "its work did not end within 4 seconds"),
        (SwapPhase.DRAINING, True, "its work did not end within 4 seconds"),
        (SwapPhase.HERE, True, "its memory was not moved within 22 seconds"),
    ],
)
def test_a_swap_out_fails_if_libvgpu_does_not_begin_it_in_time(
    phase: SwapPhase, quiet: bool, why: str
) -> None:
    with pytest.raises(VgpuError, match=why):
        clock.run(Goes(phase, quiet).until(tenant("a", State.SUSPENDING), SwapPhase.OUT))


class Prepares(swaps.Swaps):
    """Swaps of an evicted tenant with two processes of 8 GiB, of which `ready` are ready for the driver."""

    def __init__(self, ready: int = 0) -> None:
        self.ready = ready
        self._context = cast(NodeContext, SimpleNamespace(activities=Silent()))

    def _read(self, _: Allocation) -> tuple[ProcessSwap, ...]:
        size = 8 * GIB
        return tuple(ProcessSwap(SwapPhase.OUT, 0, size, size, is_ready=self.ready > at) for at in range(2))


def test_the_driver_saves_an_evicted_tenant_only_after_all_its_processes_are_ready() -> None:
    prepares = Prepares()

    async def saves() -> None:
        waits = asyncio.ensure_future(prepares.until_ready(tenant("a", State.SUSPENDING)))
        for prepares.ready in range(2):
            await clock.passed(3)
            assert not waits.done()
        prepares.ready = 2
        await clock.passed(1)
        assert waits.done()

    with capture_logs() as lines:
        clock.run(saves())
    assert lines == []


def test_an_evicted_tenant_that_does_not_become_ready_is_saved_after_a_time_for_its_memory() -> None:
    """The lease of a libvgpu of an older version never says that a process is ready."""

    async def saves() -> float:
        began = daemon_clock.now()
        await Prepares(ready=1).until_ready(tenant("a", State.SUSPENDING))
        return daemon_clock.now() - began

    with capture_logs() as lines:
        assert clock.run(saves()) == pytest.approx(8, abs=0.1)
    (line,) = lines
    assert (line["event"], line["allocation"]) == ("tenant_not_ready_for_checkpoint", "a")


class Lies(swaps.Swaps):
    """Swaps of a tenant whose two processes each report 1 PiB to move."""

    def __init__(self, phase: SwapPhase, available_gib: int = 0) -> None:
        self.ordered: list[bool] = []
        word = ProcessSwap(phase, 0, 1 << 50, 0, 1 << 50)

        self._book = Book()
        told = SimpleNamespace(swaps=lambda _: (word, word), expect=lambda _, soon: self.ordered.append(soon))
        self._suspendable = cast(Any, told)
        memory = HostMemory(available_gib * GIB, 1 * GIB)
        host = HostTable(self._book, self._suspendable, lambda: memory)
        kept = SimpleNamespace(forbid=lambda _: None)
        self._context = cast(Any, SimpleNamespace(activities=Silent(), host=host, kept=kept))


@pytest.mark.parametrize(
    ("phase", "wanted", "state"),
    [
        (SwapPhase.GOING, SwapPhase.OUT, State.SUSPENDING),
        (SwapPhase.COMING, SwapPhase.HERE, State.RESUMING),
    ],
)
def test_a_swap_of_a_lease_that_claims_a_pebibyte_is_awaited_only_as_long_as_its_limit_takes(
    phase: SwapPhase, wanted: SwapPhase, state: State
) -> None:
    """While vgpud waits for a swap, the other tenants of the device cannot have their turns."""
    liar = Allocation("a", request("a"), state, (Slice(GPU, Mode.PRELOAD, 8 * GIB),))
    with pytest.raises(VgpuError, match="its memory was not moved within 40 seconds"):
        clock.run(Lies(phase).until(liar, wanted))


def test_a_lease_that_claims_a_pebibyte_is_not_refused_for_want_of_host_memory() -> None:
    """If the check of host memory believed the lease, the tenant would stay on its device after its turn."""
    liar = Allocation("a", request("a"), State.ACTIVE, (Slice(GPU, Mode.PRELOAD, 8 * GIB),))
    lies = Lies(SwapPhase.HERE, available_gib=9)
    lies.expect([liar], [], {})
    assert lies.ordered == [True]


class Reports:
    """A tenant whose libvgpu reports `calls` one second after a request, unless it is `stopped`."""

    def __init__(self, stopped: bool) -> None:
        self.calls, self.stopped = 9, stopped
        self._report = LeaseActivity(calls=7, answers=(((0, 1), 1),))

    def activity(self, _: str) -> LeaseActivity:
        return self._report

    async def look(self, _: str) -> None:
        if not self.stopped:
            asyncio.get_running_loop().call_later(1, self._answer)

    def _answer(self) -> None:
        ((process, times),) = self._report.answers
        self._report = LeaseActivity(calls=self.calls, answers=((process, times + 1),))


def test_calls_before_a_swap_out_do_not_count_as_work_after_it() -> None:
    async def leaves() -> None:
        reports, book = Reports(stopped=False), Book()
        activities = Activities(cast(Any, reports))
        away = Allocation("a", request("a"), State.SUSPENDED, (Slice(GPU, Mode.PRELOAD, GIB),))
        book.add(away)
        await activities.left(away)
        await activities.ask("a")
        await clock.passed(2)
        assert not activities.wants(away)
        reports.calls += 1
        await activities.ask("a")
        await clock.passed(2)
        assert activities.wants(away)

    clock.run(leaves())


def test_a_swap_out_waits_a_bounded_time_for_a_tenant_that_does_not_report() -> None:
    away = Allocation("a", request("a"), State.SUSPENDING, (Slice(GPU, Mode.PRELOAD, GIB),))
    activities = Activities(cast(Any, Reports(stopped=True)))

    async def leaves() -> None:
        async with asyncio.timeout(3):
            await activities.left(away)

    clock.run(leaves())


class Buffers:
    """The leases of tenants, each with its movable GiB and the GiB of its host buffer. Records which tenants
    make host buffers in advance, and those that keep memory on the device for another tenant's turn.
    """

    def __init__(self, **gib: tuple[int, int]) -> None:
        self.gib = gib
        self.ordered: dict[str, bool] = {}
        self.keeps: dict[str, str] = {}

    def allow(self, going: Allocation, stays_bytes: int, room_for: str) -> None:
        assert stays_bytes == GIB // 2, "what cannot be evicted"
        self.keeps[going.id] = room_for

    def forbid(self, going: Allocation) -> None:
        self.keeps.pop(going.id, None)

    def held(self, name: str) -> Any:
        return SimpleNamespace(used_bytes=self.gib[name][0] * GIB, context_bytes=GIB // 2)

    def expect(self, name: str, soon: bool) -> None:
        if name not in self.gib:
            raise VgpuError(ErrorCode.LEASE_FAILED, "the lease is gone", "")
        self.ordered[name] = soon

    def swaps(self, name: str) -> tuple[ProcessSwap, ...]:
        movable, made = self.gib[name]
        return (ProcessSwap(SwapPhase.HERE, 0, movable * GIB, made * GIB),)


def running(name: str, gib: int = 8) -> Allocation:
    return Allocation(name, request(name), State.ACTIVE, (Slice(GPU, Mode.PRELOAD, gib * GIB),))


def table(buffers: Buffers, available_gib: int, limit_gib: int | None = None) -> HostTable:
    """The table of host memory for running tenants, on a host with `available_gib`, of which 1 GiB must stay
    free.
    """
    book = Book()
    for name in buffers.gib:
        book.add(running(name))
    limit = None if limit_gib is None else limit_gib * GIB
    return HostTable(book, cast(Any, buffers), lambda: HostMemory(available_gib * GIB, GIB, limit))


@pytest.mark.parametrize(
    ("available_gib", "ordered"),
    [
        (9, {"a": True, "b": True, "c": True}),
        (8, {"a": True, "b": True, "c": False}),
        (6, {"a": True, "b": False, "c": True}),
        (1, {"a": False, "b": False, "c": False}),
    ],
)
def test_host_buffers_are_ordered_for_as_many_tenants_as_the_host_has_memory_for(
    available_gib: int, ordered: dict[str, bool]
) -> None:
    """The host has memory for the buffers of only some tenants. vgpud takes back the orders for which there
    is no longer room.
    """
    buffers = Buffers(a=(4, 1), b=(5, 1), c=(2, 1))
    host = swaps.Swaps(
        cast(
            NodeContext,
            SimpleNamespace(book=(), suspendable=buffers, host=table(buffers, available_gib), kept=buffers),
        )
    )
    for _ in range(2):  # twice: the orders of the first round must not count as used memory in the second
        host.expect([running(name) for name in buffers.gib], [], {})
        assert buffers.ordered == ordered
    host.expect([], [running("gone"), running("a")], {})
    assert buffers.ordered == {**ordered, "a": False}


def test_host_buffers_are_ordered_only_for_memory_that_leaves_at_the_end_of_the_turn() -> None:
    buffers = Buffers(a=(4, 1), b=(4, 1))
    context = SimpleNamespace(book=(), suspendable=buffers, host=table(buffers, 100), kept=buffers)
    host = swaps.Swaps(cast(NodeContext, context))
    host.expect([running("a"), running("b")], [], {"a": "c"})
    assert (buffers.ordered, buffers.keeps) == ({"a": True, "b": True}, {"a": "c"})
    host.expect([running("a")], [], {})
    assert buffers.keeps == {}, "no turn is awaited, so all of the memory may leave"


def test_a_tenant_of_two_devices_is_ordered_to_keep_no_memory_for_a_turn() -> None:
    """libvgpu evicts nothing of it, and the share that may stay is a share of one device."""
    buffers = Buffers(a=(4, 1))
    context = SimpleNamespace(book=(), suspendable=buffers, host=table(buffers, 100), kept=buffers)
    one = running("a")
    two = replace(one, slices=(*one.slices, Slice("GPU-1", Mode.PRELOAD, 8 * GIB)))
    swaps.Swaps(cast(NodeContext, context)).expect([two], [], {"a": "c"})
    assert buffers.keeps == {}


def test_the_existing_host_buffer_of_a_tenant_counts_as_room_for_that_tenant() -> None:
    buffers = Buffers(a=(4, 4))
    with table(buffers, available_gib=2, limit_gib=5).ordered(running("a"), 4 * GIB, driver_bytes=1 * GIB):
        pass


def test_two_host_buffers_ordered_at_once_do_not_count_the_same_free_memory() -> None:
    """The second tenant finds no room until the first one's order has ended."""
    host = table(Buffers(a=(4, 0), b=(4, 0)), available_gib=8)
    with (
        host.ordered(running("a"), 4 * GIB),
        pytest.raises(
            VgpuError, match="1GiB must stay free and 4GiB are ordered for other tenants"
        ) as refused,
        host.ordered(running("b"), 4 * GIB),
    ):
        raise AssertionError("it has the room of the first")
    assert refused.value.code is ErrorCode.NO_CAPACITY
    with host.ordered(running("b"), 4 * GIB):
        pass


def test_memory_of_a_half_made_host_buffer_is_not_counted_twice() -> None:
    """4 GiB of the buffer are made: the host has 4 GiB less, and the order still contains these 4 GiB."""
    buffers = Buffers(a=(8, 0), b=(3, 0))
    available = [12]
    book = Book()
    for name in buffers.gib:
        book.add(running(name))
    host = HostTable(book, cast(Any, buffers), lambda: HostMemory(available[0] * GIB, GIB))
    with host.ordered(running("a"), 8 * GIB):
        buffers.gib["a"], available[0] = (8, 4), 8
        with host.ordered(running("b"), 3 * GIB):
            pass


def test_host_buffers_of_running_tenants_count_against_the_bound_of_the_policy() -> None:
    host = table(Buffers(a=(6, 6), b=(4, 0)), available_gib=100, limit_gib=9)
    with (
        pytest.raises(VgpuError, match="6GiB of 9GiB are taken"),
        host.ordered(running("b"), 4 * GIB),
    ):
        pass
    assert set(host.expect([running("b"), running("a")])) == {"b"}
    with host.ordered(running("b"), 3 * GIB):
        pass


def test_a_lease_that_claims_too_much_memory_counts_with_the_limit_of_its_tenant() -> None:
    """The tenant can write its lease. Neither the claimed memory nor the claimed buffer may take the room of
    others.
    """
    host = table(Buffers(a=(1 << 20, 1 << 20), b=(4, 0)), available_gib=100, limit_gib=12)
    assert host.movable_bytes(running("a")) == 8 * GIB
    with host.ordered(running("a"), 1 << 60), host.ordered(running("b"), 4 * GIB):
        pass


def test_a_suspension_by_hand_waits_for_a_resumption_by_a_rule_and_not_for_one_by_hand() -> None:
    async def orders() -> None:
        book = Book()
        changes = Changes(book)
        away = Allocation("a", request("a"), State.RESUMING, (), cause=Cause.TURN)
        book.add(away)

        async def resumes() -> None:
            await asyncio.sleep(5)
            book.replace(replace(book.get("a"), state=State.ACTIVE))

        do = Checkpoints(cast(NodeContext, SimpleNamespace(book=book, changes=changes)))
        change = changes.begin("a", resumes())
        assert (await do.wait_until_settled("a")).state is State.ACTIVE
        assert change.done()
        book.replace(replace(away, cause=Cause.HAND))
        change = changes.begin("a", resumes())
        with pytest.raises(VgpuError, match="is resuming at this moment"):
            await do.wait_until_settled("a")
        assert not change.done()
        await change

    clock.run(orders())


def process(ended: bool) -> SuspendedProcess:
    """Returns a record of the test's own process; with `ended`, of an earlier process with the same pid."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return SuspendedProcess(os.getpid(), ticks - ended, 2 * GIB, Way.SWAP, stays_bytes=1 * GIB)


@pytest.mark.parametrize(
    ("ended", "held_gib", "stays_gib"), [((True,), 0, 0), ((True, False), 2, 1), ((False, False), 4, 2)]
)
def test_host_memory_of_a_suspended_tenants_ended_processes_is_no_longer_counted(
    ended: tuple[bool, ...], held_gib: int, stays_gib: int
) -> None:
    async def ends() -> None:
        store = AllocationStore(cast(Any, SimpleNamespace(events_after=None)), Book())
        changes = Changes(store.book)
        services = SimpleNamespace(book=store.book, store=store, changes=changes, suspendable=None)
        watch = asyncio.ensure_future(Suspends(cast(NodeContext, services)).watch())
        part = Slice(GPU, Mode.PRELOAD, 8 * GIB)
        away = Allocation("a", request("a"), State.SUSPENDED, (part,), suspended=tuple(map(process, ended)))
        change = changes.begin("a", asyncio.sleep(60))
        store.book.add(away)
        await clock.passed(30)
        assert store.book.get("a") is away, "a record was changed in the middle of another change"
        await change
        await clock.passed(5)
        host = HostTable(store.book, None, lambda: HostMemory(0, 0))
        assert sum(map(host.taken_bytes, store.book)) == held_gib * GIB
        assert store.book.use_of(GPU).memory_bytes == stays_gib * GIB
        watch.cancel()

    clock.run(ends())
