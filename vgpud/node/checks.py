"""May this caller change this allocation, and may it be changed now? All raise VgpuError."""

from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, State


def check_owner(allocation: Allocation, caller: Caller) -> None:
    if not caller.may_touch(allocation.request.owner.uid):
        raise VgpuError(
            ErrorCode.NOT_OWNER,
            f"allocation {allocation.id} belongs to uid {allocation.request.owner.uid}, "
            f"and the caller is uid {caller.uid}",
            "ask its owner, or root by the admin socket",
        )


def check_resizable(allocation: Allocation) -> None:
    if settled(allocation).state is State.FAILED:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} has failed: {allocation.failure}",
            "release it and allocate anew",
        )


def settled(allocation: Allocation) -> Allocation:
    if allocation.state in (State.ACTIVE, State.FAILED):
        return allocation
    raise VgpuError(
        ErrorCode.ALLOCATION_BUSY,
        f"allocation {allocation.id} is {allocation.state.value} at this moment",
        "try again in a moment",
    )
