"""Tables of MIG layouts compared with an independent brute-force search."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.device import GpuInstance, MigProfile, Placement
from vgpud.model.tenancy import MigSlice
from vgpud.planner.geometry import Layout, MigGeometry, bits, geometry_for

from .cards import A30_PROFILES, H200_PROFILES, H200_WITHOUT_ME, instance, profile, used_mig

Key = tuple[int, Placement]

# the rules of this device do not follow from places alone: compute slices and counts bound it, too
TIGHT_PROFILES = (
    profile(1, "1c", 1, 3, 10, 1000, (0, 1, 2, 3, 4, 5), 1),
    profile(2, "2c", 2, 2, 20, 1000, (0, 2, 4), 1),
    profile(3, "4c", 4, 1, 40, 4000, (0,), 6),
)
CARDS = {"h200": H200_PROFILES, "a30": A30_PROFILES, "tight": TIGHT_PROFILES}


def legal(profiles: tuple[MigProfile, ...], keys: frozenset[Key]) -> bool:
    """Returns whether a layout is legal by NVIDIA's rules, checked slice by slice."""
    by_id = {p.id: p for p in profiles}
    cells: set[int] = set()
    for _, place in keys:
        mine = set(range(place.start, place.start + place.size))
        if cells & mine:
            return False
        cells |= mine
    for p in profiles:
        if sum(key[0] == p.id for key in keys) > p.instance_count:
            return False
    return sum(by_id[key[0]].slice_count for key in keys) <= max(p.slice_count for p in profiles)


@cache
def every_state(profiles: tuple[MigProfile, ...]) -> frozenset[frozenset[Key]]:
    """Returns every legal layout. A breadth-first search over sets checks each layout as a whole."""
    keys = [(p.id, place) for p in profiles for place in p.placements]
    states = {frozenset[Key]()}
    edge = set(states)
    while edge:
        grown = {state | {key} for state in edge for key in keys if key not in state}
        edge = {state for state in grown if legal(profiles, state)} - states
        states |= edge
    return frozenset(states)


@cache
def in_order(profiles: tuple[MigProfile, ...]) -> list[frozenset[Key]]:
    return sorted(every_state(profiles), key=sorted)


def keys_of(geometry: MigGeometry, state: int) -> frozenset[Key]:
    return frozenset((p.id, place) for i, (p, place) in enumerate(geometry.slots) if state >> i & 1)


def brute_free(profiles: tuple[MigProfile, ...], state: frozenset[Key]) -> set[Key]:
    keys = {(p.id, place) for p in profiles for place in p.placements}
    return {key for key in keys - state if legal(profiles, state | {key})}


def free_of(geometry: MigGeometry, layout: Layout, profile_id: int) -> tuple[Placement, ...]:
    """The free placements of a profile, in NVML's order."""
    found = [geometry.slots[slot] for slot in bits(geometry.free(layout))]
    return tuple(place for profile, place in found if profile.id == profile_id)


def slices(state: frozenset[Key]) -> tuple[MigSlice, ...]:
    return tuple(MigSlice(number, "", place) for number, place in sorted(state))


def test_an_h200_has_723_mig_layouts_without_profiles_with_media_engines() -> None:
    assert len(geometry_for(H200_WITHOUT_ME).free_after) == 723


@pytest.mark.parametrize("card", CARDS)
def test_the_legal_mig_layouts_are_those_that_a_brute_force_search_finds(card: str) -> None:
    geometry = geometry_for(CARDS[card])
    assert {keys_of(geometry, state) for state in geometry.free_after} == every_state(CARDS[card])


@pytest.mark.parametrize("card", CARDS)
@given(data=st.data())
def test_free_and_best_mig_placements_equal_brute_force(card: str, data: st.DataObject) -> None:
    profiles = CARDS[card]
    geometry = geometry_for(profiles)
    state = data.draw(st.sampled_from(in_order(profiles)))
    layout = geometry.layout((), slices(state))
    free = brute_free(profiles, state)
    for p in profiles:
        mine = [key for key in free if key[0] == p.id]
        assert set(free_of(geometry, layout, p.id)) == {place for _, place in mine}
        best = geometry.best_place(layout, p.id)
        ended = {key: free - brute_free(profiles, state | {key}) for key in mine}
        slices_of = {q.id: q.slice_count for q in profiles}
        lost = {key: sum(slices_of[other[0]] for other in ended[key]) for key in mine}
        if not mine:
            assert best is None
            continue
        assert best is not None
        assert best.cost == min(lost.values()) == lost[p.id, best.placement]
        assert best.worth == sum(slices_of[other[0]] for other in free) - best.cost
        assert best.destroyed == len(ended[p.id, best.placement])
        assert best.left == len(free) - best.destroyed
        assert best.placement == min(key[1] for key in mine if lost[key] == best.cost)
    assert {p.id for p in geometry.free_profiles(layout)} == {key[0] for key in free}


