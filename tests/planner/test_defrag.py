"""The fewest moves of a defragmentation, compared with all sequences of moves on small nodes."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpud.planner.defrag import Bin, Goal, Piece, Way, fewest_moves

MOST = 3


def bins(*memory: int, tenants: int = 4) -> list[Bin]:
    return [Bin(f"d{i}", "h200", size, tenants) for i, size in enumerate(memory)]


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[Bin], list[Piece], Goal]:
    devices = [
        Bin(
            f"d{i}",
            draw(st.sampled_from("aab")),
            draw(st.sampled_from((6, 8))),
            draw(st.sampled_from((2, 3))),
            10,
            draw(st.sampled_from((True, True, True, False))),
        )
        for i in range(draw(st.integers(2, 4)))
    ]
    pieces: list[Piece] = []
    for n in range(draw(st.integers(0, 6))):
        one = Piece(
            f"a{draw(st.integers(0, n)) if draw(st.booleans()) else n}",
            draw(st.sampled_from(devices)).uuid,
            draw(st.integers(1, 5)),
            draw(st.sampled_from((0, 3, 5))),
            draw(st.sampled_from((True, True, True, False))),
        )
        if sound(devices, [*pieces, one]):
            pieces.append(one)
    on = frozenset(draw(st.sets(st.sampled_from([one.uuid for one in devices]))))
    goal = Goal(on, draw(st.integers(1, 8)), draw(st.sampled_from((0, 5))), draw(st.booleans()))
    return devices, pieces, goal


def sound(devices: list[Bin], pieces: list[Piece]) -> bool:
    """Returns whether no device exceeds its bounds or has two slices of one allocation."""
    for device in devices:
        here = [piece for piece in pieces if piece.device_uuid == device.uuid]
        if (
            sum(piece.memory_bytes for piece in here) > device.memory_bytes
            or sum(piece.share_hundredths for piece in here) > device.share_hundredths
            or len(here) > device.tenants
            or len({piece.allocation_id for piece in here}) < len(here)
        ):
            return False
    return True


def ready(devices: list[Bin], pieces: list[Piece], goal: Goal) -> set[str]:
    found = set()
    for device in devices:
        here = [piece for piece in pieces if piece.device_uuid == device.uuid]
        new = Piece("new", device.uuid, goal.memory_bytes, goal.share_hundredths)
        fits = not here if goal.whole else sound(devices, [*pieces, new])
        if device.uuid in goal.on and fits:
            found.add(device.uuid)
    return found


def moved(devices: list[Bin], pieces: list[Piece], number: int, to: str) -> list[Piece] | None:
    """The pieces after one of them has moved to another device, or None if the move is not allowed."""
    kinds = {device.uuid: device.kind for device in devices}
    takes = {device.uuid: device.takes for device in devices}
    piece = pieces[number]
    if not piece.movable or to == piece.device_uuid or kinds[to] != kinds[piece.device_uuid] or not takes[to]:
        return None
    there = Piece(piece.allocation_id, to, piece.memory_bytes, piece.share_hundredths, piece.movable)
    after = [*pieces[:number], there, *pieces[number + 1 :]]
    return after if sound(devices, after) else None


def brute_force(devices: list[Bin], pieces: list[Piece], goal: Goal) -> int | None:
    """Returns the number of moves that the goal needs, or None if MOST moves are not enough. Tries all
    sequences of moves, the shorter ones first.
    """
    level = [pieces]
    for moves in range(MOST + 1):
        if any(ready(devices, position, goal) for position in level):
            return moves
        seen: dict[tuple[str, ...], list[Piece]] = {}
        for position in level:
            for number in range(len(position)):
                for device in devices:
                    after = moved(devices, position, number, device.uuid)
                    if after is not None:
                        seen[tuple(piece.device_uuid for piece in after)] = after
        level = list(seen.values())
    return None


def follow(devices: list[Bin], pieces: list[Piece], way: Way) -> list[Piece]:
    """Applies the moves of a plan, and asserts that each is allowed."""
    numbers = {piece: n for n, piece in zip(count(), pieces, strict=False)}
    for piece, to in way.moves:
        after = moved(devices, pieces, numbers[piece], to)
        assert after is not None
        pieces = after
    return pieces


@settings(max_examples=examples(75))
@given(nodes())
def test_a_defragmentation_moves_as_few_slices_as_possible(
    world: tuple[list[Bin], list[Piece], Goal],
) -> None:
    devices, pieces, goal = world
    way = fewest_moves(devices, pieces, goal, MOST)
    fewest = brute_force(devices, pieces, goal)
    assert (None if way is None else len(way.moves)) == fewest
    if way is not None:
        assert way.device_uuid in ready(devices, follow(devices, pieces, way), goal)


def test_a_defragmentation_moves_nothing_where_there_is_room() -> None:
    way = fewest_moves(bins(10, 10), [Piece("a", "d0", 6)], Goal(frozenset({"d0", "d1"}), 9))
    assert way == Way("d1", ())


def test_a_slice_may_move_to_make_way_for_another_slice() -> None:
    """The piece of 4 on d0 fits on d1 only after the piece of 2 on d1 has moved to d2."""
    pieces = [
        Piece("a", "d0", 4),
        Piece("b", "d1", 5),
        Piece("c", "d1", 2),
        Piece("e", "d2", 8, movable=False),
    ]
    way = fewest_moves(bins(10, 10, 10), pieces, Goal(frozenset({"d0"}), whole=True))
    assert way is not None
    assert [(piece.allocation_id, to) for piece, to in way.moves] == [("c", "d2"), ("a", "d1")]


def test_the_search_for_moves_stays_fast_with_many_equal_tenants() -> None:
    """With forty equal tenants on eight devices, the search must not distinguish between them."""
    devices = bins(*[100] * 8, tenants=8)
    pieces = [Piece(f"t{n}", f"d{n % 8}", 18) for n in range(40)]
    way = fewest_moves(devices, pieces, Goal(frozenset(one.uuid for one in devices), 28))
    assert way is None  # each device has 10 free, so no piece of 18 fits
    way = fewest_moves(devices, pieces[:35], Goal(frozenset(one.uuid for one in devices), 45))
    assert way is not None
    assert len(way.moves) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_defragmentation_does_not_move_a_slice_that_is_not_movable(whole: bool) -> None:
    pieces = [Piece("a", "d0", 9, movable=False)]
    assert fewest_moves(bins(10), pieces, Goal(frozenset({"d0"}), 5, whole=whole)) is None
