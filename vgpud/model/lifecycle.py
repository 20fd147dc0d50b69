"""The phases of an allocation, and the allowed changes between them. Pure.

TABLE lists every allowed change. The store (node/store/allocations.py) refuses any other change, and
docs/architecture.md shows the table as a picture.
"""

from collections.abc import Iterator
from enum import StrEnum

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind
from vgpud.model.tenancy import Allocation, State


class Phase(StrEnum):
    ABSENT = "absent"  # the allocation is not yet recorded, or is deleted
    ALLOCATING = "allocating"
    ACTIVE = "active"
    RESIZING = "resizing"
    SUSPENDING = "suspending"  # the driver or libvgpu is moving the tenant's memory to the host
    SUSPENDED = "suspended"  # the driver has moved the tenant's memory to the host, or there is none
    EVICTED = "evicted"  # libvgpu has moved the tenant's memory to the host
    RESUMING = "resuming"
    MOVING = "moving"  # the allocation holds capacity on the old and on the new devices
    FAILED = "failed"
    RELEASING = "releasing"


class Change(StrEnum):
    """A change of an allocation that the ledger records. The first six values are intents, the others are
    outcomes.
    """

    ALLOCATE = "allocate"
    RESIZE = "resize"
    SUSPEND = "suspend"
    RESUME = "resume"
    MOVE = "move"
    RELEASE = "release"

    ALLOCATED = "allocated"
    ALLOCATED_SUSPENDED = "allocated suspended"  # the tenant waits for its turn from the start
    REPAIRED = "repaired"
    BOUND = "bound"  # the allocation became bound to the init process of its container
    PAUSED = "paused"  # the tenant's processes are kept off their devices, and its memory stays there
    UNPAUSED = "unpaused"
    RESIZED = "resized"  # a resize ended: the new limits are in force, or the old ones again
    SUSPENDED = "suspended"  # the outcome of a suspension, or of a failed resumption
    EVICTED = "evicted"  # libvgpu has moved the memory: the outcome of a swap-out, or of a failed swap-in
    RESUMED = "resumed"  # the outcome of a resumption, or of a failed suspension
    MOVED = "moved"  # the outcome of a move, successful or failed
    MOVED_SUSPENDED = "moved suspended"
    FAILED = "failed"
    RELEASED = "released"


# The event that watchers get for each outcome. No event reports BOUND.
EVENT_OF = {
    Change.ALLOCATED: EventKind.ALLOCATION_ACTIVE,
    Change.ALLOCATED_SUSPENDED: EventKind.ALLOCATION_SUSPENDED,
    Change.REPAIRED: EventKind.ALLOCATION_ACTIVE,
    Change.PAUSED: EventKind.ALLOCATION_PAUSED,
    Change.UNPAUSED: EventKind.ALLOCATION_UNPAUSED,
    Change.RESIZED: EventKind.ALLOCATION_RESIZED,
    Change.SUSPENDED: EventKind.ALLOCATION_SUSPENDED,
    Change.EVICTED: EventKind.ALLOCATION_SUSPENDED,
    Change.RESUMED: EventKind.ALLOCATION_RESUMED,
    Change.MOVED: EventKind.ALLOCATION_MOVED,
    Change.MOVED_SUSPENDED: EventKind.ALLOCATION_MOVED,
    Change.FAILED: EventKind.ALLOCATION_FAILED,
    Change.RELEASED: EventKind.ALLOCATION_RELEASED,
}

