"""Moves of tenants between devices: plans and results."""

from dataclasses import dataclass, field

from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Selector


@dataclass(frozen=True, slots=True)
class TenantMove:
    """The move of one slice of an allocation from one device to another (UUIDs)."""

    allocation_id: str
    source: str
    target: str
    memory_bytes: int
    done: bool = False


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """Capacity that a slice in mode preload needs on one device. With neither memory nor share, the request
    is for a device without any slice.
    """

    memory_bytes: int | None = None
    share: Percent | None = None
    selector: Selector = field(default_factory=Selector)

    @property
    def whole_device(self) -> bool:
        return self.memory_bytes is None and self.share is None


@dataclass(frozen=True, slots=True)
class DefragView:
    """The device that gets the free capacity, and the moves that free that capacity, in order."""

    device_uuid: str
    moves: tuple[TenantMove, ...]


@dataclass(frozen=True, slots=True)
class Evacuation:
    """The moves away from a drained device, and the allocations that stay there (allocation id, reason)."""

    moved: tuple[TenantMove, ...] = ()
    staying: tuple[tuple[str, str], ...] = ()


NO_EVACUATION = Evacuation()
