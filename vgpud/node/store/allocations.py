"""The store of allocations: the only owner of the book, the ledger, the events for watchers and the tally.

A change of an allocation is recorded as an intent (`begin`), carried out, and recorded as an outcome
(`commit`, `forget`), which watchers and the tally then see. `reserve` books the capacity of an intent before
anything is awaited, so that no other request gets the same capacity. The store refuses changes that
model.lifecycle does not allow.

No other module writes the book or the ledger's allocations; a lint test checks that. All methods that write
raise VgpuError.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from vgpud import audit
from vgpud.ledger import Ledger, LedgerState
from vgpud.model.event import Event, EventKind
from vgpud.model.lifecycle import EVENT_OF, Change, check_change, problems
from vgpud.model.marks import Mark
from vgpud.model.tenancy import Allocation, Lifetime, State, Workload
from vgpud.node.store.account import Account
from vgpud.node.store.book import Book
from vgpud.node.store.hub import Hub, Item
from vgpud.planner.use import DeviceUse, use_of


class AllocationStore:
    """The store. If `checked`, all invariants are verified after each change, in time linear in the number of
    allocations.
    """

    def __init__(self, ledger: Ledger, book: Book, checked: bool = False) -> None:
        self.book = book
        self.account = Account()
        self._ledger = ledger
        self._hub = Hub(ledger.events_after)
        self._checked = checked
        # The allocation as it was before each reservation that is not recorded yet; None if the allocation is
        # new.
        self._before: dict[str, Allocation | None] = {}

    # --- start

    def restore(self, state: LedgerState) -> None:
        """At the start of vgpud: books the allocations of the ledger."""
        for allocation in state.allocations:
            self.book.add(allocation)
        self._hub.revision = state.revision

    async def set_boot_id(self, boot_id: str) -> None:
        self._hub.revision = await self._ledger.set_boot_id(boot_id)

    # --- intents

    def reserve(self, intent: Allocation, change: Change) -> None:
        """Books an intent in memory, until `begin` records it or `cancel` takes it back."""
        before = self.book.get(intent.id) if intent.id in self.book else None
        check_change(before, change, intent)
        if before is None:
            self.book.add(intent)
        else:
            self.book.replace(intent)
        if before is not None and before.state is State.ALLOCATING:
            before = intent  # an allocation that was never committed has no earlier state
        self._before.setdefault(intent.id, before)
        self._check()

    async def begin(self, intent: Allocation, change: Change, booked: Allocation | None = None) -> None:
        """Records an intent durably. Until the outcome is recorded, the book has `booked`, or else the
        intent. If the intent cannot be recorded, the book again has the allocation as it was before the
        reservation.
        """
        if intent.id not in self._before:
            self.reserve(booked or intent, change)
        check_change(self._before[intent.id], change, intent)
        try:
            await self._ledger.intent(intent)
        except asyncio.CancelledError:
            # the call was cancelled, but the ledger still writes what it was asked to write
            self._begun(booked or intent)
            raise
        except Exception:
            self.cancel(intent.id)
            raise
        self._begun(booked or intent)

    def _begun(self, booked: Allocation) -> None:
        del self._before[booked.id]
        self.book.replace(booked)
        self._check()

    def cancel(self, allocation_id: str) -> None:
        """Takes a reservation back. Does nothing if there is none, or if the ledger has recorded it."""
        if allocation_id not in self._before:
            return
        before = self._before.pop(allocation_id)
        if before is None:
            self.book.remove(allocation_id)
        else:
            self.book.replace(before)
        self._check()

    def amend(self, allocation: Allocation, change: Change | None = None) -> None:
        """Adds details that an effect found out to the booked allocation, such as the ids of its MIG
        instance. The ledger gets them with the outcome. The allocation's phase stays the same. If the ledger
        could not record an outcome, `change` names this outcome, and the phase changes as it says.
        """
        check_change(self.book.get(allocation.id), change, allocation)
        self.book.replace(allocation)
        self._check()

    # --- outcomes

    async def commit(self, outcome: Allocation, change: Change, sentence: str) -> Allocation:
        """Records an outcome, and sends watchers an event with `sentence`. Returns the allocation with its
        revision.

        If a release was booked while the outcome was written, the release stays booked.
        """
        booked = self.book.get(outcome.id)
        check_change(booked, change, outcome)
        event = _event(EVENT_OF[change], outcome, sentence)
        done = await self._ledger.commit(outcome, event)
        if outcome.id in self.book and self.book.get(outcome.id) is booked:
            self.book.replace(done)
        self._hub.publish(replace(event, revision=done.revision), done)
        self._count(done, change, sentence)
        self._check()
        return done

    async def bind(self, allocation_id: str, lifetime: Lifetime) -> None:
        """Records the process whose end releases the allocation. Watchers receive no event."""
        held = self.book.get(allocation_id)
        bound = replace(held, request=replace(held.request, lifetime=lifetime))
        check_change(held, Change.BOUND, bound)
        await self._ledger.rebind(bound)
        held = self.book.get(allocation_id)
        self.book.replace(replace(held, request=bound.request))
        self._check()

    async def name(self, allocation_id: str, workload: Workload) -> None:
        """Records the names of the pod, container and claim that use an allocation, and sends watchers an
        event. Does nothing if they are recorded already.
        """
        if self.book.get(allocation_id).request.workload == workload:
            return
        await self._ledger.rebind(_named(self.book.get(allocation_id), workload))
        named = _named(self.book.get(allocation_id), workload)
        self.book.replace(named)
        event = _event(EventKind.ALLOCATION_NAMED, named, f"it belongs to {workload}")
        written = await self._ledger.event(event.kind, event.subject, event.sentence, event.user)
        self._hub.publish(written, named)

    async def forget(self, allocation: Allocation) -> None:
        """Deletes a released allocation. If it was never committed, watchers get no event."""
        check_change(self.book.get(allocation.id), Change.RELEASED, None)
        event = None
        if allocation.revision:
            workload = str(allocation.request.workload)
            sentence = slices_sentence(allocation) + (f", of {workload}" if workload else "")
            event = _event(EVENT_OF[Change.RELEASED], allocation, sentence)
        written = await self._ledger.forget(allocation.id, event)
        self.book.remove(allocation.id)
        if written is not None:
            self._hub.publish(written, allocation)
        self.account.released(allocation)
        self._check()

    def _count(self, done: Allocation, change: Change, sentence: str) -> None:
        if change in (Change.ALLOCATED, Change.ALLOCATED_SUSPENDED):
            self.account.allocated(done)
        elif change is Change.RESIZED:
            self.account.tally.resized += 1
            audit.did(sentence)
        elif change is Change.FAILED:
            self.account.tally.failed += 1

    # --- marks and notices

    async def mark(self, mark: Mark, kind: EventKind, allocation: Allocation) -> None:
        """Records a mark of an allocation, and sends watchers an event. The mark replaces an earlier mark of
        the same kind.
        """
        event = _event(kind, allocation, mark.sentence)
        self._hub.publish(await self._ledger.mark(mark, event), allocation)

    async def unmark(self, mark: Mark, allocation: Allocation, sentence: str) -> None:
        event = _event(EventKind.ALLOCATION_CLEARED, allocation, sentence)
        self._hub.publish(await self._ledger.unmark(mark, event), allocation)

    async def notice(self, kind: EventKind, subject: str, sentence: str, user: int = 0) -> None:
        """Records an event that changes no allocation, and sends it to watchers. The event belongs to the
        user with the uid `user`.
        """
        self._hub.publish(await self._ledger.event(kind, subject, sentence, user))

    # --- watching

    @property
    def revision(self) -> int:
        """The revision of the last event."""
        return self._hub.revision

    @property
    def watchers(self) -> int:
        return self._hub.watchers

    def subscribe(self, after_revision: int | None) -> AsyncIterator[Item]:
        """Yields the events after the revision, then live ones: see Hub.subscribe."""
        return self._hub.subscribe(after_revision)

    def latest(self, count: int) -> tuple[Event, ...]:
        """The last events since the daemon started, oldest first."""
        return self._hub.latest(count)

    async def last_events(self, count: int, user: int | None = None) -> tuple[Event, ...]:
        """The last events on record, of one user or of all users (None), oldest first. For the events of all
        users, the ledger is read only if fewer than `count` events came since the daemon started.
        """
        if user is not None:
            return await self._ledger.last_events(count, user)
        latest = self.latest(count)
        return latest if len(latest) == count else await self._ledger.last_events(count)

    def close(self) -> None:
        """Ends all watches."""
        self._hub.close()

    # --- invariants

    def _check(self) -> None:
        if self._checked:
            self.check_invariants()

    def check_invariants(self) -> None:
        """Raises AssertionError if the book contradicts itself."""
        for allocation in self.book:
            found = list(problems(allocation))
            assert not found, f"allocation {allocation.id}: {'; '.join(found)}"
            assert self.book.by_request(allocation.request) is allocation
            assert allocation.revision <= self.revision, f"{allocation.id}: revision {allocation.revision}"
        assert all(name in self.book for name in self._before)
        booked = {uuid: _content(use) for uuid, use in self.book.use.items()}
        assert booked == {uuid: _content(use) for uuid, use in use_of(self.book).items()}


def slices_sentence(allocation: Allocation) -> str:
    """The mode and device of each slice as text, for the sentence of an event."""
    return ", ".join(f"{part.mode.value} on {part.device_uuid}" for part in allocation.slices)


def _named(allocation: Allocation, workload: Workload) -> Allocation:
    return replace(allocation, request=replace(allocation.request, workload=workload))


def _event(kind: EventKind, allocation: Allocation, sentence: str) -> Event:
    """A new event. The event has no revision yet, because the ledger assigns the revision."""
    text = f"allocation {allocation.id}: {sentence}"
    return Event(0, kind, allocation.id, text, time.time_ns(), allocation.request.counts_for.uid)


def _content(use: DeviceUse) -> tuple[object, ...]:
    """A device's use in a form that does not depend on the order in which slices were booked."""
    mig = sorted(map(repr, (one.place for one in use.mig)))
    return use.mode, use.memory_bytes, use.share_hundredths, use.count, mig, frozenset(use.shared)
