"""Makes room by moves of tenants: evacuates a device, or defragments devices for a larger request."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from vgpud.model.caller import Caller
from vgpud.model.device import Device, Health
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.move_view import DefragView, Evacuation, RoomWanted, TenantMove
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, Mode, State
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.moves import Moves
from vgpud.planner.defrag import MOVES_MAX, Bin, Goal, Piece, fewest_moves
from vgpud.planner.move import check_movable, ends_by_nearness, kind_of
from vgpud.planner.places import devices_of
from vgpud.planner.select import selector_error, selects
from vgpud.planner.suspend import is_away
from vgpud.planner.terms import all_terms
from vgpud.planner.use import charged
from vgpud.planner.words import DRAINED, shown_bytes

# Maximum number of moves that run at once. They overlap so that libvgpu makes a tenant's host buffer
# while other moves use the driver and the links.
AT_ONCE = 4

#: Begins a move. The argument is a callback that the move calls when its room is booked.
_Begin = Callable[[Callable[[], None]], Awaitable[TenantMove]]
_Outcome = TenantMove | VgpuError


class _Overlap:
    """Moves in a given order: each begins when the one before it has booked its room, on the devices and on
    the host. A move that is refused for lack of room, also because its tenant has grown since, begins anew
    when the other moves have ended.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[_Outcome]] = set()
        self._waiting: set[asyncio.Task[_Outcome]] = set()  # those that wait for others to end

    async def begin(self, move: _Begin) -> asyncio.Task[_Outcome]:
        """Begins a move as soon as fewer than AT_ONCE run. Returns when the move has booked its room or has
        ended.
        """
        while len(self._running) >= AT_ONCE:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        booked = asyncio.Event()
        task = self._group.create_task(self._make(move, booked.set))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: booked.set())
        await booked.wait()
        return task

    async def _make(self, move: _Begin, booked: Callable[[], None]) -> _Outcome:
        this = asyncio.current_task()
        assert this is not None
        while True:
            others = self._running - {this}
            try:
                return await move(booked)
            except VgpuError as error:
                others = (others | self._running) - self._waiting - {this}
                if error.code is not ErrorCode.NO_CAPACITY or not others:
                    return error
            self._waiting.add(this)
            await asyncio.wait(others)
            self._waiting.remove(this)


