"""From one MIG layout of a card to another, touching the fewest instances; pure table look-ups.

GPU instances cannot move, so a change is some destroyed and then some created. What is `pinned`
(in use, or not ours to touch) stays. Each target below is the best of *all* legal states that keep
the pinned ones, which is what makes "fewest" provable: there are only some hundred to compare.
"""

from collections.abc import Iterable
from typing import NamedTuple

from vgpud.planner.geometry import Layout, SlotKey, Table


class Transition(NamedTuple):
    """Masks of slots: first all of `destroy` go, then all of `create` come."""

    destroy: int
    create: int

    @property
    def touched(self) -> int:
        return self.destroy.bit_count() + self.create.bit_count()


class Step(NamedTuple):
    """One instance that goes (`create` is False) or comes."""

    create: bool
    key: SlotKey


def between(current: int, target: int) -> Transition:
    """The only transition that touches nothing which both layouts have."""
    return Transition(current & ~target, target & ~current)


def to_counts(table: Table, layout: Layout, pinned: int, counts: int) -> int | None:
    """The state with `counts` instances (Table.packed) that is reached from `layout` most cheaply.

    Fewest destroyed; since the counts are given, so are then the fewest created. Among equals the
    one that leaves most room. None if no state with these counts keeps the pinned instances.
    """
    return _cheapest(table, layout, pinned, table.with_counts.get(counts, ()))


def make_room(table: Table, layout: Layout, pinned: int, profile_id: int) -> int | None:
    """The state in which one more of `profile_id` is there; idle instances (not pinned) may move.

    If they cannot all be kept, the fewest are given up: fewest lost, then fewest destroyed. None
    if the pinned instances alone leave no place for it. `layout` itself needs not be legal.
    """
    more = table.unit(profile_id)
    idle = [table.unit(key[0]) for key in table.keys(layout.slots & ~pinned)]
    keep = {table.packed(key[0] for key in table.keys(layout.slots & pinned)) + more}
    kept = [keep]
    for unit in idle:
        kept = _grown(kept, unit)
    for choices in reversed(kept):  # those that keep most of the idle ones first
        states = [state for counts in choices for state in table.with_counts.get(counts, ())]
        target = _cheapest(table, layout, pinned, states)
        if target is not None:
            return target
    return None


def _grown(kept: list[set[int]], unit: int) -> list[set[int]]:
    """`kept[n]` holds the counts with n idle instances kept; now with one idle instance more."""
    grown = [set(choices) for choices in kept] + [set()]
    for n, choices in enumerate(kept):
        grown[n + 1] |= {counts + unit for counts in choices}
    return grown


def _cheapest(table: Table, layout: Layout, pinned: int, states: Iterable[int]) -> int | None:
    best: tuple[int, int, int] | None = None
    for state in states:
        if pinned & ~state or state & layout.blocked:
            continue
        cost = ((layout.slots & ~state).bit_count(), -table.worth(table.free_after[state]), state)
        if best is None or cost < best:
            best = cost
    return None if best is None else best[2]


def steps(table: Table, transition: Transition) -> tuple[Step, ...]:
    """In an order in which every prefix is a legal layout: what goes first, then the largest first."""
    going = [Step(False, key) for key in table.keys(transition.destroy)]
    coming = sorted(table.keys(transition.create), key=lambda key: (-key[1].size, key[1], key[0]))
    return (*going, *(Step(True, key) for key in coming))


def defragmented(table: Table, layout: Layout, pinned: int) -> int | None:
    """The state with the same instances that leaves most room; of those, the fewest moved.

    None if nothing that may move would gain any.
    """
    counts = table.counts.get(layout.slots)
    if counts is None:
        return None
    best, found = (-table.worth(table.free(layout)), 0, layout.slots), layout.slots
    for state in table.with_counts[counts]:
        if pinned & ~state or state & layout.blocked:
            continue
        room = table.worth(table.free_after[state] & ~layout.blocked)
        cost = (-room, (layout.slots & ~state).bit_count(), state)
        if cost < best:
            best, found = cost, state
    return None if best[0] == -table.worth(table.free(layout)) else found


def room_for(table: Table, layout: Layout, profile_id: int) -> int:
    """How many more instances of a profile fit, with nothing moved."""
    free = table.free(layout)
    most, start = 0, table.counts.get(layout.slots)
    if start is None or not free:
        return 0
    unit = table.unit(profile_id)
    while any(
        not layout.slots & ~state and not state & layout.blocked
        for state in table.with_counts.get(start + unit * (most + 1), ())
    ):
        most += 1
    return most
