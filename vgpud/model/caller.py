"""The caller of a request, its door, and the rights of a door."""

from dataclasses import dataclass
from enum import IntEnum

from vgpud.model.tenancy import Lifetime, Owner


class Door(IntEnum):
    """The sockets, least privilege first."""

    READ = 0  # ro.sock: anyone, read only
    TENANT = 1  # vgpud.sock: group vgpu, allocates for itself
    ADMIN = 2  # admin.sock: root


@dataclass(frozen=True, slots=True)
class Account:
    """What the host's databases say of a user: its name, and all its groups. Not known: they gave no answer,
    or no account."""

    user: str = ""
    gids: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()
    is_known: bool = True


BARE = Account()  # where no quota needs more
UNKNOWN = Account(is_known=False)


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of a connection by SO_PEERCRED at accept; `process` distinguishes it from a later process with
    its pid.

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
        """The user to whom connections, calls and log lines of this caller count."""
        return self.uid if self.quota_owner is None else self.quota_owner.uid

    @property
    def is_admin(self) -> bool:
        return self.door is Door.ADMIN

    def may_touch(self, owner_uid: int) -> bool:
        """May the caller change an allocation of `owner_uid`? The owner may through the tenant's door, root
        through the admin door.
        """
        return self.is_admin or (self.door is Door.TENANT and self.uid == owner_uid)
