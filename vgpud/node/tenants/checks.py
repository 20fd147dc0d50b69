"""Checks whether a caller may change an allocation, and whether the state of the allocation allows the
change. All functions raise VgpuError.
"""

from collections.abc import Iterable

from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, State
from vgpud.proc import has_ended

# the commands that end a change which could be neither finished nor undone
_ENDS = {State.SUSPENDING: "resume", State.RESIZING: "resize"}


def check_owner(allocation: Allocation, caller: Caller) -> None:
    if not caller.may_touch(allocation.request.owner.uid):
        raise VgpuError(
            ErrorCode.NOT_OWNER,
            f"allocation {allocation.id} belongs to uid {allocation.request.owner.uid}, "
            f"and the caller is uid {caller.uid}",
            "its owner can make this change, and so can root through admin.sock",
        )


def check_resizable(allocation: Allocation) -> None:
    if settled(allocation).state is State.SUSPENDED:
        raise VgpuError(
            ErrorCode.ALLOCATION_BUSY,
            f"allocation {allocation.id} is suspended, with {counted(len(allocation.suspended), 'process')}",
            f"run 'vgpuctl resume {allocation.id}' first",
        )
    if allocation.state is State.FAILED:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} has failed: {allocation.failure}",
            "release it and allocate again",
        )


def settled(allocation: Allocation) -> Allocation:
    if allocation.moves:
        raise VgpuError(
            ErrorCode.ALLOCATION_BUSY,
            f"allocation {allocation.id} is being moved to another device",
            f"try again in a moment; 'vgpuctl resume {allocation.id}' ends a move that was interrupted",
        )
    if allocation.state in (State.ACTIVE, State.SUSPENDED, State.FAILED):
        return allocation
    hint = f"try again when 'vgpuctl show {allocation.id}' says that this has ended"
    if (verb := _ENDS.get(allocation.state)) is not None:
        hint += f"; 'vgpuctl {verb} {allocation.id}' ends a change that was interrupted"
    raise VgpuError(
        ErrorCode.ALLOCATION_BUSY,
        f"allocation {allocation.id} is {allocation.state.value} at this moment",
        hint,
    )


def check_ended(allocation_id: str, listed: Iterable[int]) -> None:
    """Raises VgpuError(TENANT_ALIVE) if one of the listed processes still runs."""
    pids = [pid for pid in listed if not has_ended(pid)]
    if pids:
        named = ", ".join(str(pid) for pid in pids[:8])
        raise VgpuError(
            ErrorCode.TENANT_ALIVE,
            f"allocation {allocation_id} still has {counted(len(pids), 'process')} (pid {named})",
            "end them first; root can release with --force: they then keep their memory and get no more",
        )
