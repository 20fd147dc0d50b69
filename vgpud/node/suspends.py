"""Suspending and resuming tenants: all processes of one, or none; on record before each change.

Locked, then saved, one process after the other; back in the same order. A suspension that is cut is
undone at the next start, a resumption is finished: no tenant stays locked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from vgpud.hardware.suspender import ProcessState, Session, Suspender
from vgpud.ledger import Ledger
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind
from vgpud.model.quantity import format_bytes
from vgpud.model.tenancy import Allocation, Mode, State, SuspendedProcess
from vgpud.modes.base import Effector
from vgpud.node.book import Book
from vgpud.node.changes import Changes
from vgpud.node.checks import settled
from vgpud.node.execute import FaultHook, new_event
from vgpud.node.hub import Hub
from vgpud.node.inventory import Inventory
from vgpud.node.lifetimes import start_ticks
from vgpud.node.transitions import Transitions
from vgpud.planner import suspend as rules
from vgpud.planner.suspend import HostMemory

log = structlog.get_logger(__name__)

_LOCK_SECONDS = 10.0
_SAVE_SECONDS = 60.0  # and as long again for each of these many bytes
_SAVE_BYTES = 16 << 30
_ROUNDS = 5  # in which a tenant may bring forth new processes before it is given up


@dataclass(frozen=True)
class Surroundings:
    """What suspending works with. `host` reads what the host has left, and what the policy says of it."""

    book: Book
    ledger: Ledger
    inventory: Inventory
    effectors: Mapping[Mode, Effector]
    hub: Hub
    changes: Changes
    transitions: Transitions
    suspender: Suspender
    host: Callable[[], HostMemory]
    fault: FaultHook


class Suspends:
    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._book = around.book

    # --- suspend

    async def suspend(self, allocation: Allocation) -> Allocation:
        """Raises VgpuError, with every process of the tenant running as before."""
        if settled(allocation).state is State.SUSPENDED:
            return allocation
        _check_well(allocation)
        rules.check_mode(allocation)
        return await asyncio.shield(self._around.changes.begin(allocation.id, self._suspend(allocation)))

    async def _suspend(self, before: Allocation) -> Allocation:
        async with self._around.suspender.session() as session:
            processes = await self._processes(session, before, ())
            wanted = sum(process.memory_bytes for process in processes)
            rules.check_host(wanted, rules.held_bytes(self._book), self._around.host())
            going = replace(before, state=State.SUSPENDING, suspended=processes)
            await self._record(going, "suspend", before)
            try:
                going = await self._lock_all(session, going)
                await self._save_all(session, going)
                away = replace(going, state=State.SUSPENDED)
                await self._limit(away)
                return await self._end(away, EventKind.ALLOCATION_SUSPENDED, _told("suspended", away))
            except VgpuError as error:
                await self._undo(session, self._book.get(before.id), error)
                raise

    async def _lock_all(self, session: Session, going: Allocation) -> Allocation:
        """A process may be made while others are being locked; it is then written down, and locked too."""
        locked: set[int] = set()
        for _ in range(_ROUNDS):
            for number, process in enumerate(going.suspended):
                if process.pid not in locked:
                    await self._unless_gone(process, session.lock(process.pid, _LOCK_SECONDS))
                    locked.add(process.pid)
                    self._around.fault(f"suspend.lock-{number}")
            found = await self._processes(session, going, going.suspended)
            if {process.pid for process in found} <= locked:
                return going
            going = replace(going, suspended=found)
            await self._record(going, "suspend-more", self._book.get(going.id))
        raise VgpuError(
            ErrorCode.SUSPEND_FAILED,
            f"allocation {going.id} starts processes faster than they can be locked: {len(locked)} so far",
            "try again when it is quieter",
        )

    async def _save_all(self, session: Session, going: Allocation) -> None:
        for number, process in enumerate(going.suspended):
            await self._unless_gone(process, session.save(process.pid, _seconds(process)))
            self._around.fault(f"suspend.save-{number}")

    async def _unless_gone(self, process: SuspendedProcess, work: Awaitable[None]) -> None:
        try:
            await work
        except VgpuError:
            if start_ticks(process.pid) == process.start_ticks:
                raise

    async def _undo(self, session: Session, going: Allocation, why: VgpuError) -> None:
        try:
            await self._wake(session, going, f"not suspended, {why.sentence}")
        except VgpuError as error:
            log.error("a suspension stays open", allocation=going.id, why=str(error))

    # --- resume

    async def resume(self, allocation: Allocation) -> Allocation:
        """Raises VgpuError; the tenant is then suspended as before, or failed if it cannot come back."""
        if settled(allocation).state is State.ACTIVE:
            return allocation
        _check_well(allocation)
        await self._around.inventory.refresh()
        rules.check_room(allocation, self._around.inventory.node, self._book.use)
        rules.check_card(_living(allocation), self._around.inventory.node)
        # its room is taken from this moment on
        coming = replace(_living(allocation), state=State.RESUMING)
        self._book.replace(coming)
        return await asyncio.shield(
            self._around.changes.begin(allocation.id, self._resume(allocation, coming))
        )

    async def _resume(self, before: Allocation, coming: Allocation) -> Allocation:
        try:
            for part in coming.slices:
                await self._around.transitions.ensure(part.device_uuid, part.mode)
            async with self._around.suspender.session() as session:
                await self._record(coming, "resume", before)
                return await self._bring_back(session, before, coming)
        except VgpuError:
            if self._book.get(before.id) is coming:
                self._book.replace(before)
            raise

    async def _bring_back(self, session: Session, before: Allocation, coming: Allocation) -> Allocation:
        try:
            for number, process in enumerate(coming.suspended):
                await self._unless_gone(process, self._restore(session, process))
                self._around.fault(f"resume.restore-{number}")
        except VgpuError as error:
            await self._stay(session, before, error)
            raise
        active = replace(coming, state=State.ACTIVE, suspended=())
        await self._limit(active)
        for number, process in enumerate(coming.suspended):
            await self._unless_gone(process, session.unlock(process.pid))
            self._around.fault(f"resume.unlock-{number}")
        return await self._end(active, EventKind.ALLOCATION_RESUMED, _told("resumed", coming))

    async def _restore(self, session: Session, process: SuspendedProcess) -> None:
        """One that an earlier try brought back needs only to be unlocked."""
        if await session.state(process.pid) is not ProcessState.LOCKED:
            await session.restore(process.pid, _seconds(process))

    async def _stay(self, session: Session, before: Allocation, why: VgpuError) -> None:
        """What came back goes again: half a tenant must not run."""
        for process in before.suspended:
            with suppress(VgpuError):
                if await session.state(process.pid) is ProcessState.LOCKED:
                    await session.save(process.pid, _seconds(process))
        await self._end(before, EventKind.ALLOCATION_SUSPENDED, f"not resumed, {why.sentence}")

    # --- the start

    async def recover(self, allocation: Allocation) -> None:
        """After a start: a suspension that was cut is undone, a resumption goes on. Raises VgpuError."""
        coming = replace(_living(allocation), state=State.RESUMING)

        async def wake() -> None:
            async with self._around.suspender.session() as session:
                await self._wake(session, coming, _told("resumed after vgpud was interrupted", coming))

        await asyncio.shield(self._around.changes.begin(allocation.id, wake()))

    async def _wake(self, session: Session, allocation: Allocation, sentence: str) -> None:
        """Whatever state its processes are in, they run in the end. Where one cannot, the tenant is
        suspended as far as it is, and can be resumed when the reason is gone."""
        for process in allocation.suspended:
            with suppress(VgpuError):
                if await session.state(process.pid) is ProcessState.SAVED:
                    await session.restore(process.pid, _seconds(process))
        states = [await session.state(process.pid) for process in allocation.suspended]
        if ProcessState.SAVED in states:
            away = replace(allocation, state=State.SUSPENDED)
            await self._limit(away)
            await self._end(away, EventKind.ALLOCATION_SUSPENDED, f"{sentence}; its memory is still away")
            return
        active = replace(allocation, state=State.ACTIVE, suspended=())
        await self._limit(active)
        for process, state in zip(allocation.suspended, states, strict=True):
            if state is ProcessState.LOCKED:
                await session.unlock(process.pid)
        await self._end(active, EventKind.ALLOCATION_RESUMED, sentence)

    # --- parts

    async def _processes(
        self, session: Session, allocation: Allocation, known: tuple[SuspendedProcess, ...]
    ) -> tuple[SuspendedProcess, ...]:
        """Those of the tenant that use CUDA and live, `known` first, then new ones by pid."""
        used: dict[int, int] = {}
        await self._around.inventory.refresh()
        for part in allocation.slices:
            for process in self._around.inventory.device(part.device_uuid).processes:
                used[process.pid] = used.get(process.pid, 0) + (process.memory_bytes or 0)
        pids: set[int] = set()
        for part in allocation.slices:
            pids.update(await self._around.effectors[part.mode].tenants(allocation, part))
        new = []
        for pid in sorted(pids - {process.pid for process in known}):
            ticks = start_ticks(pid)
            if ticks is not None and await session.state(pid) is not None:
                new.append(SuspendedProcess(pid, ticks, used.get(pid, 0)))
        return (*known, *new)

    async def _record(self, intent: Allocation, verb: str, before: Allocation) -> None:
        try:
            await self._around.ledger.intent(intent)
        except VgpuError:
            self._book.replace(before)
            raise
        self._book.replace(intent)
        self._around.fault(f"{verb}.record-intent")

    async def _limit(self, allocation: Allocation) -> None:
        """A suspended tenant gets no new memory, whatever processes it starts."""
        for mode in {part.mode for part in allocation.slices}:
            await self._around.effectors[mode].resize(allocation)

    async def _end(self, outcome: Allocation, kind: EventKind, sentence: str) -> Allocation:
        event = new_event(kind, outcome.id, f"allocation {outcome.id}: {sentence}")
        done = await self._around.ledger.commit(outcome, event)
        self._book.replace(done)
        self._around.hub.publish(replace(event, revision=done.revision), done)
        log.info(outcome.state.value, allocation=outcome.id, why=sentence)
        return done


def _check_well(allocation: Allocation) -> None:
    if allocation.state is State.FAILED:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} has failed: {allocation.failure}",
            "release it and allocate anew",
        )


def waiting(allocation: Allocation) -> tuple[SuspendedProcess, ...]:
    """Its suspended processes, without those that have ended."""
    return tuple(p for p in allocation.suspended if start_ticks(p.pid) == p.start_ticks)


def _living(allocation: Allocation) -> Allocation:
    return replace(allocation, suspended=waiting(allocation))


def _seconds(process: SuspendedProcess) -> float:
    return _SAVE_SECONDS * (1 + process.memory_bytes / _SAVE_BYTES)


def _told(verb: str, allocation: Allocation) -> str:
    held = sum(process.memory_bytes for process in allocation.suspended)
    amount = format_bytes(held) if held else "0 bytes"
    return f"{verb} with {len(allocation.suspended)} processes and {amount} of device memory"