class Relocations:
    def __init__(self, context: NodeContext, moves: Moves) -> None:
        self._moves = moves
        self._book = context.book
        self._inventory = context.inventory
        self._policy = context.policy
        self._is_drained = context.operations.is_drained
        self._suspender = context.suspender

    # --- evacuation

    async def evacuate(self, device_uuid: str, caller: Caller) -> Evacuation:
        """Moves tenants off a device. Running tenants come first, the largest of them first. Suspended
        tenants come last, because they need no free memory. The result names the tenants that stay, with the
        reasons. Raises VgpuError(NO_SUCH_DEVICE).
        """
        # Until vgpu-suspend has ended, NVML may list it on a device that a tenant has just left.
        await self._suspender.settle()
        await self._inventory.refresh()
        self._inventory.device(device_uuid)
        tasks = {}
        async with asyncio.TaskGroup() as group:
            overlap = _Overlap(group)
            for listed in sorted(self._book.allocations_on(device_uuid), key=_first_to_leave):
                await self._moves.settle(listed.id)
                if listed.id in self._book:
                    leave = partial(self._leave, listed.id, device_uuid, caller)
                    tasks[listed.id] = await overlap.begin(leave)
        outcomes = {name: task.result() for name, task in tasks.items()}
        return Evacuation(
            tuple(one for one in outcomes.values() if isinstance(one, TenantMove)),
            tuple((name, _why_it_stays(one)) for name, one in outcomes.items() if isinstance(one, VgpuError)),
        )

    async def _leave(
        self, allocation_id: str, device_uuid: str, caller: Caller, booked: Callable[[], None]
    ) -> TenantMove:
        allocation = self._book.get(allocation_id)
        check_movable(allocation, self._inventory.node)
        refusals: list[VgpuError] = []
        targets = self._targets(allocation, device_uuid)
        open_ = [target for target in targets if not self._is_drained(target)]
        if targets and not open_:
            raise _all_drained(len(targets))
        for target in open_:
            to = _instead(allocation, device_uuid, target)
            try:
                # a whole card that another tenant holds has no room until that tenant leaves it
                self._moves.plan(_awake(allocation) if _is_whole_card(allocation) else allocation, to)
            except VgpuError as error:
                refusals.append(error)
                continue
            await self._moves.move(allocation.id, caller, to, "", booked)
            return _told(allocation, device_uuid, target)
        raise _nowhere(refusals)

    def _targets(self, allocation: Allocation, device_uuid: str) -> list[str]:
        """Target devices for an allocation, the best first. For a suspended tenant, devices on which it could
        resume now come first.
        """
        spread = self._policy().planner.strategy == "spread"
        near = ends_by_nearness(allocation, device_uuid, self._inventory.node, self._book.use, spread)
        if not is_away(allocation):
            return list(near)
        return sorted(near, key=lambda target: not self._has_room(allocation, device_uuid, target))

    def _has_room(self, away: Allocation, device_uuid: str, target: str) -> bool:
        try:
            self._moves.plan(_awake(away), _instead(away, device_uuid, target))
        except VgpuError:
            return False
        return True

    # --- defragmentation

    async def plan(self, wanted: RoomWanted) -> DefragView:
        """The moves that make the requested room. Raises VgpuError: NO_CAPACITY if MOVES_MAX moves are not
        enough or no device takes tenants, IMPOSSIBLE if no device is large enough, NO_SUCH_DEVICE.
        """
        # Until vgpu-suspend has ended, NVML may list it on a device that a tenant has just left.
        await self._suspender.settle()
        await self._inventory.refresh()
        node = self._inventory.node
        selected = [device for device in node.devices if selects(wanted.selector, device)]
        error = selector_error(wanted.selector, node, selected)
        if error is not None:
            raise error
        bins = self._bins()
        known = {one.uuid for one in bins}
        if all(self._closed(device) for device in selected):
            raise _no_target(selected[0], self._closed(selected[0]))
        goal = Goal(
            on=frozenset(one.uuid for one in bins if one.takes) & {device.uuid for device in selected},
            memory_bytes=wanted.memory_bytes or 0,
            share_hundredths=0 if wanted.share is None else wanted.share.hundredths,
            whole=wanted.whole_device,
        )
        largest = max((one.memory_bytes for one in bins if one.uuid in goal.on), default=goal.memory_bytes)
        if goal.memory_bytes > largest:
            raise _too_large(goal.memory_bytes, largest)
        pieces = [piece for piece in self._pieces(wanted.whole_device) if piece.device_uuid in known]
        way = fewest_moves(bins, pieces, goal)
        if way is None:
            raise _no_way(wanted, len(pieces))
        at = {(piece.allocation_id, piece.device_uuid): piece.device_uuid for piece in pieces}
        moves = []
        for piece, target in way.moves:
            key = (piece.allocation_id, piece.device_uuid)
            moves.append(TenantMove(piece.allocation_id, at[key], target, piece.memory_bytes))
            at[key] = target
        return DefragView(way.device_uuid, tuple(moves))

    async def defrag(self, wanted: RoomWanted, caller: Caller) -> DefragView:
        """Makes the moves of `plan`. Moves that need the room of earlier ones wait for them. Raises the
        errors of `plan` and of a move, with the finished moves in the details.
        """
        view = await self.plan(wanted)
        tasks: list[asyncio.Task[_Outcome]] = []
        async with asyncio.TaskGroup() as group:
            overlap = _Overlap(group)
            for one in view.moves:
                await self._moves.settle(one.allocation_id)
                if any(task.done() and isinstance(task.result(), VgpuError) for task in tasks):
                    break
                tasks.append(await overlap.begin(partial(self._move, one, caller)))
        outcomes = [task.result() for task in tasks]
        done = tuple(one for one in outcomes if isinstance(one, TenantMove))
        for error in outcomes:
            if isinstance(error, VgpuError):
                said = tuple(f"moved: {d.allocation_id} from {d.source} to {d.target}" for d in done)
                raise replace(error, details=(*error.details, *said))
        return DefragView(view.device_uuid, done)

    async def _move(self, one: TenantMove, caller: Caller, booked: Callable[[], None]) -> TenantMove:
        await self._moves.move(one.allocation_id, caller, [one.target], one.source, booked)
        return replace(one, done=True)

    def _bins(self) -> list[Bin]:
        """The devices that are in mode preload or can be put into this mode."""
        node = self._inventory.node
        terms = all_terms(self._policy(), node)
        found = []
        for device in node.devices:
            mode = self._book.use_of(device.uuid).mode
            if mode not in (None, Mode.PRELOAD) or terms[device.uuid].fixed not in (None, Mode.PRELOAD):
                continue
            found.append(
                Bin(
                    device.uuid,
                    kind_of(device),
                    terms[device.uuid].memory_bytes(Mode.PRELOAD, device.memory_usable_bytes),
                    terms[device.uuid].tenants(Mode.PRELOAD),
                    terms[device.uuid].share_hundredths(Mode.PRELOAD),
                    not self._closed(device),
                )
            )
        return found

    def _closed(self, device: Device) -> str:
        """Why no tenant can move to the device; empty if tenants can."""
        if self._is_drained(device.uuid):
            return DRAINED
        if device.health is not Health.OK:
            return f"it is {device.health.value}"
        if device.mig.current:
            return "it is in MIG mode"
        foreign = [process for process in device.processes if process.kind != "graphics"]
        if foreign and not self._book.use_of(device.uuid).count:
            return f"{counted(len(foreign), 'process')} outside of vgpud use it"
        return ""

    def _pieces(self, whole: bool) -> list[Piece]:
        """The slices on the node. A suspended tenant is in the way of a request for a `whole` device only, so
        it is movable only for such a request.
        """
        pieces = []
        for allocation in self._book:
            movable = self._is_movable(allocation) and (whole or not is_away(allocation))
            for part in charged(allocation):
                share = 0 if part.share is None else part.share.hundredths
                pieces.append(Piece(allocation.id, part.device_uuid, part.memory_bytes, share, movable))
        return pieces

    def _is_movable(self, allocation: Allocation) -> bool:
        try:
            self._moves.check(allocation)
        except VgpuError:
            return False
        return all(part.mode is Mode.PRELOAD for part in allocation.slices)


