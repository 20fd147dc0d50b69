"""Evicts tenants: libvgpu swaps a tenant's evictable memory out of the card and in again (residency/swap.h).

vgpud records the swap, writes the order into the lease, and waits until every process reports that it has
followed. All processes of a tenant are swapped or none. The next start finishes an interrupted swap.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog

from vgpud import clock
from vgpud.lease import LeaseActivity, ProcessSwap, SwapPhase, within
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change, suspension_outcome
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import format_bytes
from vgpud.model.tenancy import Allocation, Cause, Mode, State, SuspendedProcess, Way
from vgpud.node.tenants.activities import seconds_to_move
from vgpud.node.tenants.checkpoints import Checkpoints, living, told, waiting
from vgpud.node.tenants.context import NodeContext
from vgpud.planner import suspend as rules
from vgpud.planner.suspend import Evictable
from vgpud.proc import start_ticks

log = structlog.get_logger(__name__)

_SAID = {
    Cause.HAND: "evicted by libvgpu",
    Cause.IDLE: "evicted by libvgpu as idle",
    Cause.TURN: "swapped out at the end of its turn,",
}
_DRAIN_SECONDS = 4.0  # maximum time for the running work of a tenant to end
_PREPARE_SECONDS = 4.0  # maximum time in which a host buffer that is being made does not grow
# after a direct move: maximum time in which libvgpu frees the tenant's memory on the old device
_BEHIND_SECONDS = 2.0
# Maximum time in which libvgpu prepares a tenant for the driver's checkpoint, and the same time again for
# each _READY_BYTES of its memory: ten times as long as an idle host takes to unlock the host buffer
_READY_SECONDS = 4.0
_READY_BYTES = 16 << 30
_ROOM_SECONDS = 10.0  # maximum wait of a swap-in for room on the card
_TIGHT_SECONDS = 1.0  # wait after which other tenants may keep no memory on the card


class Swaps:
    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._book = context.book
        self._do = Checkpoints(context)
        self._suspendable = context.suspendable

    def evictable(self, allocation: Allocation) -> Evictable:
        """What libvgpu could evict now of a running tenant."""
        if self._suspendable is None or not _is_alone(allocation):
            return Evictable(why_not="libvgpu evicts the memory of preload tenants with one slice only")
        try:
            swaps = self._read(allocation)
            held = self._suspendable.held(allocation.id)
        except VgpuError as error:
            return Evictable(why_not=error.sentence)
        return rules.evictable(
            sum(swap.movable_bytes for swap in swaps),
            held.used_bytes,
            held.context_bytes,
            all(swap.phase is SwapPhase.HERE for swap in swaps),
        )

    def are_here(self, allocation: Allocation) -> bool:
        """Is the memory of all processes of the tenant on its device?"""
        try:
            swaps = self._read(allocation)
        except VgpuError:  # for example, the allocation was released meanwhile
            return False
        return bool(swaps) and all(swap.phase is SwapPhase.HERE for swap in swaps)

    def stays_bytes(self, allocation: Allocation) -> int | None:
        """Bytes that would stay on the device after an eviction; None if libvgpu cannot evict most of the
        tenant's memory now.
        """
        found = self.evictable(allocation)
        return None if found.why_not else found.stays_bytes

    def stays(self, away: Allocation) -> tuple[tuple[str, int], ...]:
        """Bytes that an eviction of the suspended tenant left on its device, by kind; empty if none."""
        if self._suspendable is None or not away.stays_bytes:
            return ()
        try:
            movable = sum(swap.movable_bytes for swap in self._read(away))
            unevictable = self._suspendable.held(away.id).used_bytes - movable
            return rules.stays_by_kind(away.stays_bytes, unevictable, self._suspendable.stays(away.id))
        except VgpuError as error:  # the lease is gone, for example if the allocation was released meanwhile
            log.debug(LogEvent.SWAP_STATE_UNREADABLE, allocation=away.id, why=str(error))
            return ()

    def told_out(self, away: Allocation) -> str:
        """A sentence on an eviction, for the journal and the events."""
        return f"{told(_SAID[away.cause], away)}; {self.told_stays(away)} of it stays on the device"

    def told_stays(self, away: Allocation) -> str:
        if not away.stays_bytes:
            return "nothing"
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.stays(away))
        return f"{format_bytes(away.stays_bytes)} ({kinds})" if kinds else format_bytes(away.stays_bytes)

    def expect(
        self, soon: Sequence[Allocation], no_longer: Sequence[Allocation], room_for: Mapping[str, str]
    ) -> None:
        """Lets libvgpu prepare the host buffers of evictions while the tenants `soon` run, as far as the host
        has the memory for all of them. The tenants `no_longer` stop doing so. `room_for` has the id of each
        tenant whose turn another tenant awaits, and the id of that one: buffers are prepared only for the
        memory that leaves at the end of the turn. Those of the others are for all of their memory.
        """
        for allocation in no_longer:
            self._order_buffers(allocation, False)
        refused = self._context.host.expect(soon)
        for allocation in soon:
            if (why := refused.get(allocation.id)) is not None:
                log.debug(
                    LogEvent.LIBVGPU_NOT_TOLD_TO_PREPARE_HOST_BUFFERS, allocation=allocation.id, why=str(why)
                )
            self._order_buffers(allocation, why is None, room_for.get(allocation.id, ""))

    def _order_buffers(self, allocation: Allocation, soon: bool, room_for: str = "") -> None:
        if allocation.id in self._context.host:
            return  # a change that is under way has ordered the tenant's buffers itself
        try:
            if self._suspendable is not None:
                if room_for and _is_alone(allocation):
                    self._context.kept.allow(allocation, self.evictable(allocation).stays_bytes, room_for)
                elif soon:
                    self._context.kept.forbid(allocation)
                self._suspendable.expect(allocation.id, soon)
        except VgpuError as error:  # the lease is gone, for example if the allocation was released meanwhile
            log.debug(
                LogEvent.LIBVGPU_NOT_TOLD_TO_PREPARE_HOST_BUFFERS, allocation=allocation.id, why=str(error)
            )

    async def prepare(self, allocation: Allocation) -> None:
        """Lets libvgpu make the host buffers of a tenant that runs, and waits for them. The eviction makes
        the buffers that are not made in time. Raises VgpuError(LEASE_FAILED).
        """
        assert self._suspendable is not None
        self._context.kept.forbid(allocation)
        self._suspendable.expect(allocation.id, True)
        try:
            await self._context.activities.ask(allocation.id)
            await self._until_made(allocation)
        finally:
            # libvgpu stops making buffers: a buffer made later would not be in the table of host memory
            self._suspendable.expect(allocation.id, False)

    async def _until_made(self, allocation: Allocation) -> None:
        grown, made, stands = clock.now(), -1, False
        most = seconds_to_move(sum(swap.movable_bytes for swap in self._read(allocation)))

        def late(_: bool) -> tuple[str, ...]:
            nonlocal grown, made, stands
            swaps, now, before = self._read(allocation), clock.now(), made
            if all(swap.is_prepared for swap in swaps):
                return ()
            made = sum(swap.host_bytes for swap in swaps)
            grown = now if made > before else grown
            stands = now > grown + _PREPARE_SECONDS
            return () if stands else (allocation.id,)

        if not await self._context.activities.wait(late, most) or stands:
            log.info(LogEvent.HOST_BUFFERS_NOT_MADE_IN_TIME, allocation=allocation.id, made_bytes=made)

    async def out(
        self,
        before: Allocation,
        idle_since: LeaseActivity | None = None,
        room_for: str = "",
        all_: bool = False,
    ) -> Allocation:
        """Swaps a tenant out. At the end of a turn, unless `all_` is set, the tenant keeps memory on the
        device that neither `room_for` nor another tenant needs.

        Raises VgpuError, also if the tenant has worked since the observation `idle_since`. The tenant is then
        swapped in again; if that fails, it is suspended.
        """
        found = self.evictable(before)
        processes = await self.processes(before)
        with self._context.host.ordered(before, self._context.host.movable_bytes(before)):
            return await self._out(
                replace(before, suspended=processes), found.stays_bytes, idle_since, room_for, all_
            )

    async def _out(
        self, before: Allocation, stays_bytes: int, idle: LeaseActivity | None, room_for: str, all_: bool
    ) -> Allocation:
        going = replace(before, state=State.SUSPENDING)
        await self._do.record(going, Change.SUSPEND, "swap-out")
        try:
            if before.cause is Cause.TURN and not all_:
                self._context.kept.allow(going, stays_bytes, room_for)
            else:
                self._context.kept.forbid(going)
            await self._do.limit(going)
            self._context.fault("swap-out.limit")
            if idle is not None:
                await self._context.activities.quieten(going, idle)
            await self.until(going, SwapPhase.OUT)
            await self._context.activities.left(going)
            self._context.fault("swap-out.out")
            away = await self.measured(replace(going, state=State.SUSPENDED))
            return await self._do.end(away, suspension_outcome(away), self.told_out(away), undone=True)
        except VgpuError as error:
            await self.wake(self._book.get(before.id), f"not evicted, {error.sentence}")
            raise

    async def back(self, before: Allocation, coming: Allocation) -> Allocation:
        """Swaps a tenant in, whose room must be booked. Raises VgpuError; the tenant is then suspended as
        before.
        """
        await self._do.record(coming, Change.RESUME, "swap-in")
        try:
            await self._do.limit(coming)
            self._context.fault("swap-in.limit")
            await self.until(coming, SwapPhase.HERE)
            self._context.fault("swap-in.here")
        except VgpuError as error:
            await self._stay(before, error)
            raise
        return await self._end_active(coming, told("resumed", coming))

    async def wake(self, allocation: Allocation, sentence: str) -> None:
        """Swaps a tenant in from any phase. If one of its processes cannot be swapped in, the tenant becomes
        suspended as before.
        """
        coming = replace(allocation, state=State.RESUMING)
        try:
            await self._do.limit(coming)
            await self.until(coming, SwapPhase.HERE)
        except VgpuError as error:
            log.warning(LogEvent.SWAP_IN_FAILED, allocation=allocation.id, why=str(error))
            await self._stay(replace(living(allocation), state=State.SUSPENDED), error)
            return
        await self._end_active(coming, sentence)

    async def recover(self, cut: Allocation, sentence: str) -> None:
        """At the start of vgpud: finishes an interrupted swap-out, because another tenant may have the room.
        Otherwise swaps the tenant in.
        """
        if cut.state is State.SUSPENDING:
            try:
                self._context.kept.forbid(cut)
                await self._do.limit(cut)
                await self.until(cut, SwapPhase.OUT)
            except VgpuError as error:
                sentence = f"{sentence}, {error.sentence}"
            else:
                away = await self.measured(replace(living(cut), state=State.SUSPENDED))
                await self._do.end(away, suspension_outcome(away), self.told_out(away))
                return
        await self.wake(living(cut), sentence)

    # --- the steps of a swap

    async def _end_active(self, coming: Allocation, sentence: str) -> Allocation:
        active = replace(coming, state=State.ACTIVE, suspended=())
        await self._do.limit(active)
        self._context.fault("swap-in.open")
        return await self._do.end(active, Change.RESUMED, sentence)

    async def _stay(self, before: Allocation, why: VgpuError) -> None:
        """Swaps a tenant out again after a failed swap-in, because a tenant must not run with half of its
        memory.
        """
        away = replace(before, state=State.SUSPENDED)
        await self._do.limit(away)
        try:
            await self.until(away, SwapPhase.OUT)
        except VgpuError as error:  # the order stays in the lease, and libvgpu follows it later
            log.warning(LogEvent.SWAP_OUT_FAILED_AFTER_FAILED_SWAP_IN, allocation=before.id, why=str(error))
        await self._do.end(away, suspension_outcome(away), f"not resumed, {why.sentence}")

    async def processes(self, allocation: Allocation) -> tuple[SuspendedProcess, ...]:
        """The live processes of the tenant, with the device memory that each holds."""
        await self._context.inventory.refresh()
        used = self._used(allocation)
        (part,) = allocation.slices
        pids = await self._context.effectors[part.mode].tenants(allocation, part)
        ticks = [(pid, start_ticks(pid)) for pid in sorted(pids)]
        return tuple(
            SuspendedProcess(pid, since, used.get(pid, 0), Way.SWAP)
            for pid, since in ticks
            if since is not None
        )

    async def measured(self, away: Allocation) -> Allocation:
        """Returns the tenant's record with the bytes that left the device, according to NVML. Memory that the
        tenant may keep for now counts as swapped out.
        """
        await self._context.inventory.refresh()
        stays, kept = {}, self._context.kept.bytes_of(away)
        for pid, used in self._used(away).items():
            stays[pid] = max(used - kept, 0)
            kept -= used - stays[pid]
        return replace(
            away,
            suspended=tuple(
                replace(
                    process,
                    memory_bytes=max(
                        process.memory_bytes + process.stays_bytes - stays.get(process.pid, 0), 0
                    ),
                    stays_bytes=stays.get(process.pid, 0),
                )
                for process in away.suspended
            ),
        )

    def _used(self, allocation: Allocation) -> dict[int, int]:
        (part,) = allocation.slices
        device = self._context.inventory.device(part.device_uuid)
        own = {process.pid for process in allocation.suspended}
        known = {process.pid: process.memory_bytes or 0 for process in device.processes}
        return {pid: used for pid, used in known.items() if pid in own or not own}

    def _read(self, allocation: Allocation) -> tuple[ProcessSwap, ...]:
        if self._suspendable is None:
            return ()
        limit = sum(part.memory_bytes for part in allocation.slices)
        return within(self._suspendable.swaps(allocation.id), limit)

    def _others_go(self, allocation: Allocation, since: dict[str, float]) -> bool:
        """Is another tenant leaving the device? Leaving takes longer while the tenant's host buffer is
        allocated. `since` maps each leaving tenant to the time at which it was first seen to leave. A tenant
        counts as leaving only for the time that the copy of its memory may take: afterwards it may be waiting
        for the driver, which is busy with `allocation`.
        """
        (part,) = allocation.slices
        now = clock.now()
        for other in self._book.allocations_on(part.device_uuid):
            held = [one.memory_bytes for one in other.slices if one.device_uuid == part.device_uuid]
            if not held or other.state is not State.SUSPENDING or other.id == allocation.id:
                continue
            if now <= since.setdefault(other.id, now) + seconds_to_move(sum(held)):
                return True
        return False

    def _drains(self, allocation: Allocation, swaps: Sequence[ProcessSwap]) -> bool:
        """Does a swap-out wait for the tenant's work? A quiet tenant has no work left, and its swap thread
        begins when it has allocated its host buffer and has CPU time.
        """
        phases = {swap.phase for swap in swaps}
        if SwapPhase.DRAINING in phases or SwapPhase.HERE not in phases:
            return SwapPhase.DRAINING in phases
        activity = self._context.activities.read(allocation)
        return activity is None or not activity.quiet

    async def until(
        self,
        allocation: Allocation,
        wanted: SwapPhase,
        copy: Callable[[Iterable[int]], Awaitable[None]] | None = None,
    ) -> None:
        """Waits until every process reports the phase `wanted`, or all have ended. `copy` is called with the
        lists of parked memory that wait for their copy. Raises VgpuError(SUSPEND_FAILED).
        """
        began = drained = full = clock.now()
        leaving: dict[str, float] = {}
        lists: set[int] = set()

        def late(is_asked: bool) -> tuple[str, ...]:
            nonlocal began, drained, full, lists
            lists = set()
            if is_asked and allocation.suspended and not waiting(allocation):
                # All of the tenant's processes have ended, so nothing can answer. (Without an arbiter, the
                # lease still has their slots.)
                return ()
            swaps, now = self._read(allocation), clock.now()
            if all(swap.phase is wanted for swap in swaps):
                return ()
            if not self._drains(allocation, swaps):
                drained = now
            if self._others_go(allocation, leaving):
                # While another tenant leaves the device, the wait for room starts anew: the suspension of
                # that tenant has a timeout of its own.
                began = full = now
            if not any(swap.phase is SwapPhase.COMING and swap.error for swap in swaps):
                full = now
            most = seconds_to_move(sum(swap.movable_bytes for swap in swaps))
            if wanted is SwapPhase.OUT and any(swap.phase is SwapPhase.REFUSED for swap in swaps):
                errors = sorted({swap.error for swap in swaps if swap.error})
                raise _failed(allocation, f"libvgpu could not move it (CUDA error {errors})")
            if wanted is SwapPhase.OUT and now > drained + _DRAIN_SECONDS:
                raise _failed(allocation, f"its work did not end within {_DRAIN_SECONDS:g} seconds")
            if wanted is SwapPhase.HERE and now > full + _ROOM_SECONDS:
                raise _failed(allocation, "the card has no room for it")
            if wanted is SwapPhase.HERE and now > full + _TIGHT_SECONDS:
                self._context.kept.forbid_beside(allocation)
            if now > began + most:
                raise _failed(allocation, f"its memory was not moved within {most:.0f} seconds")
            if copy is not None:
                lists = {swap.parked_list for swap in swaps if swap.parked_list}
            return () if lists else (allocation.id,)

        await self._context.activities.wait(late)
        while copy is not None and lists:
            await copy(lists)
            await self._context.activities.wait(late)

    async def until_ready(self, going: Allocation) -> None:
        """Waits until libvgpu has prepared an evicted tenant for the driver's checkpoint; for a bounded time,
        because the checkpoint only takes longer without that, and a libvgpu of an older version does not
        report it.
        """
        movable = sum(swap.movable_bytes for swap in self._read(going))
        most = _READY_SECONDS * (1 + movable / _READY_BYTES)

        def late(_: bool) -> tuple[str, ...]:
            return (going.id,) if not all(swap.is_ready for swap in self._read(going)) else ()

        if not await self._context.activities.wait(late, most):
            log.warning(LogEvent.TENANT_NOT_READY_FOR_CHECKPOINT, allocation=going.id, seconds=round(most))

    async def until_behind_is_free(self, moved: Allocation) -> None:
        """Waits until libvgpu has freed the memory on the device that the tenant has left; for a bounded
        time, because the tenant may be stopped.
        """

        def late(_: bool) -> tuple[str, ...]:
            return (moved.id,) if any(swap.blocks_behind for swap in self._read(moved)) else ()

        await self._context.activities.wait(late, _BEHIND_SECONDS)


def _is_alone(allocation: Allocation) -> bool:
    return len(allocation.slices) == 1 and allocation.slices[0].mode is Mode.PRELOAD


def _failed(allocation: Allocation, why: str) -> VgpuError:
    return VgpuError(
        ErrorCode.SUSPEND_FAILED,
        f"the memory of allocation {allocation.id} was not swapped: {why}",
        "see docs/pool.md for what can be moved",
    )
