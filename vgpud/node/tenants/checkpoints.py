"""What suspend, resume and move have in common: finding, locking and saving the processes of a tenant."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace

import structlog

from vgpud import audit
from vgpud.hardware.suspender import ProcessState, Session
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted, show_bytes
from vgpud.model.tenancy import Allocation, Cause, State, SuspendedProcess, Way
from vgpud.node.tenants.belonging import belongs
from vgpud.node.tenants.checks import settled
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.sight import visible_devices
from vgpud.planner.places import device_map, devices_of, saved_on
from vgpud.proc import is_alive, start_ticks

log = structlog.get_logger(__name__)

_LOCK_SECONDS = 10.0
# time for saving a process, and the same time again for each _SAVE_BYTES of its memory
_SAVE_SECONDS = 60.0
_SAVE_BYTES = 16 << 30
_RECORD_SECONDS = 1.0  # pause between attempts to record an outcome
_ROUNDS = 5  # rounds of locking; a tenant that still starts processes after these is not suspended


class Checkpoints:
    """Saves the processes of one tenant with the driver's checkpoint, one after the other."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._book = context.book

    async def wait_until_settled(self, allocation_id: str) -> Allocation:
        """Waits until no change of the allocation is running, and returns its record. No other change can
        begin before the caller's next await.

        Raises VgpuError: NO_SUCH_ALLOCATION; ALLOCATION_BUSY at once if it is being made, released, moved or
        resized, or suspended or resumed by hand. Other changes are awaited: a suspension or resumption by a
        rule, a pause, a repair.
        """
        now = self._book.get(allocation_id)
        if now.cause is Cause.HAND or now.moves:
            settled(now)
        await self._context.changes.settle(allocation_id)
        return settled(self._book.get(allocation_id))

    async def lock_all(self, session: Session, going: Allocation, verb: str = "suspend") -> Allocation:
        """Locks all processes of the tenant. A process that starts meanwhile is recorded and locked too.
        `verb` (suspend, move) selects the change on record, and names the points at which tests interrupt
        this method. Raises VgpuError(SUSPEND_FAILED).
        """
        locked: set[int] = set()
        for _ in range(_ROUNDS):
            for number, process in enumerate(going.suspended):
                if process.pid not in locked:
                    await self.unless_gone(process, session.lock(process, _LOCK_SECONDS))
                    locked.add(process.pid)
                    self._context.fault(f"{verb}.lock-{number}")
            found = await self.processes(session, going, going.suspended)
            if {process.pid for process in found} <= locked:
                return going
            going = replace(going, suspended=found)
            await self.record(going, Change.MOVE if verb == "move" else Change.SUSPEND, f"{verb}-more")
        raise VgpuError(
            ErrorCode.SUSPEND_FAILED,
            f"allocation {going.id} starts processes faster than they can be locked: {len(locked)} so far",
            "try again when the tenant starts fewer processes",
        )

    async def save_all(self, session: Session, going: Allocation, verb: str = "suspend") -> None:
        for number, process in enumerate(going.suspended):
            await self.unless_gone(process, session.save(process, seconds_for(process)))
            self._context.fault(f"{verb}.save-{number}")

    async def restore(self, session: Session, process: SuspendedProcess, allocation: Allocation) -> None:
        """Restores a process to the devices of the slices. The devices from which it was saved may be
        others.
        """
        saved, now = saved_on(process, allocation), devices_of(allocation)
        pairs = None if saved == now else device_map(saved, now, self.visible(process.pid))
        await session.restore(process, seconds_for(process), pairs)

    async def placed(self, session: Session, allocation: Allocation) -> Allocation:
        """The record of the allocation after its processes were to be restored. A process whose state is
        still SAVED keeps its record. The record of any other process says that it is on the devices of the
        slices.
        """
        states = [await session.state(process) for process in allocation.suspended]
        found = zip(allocation.suspended, states, strict=True)
        return replace(
            allocation,
            suspended=tuple(p if s is ProcessState.SAVED else replace(p, saved_on="") for p, s in found),
        )

    def visible(self, pid: int) -> frozenset[str]:
        """UUIDs of the devices whose node the process sees at the same path as the host."""
        return visible_devices(pid, self._context.inventory.node.devices, self._context.host_root)

    def session(self, allocation: Allocation) -> AbstractAsyncContextManager[Session]:
        """A session of vgpu-suspend. Users take turns; the turn counts for the user of the allocation."""
        return self._context.suspender.session(allocation.request.counts_for.uid, allocation.id)

    async def unless_gone(self, process: SuspendedProcess, work: Awaitable[None]) -> None:
        try:
            await work
        except VgpuError:
            if is_alive(process.pid, process.start_ticks):
                raise

    async def processes(
        self, session: Session, allocation: Allocation, known: tuple[SuspendedProcess, ...]
    ) -> tuple[SuspendedProcess, ...]:
        """`known`, and then the tenant's other live processes that use CUDA, in the order of their pids. The
        others get the `Way` of suspension of the known ones.
        """
        used: dict[int, int] = {}
        await self._context.inventory.refresh()
        for part in allocation.slices:
            for process in self._context.inventory.device(part.device_uuid).processes:
                used[process.pid] = used.get(process.pid, 0) + (process.memory_bytes or 0)
        pids: set[int] = set()
        for part in allocation.slices:
            pids.update(await self._context.effectors[part.mode].tenants(allocation, part))
        new = []
        for pid in sorted(pids - {process.pid for process in known}):
            ticks = start_ticks(pid)
            way = known[0].way if known else Way.CHECKPOINT
            found = SuspendedProcess(pid, ticks or 0, used.get(pid, 0), way)
            if ticks is None or not await self.owns(allocation, found):
                continue
            if await session.state(found) is not None:
                new.append(found)
        return (*known, *new)

    async def owns(self, allocation: Allocation, process: SuspendedProcess) -> bool:
        """Does the process belong to the tenant? vgpud locks and saves no other process."""
        return await asyncio.to_thread(self._is_own, process, allocation)

    def _is_own(self, process: SuspendedProcess, allocation: Allocation) -> bool:
        own = belongs(process, allocation)
        if not own and start_ticks(process.pid) == process.start_ticks:
            log.warning(
                LogEvent.PROCESS_OUTSIDE_ALLOCATION_NOT_SUSPENDED,
                allocation=allocation.id,
                pid=process.pid,
                owner_uid=allocation.request.owner.uid,
            )
        return own

    async def record(
        self, intent: Allocation, change: Change, verb: str, point: str = "record-intent"
    ) -> None:
        await self._context.store.begin(intent, change)
        self._context.fault(f"{verb}.{point}")

    async def limit(self, allocation: Allocation) -> None:
        """Writes the lease's limits again, with the state of the allocation. libvgpu then holds the driver
        calls of a suspended tenant, in new processes too.
        """
        for mode in {part.mode for part in allocation.slices}:
            await self._context.effectors[mode].resize(allocation)

    async def end(
        self, outcome: Allocation, change: Change, sentence: str, undone: bool = False
    ) -> Allocation:
        """Records `outcome`, an active or suspended allocation. The audit line says `sentence`.

        Raises VgpuError if the ledger cannot record it. The book then has the outcome all the same, because
        the tenant is as it says, and the ledger gets it later; unless the caller undoes the change
        (`undone`).
        """
        audit.did(sentence)
        try:
            return await self._context.store.commit(outcome, change, sentence)
        except VgpuError:
            if not undone:
                self._context.store.amend(outcome, change)
                self._context.background.spawn(self._record_later(outcome, change, sentence))
            raise

    async def _record_later(self, outcome: Allocation, change: Change, sentence: str) -> None:
        """Records an outcome that the book has, unless a later change is recorded first."""

        async def record() -> None:
            now = self._book.get(outcome.id)
            if (now.state, now.revision) == (outcome.state, outcome.revision):
                await self._context.store.commit(now, change, sentence)

        while outcome.id in self._book:
            await asyncio.sleep(_RECORD_SECONDS)
            with suppress(VgpuError):
                await self._context.changes.run(outcome.id, record)
                return


def check_well(allocation: Allocation) -> None:
    if allocation.state is State.FAILED:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} has failed: {allocation.failure}",
            "release it and allocate again",
        )


def waiting(allocation: Allocation) -> tuple[SuspendedProcess, ...]:
    """The suspended processes of the allocation that are still alive."""
    return tuple(p for p in allocation.suspended if is_alive(p.pid, p.start_ticks))


def living(allocation: Allocation) -> Allocation:
    return replace(allocation, suspended=waiting(allocation))


def seconds_for(process: SuspendedProcess) -> float:
    return _SAVE_SECONDS * (1 + process.memory_bytes / _SAVE_BYTES)


def told(verb: str, allocation: Allocation) -> str:
    held = sum(process.memory_bytes for process in allocation.suspended)
    amount = show_bytes(held) if held else "0 bytes"
    return f"{verb} with {counted(len(allocation.suspended), 'process')} and {amount} of device memory"
