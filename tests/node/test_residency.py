"""The idle rule, turns, and the pauses after failed suspensions, on a simulated clock."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests import clock
from tests.node.world import device, policy_of, request
from vgpud import clock as daemon_clock
from vgpud.lease import LeaseActivity
from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tally import Tally
from vgpud.model.tenancy import Allocation, Cause, Mode, Slice, State
from vgpud.node.store.book import Book
from vgpud.node.tenants.residency import Residency

CARD = device(0)  # a device of 80 GiB
IDLE_SECONDS, TURN_SECONDS, BACK_OFF_SECONDS = 600.0, 60.0, 30.0
HOUR = 3600.0
IDLE = 'idle_suspend = "10min"'
TURNS = 'memory_overcommit = 2.0\nturn = "1min"'


@dataclass
class Card:
    """Tenants of one device. A suspension changes a tenant's state after `takes_seconds`, or fails if `fails`
    is set.
    """

    book: Book = field(default_factory=Book)
    works: set[str] = field(default_factory=set)
    calls: int = 0
    fails: bool = False
    fails_after_seconds: float = 0.0
    takes_seconds: float = 0.0
    released_when_asked: set[str] = field(default_factory=set)
    # allocation id, and whose turn the host buffers are made for: "" if no turn, None if none are made
    expected: dict[str, str | None] = field(default_factory=dict)
    moves: list[tuple[float, str, State]] = field(default_factory=list)

    def add(self, name: str, gib: int = 60) -> None:
        part = Slice(CARD.uuid, Mode.PRELOAD, gib * GIB)
        self.book.add(Allocation(name, request(name, gib), State.ACTIVE, (part,)))

    def state(self, name: str) -> tuple[State, Cause]:
        one = self.book.get(name)
        return one.state, one.cause

    # --- calls of Residency into the node

    def expect(self, soon: list[Allocation], no_longer: list[Allocation], room_for: dict[str, str]) -> None:
        self.expected |= {one.id: None for one in no_longer}
        self.expected |= {one.id: room_for.get(one.id, "") for one in soon}

    def read(self, allocation: Allocation) -> LeaseActivity:
        self.calls += allocation.id in self.works
        return LeaseActivity(calls=self.calls)

    def wants(self, allocation: Allocation) -> bool:
        return allocation.id in self.works

    async def ask(self, name: str) -> None:
        if name in self.released_when_asked:
            self.released_when_asked.remove(name)
            self.book.remove(name)

    async def suspend(self, one: Allocation, cause: Cause, *_: object) -> Allocation:
        return await self._becomes(replace(one, cause=cause), State.SUSPENDING, State.SUSPENDED)

    async def resume(self, one: Allocation, *_: object, **__: object) -> Allocation:
        return await self._becomes(one, State.RESUMING, State.ACTIVE)

    async def _becomes(self, one: Allocation, meanwhile: State, then: State) -> Allocation:
        self.moves.append((daemon_clock.now(), one.id, then))
        if self.fails:
            await asyncio.sleep(self.fails_after_seconds)
            raise VgpuError(ErrorCode.HELPER_FAILED, "the driver was told to fail", "")
        for state in (meanwhile, then):
            self.book.replace(replace(one, state=state))
            await asyncio.sleep(self.takes_seconds)
        return self.book.get(one.id)


Scene = Callable[[Card], Awaitable[None]]


def play(folder: Path, rules: str, scene: Scene) -> None:
    text = f'version = 1\n[[device]]\nmode = "preload"\n[device.preload]\n{rules}\n'
    policy = policy_of(folder, text)().policy
    card = Card()
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.add(asyncio.ensure_future(work))

    async def main() -> None:
        context = SimpleNamespace(
            book=card.book,
            activities=SimpleNamespace(read=card.read, wants=card.wants, ask=card.ask, keep=lambda _: None),
            inventory=SimpleNamespace(node=Node(devices=(CARD,))),
            policy=lambda: policy,
            tally=Tally(),
            background=SimpleNamespace(spawn=spawn),
        )
        swaps = SimpleNamespace(stays_bytes=lambda _: None, expect=card.expect)
        suspends = SimpleNamespace(suspend=card.suspend, resume=card.resume, swaps=swaps)
        watch = Residency(cast(Any, context), cast(Any, suspends))
        task = asyncio.ensure_future(watch.run())
        await scene(card)
        task.cancel()
        await asyncio.wait((task,))

    clock.run(main())


def test_an_idle_tenant_is_suspended_after_the_idle_time_and_not_before(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        await clock.passed(0.9 * IDLE_SECONDS)
        assert card.state("a")[0] is State.ACTIVE
        await clock.passed(0.3 * IDLE_SECONDS)
        assert card.state("a") == (State.SUSPENDED, Cause.IDLE)

    play(tmp_path, IDLE, scene)


def test_a_working_tenant_is_not_suspended_as_idle(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        card.works.add("a")
        await clock.passed(HOUR)
        assert card.moves == []
        card.works.clear()
        await clock.passed(1.2 * IDLE_SECONDS)
        assert card.state("a")[0] is State.SUSPENDED

    play(tmp_path, IDLE, scene)


def test_the_idle_rule_goes_on_after_a_release_while_activity_is_read(tmp_path: Path) -> None:
    """An allocation is released while the loop reads the activity of its tenant. The loop must go on with the
    other tenants.
    """

    async def scene(card: Card) -> None:
        card.add("a", gib=10)
        card.add("b", gib=10)
        card.released_when_asked.add("a")
        await clock.passed(1.2 * IDLE_SECONDS)
        assert card.state("b") == (State.SUSPENDED, Cause.IDLE)

    play(tmp_path, IDLE, scene)


def test_a_tenant_suspended_as_idle_is_resumed_when_it_calls_the_driver(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        await clock.passed(1.2 * IDLE_SECONDS)
        assert card.state("a")[0] is State.SUSPENDED
        card.works.add("a")
        await clock.passed(1.0)
        assert card.state("a")[0] is State.ACTIVE

    play(tmp_path, IDLE, scene)


def test_an_idle_suspension_and_its_resume_leave_an_audit_line_each(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        await clock.passed(1.2 * IDLE_SECONDS)
        card.works.add("a")
        await clock.passed(1)

    with capture_logs() as lines:
        play(tmp_path, IDLE, scene)
    told = [line for line in lines if "audit" in line]
    assert [line["audit"] for line in told][:2] == ["suspend", "resume"]
    assert all(line["door"] == "vgpud" and line["reason"].startswith("residency: ") for line in told)


def test_a_failed_suspension_is_tried_again_after_a_pause(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        card.fails = True
        await clock.passed(HOUR)
        times = [at for at, _, _ in card.moves]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        assert len(gaps) > 10
        # a gap is the pause and the rest of the interval between two checks
        assert BACK_OFF_SECONDS <= min(gaps) <= max(gaps) <= BACK_OFF_SECONDS + 2.5
        assert card.state("a")[0] is State.ACTIVE
        card.fails = False
        await clock.passed(BACK_OFF_SECONDS + 2.5)
        assert card.state("a")[0] is State.SUSPENDED

    play(tmp_path, IDLE, scene)


def test_the_pause_after_a_failed_suspension_lasts_as_long_as_the_suspension_did(tmp_path: Path) -> None:
    """Otherwise a tenant that holds up its suspensions would take nearly all of the other tenants' time."""

    async def scene(card: Card) -> None:
        card.add("a")
        card.fails, card.fails_after_seconds = True, 100.0
        await clock.passed(HOUR)
        times = [at for at, _, _ in card.moves]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        assert len(gaps) > 10
        assert 200 <= min(gaps) <= max(gaps) <= 202.5

    play(tmp_path, IDLE, scene)


