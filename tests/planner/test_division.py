"""Compute instances in the planner: their places, their GPU instances, and the requests that they cannot
serve.
"""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planner.cards import A30_PROFILES, H200_PROFILES, OWNER, h200, node_of
from vgpud.model.device import (
    ComputeInstance,
    Device,
    DeviceProcess,
    GpuInstance,
    Mig,
    MigProfile,
    PlaceKey,
    Placement,
    split_name,
)
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, MIB, Percent
from vgpud.model.tenancy import Decision, Isolation, Mode, Request, Slice
from vgpud.planner.choose import choose
from vgpud.planner.division import part_of
from vgpud.planner.geometry import geometry_for
from vgpud.planner.layouts import spell
from vgpud.planner.mig_parts import split
from vgpud.planner.pool import Pool
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.model import Policy

HALF = (9, Placement(4, 4))
ON_TOP: dict[str, object] = {"mode": "mig", "mig": {"on_top": ["preload", "mps"]}}


def request(profile: str, **asked: Any) -> Request:
    return replace(Request("r", OWNER, mig_profile=profile), **asked)


def ask(
    wanted: Request,
    *devices: Device,
    use: dict[str, DeviceUse] | None = None,
    pools: dict[str, Pool] | None = None,
    rule: dict[str, object] | None = None,
) -> Decision:
    policy = Policy.model_validate({"device": [rule or {"mode": "mig"}]})
    return choose(wanted, node_of(*(devices or (h200(0, mig_on=True),))), policy, use or {}, pools or {})


def taken(decision: Decision) -> Slice:
    assert decision.refusal is None, decision.refusal
    return decision.slices[0]


def test_compute_instances_have_the_names_that_the_driver_gives_them() -> None:
    assert split_name("1c.3g.71gb") == (1, "3g.71gb")
    assert split_name("MIG 2c.4g.71gb+me") == (2, "4g.71gb+me")
    assert split_name("3g.71gb") is None


def test_further_compute_instances_use_the_gpu_instance_of_the_first_until_it_is_full() -> None:
    use, places = EMPTY, []
    for _ in range(3):
        piece = taken(ask(request("1c.3g.71gb"), use={"GPU-0": use} if use.count else {}))
        assert piece.mode is Mode.MIG
        assert piece.mig is not None
        assert piece.mig.profile_name == "1c.3g.71gb"
        use = use.with_slice(piece)
        places.append(piece.mig.place)
    assert len({key for key, _ in places}) == 1, "one GPU instance holds three"
    assert len({part for _, part in places}) == 3
    assert use.memory_bytes <= 71424 * MIB, "even parts are not more than there is"
    fourth = taken(ask(request("1c.3g.71gb"), use={"GPU-0": use})).mig
    assert fourth is not None
    assert fourth.key not in {key for key, _ in places}


def test_a_compute_profile_of_all_slices_means_the_whole_gpu_instance() -> None:
    assert taken(ask(request("3c.3g.71gb"))).mig == taken(ask(request("3g.71gb"))).mig


def test_a_request_may_name_the_place_of_a_compute_instance() -> None:
    mig = taken(ask(request("1c.3g.71gb@0"))).mig
    assert mig is not None
    assert mig.placement.start == 0


@given(st.data())
@settings(max_examples=examples(75))
def test_a_place_for_a_compute_instance_is_found_whenever_there_is_one(data: st.DataObject) -> None:
    """Searches a place in one divided GPU instance, and compares the result with all places that do not
    overlap.
    """
    profile = data.draw(st.sampled_from([p for p in H200_PROFILES if p.slice_count > 1]))
    geometry = geometry_for(profile.compute)
    whole = max(profile.compute, key=lambda p: p.slice_count)
    states = [s for s in geometry.free_after if s and whole.id not in ids(geometry.keys(s))]
    state = data.draw(st.sampled_from(sorted(states)))
    part = data.draw(st.sampled_from([p for p in profile.compute if p.id != whole.id]))
    key = (profile.id, profile.placements[0])
    device, pool = divided(key, geometry.keys(state), profile.slice_count)
    decision = ask(
        request(f"{part.slice_count}c.{profile.name[4:]}@{key[1].start}"), device, pools={"GPU-0": pool}
    )
    idle = [at for number, at in geometry.keys(state) if number == part.id]
    free = [at for at in part.placements if not any(meet(at, other) for _, other in geometry.keys(state))]
    if not idle and not free:
        assert decision.refusal is not None
        return
    mig = taken(decision).mig
    assert mig is not None
    assert mig.key == key
    assert mig.compute_placement in (idle or free)


def meet(a: Placement, b: Placement) -> bool:
    return a.start < b.start + b.size and b.start < a.start + a.size


def ids(keys: tuple[PlaceKey, ...]) -> set[int]:
    return {number for number, _ in keys}


def divided(key: PlaceKey, parts: tuple[PlaceKey, ...], slices: int, **fields: Any) -> tuple[Device, Pool]:
    """A device with one GPU instance, which vgpud made."""
    computes = tuple(ComputeInstance(n, p[0], f"MIG-{n}", p[1]) for n, p in enumerate(parts))
    instance = GpuInstance(7, *key, computes, slices)
    device = replace(h200(0), mig=Mig(True, True, True, H200_PROFILES, (instance,)), **fields)
    return device, Pool(frozenset([key]), own_computes=frozenset((key, p) for p in parts))


