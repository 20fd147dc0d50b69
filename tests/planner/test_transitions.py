"""Transitions between MIG layouts are legal and change the fewest instances.

The oracle uses neither masks nor tables: a layout is a frozenset of (profile id, placement), legal by the
rules of tests.planner.test_geometry.legal, enumerated breadth first.
"""

import random
from collections import Counter
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.device import MigProfile
from vgpud.planner.geometry import Layout, MigGeometry, geometry_for
from vgpud.planner.transitions import between, make_room, steps

from .cards import A30_PROFILES, H200_PROFILES, H200_WITHOUT_ME
from .test_geometry import TIGHT_PROFILES, Key, every_state, in_order, legal, slices

State = frozenset[Key]
CARDS = {"h200": H200_PROFILES, "a30": A30_PROFILES, "tight": TIGHT_PROFILES}


def counts_of(state: State) -> tuple[int, ...]:
    return tuple(sorted(key[0] for key in state))


@cache
def by_counts(profiles: tuple[MigProfile, ...]) -> dict[tuple[int, ...], tuple[State, ...]]:
    found: dict[tuple[int, ...], list[State]] = {}
    for state in every_state(profiles):
        found.setdefault(counts_of(state), []).append(state)
    return {counts: tuple(states) for counts, states in found.items()}


def mask(geometry: MigGeometry, state: State) -> int:
    return geometry.layout((), slices(state)).slots


def keys(geometry: MigGeometry, state: int) -> State:
    return frozenset(geometry.keys(state))


def test_every_transition_of_a_seven_slice_card_touches_the_fewest_instances() -> None:
    """All 723 x 723 transitions: instances in both layouts stay, and only the difference is changed."""
    geometry = geometry_for(H200_WITHOUT_ME)
    states = in_order(H200_WITHOUT_ME)
    masks = [mask(geometry, state) for state in states]
    assert len(set(masks)) == len(states) == 723
    compared = 0
    for a, from_ in zip(masks, states, strict=True):
        for b, to in zip(masks, states, strict=True):
            change = between(a, b)
            # the fewest changes: a transition must destroy `from - to` and create `to - from`
            assert (change.destroy | change.create).bit_count() == len(from_ ^ to)
            assert (a & ~change.destroy | change.create) == b
            compared += 1
    assert compared == 723 * 723


@pytest.mark.parametrize("card", CARDS)
@given(data=st.data())
def test_making_room_destroys_or_moves_as_few_idle_mig_instances_as_possible(
    card: str, data: st.DataObject
) -> None:
    profiles = CARDS[card]
    geometry = geometry_for(profiles)
    state = data.draw(st.sampled_from(in_order(profiles)))
    pinned = frozenset(data.draw(st.sets(st.sampled_from(sorted(state))))) if state else frozenset()
    wanted = data.draw(st.sampled_from([p.id for p in profiles]))
    found = make_room(geometry, Layout(mask(geometry, state)), mask(geometry, pinned), wanted)
    best = brute_room(profiles, state, pinned, wanted)
    if found is None:
        assert best is None
        return
    reached = keys(geometry, found)
    lost = Counter(counts_of(state))
    lost.subtract(counts_of(reached))
    lost[wanted] += 1
    assert min(lost.values()) >= 0, "nothing but the wanted one may be new"
    assert (sum(lost.values()), len(state - reached)) == best


def brute_room(
    profiles: tuple[MigProfile, ...], state: State, pinned: State, wanted: int
) -> tuple[int, int] | None:
    """Returns the least (instances given up, instances destroyed) over all layouts that keep the pinned
    instances and have room for one more of the profile `wanted`. Returns None if there is no such layout.
    """
    have = Counter(counts_of(state))
    have[wanted] += 1
    options = []
    for counts, targets in by_counts(profiles).items():
        got = Counter(counts)
        if all(got[p] <= have[p] for p in got) and got[wanted] >= Counter(counts_of(pinned))[wanted] + 1:
            lost = sum(have.values()) - sum(got.values())
            options += [(lost, len(state - target)) for target in targets if pinned <= target]
    return min(options, default=None)


@given(data=st.data())
def test_after_each_step_of_a_change_of_layout_the_mig_layout_is_legal(data: st.DataObject) -> None:
    geometry = geometry_for(H200_PROFILES)
    states = in_order(H200_PROFILES)
    now = set(data.draw(st.sampled_from(states)))
    target = data.draw(st.sampled_from(states))
    for step in steps(geometry, between(mask(geometry, frozenset(now)), mask(geometry, target))):
        if step.create:
            now.add(step.key)
        else:
            now.remove(step.key)
        assert legal(H200_PROFILES, frozenset(now))
    assert now == target


def test_a_mig_layout_is_found_whenever_there_is_one() -> None:
    """10 000 random lists of profiles: the planner finds a layout exactly if brute force over placements
    finds one.
    """
    geometry = geometry_for(H200_PROFILES)
    draw = random.Random(20261120)
    ids = [p.id for p in H200_PROFILES]
    found = 0
    for _ in range(10_000):
        wanted = [draw.choice(ids) for _ in range(draw.randint(1, 8))]
        states = geometry.with_counts.get(geometry.packed(wanted), ())
        assert bool(states) == packs(tuple(sorted(wanted))), wanted
        for state in states[:1]:
            reached = keys(geometry, state)
            assert counts_of(reached) == tuple(sorted(wanted))
            assert legal(H200_PROFILES, reached)
            found += 1
    assert 1000 < found < 9000, "the draw must have both kinds in number"


@cache
def packs(wanted: tuple[int, ...]) -> bool:
    """Returns whether the profiles fit, by trying every combination of places."""
    by_id = {p.id: p for p in H200_PROFILES}
    if sum(by_id[number].placements[0].size for number in wanted) > 8:
        return False  # the profiles need more memory slices than the device has
    choices: list[State] = [frozenset()]
    for number, times in Counter(wanted).items():
        places = [(number, place) for place in by_id[number].placements]
        choices = [
            grown
            for state in choices
            for added in combinations(places, times)
            if legal(H200_PROFILES, grown := state | frozenset(added))
        ]
    return bool(choices)
