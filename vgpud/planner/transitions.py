"""Plans changes from one MIG layout of a card to another with the fewest changed instances, by look-ups in
its MigGeometry.

GPU instances cannot move, so a change destroys some instances and then creates some. `pinned` instances (in
use, or foreign) stay. `make_room` and `defragmented` compare *all* legal states that keep the pinned
instances, so that "fewest" is exact: there are only some hundred states.
"""

from collections.abc import Iterable
from typing import NamedTuple

from vgpud.planner.geometry import Layout, MigGeometry, SlotKey


class Transition(NamedTuple):
    """A change of layout as masks of slots. First all of `destroy` are destroyed, then all of `create` are
    created.
    """

    destroy: int
    create: int


class Step(NamedTuple):
    """One instance that is created (`create` is True) or destroyed."""

    create: bool
    key: SlotKey


def between(current: int, target: int) -> Transition:
    """The transition from layout `current` to layout `target`. The transition keeps all instances that are in
    both layouts.
    """
    return Transition(current & ~target, target & ~current)


def make_room(geometry: MigGeometry, layout: Layout, pinned: int, profile_id: int) -> int | None:
    """The state with one more instance of `profile_id`. Idle instances (not pinned) may be moved for it.

    If not all idle instances can be kept, the result is the state with the fewest lost, then with the fewest
    destroyed. None if the pinned instances leave no place. `layout` itself may be an illegal state.
    """
    more = geometry.unit(profile_id)
    idle = [geometry.unit(key[0]) for key in geometry.keys(layout.slots & ~pinned)]
    keep = {geometry.packed(key[0] for key in geometry.keys(layout.slots & pinned)) + more}
    kept = [keep]
    for unit in idle:
        kept = _grown(kept, unit)
    for choices in reversed(kept):  # States that keep most idle instances are tried first.
        states = [state for counts in choices for state in geometry.with_counts.get(counts, ())]
        target = _cheapest(geometry, layout, pinned, states)
        if target is not None:
            return target
    return None


def _grown(kept: list[set[int]], unit: int) -> list[set[int]]:
    """Adds one more idle instance to the choices. `kept[n]` has the packed counts with n idle
    instances kept.
    """
    grown = [set(choices) for choices in kept] + [set()]
    for n, choices in enumerate(kept):
        grown[n + 1] |= {counts + unit for counts in choices}
    return grown


def _cheapest(geometry: MigGeometry, layout: Layout, pinned: int, states: Iterable[int]) -> int | None:
    best: tuple[int, int, int] | None = None
    for state in states:
        if pinned & ~state or state & layout.blocked:
            continue
        cost = ((layout.slots & ~state).bit_count(), -geometry.worth(geometry.free_after[state]), state)
        if best is None or cost < best:
            best = cost
    return None if best is None else best[2]


def steps(geometry: MigGeometry, transition: Transition) -> tuple[Step, ...]:
    """The steps of a transition in an order in which each intermediate layout is legal: removals, then
    creations, the largest instances first.
    """
    going = [Step(False, key) for key in geometry.keys(transition.destroy)]
    coming = sorted(geometry.keys(transition.create), key=lambda key: (-key[1].size, key[1], key[0]))
    return (*going, *(Step(True, key) for key in coming))


def defragmented(geometry: MigGeometry, layout: Layout, pinned: int) -> int | None:
    """The state with the same instances that leaves most room; if several do, the one with the fewest moves.

    None if no move gains room.
    """
    counts = geometry.counts.get(layout.slots)
    if counts is None:
        return None
    best, found = (-geometry.worth(geometry.free(layout)), 0, layout.slots), layout.slots
    for state in geometry.with_counts[counts]:
        if pinned & ~state or state & layout.blocked:
            continue
        room = geometry.worth(geometry.free_after[state] & ~layout.blocked)
        cost = (-room, (layout.slots & ~state).bit_count(), state)
        if cost < best:
            best, found = cost, state
    return None if best[0] == -geometry.worth(geometry.free(layout)) else found


def room_for(geometry: MigGeometry, layout: Layout, profile_id: int) -> int:
    """Returns how many more instances of a profile fit beside a layout without moving any."""
    free = geometry.free(layout)
    most, start = 0, geometry.counts.get(layout.slots)
    if start is None or not free:
        return 0
    unit = geometry.unit(profile_id)
    while any(
        not layout.slots & ~state and not state & layout.blocked
        for state in geometry.with_counts.get(start + unit * (most + 1), ())
    ):
        most += 1
    return most
