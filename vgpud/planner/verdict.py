"""The verdict on one device for one request: the request fits, or the reason why it does not."""

from collections.abc import Sequence
from typing import NamedTuple

from vgpud.model.device import Device, DeviceProcess
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import counted
from vgpud.model.tenancy import MigMove, Mode, Slice
from vgpud.planner.pool import NO_POOL, Pool
from vgpud.planner.terms import Terms
from vgpud.planner.use import DeviceUse
from vgpud.planner.words import listed


class Seat(NamedTuple):
    """A device with its terms and its present use.

    `shut` has the UUIDs of MIG devices that do not accept the request now.
    """

    device: Device
    terms: Terms
    use: DeviceUse
    pool: Pool = NO_POOL
    shut: frozenset[str] = frozenset()

    @property
    def claims_free_card(self) -> bool:
        """True if a slice on this device makes an idle card unavailable to other modes."""
        return self.terms.fixed is None and self.use.count == 0

    def memory_free_bytes(self, mode: Mode) -> int:
        """Memory that can still be allocated in mode preload or mps. The result is negative if an earlier
        policy allowed more.
        """
        return self.terms.memory_bytes(mode, self.device.memory_usable_bytes) - self.use.memory_bytes


class Fit(NamedTuple):
    """The verdict that the device can hold slice `piece`. A lower `rank` is better according to the policy's
    strategy.
    """

    device: Device
    mode: Mode
    piece: Slice
    rank: tuple[int, ...]
    sentence: str
    moves: tuple[MigMove, ...] = ()


class Room(NamedTuple):
    """An amount that a device can hold in the requested mode: what is free (`Unfit.room`), or all of it
    (`Unfit.largest`).
    """

    memory_bytes: int = 0
    share_hundredths: int = 0
    profiles: tuple[str, ...] = ()


NO_ROOM = Room()


class Unfit(NamedTuple):
    """The verdict that the device cannot hold the request. `busy`: it could if it were idle, and now has only
    `room` free.

    If it never can, `code` is the kind of the cause, and `largest` is the most that it can hold. A `closed`
    device has the room, but does not accept the request now. A `foreign` one has processes outside vgpud.
    """

    device: Device
    mode: Mode | None
    busy: bool
    code: ErrorCode
    sentence: str
    room: Room = NO_ROOM
    largest: Room = NO_ROOM
    closed: bool = False
    foreign: bool = False


Verdict = Fit | Unfit


def busy(seat: Seat, mode: Mode, sentence: str, room: Room = NO_ROOM) -> Unfit:
    return Unfit(seat.device, mode, True, ErrorCode.NO_CAPACITY, sentence, room)


def occupied(seat: Seat, mode: Mode, processes: Sequence[DeviceProcess], effect: str = "") -> Unfit:
    pids = listed(tuple(str(process.pid) for process in processes))
    count = counted(len(processes), "process")
    sentence = f"it has {count} that vgpud did not start (pid {pids}){effect}"
    return busy(seat, mode, sentence)._replace(foreign=True)


def never(seat: Seat, mode: Mode | None, code: ErrorCode, sentence: str, largest: Room = NO_ROOM) -> Unfit:
    return Unfit(seat.device, mode, False, code, sentence, largest=largest)