def test_an_empty_h200_allocates_the_placements_of_lowest_cost() -> None:
    geometry = geometry_for(H200_PROFILES)
    starts = {p.name: geometry.best_place(Layout(), p.id).placement.start for p in H200_PROFILES}  # type: ignore[union-attr]
    assert starts == {
        "MIG 1g.18gb": 6,
        "MIG 1g.18gb+me": 6,
        "MIG 1g.35gb": 6,
        "MIG 2g.35gb": 4,
        "MIG 3g.71gb": 4,  # at this place a 3g instance keeps place 0 free for a 4g
        "MIG 4g.71gb": 0,
        "MIG 7g.141gb": 0,
    }


def test_beside_two_3g_instances_no_profile_fits_although_a_compute_slice_is_free() -> None:
    geometry = geometry_for(H200_PROFILES)
    layout = geometry.layout((), used_mig((9, 0), (9, 4)).mig)
    assert geometry.compute_slices == 7
    assert geometry.free_profiles(layout) == ()


def test_four_1g_instances_leave_room_for_a_3g_instance() -> None:
    geometry = geometry_for(H200_PROFILES)
    layout = geometry.layout((), used_mig((19, 0), (19, 1), (19, 2), (19, 3)).mig)
    assert free_of(geometry, layout, 9) == (Placement(4, 4),)


def test_a_mig_profile_with_media_engines_is_allocated_at_most_once() -> None:
    geometry = geometry_for(H200_PROFILES)
    layout = geometry.layout((), used_mig((20, 3)).mig)
    assert free_of(geometry, layout, 20) == ()
    assert len(free_of(geometry, layout, 19)) == 6


def test_an_allocated_mig_instance_that_nvml_also_lists_is_counted_once() -> None:
    geometry = geometry_for(H200_PROFILES)
    held = used_mig((9, 0)).mig
    assert geometry.layout((instance(1, 9, 0),), held) == geometry.layout((), held)


def test_a_foreign_mig_instance_occupies_its_placement() -> None:
    geometry = geometry_for(H200_PROFILES)
    layout = geometry.layout((instance(1, 9, 4),), ())
    assert free_of(geometry, layout, 9) == (Placement(0, 4),)


def test_a_mig_instance_at_an_unknown_placement_blocks_placements_that_it_overlaps() -> None:
    geometry = geometry_for(H200_PROFILES)
    layout = geometry.layout((GpuInstance(1, 77, Placement(1, 2), ()),), ())
    assert [p.start for p in free_of(geometry, layout, 19)] == [0, 3, 4, 5, 6]
    assert [p.start for p in free_of(geometry, layout, 14)] == [4]


def test_no_mig_profile_fits_into_a_layout_with_overlapping_instances() -> None:
    geometry = geometry_for(H200_PROFILES)
    overlapping = (instance(1, 9, 0), instance(2, 19, 1))
    assert geometry.free_profiles(geometry.layout(overlapping, ())) == ()


def test_cards_with_equal_profiles_share_one_table_of_layouts() -> None:
    other_snapshot = tuple(replace(p) for p in H200_PROFILES)
    assert other_snapshot[0] is not H200_PROFILES[0]
    assert other_snapshot is not H200_PROFILES
    assert geometry_for(other_snapshot) is geometry_for(H200_PROFILES)


def test_tables_of_layouts_of_different_cards_are_not_mixed_up() -> None:
    for first, second in combinations(CARDS.values(), 2):
        assert geometry_for(first).profiles == first
        assert geometry_for(second).profiles == second


def test_a_card_without_mig_profiles_has_only_the_empty_layout() -> None:
    assert geometry_for(()).free_after == {0: 0}
