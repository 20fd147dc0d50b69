"""Finds the fewest moves of tenants in mode preload that make room on one device. Pure, and exact within its
budget.

Iterative deepening (IDA*, Korf 1985) over the devices of the slices. On each device that may get the room, a
number of slices must leave. The smallest of these numbers is the lower bound of the moves still needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOVES_MAX = 8
_BUDGET = 60_000  # number of positions after which the search is given up
_NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Bin:
    """A device and its capacity for slices. Tenants can move between devices of the same `kind`. `takes` is
    False for a device that accepts no tenant, for example a drained one.
    """

    uuid: str
    kind: object
    memory_bytes: int
    tenants: int
    share_hundredths: int = 10000
    takes: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice on a device. Two slices of one allocation cannot be on the same device."""

    allocation_id: str
    device_uuid: str
    memory_bytes: int
    share_hundredths: int = 0
    movable: bool = True


@dataclass(frozen=True, slots=True)
class Goal:
    """The requested capacity, on any one of the devices `on`. With `whole`, the request is for a device
    without any slice.
    """

    on: frozenset[str]
    memory_bytes: int = 0
    share_hundredths: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """The result of a search: the device that has the room in the end, and the ordered moves as (piece,
    target device).
    """

    device_uuid: str
    moves: tuple[tuple[Piece, str], ...]


def fewest_moves(
    bins: Sequence[Bin], pieces: Sequence[Piece], goal: Goal, most: int = MOVES_MAX
) -> Way | None:
    """Finds the fewest moves; None if more than `most` moves are needed, or if the search is given up
    (_BUDGET). When a move is made, its target has room for it.
    """
    search = _Search(bins, pieces, goal)
    start = tuple(search.number[piece.device_uuid] for piece in pieces)
    for depth in range(search.least(start), most + 1):
        search.seen.clear()
        found = search.within(start, depth)
        if found is not None:
            return search.told(start, found)
        if search.left <= 0:
            return None
    return None


_Place = tuple[int, ...]  # The position of a search: the bin of each piece.
_Moves = tuple[tuple[int, int], ...]


class _Search:
    def __init__(self, bins: Sequence[Bin], pieces: Sequence[Piece], goal: Goal) -> None:
        self.number = {one.uuid: i for i, one in enumerate(bins)}
        self.bins, self.pieces, self.goal = bins, pieces, goal
        self.targets = [i for i, one in enumerate(bins) if one.uuid in goal.on]
        self.seen: dict[_Place, int] = {}
        self.left = _BUDGET

    def least(self, at: _Place) -> int:
        """A lower bound of the number of moves from a position to the goal."""
        return min((self._removals(at, target) for target in self.targets), default=_NEVER)

    def _on(self, at: _Place, where: int) -> list[Piece]:
        return [piece for piece, place in zip(self.pieces, at, strict=True) if place == where]

    def _removals(self, at: _Place, where: int) -> int:
        here, device, goal = self._on(at, where), self.bins[where], self.goal
        loose = [piece for piece in here if piece.movable]
        if goal.whole:
            return len(here) if len(loose) == len(here) else _NEVER
        memory = sum(piece.memory_bytes for piece in here) + goal.memory_bytes - device.memory_bytes
        share = sum(piece.share_hundredths for piece in here) + goal.share_hundredths
        return max(
            _taken(memory, [piece.memory_bytes for piece in loose]),
            _taken(share - device.share_hundredths, [piece.share_hundredths for piece in loose]),
            _taken(len(here) + 1 - device.tenants, [1] * len(loose)),
        )

    def within(self, at: _Place, depth: int) -> _Moves | None:
        """Moves from a position to the goal, at most `depth` of them; None if none are found."""
        need = self.least(at)
        if need == 0:
            return ()
        if need > depth or self.seen.get(at, -1) >= depth or self.left <= 0:
            return None
        self.seen[at] = depth
        self.left -= 1
        for piece, to in self._moves(at):
            found = self.within((*at[:piece], to, *at[piece + 1 :]), depth - 1)
            if found is not None:
                return ((piece, to), *found)
        return None

    def _moves(self, at: _Place) -> Iterable[tuple[int, int]]:
        """The possible moves from a position. Of several equal pieces, or equal empty devices, only one is
        tried.
        """
        loads = [self._load(at, where) for where in range(len(self.bins))]
        tried: set[object] = set()
        order = sorted(range(len(at)), key=lambda i: (at[i] not in self.targets, self.pieces[i].memory_bytes))
        for i in order:
            if not self.pieces[i].movable:
                continue
            for to in range(len(self.bins)):
                if to == at[i] or not self._fits(i, at, to, loads[to]):
                    continue
                alike = (self._likeness(i), at[i], to if loads[to][2] else self._empty(to))
                if alike not in tried:
                    tried.add(alike)
                    yield i, to

    def _likeness(self, number: int) -> object:
        """A key that is equal for interchangeable pieces. A slice of an allocation with several slices is
        unique.
        """
        piece = self.pieces[number]
        siblings = sum(other.allocation_id == piece.allocation_id for other in self.pieces)
        return number if siblings > 1 else (piece.memory_bytes, piece.share_hundredths)

    def _empty(self, where: int) -> object:
        one = self.bins[where]
        size = (one.memory_bytes, one.tenants, one.share_hundredths)
        return one.kind, size, one.takes, one.uuid in self.goal.on

    def _load(self, at: _Place, where: int) -> tuple[int, int, int]:
        here = self._on(at, where)
        return (
            sum(piece.memory_bytes for piece in here),
            sum(piece.share_hundredths for piece in here),
            len(here),
        )

    def _fits(self, number: int, at: _Place, to: int, load: tuple[int, int, int]) -> bool:
        device, piece = self.bins[to], self.pieces[number]
        return (
            device.takes
            and device.kind == self.bins[at[number]].kind
            and load[0] + piece.memory_bytes <= device.memory_bytes
            and load[1] + piece.share_hundredths <= device.share_hundredths
            and load[2] < device.tenants
            and all(other.allocation_id != piece.allocation_id for other in self._on(at, to))
        )

    def told(self, at: _Place, moves: _Moves) -> Way:
        for piece, to in moves:
            at = (*at[:piece], to, *at[piece + 1 :])
        ready = next(target for target in self.targets if self._removals(at, target) == 0)
        return Way(
            self.bins[ready].uuid, tuple((self.pieces[piece], self.bins[to].uuid) for piece, to in moves)
        )


def _taken(lack: int, sizes: list[int]) -> int:
    """The smallest number of the given sizes whose sum is at least `lack`."""
    count = 0
    for size in sorted(sizes, reverse=True):
        if lack <= 0:
            break
        lack -= size
        count += 1
    return count if lack <= 0 else _NEVER
