"""The rights of callers: by the socket at which they connected, and by their uid."""

from vgpud.api.doors import LEAST_DOOR, SOCKET_NAMES
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError

_HINTS = {
    Door.TENANT: "use vgpud.sock, which is open to its group: usermod -aG vgpu USER, then log in again",
    Door.ADMIN: "call as root, by admin.sock",
}


def check_door(method: str, caller: Caller) -> None:
    """Raises VgpuError(NOT_ALLOWED) if the caller's door has too few rights for `method`."""
    least = LEAST_DOOR[method]
    if caller.door < least:
        raise VgpuError(
            ErrorCode.NOT_ALLOWED,
            f"uid {caller.uid} may not call {method} by {SOCKET_NAMES[caller.door]}",
            "call by admin.sock" if caller.uid == 0 else _HINTS[least],
        )


def check_owner_override(caller: Caller) -> None:
    """Raises VgpuError(NOT_ALLOWED) if the caller may not allocate for another owner."""
    if not caller.is_admin:
        raise VgpuError(
            ErrorCode.NOT_ALLOWED,
            f"uid {caller.uid} may not name another owner by {SOCKET_NAMES[caller.door]}",
            "leave --owner (owner_uid, owner_gid) out, or call as root by admin.sock",
        )


def may_see_edits(caller: Caller, owner_uid: int) -> bool:
    """True if the caller may see environment and paths: the owner and administrators may."""
    return caller.is_admin or caller.uid == owner_uid
