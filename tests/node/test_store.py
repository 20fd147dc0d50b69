"""The store's book, ledger, watchers and counts agree after every change and after every failure of the
ledger.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import clock
from tests.model.test_lifecycle import INTENTS, record_in
from tests.node.world import Counted, request
from vgpud.ledger import Ledger, LedgerState
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event
from vgpud.model.lifecycle import EVENT_OF, TABLE, Change, Phase, phase_of
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Lifetime, Mode, Slice, State
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book


def full() -> VgpuError:
    return VgpuError(ErrorCode.LEDGER_FULL, "the disk is full", "make room")


class Walk:
    """A store over a real ledger, which can be made to fail."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.store = AllocationStore(ledger, Book(), checked=True)
        self.told: list[Event] = []
        self.outcomes: list[Change] = []
        self.made = 0

    def held(self) -> tuple[Allocation, ...]:
        return tuple(self.store.book)

    def new(self) -> Allocation:
        self.made += 1
        part = Slice("GPU-0", Mode.PRELOAD, GIB)
        return Allocation(f"a{self.made}", request(f"r{self.made}"), State.ALLOCATING, (part,))

    async def make(self, before: Allocation | None, change: Change, end: Phase) -> None:
        """Makes the store's change that leads to the phase `end`."""
        if change is Change.ALLOCATE:
            await self.store.begin(record_in(end, before or self.new()) or self.new(), change)
            return
        assert before is not None
        after = record_in(end, before)
        if change in INTENTS and after is not None:
            await self.store.begin(after, change)
        elif change is Change.BOUND:
            await self.store.bind(before.id, Lifetime(pid=9, start_ticks=self.made))
        elif change is Change.RELEASED:
            await self.store.forget(before)
            self.outcomes += [change] if before.revision else []
        elif after is not None:
            await self.store.commit(after, change, "it changed")
            self.outcomes.append(change)

    async def agrees(self) -> None:
        state = await self.ledger.load()
        recorded = {a.id: (phase_of(a), a.slices, a.request, a.revision) for a in state.allocations}
        booked = {a.id: (phase_of(a), a.slices, a.request, a.revision) for a in self.held()}
        never = [a.id for a in self.held() if not a.revision and a.state is State.RELEASING]
        # the release of an allocation whose intent was never recorded may not be recorded yet
        for name in never:
            recorded.pop(name), booked.pop(name)
        assert recorded == booked
        told = await self.ledger.last_events(1000)
        assert [event.kind for event in told] == [EVENT_OF[change] for change in self.outcomes]
        assert self.store.latest(1000) == told
        account = self.store.account.tally
        made = [one for one in self.outcomes if one in (Change.ALLOCATED, Change.ALLOCATED_SUSPENDED)]
        assert sum(account.made.values()) == len(made)
        assert account.failed == self.outcomes.count(Change.FAILED)


def walking(work: Callable[[Walk], object]) -> None:
    async def main() -> None:
        with TemporaryDirectory() as folder:
            async with await Counted.open(Path(folder) / "ledger.db") as ledger:
                await work(Walk(ledger))  # type: ignore[misc]

    clock.run(main())


@settings(max_examples=30)
@given(st.data())
def test_the_books_records_and_counts_agree_with_ledger_and_watchers_after_every_change(
    data: st.DataObject,
) -> None:
    async def work(walk: Walk) -> None:
        for _ in range(data.draw(st.integers(1, 30))):
            before = data.draw(st.sampled_from((None, *walk.held())))
            phase = phase_of(before)
            change, end = data.draw(
                st.sampled_from([(c, end) for (p, c), end in TABLE.items() if p is phase])
            )
            with pytest.MonkeyPatch.context() as patched:
                fails = data.draw(st.integers(0, 5)) == 0
                if fails:
                    for name in ("intent", "commit", "forget", "rebind"):
                        patched.setattr(walk.ledger, name, _raises)
                try:
                    await walk.make(before, change, end)
                except VgpuError as error:
                    assert fails and error.code is ErrorCode.LEDGER_FULL
                    if before is not None and phase is not Phase.ALLOCATING:
                        assert walk.store.book.get(before.id) == before
            await walk.agrees()

    walking(work)


async def _raises(*_: object, **__: object) -> None:
    raise full()


