"""Who calls, through which door, and what a door lets through."""

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
    """What the host's databases say of a user: its name, and all its groups."""

    user: str = ""
    gids: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()


BARE = Account()


@dataclass(frozen=True, slots=True)
class Caller:
    """A peer as SO_PEERCRED named it at accept; `process` tells its pid from a later reuse.

    `quota_owner` is as in Request: the user behind a subordinate uid.
    """

    door: Door
    uid: int
    gid: int
    process: Lifetime
    quota_owner: Owner | None = None

    @property
    def owner(self) -> Owner:
        """The owner of what this caller allocates for itself."""
        return Owner(self.uid, self.gid)

    @property
    def user(self) -> int:
        """The user whose connections, calls and log lines these are."""
        return self.uid if self.quota_owner is None else self.quota_owner.uid

    @property
    def is_admin(self) -> bool:
        return self.door is Door.ADMIN

    def may_touch(self, owner_uid: int) -> bool:
        """An owner may change what it holds, through the tenant's door; root anything by its own."""
        return self.is_admin or (self.door is Door.TENANT and self.uid == owner_uid)