@pytest.mark.parametrize(("rules", "room_for"), [(TURNS, "b"), (IDLE, "")])
def test_host_buffers_are_ordered_while_another_tenant_waits_and_not_longer(
    tmp_path: Path, rules: str, room_for: str
) -> None:
    """At the end of a turn the memory that the first tenant in the queue leaves room for stays on the device.
    A suspension as idle takes all memory.
    """

    async def scene(card: Card) -> None:
        card.add("a")
        card.works.add("a")
        await clock.passed(TURN_SECONDS / 2)
        assert card.expected == {}
        for name in ("b", "c"):
            card.add(name)
            card.works.add(name)
            card.book.replace(replace(card.book.get(name), state=State.SUSPENDED, cause=Cause.TURN))
            await clock.passed(5)
        assert card.expected == {"a": room_for}
        card.book.remove("b")
        card.book.remove("c")
        await clock.passed(5)
        assert card.expected == {"a": None}

    play(tmp_path, rules, scene)


def test_host_buffers_are_ordered_shortly_before_the_end_of_the_idle_time(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        await clock.passed(0.6 * IDLE_SECONDS)
        assert card.expected == {}
        await clock.passed(0.3 * IDLE_SECONDS)
        assert card.expected == {"a": ""}
        card.works.add("a")
        await clock.passed(0.2 * IDLE_SECONDS)
        assert card.expected == {"a": None}, "it works again"
        assert card.state("a")[0] is State.ACTIVE

    play(tmp_path, IDLE, scene)


def test_the_release_of_a_suspended_tenant_suspends_no_other_tenant(tmp_path: Path) -> None:
    """A suspended tenant takes no room on the device, before its release and during it."""

    async def scene(card: Card) -> None:
        card.add("a")
        card.works.add("a")
        card.add("b")
        for state in (State.SUSPENDED, State.RELEASING):
            card.book.replace(replace(card.book.get("b"), state=state, cause=Cause.TURN))
            await clock.passed(5)
        assert card.moves == []

    play(tmp_path, TURNS, scene)


def test_a_long_allocation_suspends_no_tenant_before_the_end_of_its_turn(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.add("a")
        await clock.passed(5)
        card.add("b")
        card.book.replace(replace(card.book.get("b"), state=State.ALLOCATING))
        await clock.passed(TURN_SECONDS / 2)
        assert card.moves == []

    play(tmp_path, TURNS, scene)


@pytest.mark.parametrize("takes_seconds", [0.0, 20.0])
def test_two_tenants_that_do_not_fit_together_take_turns(tmp_path: Path, takes_seconds: float) -> None:
    async def scene(card: Card) -> None:
        card.takes_seconds = takes_seconds
        card.works |= {"a", "b"}
        card.add("a")
        card.add("b")
        await clock.passed(12 * (TURN_SECONDS + 4 * takes_seconds + 2.5))
        came = [(at, name) for at, name, then in card.moves if then is State.ACTIVE]
        assert len(came) > 10
        assert all(one != other for (_, one), (_, other) in pairwise(came))
        stays = [later - sooner for (sooner, _), (later, _) in pairwise(came)]
        assert min(stays) >= TURN_SECONDS
        assert max(stays) <= TURN_SECONDS + 4 * takes_seconds + 2.5

    play(tmp_path, TURNS, scene)


def test_tenants_that_fit_together_do_not_take_turns(tmp_path: Path) -> None:
    async def scene(card: Card) -> None:
        card.works |= {"a", "b"}
        card.add("a", 30)
        card.add("b", 30)
        await clock.passed(HOUR)
        assert card.moves == []

    play(tmp_path, TURNS, scene)