PARTS = ((0, Placement(0, 1)), (0, Placement(1, 1)), (0, Placement(2, 1)))


def test_a_compute_instance_with_processes_is_not_allocated() -> None:
    running = (DeviceProcess(1, None, "compute", 7, 0), DeviceProcess(2, None, "compute", 7, 2))
    device, pool = divided(HALF, PARTS, 3, processes=running)
    mig = taken(ask(request("1c.3g.71gb@4"), device, pools={"GPU-0": pool})).mig
    assert mig is not None
    assert mig.compute_key == PARTS[1]


@pytest.mark.parametrize("foreign", ["keep", "lend"])
def test_foreign_compute_instances_are_allocated_only_if_the_policy_lends_them(foreign: str) -> None:
    device, _ = divided(HALF, PARTS[:1], 3)
    pools = {"GPU-0": Pool(foreign=foreign)}
    decision = ask(request("1c.3g.71gb@4"), device, pools=pools)
    assert (decision.refusal is None) is (foreign == "lend")
    whole = ask(request("3g.71gb@4"), device, pools=pools)
    assert whole.refusal is not None, "a part is not the whole"
    held = DeviceUse(Mode.MIG, count=1)
    if decision.slices:
        held = EMPTY.with_slice(decision.slices[0])
        again = ask(request("1c.3g.71gb@4"), device, use={"GPU-0": held}, pools=pools)
        assert again.refusal is not None, "nothing is made inside what others made"


def test_a_divided_gpu_instance_is_not_allocated_as_a_whole() -> None:
    device, pool = divided(HALF, PARTS, 3)
    use = {"GPU-0": EMPTY.with_slice(taken(ask(request("1c.3g.71gb"), device, pools={"GPU-0": pool})))}
    assert ask(request("3g.71gb@4"), device, use=use, pools={"GPU-0": pool}).refusal is not None
    mig = taken(ask(request("3g.71gb"), device, use=use, pools={"GPU-0": pool})).mig
    assert mig is not None
    assert mig.placement.start == 0


def test_an_idle_divided_gpu_instance_is_removed_for_a_whole_one() -> None:
    """The only place left for the whole instance is that of a divided GPU instance. vgpud removes all compute
    instances from it first.
    """
    device, pool = divided(HALF, PARTS, 3)
    other = taken(ask(request("4g.71gb"), device, pools={"GPU-0": pool}))
    decision = ask(request("3g.71gb"), device, use={"GPU-0": EMPTY.with_slice(other)}, pools={"GPU-0": pool})
    mig = taken(decision).mig
    assert mig is not None
    assert (mig.key, mig.compute_key) == (HALF, None)
    assert [move.source for move in decision.moves] == [HALF[1]]


def test_a_compute_instance_with_a_memory_limit_is_refused() -> None:
    refusal = ask(request("1c.3g.71gb", memory_bytes=GIB)).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.UNSUPPORTED
    assert "isolation quota" in " ".join((refusal.sentence, *refusal.details))


def test_memory_limits_of_tenants_in_one_gpu_instance_add_up_to_at_most_its_memory() -> None:
    """The tenants have separate compute instances, and the GPU instance has only one memory."""
    asked = request("1c.3g.71gb", isolation=Isolation.QUOTA, memory_bytes=30 * GIB)
    use, keys = EMPTY, []
    for _ in range(5):
        piece = taken(ask(asked, use={"GPU-0": use} if use.count else {}, rule=ON_TOP))
        assert piece.mig is not None
        assert piece.mode is Mode.PRELOAD
        assert piece.memory_bytes == 30 * GIB
        keys.append(piece.mig.place)
        use = use.with_slice(piece)
        if len(keys) == 4:
            break
    per_instance = [sum(key == other for other, _ in keys) for key in {key for key, _ in keys}]
    assert per_instance == [2, 2], "two times 30 GiB fit in 69.75 GiB"
    assert ask(asked, use={"GPU-0": use}, rule=ON_TOP).refusal is not None


def test_a_compute_instance_without_a_memory_limit_counts_as_an_even_part_of_the_memory() -> None:
    plain = EMPTY.with_slice(taken(ask(request("2c.3g.71gb@4"))))
    asked = request("1c.3g.71gb@4", isolation=Isolation.QUOTA, memory_bytes=30 * GIB)
    refusal = ask(asked, use={"GPU-0": plain}, rule=ON_TOP).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.NO_CAPACITY
    fits = replace(asked, memory_bytes=23 * GIB)
    assert taken(ask(fits, use={"GPU-0": plain}, rule=ON_TOP)).memory_bytes == 23 * GIB