_P, _C = Phase, Change
TABLE: dict[tuple[Phase, Change], Phase] = {
    (_P.ABSENT, _C.ALLOCATE): _P.ALLOCATING,
    (_P.ALLOCATING, _C.ALLOCATED): _P.ACTIVE,
    (_P.ALLOCATING, _C.ALLOCATED_SUSPENDED): _P.SUSPENDED,
    (_P.ACTIVE, _C.BOUND): _P.ACTIVE,
    (_P.ACTIVE, _C.PAUSED): _P.ACTIVE,
    (_P.ACTIVE, _C.UNPAUSED): _P.ACTIVE,
    # the tenant is no longer paused, but runs only after it is resumed
    (_P.SUSPENDED, _C.UNPAUSED): _P.SUSPENDED,
    (_P.EVICTED, _C.UNPAUSED): _P.EVICTED,
    (_P.ACTIVE, _C.RESUMED): _P.ACTIVE,  # recorded later than the tenant was resumed
    (_P.ACTIVE, _C.RESIZE): _P.RESIZING,
    # The intent is repeated, because the outcome of the last resize was not recorded.
    (_P.RESIZING, _C.RESIZE): _P.RESIZING,
    (_P.RESIZING, _C.RESIZED): _P.ACTIVE,
    (_P.ACTIVE, _C.SUSPEND): _P.SUSPENDING,
    # the intent is repeated with processes that the tenant started meanwhile
    (_P.SUSPENDING, _C.SUSPEND): _P.SUSPENDING,
    (_P.SUSPENDING, _C.SUSPENDED): _P.SUSPENDED,
    (_P.SUSPENDING, _C.EVICTED): _P.EVICTED,
    (_P.SUSPENDING, _C.RESUMED): _P.ACTIVE,
    # a tenant that a rule of the policy suspended is then suspended by hand, so that no rule resumes it
    (_P.SUSPENDED, _C.SUSPENDED): _P.SUSPENDED,
    (_P.EVICTED, _C.EVICTED): _P.EVICTED,
    (_P.EVICTED, _C.SUSPENDED): _P.SUSPENDED,  # all processes have ended, so nothing is evicted any more
    (_P.SUSPENDED, _C.RESUME): _P.RESUMING,
    (_P.EVICTED, _C.SUSPEND): _P.SUSPENDING,  # the driver suspends what libvgpu could not evict
    (_P.EVICTED, _C.RESUME): _P.RESUMING,
    # the intent is repeated, because the place of the tenant's memory has changed
    (_P.RESUMING, _C.RESUME): _P.RESUMING,
    (_P.RESUMING, _C.RESUMED): _P.ACTIVE,
    (_P.RESUMING, _C.SUSPENDED): _P.SUSPENDED,
    (_P.RESUMING, _C.EVICTED): _P.EVICTED,
    (_P.ACTIVE, _C.MOVE): _P.MOVING,
    (_P.SUSPENDED, _C.MOVE): _P.MOVING,
    # an intent is recorded again: for the way back after a failure, or with processes that have started since
    (_P.MOVING, _C.MOVE): _P.MOVING,
    (_P.MOVING, _C.MOVED): _P.ACTIVE,
    (_P.MOVING, _C.MOVED_SUSPENDED): _P.SUSPENDED,
    (_P.ACTIVE, _C.FAILED): _P.FAILED,
    (_P.RESIZING, _C.FAILED): _P.FAILED,
    (_P.RELEASING, _C.RELEASED): _P.ABSENT,
}
_HELD = set(Phase) - {_P.ABSENT, _P.ALLOCATING, _P.FAILED, _P.RELEASING}
TABLE |= {(phase, _C.REPAIRED): phase for phase in Phase if phase in _HELD}
TABLE |= {(phase, _C.RELEASE): _P.RELEASING for phase in Phase if phase is not _P.ABSENT}

_PHASE_OF = {
    State.ALLOCATING: _P.ALLOCATING,
    State.ACTIVE: _P.ACTIVE,
    State.RESIZING: _P.RESIZING,
    State.SUSPENDING: _P.SUSPENDING,
    State.SUSPENDED: _P.SUSPENDED,
    State.RESUMING: _P.RESUMING,
    State.FAILED: _P.FAILED,
    State.RELEASING: _P.RELEASING,
}
_ENDING = (State.RELEASING, State.FAILED)


def phase_of(allocation: Allocation | None) -> Phase:
    """The phase of an allocation's record. State ACTIVE with suspended processes counts as RESUMING: older
    versions of vgpud recorded this state when a start repaired a half-resumed allocation.
    """
    if allocation is None:
        return Phase.ABSENT
    if allocation.state in _ENDING:
        return _PHASE_OF[allocation.state]
    if allocation.moves:
        return Phase.MOVING
    if allocation.state is State.SUSPENDED and allocation.is_swapped:
        return Phase.EVICTED
    if allocation.state is State.ACTIVE and allocation.suspended:
        return Phase.RESUMING
    return _PHASE_OF[allocation.state]


def suspension_outcome(allocation: Allocation) -> Change:
    """The outcome of a suspension: EVICTED if libvgpu has moved the memory, else SUSPENDED."""
    return Change.EVICTED if allocation.is_swapped else Change.SUSPENDED


def check_change(before: Allocation | None, change: Change | None, after: Allocation | None) -> None:
    """Checks a change of an allocation. Raises VgpuError(BUG) if TABLE does not allow this change from
    `before` to `after`, or if the phase changes although `change` is None.
    """
    start, end = phase_of(before), phase_of(after)
    if end is (start if change is None else TABLE.get((start, change))):
        return
    name = after.id if after else before.id if before else ""
    asked = f"the change {change.value!r}" if change else "an amendment"
    raise VgpuError(
        ErrorCode.BUG,
        f"allocation {name} is {start.value}: {asked} does not lead to {end.value}",
        "report this with the journal of vgpud",
    )


def problems(allocation: Allocation) -> Iterator[str]:
    """Yields a sentence for each contradiction in an allocation's record. Records of an older vgpud that
    phase_of accepts are no contradiction.
    """
    if not allocation.slices:
        yield "it has no slice"
    if allocation.suspended and allocation.state in (State.ALLOCATING, State.RESIZING, State.FAILED):
        yield f"it has suspended processes, and is {allocation.state.value}"
    if len({process.way for process in allocation.suspended}) > 1:
        yield "its processes were suspended in different ways"
    if allocation.moves and allocation.state in (
        State.ALLOCATING,
        State.ACTIVE,
        State.RESIZING,
        State.FAILED,
    ):
        yield f"it names other devices, and is {allocation.state.value}"
    if allocation.failure and allocation.state not in _ENDING:
        yield f"it has failed, and is {allocation.state.value}"
    if not allocation.revision and allocation.state not in (State.ALLOCATING, State.RELEASING):
        yield f"it was never committed, and is {allocation.state.value}"
