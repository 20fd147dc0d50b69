"""The caller of a request, the door (socket) that it uses, and the rights of a door."""

from dataclasses import dataclass
from enum import IntEnum

from vgpud.model.tenancy import Lifetime, Owner


class Door(IntEnum):
    """The sockets of the daemon, in the order of their rights: the least first."""

    READ = 0  # ro.sock: every user may connect, and may only read
    TENANT = 1  # vgpud.sock: members of group vgpu, which allocate for themselves
    ADMIN = 2  # admin.sock: root only


@dataclass(frozen=True, slots=True)
class Account:
    """What the host's account databases say of a user: its name and all its groups. `is_known` is False if
    the databases did not answer, or have no such account.
    """

    user: str = ""
    gids: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()
    is_known: bool = True


BARE = Account()  # an account without names and groups, for use where no quota needs them
UNKNOWN = Account(is_known=False)


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of a connection, as SO_PEERCRED identifies it when the connection is accepted. `process` has
    the start time too, which distinguishes the peer from a later process with the same pid.

    `quota_owner` is as in Request: the user behind a subordinate uid.
    """

    door: Door
    uid: int
    gid: int
    process: Lifetime
    quota_owner: Owner | None = None

    @property
    def owner(self) -> Owner:
        """The owner of allocations that this caller makes for itself."""
        return Owner(self.uid, self.gid)

    @property
    def user(self) -> int:
        """The user to whom connections, calls and log lines of this caller are counted."""
        return self.uid if self.quota_owner is None else self.quota_owner.uid

    @property
    def is_admin(self) -> bool:
        return self.door is Door.ADMIN

    def may_touch(self, owner_uid: int) -> bool:
        """May the caller change an allocation of `owner_uid`? The owner may change it through the tenants'
        socket, and root through the admin socket.
        """
        return self.is_admin or (self.door is Door.TENANT and self.uid == owner_uid)