@pytest.mark.parametrize(
    ("allowed", "code"),
    [
        (["3g.71gb"], None),
        (["1c.3g.71gb"], None),
        (["4g.71gb"], ErrorCode.DENIED_BY_POLICY),
        (["2c.3g.71gb"], ErrorCode.DENIED_BY_POLICY),
    ],
)
def test_the_policy_restricts_compute_instance_profiles(allowed: list[str], code: ErrorCode | None) -> None:
    refusal = ask(request("1c.3g.71gb"), rule={"mode": "mig", "mig": {"profiles": allowed}}).refusal
    assert (refusal and refusal.code) == code


def test_compute_profiles_in_the_policy_exclude_whole_gpu_instances() -> None:
    rule: dict[str, object] = {"mode": "mig", "mig": {"profiles": ["1c.3g.71gb"]}}
    refusal = ask(request("3g.71gb"), rule=rule).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.DENIED_BY_POLICY


@pytest.mark.parametrize("name", ["5c.3g.71gb", "1c.1g.18gb.x", "1c.8g.71gb", "2c.1g.18gb"])
def test_a_compute_profile_that_no_card_has_is_refused_as_impossible(name: str) -> None:
    refusal = ask(request(name)).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.IMPOSSIBLE


def test_the_share_of_a_compute_instance_is_that_of_its_own_multiprocessors() -> None:
    assert taken(ask(request("2c.4g.71gb"))).share == Percent(32 * 10000 // 132)
    assert ask(request("1c.4g.71gb", share=Percent(5000))).refusal is not None


def test_with_a_fixed_layout_only_its_compute_instances_are_allocated() -> None:
    computes = frozenset((HALF, part) for part in PARTS[:2])
    device = replace(h200(0), mig=Mig(True, True, True, H200_PROFILES))
    pool = Pool(layout=frozenset([HALF]), dynamic=False, computes=computes)
    use = EMPTY
    for _ in range(2):
        piece = taken(ask(request("1c.3g.71gb"), device, use={"GPU-0": use}, pools={"GPU-0": pool}))
        use = use.with_slice(piece)
    assert {mig.compute_key for mig in use.mig} == set(PARTS[:2])
    assert ask(request("1c.3g.71gb"), device, use={"GPU-0": use}, pools={"GPU-0": pool}).refusal is not None
    assert ask(request("3g.71gb"), device, pools={"GPU-0": pool}).refusal is not None


def test_an_idle_instance_is_said_to_stand_only_if_it_need_not_be_made() -> None:
    device = replace(h200(0), mig=Mig(True, True, True, H200_PROFILES))
    planned = ask(request("3g.71gb"), device, pools={"GPU-0": Pool(layout=frozenset([HALF]))})
    assert planned.reasons[0].sentence.endswith("at memory slice 4, where the layout has one")
    standing = replace(device, mig=replace(device.mig, instances=(GpuInstance(1, *HALF, ()),)))
    found = ask(request("3g.71gb"), standing, pools={"GPU-0": Pool(own=frozenset([HALF]))})
    assert found.reasons[0].sentence.endswith("at memory slice 4, where an idle one stands")


# --- layouts in words


def test_compute_instances_are_packed_into_the_fewest_gpu_instances() -> None:
    geometry = geometry_for(H200_PROFILES)
    plain, bins = split(geometry, ("1c.3g.71gb*4", "2c.3g.71gb", "1g.18gb"))
    assert [sorted(one.parts) for one in bins] == [[0, 1], [0, 0, 0]]
    assert plain == ("1g.18gb", "9", "9")
    assert split(geometry, ("7c.7g.141gb",)) == (("0",), ())


def test_compute_instances_that_no_gpu_instance_can_hold_are_refused_as_impossible() -> None:
    geometry = geometry_for(H200_PROFILES)
    for words in (("5c.7g.141gb",), ("2c.3g.71gb@4", "2c.3g.71gb@4"), ("1c.9g.71gb",)):
        with pytest.raises(VgpuError) as wrong:
            split(geometry, words)
        assert wrong.value.code is ErrorCode.IMPOSSIBLE


@pytest.mark.parametrize("profiles", [H200_PROFILES, A30_PROFILES], ids=["h200", "a30"])
def test_every_division_of_a_gpu_instance_can_be_written_and_read(profiles: tuple[MigProfile, ...]) -> None:
    geometry = geometry_for(profiles)
    for profile in profiles:
        inside = geometry_for(profile.compute)
        whole = part_of(profile, profile.slice_count)
        assert whole is not None
        for state in inside.free_after:
            parts = inside.keys(state)
            if not state or whole.id in ids(parts):
                continue
            key = (profile.id, profile.placements[-1])
            plain, bins = split(geometry, spell(geometry, [key], [(key, part) for part in parts]))
            assert len(plain) == len(bins) == 1
            assert inside.packed(bins[0].parts) == inside.counts[state]


def test_the_number_of_legal_divisions_of_a_gpu_instance_equals_brute_force() -> None:
    for profile in H200_PROFILES:
        slots = [(p, place) for p in profile.compute for place in p.placements]
        legal = 0
        for count in range(profile.slice_count + 1):
            for chosen in combinations(slots, count):
                taken_slices = [s for _, at in chosen for s in range(at.start, at.start + at.size)]
                legal += len(taken_slices) == len(set(taken_slices))
        assert len(geometry_for(profile.compute).free_after) == legal
