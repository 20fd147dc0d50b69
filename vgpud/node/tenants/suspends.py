"""Suspends and resumes tenants: all processes of a tenant or none; each change is recorded before it is made.

A suspension locks all processes, then saves them, one after the other. The next start undoes an interrupted
suspension and finishes an interrupted resume, so that no tenant stays locked.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace

import structlog

from vgpud.hardware.suspender import ProcessState, Session
from vgpud.lease import LeaseActivity
from vgpud.model.errors import VgpuError
from vgpud.model.lifecycle import Change, at_rest
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Cause, State, SuspendedProcess
from vgpud.node.tenants.checkpoints import Checkpoints, Surroundings, check_well, living, seconds_for, told
from vgpud.node.tenants.checks import settled
from vgpud.node.tenants.swaps import Swaps
from vgpud.planner import suspend as rules

log = structlog.get_logger(__name__)

_VERBS = {
    Cause.HAND: "suspended",
    Cause.IDLE: "suspended as idle",
    Cause.TURN: "suspended at the end of its turn",
}


class Suspends:
    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._book = around.book
        self._do = Checkpoints(around)
        self.swaps = Swaps(around)

    # --- suspend

    async def suspend(
        self,
        allocation: Allocation,
        cause: Cause = Cause.HAND,
        idle_since: LeaseActivity | None = None,
        swaps: bool = True,
        room_for: str = "",
    ) -> Allocation:
        """Suspends a tenant. At the end of a turn, with `swaps`, libvgpu swaps out as much memory as
        `room_for` and other tenants need, if it can; otherwise the driver saves all of it.

        Raises VgpuError, with every process of the tenant running as before. Raises it too if the tenant has
        worked since the observation `idle_since`."""
        allocation = await self._do.at_rest(allocation.id)
        if allocation.state is State.SUSPENDED:
            return await self._suspended_again(allocation, cause)
        check_well(allocation)
        rules.check_mode(allocation)
        if cause is Cause.TURN and swaps and self.swaps.stays_bytes(allocation) is not None:
            try:
                work = self.swaps.out(replace(allocation, cause=cause), room_for)
                return await asyncio.shield(self._around.changes.begin(allocation.id, work))
            except VgpuError as error:
                log.warning(
                    LogEvent.SWAP_OUT_FAILED_SUSPENDING_BY_DRIVER, allocation=allocation.id, why=str(error)
                )
                allocation = settled(self._book.get(allocation.id))
        work = self._suspend(replace(allocation, cause=cause), idle_since)
        return await asyncio.shield(self._around.changes.begin(allocation.id, work))

    async def _suspended_again(self, allocation: Allocation, cause: Cause) -> Allocation:
        """Changes the cause of a suspension to HAND: no rule resumes the tenant then."""
        if cause is not Cause.HAND or allocation.cause is Cause.HAND:
            return allocation
        work = self._do.end(replace(allocation, cause=cause), at_rest(allocation), "suspended by hand")
        return await asyncio.shield(self._around.changes.begin(allocation.id, work))

    async def _suspend(self, before: Allocation, idle_since: LeaseActivity | None) -> Allocation:
        async with self._around.suspender.session() as session:
            processes = await self._do.processes(session, before, ())
            wanted = sum(process.memory_bytes for process in processes)
            rules.check_host(wanted, rules.held_bytes(self._book), self._around.host())
            going = replace(before, state=State.SUSPENDING, suspended=processes)
            await self._do.record(going, Change.SUSPEND, "suspend")
            try:
                await self._do.limit(going)
                self._around.fault("suspend.limit")
                await self._around.activities.quieten(going, idle_since)
                going = await self._do.lock_all(session, going)
                await self._do.save_all(session, going)
                away = replace(going, state=State.SUSPENDED)
                return await self._do.end(away, at_rest(away), told(_VERBS[away.cause], away))
            except VgpuError as error:
                await self._undo(session, self._book.get(before.id), error)
                raise

    async def _undo(self, session: Session, going: Allocation, why: VgpuError) -> None:
        try:
            await self._wake(session, going, f"not suspended, {why.sentence}")
        except VgpuError as error:
            log.error(LogEvent.FAILED_SUSPENSION_NOT_UNDONE, allocation=going.id, why=str(error))

    # --- resume

    async def resume(self, allocation: Allocation, beside: bool = False) -> Allocation:
        """Resumes a tenant. `beside`: another tenant is being suspended to make room; a swapped tenant takes
        the memory as it becomes free.

        Raises VgpuError; the tenant is then suspended as before, or failed if it can never be resumed.
        """
        if settled(allocation).state is State.ACTIVE:
            return allocation
        check_well(allocation)
        await self._around.inventory.refresh()
        allocation = await self._do.at_rest(allocation.id)
        if allocation.state is State.ACTIVE:
            return allocation
        if not (beside and allocation.is_swapped):
            rules.check_room(allocation, self._around.inventory.node, self._book.use)
        kept = self._around.kept.bytes_of(allocation)
        # from here on its room is booked
        coming = replace(living(allocation), state=State.RESUMING)
        self._around.store.reserve(coming, Change.RESUME)
        work = self._resume(allocation, coming, None if beside and allocation.is_swapped else kept)
        return await asyncio.shield(self._around.changes.begin(allocation.id, work))

    async def _resume(self, before: Allocation, coming: Allocation, kept_bytes: int | None) -> Allocation:
        """`kept_bytes` is what the tenant kept on the card; None while another tenant still makes room."""
        try:
            if kept_bytes is not None:
                await self._around.kept.make_way(coming)
                await self._around.inventory.refresh()
                rules.check_card(coming, self._around.inventory.node, kept_bytes)
            for part in coming.slices:
                await self._around.transitions.ensure(part.device_uuid, part.mode)
            if coming.is_swapped:
                return await self.swaps.back(before, coming)
            async with self._around.suspender.session() as session:
                await self._do.record(coming, Change.RESUME, "resume")
                return await self._bring_back(session, coming)
        except VgpuError:
            self._around.store.cancel(before.id)
            held = self._book.get(before.id)
            if held.state is State.RESUMING:  # the intent is recorded, and the outcome could not be recorded
                away = replace(held, state=State.SUSPENDED)
                self._around.store.amend(away, at_rest(away))
            raise

    async def _bring_back(self, session: Session, coming: Allocation) -> Allocation:
        try:
            for number, process in enumerate(coming.suspended):
                await self._do.unless_gone(process, self._restore(session, process, coming))
                self._around.fault(f"resume.restore-{number}")
        except VgpuError as error:
            await self._stay(session, coming, error)
            raise
        active = replace(coming, state=State.ACTIVE, suspended=())
        await self._do.limit(active)
        for number, process in enumerate(coming.suspended):
            await self._do.unless_gone(process, session.unlock(process))
            self._around.fault(f"resume.unlock-{number}")
        return await self._do.end(active, Change.RESUMED, told("resumed", coming))

    async def _restore(self, session: Session, process: SuspendedProcess, coming: Allocation) -> None:
        """Restores a process, unless an earlier attempt has done it: then it only needs to be unlocked."""
        if await session.state(process) is not ProcessState.LOCKED:
            await self._do.restore(session, process, coming)

    async def _stay(self, session: Session, coming: Allocation, why: VgpuError) -> None:
        """Saves restored processes again, because half a tenant must not run. First records where they are
        now, which may be another device than the one they were saved on."""
        stays = coming
        with suppress(VgpuError):
            stays = await self._do.placed(session, coming)
        if stays != coming:
            await self._do.record(stays, Change.RESUME, "resume", "record-stay")
        for number, process in enumerate(stays.suspended):
            with suppress(VgpuError):
                if await session.state(process) is ProcessState.LOCKED:
                    await session.save(process, seconds_for(process))
            self._around.fault(f"resume.save-{number}")
        away = replace(stays, state=State.SUSPENDED)
        await self._do.end(away, at_rest(away), f"not resumed, {why.sentence}")

    # --- recovery

    async def recover(self, allocation: Allocation) -> None:
        """At start: undoes an interrupted suspension, finishes an interrupted resume. Raises VgpuError."""
        coming = replace(living(allocation), state=State.RESUMING)

        async def wake() -> None:
            if allocation.is_swapped:
                sentence = told("resumed after vgpud was interrupted", coming)
                await self.swaps.recover(allocation, sentence)
                return
            async with self._around.suspender.session() as session:
                await self._wake(session, coming, told("resumed after vgpud was interrupted", coming))

        await asyncio.shield(self._around.changes.begin(allocation.id, wake()))

    async def _wake(self, session: Session, allocation: Allocation, sentence: str) -> None:
        """Makes all processes of the tenant run, whatever state they are in. If one cannot, the tenant
        becomes suspended, and can be resumed once the reason is gone."""
        for process in allocation.suspended:
            with suppress(VgpuError):
                if await session.state(process) is ProcessState.SAVED:
                    await self._do.restore(session, process, allocation)
        states = [await session.state(process) for process in allocation.suspended]
        if ProcessState.SAVED in states:
            away = replace(await self._do.placed(session, allocation), state=State.SUSPENDED)
            await self._do.limit(away)
            await self._do.end(away, at_rest(away), f"{sentence}; its memory is on the host")
            return
        active = replace(allocation, state=State.ACTIVE, suspended=())
        await self._do.limit(active)
        for process, state in zip(allocation.suspended, states, strict=True):
            if state is ProcessState.LOCKED:
                await session.unlock(process)
        await self._do.end(active, Change.RESUMED, sentence)
