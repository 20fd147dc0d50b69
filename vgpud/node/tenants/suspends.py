"""Suspends and resumes tenants: all processes of a tenant or none. Each change is recorded before it is made.

A suspension has up to two steps. First libvgpu evicts what it can (swaps.py), while the processes keep their
contexts on the device; a plain suspension ends here. If nothing may stay (a deep suspension, a move), or if
libvgpu can evict too little, the driver then locks all processes and saves them, one after the other. The
next start finishes an interrupted eviction, undoes an interrupted step of the driver and finishes an
interrupted resume, so that no tenant stays locked.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace

import structlog

from vgpud.hardware.suspender import ProcessState, Session
from vgpud.lease import LeaseActivity
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change, suspension_outcome
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Cause, State, SuspendedProcess
from vgpud.node.tenants.checkpoints import Checkpoints, check_well, living, seconds_for, told
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.swaps import Swaps
from vgpud.planner import suspend as rules
from vgpud.proc import is_gone

log = structlog.get_logger(__name__)

_WATCH_SECONDS = 2.0
_VERBS = {
    Cause.HAND: "suspended",
    Cause.IDLE: "suspended as idle",
    Cause.TURN: "suspended at the end of its turn",
}


class Suspends:
    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._book = context.book
        self._do = Checkpoints(context)
        self.swaps = Swaps(context)

    # --- suspend

    async def suspend(
        self,
        allocation: Allocation,
        cause: Cause = Cause.HAND,
        idle_since: LeaseActivity | None = None,
        deep: bool = False,
        room_for: str = "",
    ) -> Allocation:
        """Suspends a tenant. libvgpu evicts what it can. If the suspension is `deep`, the driver then saves
        the rest. Otherwise, at the end of a turn (Cause.TURN), libvgpu evicts only as much as `room_for` and
        other tenants need. If libvgpu cannot evict at least half of the tenant, the driver saves all of it,
        provided that the suspension is `deep` or the policy says so (pool.unevictable).

        Raises VgpuError, also if the tenant has worked since the observation `idle_since`. After an error,
        every process of the tenant runs as before; but if other tenants have the room of an evicted tenant by
        then, it stays evicted.
        """
        allocation = await self._do.wait_until_settled(allocation.id)
        if deep:
            rules.check_driver(self._context.inventory.node)
        if allocation.state is State.SUSPENDED:
            return await self._suspended_again(allocation, cause, deep)
        check_well(allocation)
        rules.check_mode(allocation)
        before = replace(allocation, cause=cause)
        if self._is_evicted(allocation, deep):
            work = self._evict(before, idle_since, deep, room_for)
        else:
            work = self._save(before, idle_since)
        return await asyncio.shield(self._context.changes.begin(allocation.id, work))

    def _is_evicted(self, allocation: Allocation, deep: bool) -> bool:
        """Should libvgpu evict what it can? If False, the driver saves all. Raises VgpuError if the policy
        allows neither.
        """
        found, otherwise = self.swaps.evictable(allocation), self._context.policy().pool.unevictable
        if not found.why_not or deep or otherwise == "checkpoint":
            return not found.why_not
        if otherwise == "keep" and found.bytes > 0:
            return True
        raise rules.unevictable(allocation, found)

    async def _suspended_again(self, allocation: Allocation, cause: Cause, deep: bool) -> Allocation:
        """A suspension by hand of a tenant that is already suspended: from now on no rule resumes it. If it
        is deep, the driver saves what an eviction left.
        """
        if cause is not Cause.HAND:
            return allocation
        if deep and allocation.is_swapped:
            work = self._deepen(replace(allocation, cause=cause))
        elif allocation.cause is Cause.HAND:
            return allocation
        else:
            work = self._hold(replace(allocation, cause=cause))
        return await asyncio.shield(self._context.changes.begin(allocation.id, work))

    async def _hold(self, away: Allocation) -> Allocation:
        """Takes over a tenant that a rule has suspended: the memory that it kept on the device is evicted, as
        after a suspension by hand.
        """
        if away.is_swapped:
            await self._context.kept.clear(away)
            away = await self.swaps.measured(living(away))
        return await self._do.end(away, suspension_outcome(away), "suspended by hand", undone=True)

    async def _evict(
        self, before: Allocation, idle_since: LeaseActivity | None, deep: bool, room_for: str
    ) -> Allocation:
        try:
            evicted = await self.swaps.out(before, idle_since, room_for, all_=deep)
        except VgpuError as error:
            may_save = deep or self._context.policy().pool.unevictable == "checkpoint"
            if error.code is not ErrorCode.SUSPEND_FAILED or not may_save:
                raise
            log.warning(LogEvent.SWAP_OUT_FAILED_SUSPENDING_BY_DRIVER, allocation=before.id, why=str(error))
            now = self._book.get(before.id)
            if now.state is not State.ACTIVE:
                raise
            return await self._save(replace(now, cause=before.cause), idle_since)
        if not deep:
            return evicted
        try:
            return await self._save(evicted, None)
        except VgpuError:
            with suppress(VgpuError):  # the tenant stays evicted if other tenants have its room by now
                await self._resume(*self._book_room(self._book.get(before.id)), 0)
            raise

    async def deepen(self, allocation: Allocation) -> Allocation:
        """Lets the driver save what an eviction left on the device. Raises VgpuError; the tenant then stays
        evicted.
        """
        allocation = await self._do.wait_until_settled(allocation.id)
        if not allocation.is_swapped:
            return allocation
        return await asyncio.shield(self._context.changes.begin(allocation.id, self._deepen(allocation)))

    async def _deepen(self, evicted: Allocation) -> Allocation:
        await self._context.kept.clear(evicted)
        return await self._save(await self.swaps.measured(living(evicted)), None)

    async def _save(self, before: Allocation, idle_since: LeaseActivity | None) -> Allocation:
        """Lets the driver save all that a tenant has on the device; for an evicted tenant, what libvgpu left
        there.
        """
        rules.check_driver(self._context.inventory.node)
        known = tuple(rules.deepened(process) for process in before.suspended)
        async with self._do.session(before) as session:
            processes = await self._do.processes(session, before, known)
            wanted = sum(p.stays_bytes if before.is_swapped else p.memory_bytes for p in processes)
            going = replace(before, state=State.SUSPENDING, suspended=processes)
            with self._context.host.ordered(before, 0, wanted):
                return await self._save_all(session, going, idle_since)

    async def _save_all(
        self, session: Session, going: Allocation, idle_since: LeaseActivity | None
    ) -> Allocation:
        await self._do.record(going, Change.SUSPEND, "suspend")
        try:
            await self._do.limit(going)
            self._context.fault("suspend.limit")
            await self._context.activities.quieten(going, idle_since)
            if going.is_deep:
                await self.swaps.until_ready(going)
            going = await self._do.lock_all(session, going)
            await self._do.save_all(session, going)
            away = replace(going, state=State.SUSPENDED)
            return await self._do.end(away, suspension_outcome(away), _told_saved(away), undone=True)
        except VgpuError as error:
            await self._undo(session, self._book.get(going.id), error)
            raise

    async def _undo(self, session: Session, going: Allocation, why: VgpuError) -> None:
        try:
            await self._wake(session, going, f"not suspended, {why.sentence}", stays_evicted=True)
        except VgpuError as error:
            log.error(LogEvent.FAILED_SUSPENSION_NOT_UNDONE, allocation=going.id, why=str(error))

    # --- resume

    async def resume(self, allocation: Allocation, beside: bool = False, by_rule: bool = False) -> Allocation:
        """Resumes a tenant. `beside`: another tenant is being suspended to make room, and a swapped tenant
        takes the memory as it becomes free. `by_rule`: if the tenant was suspended by hand in the meantime,
        it stays suspended.

        Raises VgpuError; the tenant is then suspended as before.
        """
        allocation = await self._do.wait_until_settled(allocation.id)
        if allocation.state is State.ACTIVE:
            return allocation
        check_well(allocation)
        await self._context.inventory.refresh()
        allocation = await self._do.wait_until_settled(allocation.id)
        if allocation.state is State.ACTIVE or (by_rule and allocation.cause is Cause.HAND):
            return allocation
        beside = beside and allocation.is_swapped
        kept = None if beside else self._context.kept.bytes_of(allocation)
        work = self._resume(*self._book_room(allocation, beside), kept)
        return await asyncio.shield(self._context.changes.begin(allocation.id, work))

    def _book_room(self, away: Allocation, beside: bool = False) -> tuple[Allocation, Allocation]:
        """Books the room of a suspended tenant. Returns the record as it is, and the record of the resuming
        tenant. Raises VgpuError.
        """
        if not beside:
            rules.check_room(away, self._context.inventory.node, self._book.use)
        coming = replace(living(away), state=State.RESUMING)
        self._context.store.reserve(coming, Change.RESUME)
        return away, coming

    async def _resume(self, before: Allocation, coming: Allocation, kept_bytes: int | None) -> Allocation:
        """Resumes a tenant whose room is booked. `kept_bytes` is the memory that the tenant kept on the card,
        or None while another tenant still makes room.
        """
        try:
            if kept_bytes is not None:
                await self._context.kept.make_way(coming)
                await self._context.inventory.refresh()
                rules.check_card(coming, self._context.inventory.node, kept_bytes)
            for part in coming.slices:
                await self._context.transitions.ensure(part.device_uuid, part.mode)
            if coming.is_swapped:
                return await self.swaps.back(before, coming)
            async with self._do.session(coming) as session:
                await self._do.record(coming, Change.RESUME, "resume")
                coming = await self._bring_back(session, coming)
            if coming.is_swapped:
                return await self.swaps.back(coming, coming)
            return coming
        except VgpuError:
            self._context.store.cancel(before.id)
            held = self._book.get(before.id)
            # the intent of the resumption was recorded, and its outcome could not be recorded
            if held.state is State.RESUMING:
                away = replace(held, state=State.SUSPENDED)
                self._context.store.amend(away, suspension_outcome(away))
            raise

    async def _bring_back(self, session: Session, coming: Allocation) -> Allocation:
        """Restores the processes that the driver has saved. Afterwards the tenant is active. If libvgpu had
        evicted memory before the save, the tenant stays evicted: this memory is still in libvgpu's host
        buffers, and libvgpu can call the driver again.
        """
        try:
            for number, process in enumerate(coming.suspended):
                await self._do.unless_gone(process, self._restore(session, process, coming))
                self._context.fault(f"resume.restore-{number}")
        except VgpuError as error:
            await self._stay(session, coming, error)
            raise
        active = replace(coming, state=State.ACTIVE, suspended=())
        if not coming.is_deep:
            await self._do.limit(active)
        for number, process in enumerate(coming.suspended):
            await self._do.unless_gone(process, session.unlock(process))
            self._context.fault(f"resume.unlock-{number}")
        if coming.is_deep:
            return surfaced(coming)
        return await self._do.end(active, Change.RESUMED, told("resumed", coming))

    async def _restore(self, session: Session, process: SuspendedProcess, coming: Allocation) -> None:
        """Restores a process, which the caller then unlocks. Does nothing if an earlier attempt has restored
        it.
        """
        if await session.state(process) is not ProcessState.LOCKED:
            await self._do.restore(session, process, coming)

    async def _stay(self, session: Session, coming: Allocation, why: VgpuError) -> None:
        """Saves restored processes again, because half a tenant must not run. The devices on which the
        processes are now, which may differ from those from which they were saved, are recorded first.
        """
        stays = coming
        with suppress(VgpuError):
            stays = await self._do.placed(session, coming)
        if stays != coming:
            await self._do.record(stays, Change.RESUME, "resume", "record-stay")
        for number, process in enumerate(stays.suspended):
            with suppress(VgpuError):
                if await session.state(process) is ProcessState.LOCKED:
                    await session.save(process, seconds_for(process))
            self._context.fault(f"resume.save-{number}")
        away = replace(stays, state=State.SUSPENDED)
        await self._do.end(away, suspension_outcome(away), f"not resumed, {why.sentence}")

    # --- ended processes

    async def watch(self) -> None:
        """Removes ended processes from the records of suspended tenants, because their memory on the host and
        on the device is free. Runs until the daemon stops.
        """
        while True:
            for away in tuple(self._book):
                settled = away.id not in self._context.changes and not away.moves
                if away.state is State.SUSPENDED and settled:
                    self._forget_ended(away)
            await asyncio.sleep(_WATCH_SECONDS)

    def _forget_ended(self, away: Allocation) -> None:
        """Removes ended processes from the book. The ledger keeps them until the next change of the
        allocation; after a crash they are found again.
        """
        left = tuple(p for p in away.suspended if not is_gone(p.pid, p.start_ticks))
        if left != away.suspended:
            now = replace(away, suspended=left)
            self._context.store.amend(now, suspension_outcome(now))

    # --- recovery

    async def recover(self, allocation: Allocation) -> None:
        """At the start of vgpud: finishes an interrupted eviction, undoes an interrupted suspension by the
        driver, and finishes an interrupted resume. Raises VgpuError.
        """
        coming = replace(living(allocation), state=State.RESUMING)

        async def wake() -> None:
            if allocation.is_swapped:
                sentence = told("resumed after vgpud was interrupted", coming)
                await self.swaps.recover(allocation, sentence)
                return
            sentence = told("resumed after vgpud was interrupted", coming)
            stays = allocation.state is State.SUSPENDING
            async with self._do.session(coming) as session:
                await self._wake(session, coming, sentence, stays_evicted=stays)

        await asyncio.shield(self._context.changes.begin(allocation.id, wake()))

    async def _wake(
        self, session: Session, allocation: Allocation, sentence: str, stays_evicted: bool
    ) -> None:
        """Makes all processes of the tenant run, whatever state they are in. With `stays_evicted`, memory
        that libvgpu has evicted stays on the host, and libvgpu holds the processes at their next driver call.
        If a process cannot be restored, the tenant becomes suspended, and can be resumed once the cause is
        removed.
        """
        for process in allocation.suspended:
            with suppress(VgpuError):
                if await session.state(process) is ProcessState.SAVED:
                    await self._do.restore(session, process, allocation)
        states = [await session.state(process) for process in allocation.suspended]
        if ProcessState.SAVED in states:
            away = replace(await self._do.placed(session, allocation), state=State.SUSPENDED)
            await self._do.limit(away)
            await self._do.end(away, suspension_outcome(away), f"{sentence}; its memory is on the host")
            return
        active = replace(allocation, state=State.ACTIVE, suspended=())
        if not allocation.is_deep:
            await self._do.limit(active)
        for process, state in zip(allocation.suspended, states, strict=True):
            if state is ProcessState.LOCKED:
                await session.unlock(process)
        if not allocation.is_deep:
            await self._do.end(active, Change.RESUMED, sentence)
        elif stays_evicted:
            away = await self.swaps.measured(replace(surfaced(allocation), state=State.SUSPENDED))
            await self._do.limit(away)  # the driver saves nothing now, so libvgpu may evict more
            await self._do.end(away, suspension_outcome(away), f"{sentence}; libvgpu has its memory")
        else:
            await self.swaps.wake(surfaced(allocation), sentence)


def _told_saved(away: Allocation) -> str:
    """The sentence on a suspension by the driver. The sentence mentions no turn for a new tenant that starts
    without room, because this tenant has had no turn.
    """
    if away.cause is Cause.TURN and not away.suspended:
        return "suspended without a process, because other tenants use its room"
    return told(_VERBS[away.cause], away)


def surfaced(allocation: Allocation) -> Allocation:
    """The record of a tenant after the driver has restored what it had saved, while libvgpu has the rest."""
    return replace(allocation, suspended=tuple(rules.surfaced(process) for process in allocation.suspended))
