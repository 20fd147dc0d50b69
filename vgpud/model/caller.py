"""Who calls, through which door, and what a door lets through."""

from dataclasses import dataclass
from enum import IntEnum

from vgpud.model.tenancy import Lifetime


class Door(IntEnum):
    """The sockets, least privilege first."""

    READ = 0  # ro.sock: anyone, read only
    TENANT = 1  # vgpud.sock: group vgpu, allocates for itself
    ADMIN = 2  # admin.sock: root


@dataclass(frozen=True, slots=True)
class Caller:
    """A peer as SO_PEERCRED named it at accept; `process` tells its pid from a later reuse."""

    door: Door
    uid: int
    gid: int
    process: Lifetime

    @property
    def is_admin(self) -> bool:
        return self.door is Door.ADMIN

    def may_touch(self, owner_uid: int) -> bool:
        """An owner may change what it holds, through the tenant's door; root anything by its own."""
        return self.is_admin or (self.door is Door.TENANT and self.uid == owner_uid)
