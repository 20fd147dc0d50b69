"""Moves tenants to other devices of the same model: suspends the tenant and restores it on the new device, or
undoes everything.

Moves of several tenants overlap: each takes the driver and the links of its devices only while it needs
them (holds.py). A suspended tenant stays suspended: its slices get other devices, and its record keeps the
device from which it was saved. planner.move defines the steps, and explains why a crash may interrupt
them anywhere. All errors are VgpuError.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import structlog

from vgpud import audit, clock
from vgpud.hardware.suspender import ProcessState, Session
from vgpud.lease import SwapPhase
from vgpud.model.caller import Caller
from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change
from vgpud.model.log_event import LogEvent
from vgpud.model.plan import Step, StepKind
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Edits, State, SuspendedProcess, Way
from vgpud.node.tenants.cgroups import processes_in
from vgpud.node.tenants.checkpoints import Checkpoints, check_well, living, seconds_for, told
from vgpud.node.tenants.checks import check_owner, settled
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.holds import Holds, Links
from vgpud.node.tenants.suspends import Suspends, surfaced
from vgpud.planner import move as rules
from vgpud.planner.places import device_map, devices_of
from vgpud.planner.suspend import is_away
from vgpud.planner.terms import all_terms
from vgpud.planner.use import is_open_to_others
from vgpud.proc import start_ticks

# While the driver is busy with another tenant, a tenant with less memory than this is moved through the host:
# the contexts of a direct copy would slow the driver down for both tenants.
_WORTH_BYTES = 4 * GIB
# Maximum time for which a direct move holds the driver for libvgpu to park memory, and again to bring it
# back: the tenant's process may be stopped
_PARK_SECONDS = 10.0
_WATCH_SECONDS = 1.0
_AGAIN_SECONDS = 30.0  # wait after a failed attempt to end an interrupted move

log = structlog.get_logger(__name__)


class Moves:
    def __init__(self, context: NodeContext, suspends: Suspends) -> None:
        self._context = context
        self._suspends = suspends
        self._swaps = suspends.swaps
        self._book = context.book
        self._do = Checkpoints(context)
        self._executor = context.executor
        self._policy = context.policy
        self._closed = context.operations.closed
        self._tally = context.tally
        self._links = Links()
        # Allocations whose last direct move failed: their next move goes by the host. True: the copy failed,
        # and vgpud begins the next move at once.
        self._by_host: dict[str, bool] = {}

    async def move(
        self,
        allocation_id: str,
        caller: Caller,
        to: Sequence[str],
        source: str,
        booked: Callable[[], None] = lambda: None,
    ) -> Allocation:
        """Moves an allocation. `to` has one device for each slice, or one device for the slice that is on
        device `source`. `booked` is called when room is booked on both devices and on the host, before the
        move.

        Raises VgpuError; the tenant is then on its device as before, unless the move cannot be undone.
        """
        words = audit.of(self._book.get(allocation_id))
        with audit.change("move", **words, to=",".join(to)) as told_of:
            check_owner(self._book.get(allocation_id), caller)
            moved = await self._tried(allocation_id, to, source, booked)
            told_of.made = moved is not None
        return self._book.get(allocation_id) if moved is None else moved

    async def _tried(
        self, allocation_id: str, to: Sequence[str], source: str, booked: Callable[[], None]
    ) -> Allocation | None:
        """Moves a tenant. If a copy between the devices failed and the tenant is back on its device, moves it
        again, by the host.
        """
        try:
            return await self._checked(allocation_id, to, source, booked)
        except VgpuError:
            is_back = allocation_id in self._book and not self._book.get(allocation_id).moves
            if not (is_back and self._by_host.get(allocation_id)):
                raise
        return await self._checked(allocation_id, to, source, booked)

    async def _checked(
        self, allocation_id: str, to: Sequence[str], source: str, booked: Callable[[], None]
    ) -> Allocation | None:
        """Checks and makes a move. Returns the moved allocation; None if it is on these devices already."""
        await self._context.inventory.refresh()
        allocation = await self._do.wait_until_settled(allocation_id)
        if allocation.is_swapped:
            self.plan(allocation, rules.ends_of(allocation, to, source))
            await self._suspends.deepen(allocation)
            allocation = await self._do.wait_until_settled(allocation_id)
        plan = self.plan(allocation, rules.ends_of(allocation, to, source))
        if not plan.moves:
            return None
        # From here on, the capacity is booked on the old and on the new devices.
        self._context.store.reserve(plan, Change.MOVE)
        change = self._context.changes.begin(allocation.id, self._move(allocation, plan, booked))
        return await asyncio.shield(change)

    def plan(self, allocation: Allocation, to: Sequence[str]) -> Allocation:
        """The allocation with the target device of each slice that moves. Changes nothing. Raises VgpuError
        if the move is impossible.
        """
        node = self._node
        self.check(allocation)
        slices = rules.going(
            allocation,
            to,
            node,
            self._book.use,
            all_terms(self._policy(), node),
            self._closed(allocation.request),
        )
        state = State.SUSPENDED if is_away(allocation) else State.SUSPENDING
        return replace(allocation, slices=slices, state=state)

    def check(self, allocation: Allocation) -> None:
        """Raises VgpuError if the allocation cannot be moved in its present state."""
        check_well(settled(allocation))
        rules.check_movable(allocation, self._node)

    @property
    def _node(self) -> Node:
        return self._context.inventory.node

    async def _move(self, before: Allocation, going: Allocation, booked: Callable[[], None]) -> Allocation:
        try:
            async with self._holds(before) as holds:
                if not is_away(going):
                    await self._context.kept.make_way(rules.turned(going))
                going = await self._found(holds, before, going)
                if going.is_deep:
                    with self._ordered(going):
                        booked()
                        holds.direct = await self._reaches(holds, going)
                        if not holds.direct:
                            await self._swaps.prepare(before)
                            self._context.fault("move.prepared")
                            await holds.leave(devices_of(before))
                        going = await self._found(holds, before, going)
                with self._ordered(going):
                    booked()
                    first, *rest = rules.move_steps(going)
                    going = await self._step(holds, going, first, "")
                    verb = "moved while suspended" if is_away(going) else "moved"
                    sentence = f"{told(verb, going)} from {_names(before)} to {_names(rules.turned(going))}"
                    return await self._forth_or_back(holds, going, rest, sentence)
        except VgpuError:
            # takes the reservation back; does nothing if the intent has been recorded
            self._context.store.cancel(before.id)
            raise

    async def _reaches(self, holds: Holds, going: Allocation) -> bool:
        """Prepares copies from the device to the new one, for which the driver is held from here on. False if
        the memory must go by the host.
        """
        if self._by_host.pop(going.id, None) is not None:
            return False
        if not rules.is_near(going, self._node):
            return False
        if self._context.suspender.is_busy and self._context.host.movable_bytes(going) < _WORTH_BYTES:
            return False
        if await self._reach(holds, going, going.slices[0].device_uuid, going.slices[0].other_uuid):
            return True
        await holds.end_driver()
        return False

    async def _reach(self, holds: Holds, held: Allocation, old: str, new: str) -> bool:
        session = await holds.driver()
        return all([await session.reach(process, old, new) for process in held.suspended])

    def _holds(self, allocation: Allocation) -> Holds:
        user = allocation.request.counts_for.uid
        return Holds(self._links, user, lambda: self._do.session(allocation))

    async def _found(self, holds: Holds, before: Allocation, going: Allocation) -> Allocation:
        """The moving allocation with the processes that it has now, after all checks."""
        found = replace(going, suspended=await self._processes(holds, before))
        self._check(found)
        return found

    def _ordered(self, going: Allocation) -> AbstractContextManager[None]:
        """Orders the host memory of the move. The host memory of a suspended tenant does not change."""
        if is_away(going):
            return nullcontext()
        wanted = sum(process.memory_bytes for process in going.suspended)
        buffer = self._context.host.movable_bytes(going) if going.is_deep else 0
        return self._context.host.ordered(going, buffer, max(wanted - buffer, 0))

    async def _processes(self, holds: Holds, before: Allocation) -> tuple[SuspendedProcess, ...]:
        if not is_away(before):
            if self._swaps.evictable(before).why_not:
                return await self._do.processes(await holds.driver(), before, ())
            found = await self._swaps.processes(before)
            return tuple([replace(p, way=Way.DEEP) for p in found if await self._do.owns(before, p)])
        session = await holds.driver()
        there = (await self._do.placed(session, living(before))).suspended
        if any(is_open_to_others(before, part) for part in before.slices):
            return there  # other tenants may use the device too, so vgpud does not search for new processes
        found = await self._do.processes(session, before, there)
        # libvgpu did not hold this new process in time, so the process uses the old device
        for new in found[len(there) :]:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"process {new.pid} of allocation {before.id} began to use CUDA during the suspension",
                f"run 'vgpuctl resume {before.id}' first, or end that process",
            )
        return there

    def _check(self, going: Allocation) -> None:
        if not is_away(going):
            rules.check_card(going, self._node)
        lifetime = going.request.lifetime
        pids = {process.pid for process in going.suspended} | set(processes_in(lifetime.cgroup))
        for pid in sorted(pids | ({lifetime.pid} if lifetime.pid else set())):
            self._check_sight(going, pid)

    def _check_sight(self, going: Allocation, pid: int) -> None:
        seen = self._do.visible(pid)
        hidden = [part.other_uuid for part in going.slices if part.other_uuid and part.other_uuid not in seen]
        if hidden and start_ticks(pid) is not None:
            raise VgpuError(
                ErrorCode.UNSUPPORTED,
                f"process {pid} of allocation {going.id} has no node of device {hidden[0]} in its /dev",
                "restart the container where there is room; on the host, 'nvidia-modprobe -c INDEX' "
                "makes the node",
            )

    async def settle(self, allocation_id: str) -> None:
        """Waits until no change of the allocation is running."""
        await self._context.changes.settle(allocation_id)

    # --- the steps of a move

    async def _forth_or_back(
        self, holds: Holds, going: Allocation, steps: Sequence[Step], sentence: str
    ) -> Allocation:
        try:
            done = await self._run(holds, going, steps, sentence)
            self._tally.moved["done"] += 1
            return done
        except VgpuError as error:
            self._tally.moved["back"] += 1
            held = self._book.get(going.id)
            await self._back(holds, held, devices_of(held) != devices_of(going), error)
            raise

    async def _back(self, holds: Holds, held: Allocation, turned: bool, why: VgpuError) -> None:
        """Undoes a move at the step that `held` has reached. `turned`: the record names the new devices
        already.
        """
        holds.end_arrival()
        try:
            steps = rules.end_steps(held)
            if turned:
                held = rules.turned(held)
                held = held if is_away(held) else replace(held, state=State.SUSPENDING)
                steps = rules.back_steps(held)
            await self._run(holds, held, steps, f"not moved, {why.sentence}")
        except VgpuError as error:
            log.error(LogEvent.MOVE_NEITHER_FINISHED_NOR_UNDONE, allocation=held.id, why=str(error))

    async def _run(
        self, holds: Holds, allocation: Allocation, steps: Iterable[Step], sentence: str
    ) -> Allocation:
        for step in steps:
            allocation = await self._step(holds, allocation, step, sentence)
        return allocation

    async def _step(self, holds: Holds, held: Allocation, step: Step, sentence: str) -> Allocation:
        match step.kind:
            case StepKind.RECORD_INTENT | StepKind.RECORD_BACK:
                await self._do.record(held, Change.MOVE, "move", step.kind.value)
            case StepKind.LOCK:
                return await self._lock(holds, held)
            case StepKind.SAVE:
                await self._save(holds, held)
            case StepKind.RECORD_MOVE:
                return await self._record_move(holds, held)
            case StepKind.RESTORE:
                await self._restore(await holds.driver(), held)
            case StepKind.UNLOCK:
                await self._unlock(holds, held)
            case StepKind.COMMIT:
                return await self._commit(held, sentence)
            case _:
                if step.kind is StepKind.ATTACH and step.slice_ordinal == 0:
                    # computes the edits anew, because they contain the device nodes of the old device
                    held = replace(held, edits=Edits())
                held = await self._executor.run("move", held, (step,))
        return held

    async def _lock(self, holds: Holds, held: Allocation) -> Allocation:
        """Locks the tenant: libvgpu holds calls first, also those of processes that start meanwhile, and
        evicts what it can. Then the driver holds calls.
        """
        with self._parking(held, holds.direct):
            await self._do.limit(held)
            await self._context.activities.quieten(held, None)
            await (self._park(held) if holds.direct else self._evict(held))
        session = await holds.driver()
        # a process without CUDA has no state for the driver
        cuda = [process for process in held.suspended if await session.state(process) is not None]
        return await self._do.lock_all(session, replace(held, suspended=tuple(cuda)), "move")

    async def _park(self, held: Allocation) -> None:
        try:
            async with asyncio.timeout(_PARK_SECONDS):
                await self._evict(held)
        except TimeoutError:
            self._by_host[held.id] = False
            raise VgpuError(
                ErrorCode.SUSPEND_FAILED,
                f"libvgpu did not park the memory of allocation {held.id} within {_PARK_SECONDS:g} seconds",
                "move it again: it then goes by the host",
            ) from None

    @contextmanager
    def _parking(self, held: Allocation, direct: bool) -> Iterator[None]:
        """For a direct move: libvgpu parks the tenant's memory on its device, in place of moving it to the
        host, until the block ends. Without `direct`, it does nothing.
        """
        parking = self._context.preload.parking if direct and self._context.preload is not None else set()
        parking.add(held.id)
        try:
            yield
        finally:
            parking.discard(held.id)

    async def _save(self, holds: Holds, held: Allocation) -> None:
        """Saves the processes of the tenant. If the tenant is suspended, only those are saved that an
        interrupted resume has restored.
        """
        session = await holds.driver()
        if not is_away(held):
            await self._do.save_all(session, held, "move")
            return
        for number, process in enumerate(held.suspended):
            if await session.state(process) is not ProcessState.SAVED:
                await self._do.unless_gone(process, session.save(process, seconds_for(process)))
            self._context.fault(f"move.save-{number}")

    async def _record_move(self, holds: Holds, held: Allocation) -> Allocation:
        moved = rules.turned(held)
        if not is_away(held):
            await self._arrive(holds, held)
            moved = replace(moved, state=State.RESUMING)
        await self._do.record(moved, Change.MOVE, "move", "record-move")
        return moved

    async def _arrive(self, holds: Holds, held: Allocation) -> None:
        """Books the memory of the processes on the new devices. If it does not fit beside the memory of other
        moves, waits for their ends: NVML may show a part of that memory already.
        """
        there = devices_of(rules.turned(held))
        while True:
            await self._context.inventory.refresh()
            others = self._links.arriving_bytes(there)
            try:
                rules.check_card(held, self._node, others)
            except VgpuError:
                if not others:
                    raise
                await self._links.end_of_one()
            else:
                break
        holds.arrive(there, sum(process.memory_bytes for process in held.suspended))

    async def _evict(self, held: Allocation) -> None:
        """Waits until libvgpu has evicted what it can; the lease has the order already."""
        if held.is_deep:
            await self._swaps.until(held, SwapPhase.OUT)
            self._context.fault("move.out")

    async def _unlock(self, holds: Holds, held: Allocation) -> None:
        session = await holds.driver()
        if not held.is_deep:
            await self._do.limit(replace(held, state=State.ACTIVE))
        for number, process in enumerate(held.suspended):
            if await session.state(process) is ProcessState.LOCKED:
                await self._do.unless_gone(process, session.unlock(process))
            self._context.fault(f"move.unlock-{number}")
        if not holds.direct:
            await holds.end_driver()
        if held.is_deep:
            coming = surfaced(replace(held, state=State.RESUMING))
            await self._do.limit(coming)
            await self._bring_memory(holds, held, coming)
            await self._do.limit(replace(held, state=State.ACTIVE, suspended=()))
            await self._swaps.until_behind_is_free(held)
        holds.end_arrival()

    async def _bring_memory(self, holds: Holds, held: Allocation, coming: Allocation) -> None:
        copy = partial(self._copy, holds, held)
        if holds.direct:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PARK_SECONDS):
                    await self._swaps.until(coming, SwapPhase.HERE, copy)
            await holds.end_driver()
        await self._swaps.until(coming, SwapPhase.HERE, copy)
        await holds.end_driver()

    async def _copy(self, holds: Holds, held: Allocation, lists: Iterable[int]) -> None:
        """Copies memory that waits on the device that the tenant has left. vgpud does not know which process
        has parked which list of descriptors, so each list is tried with each process. A process without the
        list has no such descriptor, and refuses.
        """
        (part,) = held.slices
        self._by_host[held.id] = True
        if not await self._reach(holds, held, part.other_uuid or part.device_uuid, part.device_uuid):
            raise VgpuError(
                ErrorCode.SUSPEND_FAILED,
                f"the memory of allocation {held.id} cannot be copied from {part.other_uuid}",
                "move it again: it then goes by the host",
            )
        session = await holds.driver()
        for process in held.suspended:
            for parked in lists:
                await session.copy(process, parked, seconds_for(process))
        del self._by_host[held.id]
        self._context.fault("move.copied")

    async def _commit(self, held: Allocation, sentence: str) -> Allocation:
        ended, change = rules.arrived(held), Change.MOVED_SUSPENDED
        if not is_away(held):
            ended, change = replace(ended, state=State.ACTIVE, suspended=()), Change.MOVED
        done = await self._do.end(ended, change, sentence, undone=True)
        self._context.fault("move.commit")
        if self._context.preload is not None:
            # lowers the memory limit on the device that the tenant left to zero
            await self._context.preload.restore_wall(done)
        return done

    async def _restore(self, session: Session, held: Allocation) -> None:
        for number, process in enumerate(held.suspended):
            await self._do.unless_gone(process, self._bring(session, process, held))
            self._context.fault(f"move.restore-{number}")

    # --- one process of a move

    async def _bring(self, session: Session, process: SuspendedProcess, held: Allocation) -> None:
        """Restores a process to the devices of the slices, wherever its memory is. NVML says on which device
        a restored process is.
        """
        others = [part.other_uuid or part.device_uuid for part in held.slices]
        pairs = device_map(others, devices_of(held), self._do.visible(process.pid))
        seconds = seconds_for(process)
        if await session.state(process) is ProcessState.SAVED:
            crosses = held.state is State.RESUMING
            await session.restore(process, seconds, pairs if crosses else None)
        if await self._is_at_other_end(process, held):
            if await session.state(process) is ProcessState.RUNNING:
                # The move is undone, and the process already runs on the device that it must leave again.
                await self._evict(held)
                await session.lock(process, seconds)
            await session.save(process, seconds)
            await session.restore(process, seconds, pairs)

    async def _is_at_other_end(self, process: SuspendedProcess, held: Allocation) -> bool:
        await self._context.inventory.refresh()
        others = {part.other_uuid for part in held.slices}
        return any(
            listed.pid == process.pid
            for device in self._node.devices
            if device.uuid in others
            for listed in device.processes
        )

    # --- recovery of interrupted moves

    async def watch(self) -> None:
        """Ends moves that could be neither finished nor undone, for example because the tenant's user had
        stopped its processes, once libvgpu has brought the memory back. Runs until the daemon stops.
        """
        failed_at: dict[str, float] = {}
        while True:
            for left in tuple(self._book):
                if not self._is_left_open(left) or clock.now() < failed_at.get(left.id, 0) + _AGAIN_SECONDS:
                    continue
                try:
                    await self.recover(left)
                except VgpuError as error:
                    failed_at[left.id] = clock.now()
                    log.error(LogEvent.MOVE_NEITHER_FINISHED_NOR_UNDONE, allocation=left.id, why=str(error))
            await asyncio.sleep(_WATCH_SECONDS)

    def _is_left_open(self, allocation: Allocation) -> bool:
        changing = allocation.state in (State.SUSPENDING, State.RESUMING)
        if not allocation.moves or not changing or allocation.id in self._context.changes:
            return False
        return allocation.is_deep and self._swaps.are_here(allocation)

    async def recover(self, allocation: Allocation) -> None:
        """Undoes or finishes an interrupted move, whichever its record demands. Raises VgpuError; the tenant
        then stays as it is, and can be resumed once the cause is removed.
        """

        async def finish() -> None:
            async with self._holds(allocation) as holds:
                held = living(allocation)
                try:
                    await self._run(holds, held, rules.end_steps(held), _ended(held))
                except VgpuError as error:
                    if held.state is not State.RESUMING:
                        raise
                    await self._back(holds, self._book.get(held.id), True, error)

        await asyncio.shield(self._context.changes.begin(allocation.id, finish()))


def _names(allocation: Allocation) -> str:
    return ", ".join(devices_of(allocation))


def _ended(held: Allocation) -> str:
    return f"{told('settled', held)} on {_names(held)} after its move was interrupted"