def _first_to_leave(allocation: Allocation) -> tuple[bool, int, str]:
    return is_away(allocation), -sum(part.memory_bytes for part in allocation.slices), allocation.id


def _awake(allocation: Allocation) -> Allocation:
    """Returns the allocation as it would be if it were resumed."""
    return replace(allocation, state=State.ACTIVE)


def _is_whole_card(allocation: Allocation) -> bool:
    return any(part.mode is Mode.EXCLUSIVE for part in allocation.slices)


def _instead(allocation: Allocation, device_uuid: str, target: str) -> list[str]:
    """Returns the devices of the allocation, with `target` in place of `device_uuid`."""
    return [target if uuid == device_uuid else uuid for uuid in devices_of(allocation)]


def _told(allocation: Allocation, source: str, target: str) -> TenantMove:
    memory = sum(part.memory_bytes for part in allocation.slices if part.device_uuid == source)
    return TenantMove(allocation.id, source, target, memory, done=True)


def _nowhere(refusals: list[VgpuError]) -> VgpuError:
    """The most useful of the refusals: one from a device of the same model that has no room, if there
    is one. Its hint to name another device is left out, because all devices have refused.
    """
    if not refusals:
        return VgpuError(ErrorCode.NO_CAPACITY, "this node has no other device", "see 'vgpuctl devices'")
    full = [error for error in refusals if error.code is ErrorCode.NO_CAPACITY]
    return replace((full or refusals)[0], hint="")


def _why_it_stays(error: VgpuError) -> str:
    return f"{error.sentence}; {error.hint}" if error.hint else error.sentence


def _all_drained(devices: int) -> VgpuError:
    return VgpuError(
        ErrorCode.NO_CAPACITY,
        f"all other devices ({devices}) are drained",
        "'vgpuctl undrain DEVICE' opens one",
    )


def _no_target(device: Device, why: str) -> VgpuError:
    undrain = f"'vgpuctl undrain {device.index}' opens it, or " if why == DRAINED else ""
    return VgpuError(
        ErrorCode.NO_CAPACITY,
        f"device {device.index} takes no tenants: {why}",
        f"{undrain}name another device",
    )


def _too_large(wanted_bytes: int, largest_bytes: int) -> VgpuError:
    largest = shown_bytes(largest_bytes)
    return VgpuError(
        ErrorCode.IMPOSSIBLE,
        f"no device can hold {shown_bytes(wanted_bytes)} in mode preload, even idle: the most is {largest}",
        f"ask for at most {largest}",
    )


def _no_way(wanted: RoomWanted, slices: int) -> VgpuError:
    size = "a whole device" if wanted.whole_device else shown_bytes(wanted.memory_bytes or 0)
    return VgpuError(
        ErrorCode.NO_CAPACITY,
        f"{MOVES_MAX} moves are not enough to make room for {size}: the node has "
        f"{counted(slices, 'slice')} in mode preload",
        "see 'vgpuctl ls': slices of pods are not moved, suspended tenants only to make a whole device free",
    )
