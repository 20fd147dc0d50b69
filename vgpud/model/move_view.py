"""Moves of tenants as plans and as what came of them."""

from dataclasses import dataclass, field

from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Selector


@dataclass(frozen=True, slots=True)
class TenantMove:
    """One slice of an allocation, from one device to another (UUIDs)."""

    allocation_id: str
    source: str
    target: str
    memory_bytes: int
    done: bool = False


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """Room for a preload slice of this size on one device; with neither size, a device without any."""

    memory_bytes: int | None = None
    share: Percent | None = None
    selector: Selector = field(default_factory=Selector)

    @property
    def whole_device(self) -> bool:
        return self.memory_bytes is None and self.share is None


@dataclass(frozen=True, slots=True)
class DefragView:
    """Where the room is, and the moves that make it, in order."""

    device_uuid: str
    moves: tuple[TenantMove, ...]


@dataclass(frozen=True, slots=True)
class Evacuation:
    """What left a device, and what stays there (allocation id, why)."""

    moved: tuple[TenantMove, ...] = ()
    staying: tuple[tuple[str, str], ...] = ()


NOBODY = Evacuation()