@settings(max_examples=30)
@given(st.data())
def test_a_change_that_the_table_of_transitions_lacks_leaves_the_store_unchanged(data: st.DataObject) -> None:
    async def work(walk: Walk) -> None:
        await walk.make(None, Change.ALLOCATE, Phase.ALLOCATING)
        for _ in range(data.draw(st.integers(0, 6))):
            (before,) = walk.held()
            legal = [(c, e) for (p, c), e in TABLE.items() if p is phase_of(before) and e is not Phase.ABSENT]
            await walk.make(before, *data.draw(st.sampled_from(legal)))
        (before,) = walk.held()
        wrong = [
            (change, end)
            for change in Change
            for end in Phase
            if end is not Phase.ABSENT
            and change not in (Change.BOUND, Change.RELEASED)
            and TABLE.get((phase_of(before), change)) is not end
        ]
        with pytest.raises(VgpuError) as refused:
            await walk.make(before, *data.draw(st.sampled_from(wrong)))
        assert refused.value.code is ErrorCode.BUG
        assert walk.held() == (before,)
        await walk.agrees()

    walking(work)


def test_a_reservation_holds_its_device_memory_until_it_is_cancelled() -> None:
    async def work(walk: Walk) -> None:
        one = walk.new()
        walk.store.reserve(one, Change.ALLOCATE)
        assert walk.store.book.use_of("GPU-0").memory_bytes == GIB
        walk.store.cancel(one.id)
        assert walk.store.book.use == {}
        assert (await walk.ledger.load()).allocations == ()

    walking(work)


def test_book_and_ledger_agree_after_an_intent_whose_caller_is_cancelled() -> None:
    async def work(walk: Walk) -> None:
        one = walk.new()
        beginning = asyncio.ensure_future(walk.store.begin(one, Change.ALLOCATE))
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        await walk.agrees()
        assert walk.held() == (one,)

    walking(work)


def test_an_amendment_that_changes_the_phase_is_refused() -> None:
    async def work(walk: Walk) -> None:
        await walk.make(None, Change.ALLOCATE, Phase.ALLOCATING)
        (held,) = walk.held()
        walk.store.amend(replace(held, edits=held.edits))
        with pytest.raises(VgpuError) as refused:
            walk.store.amend(replace(held, state=State.RELEASING))
        assert refused.value.code is ErrorCode.BUG
        assert walk.held() == (held,)

    walking(work)


def test_a_store_that_checks_itself_accepts_an_old_record_that_is_being_resumed() -> None:
    async def work(walk: Walk) -> None:
        old = record_in(Phase.RESUMING, replace(walk.new(), revision=1))
        assert old is not None
        old = replace(old, state=State.ACTIVE)
        walk.store.restore(LedgerState(boot_id="", allocations=(old,), revision=1))
        walk.store.amend(replace(old, edits=old.edits))
        assert walk.held() == (old,)

    walking(work)


def test_an_intent_on_record_cannot_be_cancelled() -> None:
    async def work(walk: Walk) -> None:
        one = walk.new()
        walk.store.reserve(one, Change.ALLOCATE)
        await walk.store.begin(one, Change.ALLOCATE)
        walk.store.cancel(one.id)
        assert walk.held() == (one,)

    walking(work)


def test_a_release_that_begins_while_a_failure_is_committed_stays_in_the_book(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(walk: Walk) -> None:
        await walk.make(None, Change.ALLOCATE, Phase.ALLOCATING)
        await walk.make(walk.held()[0], Change.ALLOCATED, Phase.ACTIVE)
        (held,) = walk.held()
        gate, plain = asyncio.Event(), walk.ledger.commit

        async def slow(*words: object) -> object:
            await gate.wait()
            return await plain(*words)  # type: ignore[arg-type]

        monkeypatch.setattr(walk.ledger, "commit", slow)
        failed = replace(held, state=State.FAILED, failure="lost")
        failing = asyncio.ensure_future(walk.store.commit(failed, Change.FAILED, "lost"))
        await clock.settled()
        walk.store.reserve(replace(held, state=State.RELEASING), Change.RELEASE)
        gate.set()
        await failing
        assert walk.held()[0].state is State.RELEASING

    walking(work)


def test_a_store_that_checks_itself_notices_a_book_that_contradicts_itself() -> None:
    async def work(walk: Walk) -> None:
        await walk.make(None, Change.ALLOCATE, Phase.ALLOCATING)
        (held,) = walk.held()
        walk.store.book.replace(replace(held, state=State.ACTIVE))
        with pytest.raises(AssertionError, match="never committed"):
            walk.store.check_invariants()

    walking(work)
