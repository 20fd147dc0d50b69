"""The verdict on one device for one request: it fits, or why not."""

from typing import NamedTuple

from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode
from vgpud.model.tenancy import MigMove, Mode, Slice
from vgpud.planner.pool import NO_POOL, Pool
from vgpud.planner.terms import Terms
from vgpud.planner.use import DeviceUse


class Seat(NamedTuple):
    """A device with its terms of the policy and its present use.

    `shut`: uuids of MIG devices of the node that accept no such request now.
    """

    device: Device
    terms: Terms
    use: DeviceUse
    pool: Pool = NO_POOL
    shut: frozenset[str] = frozenset()

    @property
    def claims_free_card(self) -> bool:
        """Would a slice here make an idle card unavailable to other modes?"""
        return self.terms.fixed is None and self.use.count == 0

    def memory_free_bytes(self, mode: Mode) -> int:
        """Memory that can still be allocated in preload or mps; negative if the policy allowed more
        before."""
        return self.terms.memory_bytes(mode, self.device.memory_usable_bytes) - self.use.memory_bytes


class Fit(NamedTuple):
    """The device can hold `piece`. A lower `rank` is better by the policy's strategy."""

    device: Device
    mode: Mode
    piece: Slice
    rank: tuple[int, ...]
    sentence: str
    moves: tuple[MigMove, ...] = ()


class Room(NamedTuple):
    """What the device could still hold in the requested mode."""

    memory_bytes: int = 0
    share_hundredths: int = 0
    profiles: tuple[str, ...] = ()


NO_ROOM = Room()


class Unfit(NamedTuple):
    """The device cannot hold the request: `busy` if it could when idle, with `room` free now.

    If it never can, `code` is the kind of the cause, and `largest` what it holds at most. A `closed` device
    has the room, and accepts no such request now.
    """

    device: Device
    mode: Mode | None
    busy: bool
    code: ErrorCode
    sentence: str
    room: Room = NO_ROOM
    largest: Room = NO_ROOM
    closed: bool = False


Verdict = Fit | Unfit


def busy(seat: Seat, mode: Mode, sentence: str, room: Room = NO_ROOM) -> Unfit:
    return Unfit(seat.device, mode, True, ErrorCode.NO_CAPACITY, sentence, room)


def never(seat: Seat, mode: Mode | None, code: ErrorCode, sentence: str, largest: Room = NO_ROOM) -> Unfit:
    return Unfit(seat.device, mode, False, code, sentence, largest=largest)
