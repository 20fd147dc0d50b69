"""Moves of suspended tenants: their record keeps the device on which they were saved, from which vgpud makes
the driver's device pairs.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.plan import StepKind
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Mode, Slice, State, SuspendedProcess
from vgpud.planner import move as rules
from vgpud.planner.places import device_map, devices_of, saved_on
from vgpud.planner.suspend import check_room
from vgpud.planner.terms import all_terms
from vgpud.planner.use import use_of
from vgpud.policy.model import DeviceRule, Policy, PreloadSettings

from .test_move import GIB, NODE, UUIDS, held

PROCESS = SuspendedProcess(7, 1, GIB)


def away(allocation: Allocation, *processes: SuspendedProcess) -> Allocation:
    return replace(allocation, state=State.SUSPENDED, suspended=processes or (PROCESS,))


def whole_card(device: int, name: str = "a") -> Allocation:
    part = Slice(UUIDS[device], Mode.EXCLUSIVE, NODE.devices[device].memory_usable_bytes)
    return replace(held(device, name=name), slices=(part,))


def going(
    allocation: Allocation, *to: int, others: tuple[Allocation, ...] = (), policy: Policy | None = None
) -> Allocation:
    terms = all_terms(policy or Policy(), NODE)
    ends = rules.ends_of(allocation, [UUIDS[i] for i in to])
    slices = rules.going(allocation, ends, NODE, use_of([allocation, *others]), terms, {})
    return replace(allocation, slices=slices)


def moved(allocation: Allocation, *to: int) -> Allocation:
    return rules.arrived(rules.turned(going(allocation, *to)))


# --- pairs for the driver

ORDERS = st.lists(st.permutations(range(6)).map(lambda order: tuple(order[:2])), min_size=1, max_size=6)


@given(ORDERS, st.sets(st.sampled_from(UUIDS)))
def test_the_device_map_of_a_restore_names_every_visible_card_once(
    places: list[tuple[int, int]], seen: set[str]
) -> None:
    """The map is complete however often the slices were moved since the save."""
    first = [UUIDS[i] for i in places[0]]
    last = [UUIDS[i] for i in places[-1]]
    there = device_map(first, last, seen)
    assert set(there) == set(there.values()) == seen | {*first, *last}
    assert [there[uuid] for uuid in first] == last
    assert all(there[uuid] == uuid for uuid in seen - {*first, *last})


@given(st.permutations(range(6)), st.sets(st.sampled_from(UUIDS)))
def test_the_device_map_of_a_move_back_is_the_inverse_of_that_of_the_move(
    order: list[int], seen: set[str]
) -> None:
    old, new = [UUIDS[i] for i in order[:2]], [UUIDS[i] for i in order[2:4]]
    back = device_map(new, old, seen)
    assert {to: source for source, to in device_map(old, new, seen).items()} == back


def test_the_device_map_closes_a_chain_of_moves_onto_its_first_device() -> None:
    """The last device of a chain of moves is mapped to its first one. So no memory moves between different
    models of card, even with several chains.
    """
    a, b, c, d, e, f = UUIDS
    assert device_map([a, b, d], [b, c, e], UUIDS) == {a: b, b: c, c: a, d: e, e: d, f: f}


# --- the record


@given(ORDERS)
def test_the_record_of_a_suspended_process_keeps_the_device_on_which_it_was_saved(
    places: list[tuple[int, int]],
) -> None:
    allocation = away(held(0, 1))
    at = allocation
    for place in places:
        if not {UUIDS[i] for i in place} & set(devices_of(at)):
            at = moved(at, *place)
        (process,) = at.suspended
        assert saved_on(process, at) == devices_of(allocation)
        assert (process.saved_on == "") == (devices_of(at) == devices_of(allocation))


def test_a_tenant_that_is_back_on_its_device_needs_no_device_map() -> None:
    there = moved(away(held(0, 1)), 2, 3)
    assert there.suspended[0].saved_on == f"{UUIDS[0]},{UUIDS[1]}"
    assert moved(there, 0, 1) == away(held(0, 1))


def test_the_reversal_of_a_running_tenants_move_makes_no_device_map() -> None:
    running = replace(going(held(0), 1), state=State.SUSPENDING, suspended=(PROCESS,))
    assert rules.turned(running).suspended == (PROCESS,)


# --- requirements


def test_the_move_of_a_suspended_tenant_takes_no_memory_of_devices() -> None:
    full = held(1, name="b", gib=138)
    on_its_way = going(away(held(0)), 1, others=(full,))
    use = use_of([on_its_way, full])
    assert {UUIDS.index(uuid): (one.memory_bytes // GIB, one.count) for uuid, one in use.items()} == {
        0: (0, 1),
        1: (138, 2),
    }
    with pytest.raises(VgpuError, match="fit in the"):
        going(held(0), 1, others=(full,))


def few_tenants() -> Policy:
    return Policy(device=(DeviceRule(mode="preload", preload=PreloadSettings(max_tenants=1)),))


def test_the_move_of_a_suspended_tenant_to_a_device_that_is_too_small_is_refused() -> None:
    huge = away(held(0, gib=200))
    with pytest.raises(VgpuError, match="even idle") as refused:
        going(huge, 1, policy=Policy(device=(DeviceRule(preload=PreloadSettings(memory_overcommit=2.0)),)))
    assert refused.value.code is ErrorCode.NO_CAPACITY
    with pytest.raises(VgpuError, match="the policy allows 1"):
        going(away(held(0)), 1, others=(held(1, name="b"),), policy=few_tenants())
    shared = replace(held(1, name="b"), slices=(replace(held(1).slices[0], share=Percent(9000)),))
    asks = replace(held(0), slices=(replace(held(0).slices[0], share=Percent(5000)),))
    assert going(away(asks), 1, others=(shared,)).moves


def test_a_suspended_preload_tenant_cannot_move_to_a_device_held_as_a_whole_card() -> None:
    with pytest.raises(VgpuError) as refused:
        going(away(held(0)), 1, others=(whole_card(1, "b"),))
    assert refused.value.code is ErrorCode.DEVICE_IN_USE


def test_a_suspended_whole_card_moves_to_a_used_device_and_holds_no_part_of_it() -> None:
    there = going(away(whole_card(0)), 1, others=(held(1, name="b"),))
    assert UUIDS[0] not in use_of([there])
    kinds = [step.kind for step in rules.move_steps(there)]
    assert StepKind.APPLY_MODE not in kinds
    assert StepKind.UNAPPLY_MODE not in kinds


def test_the_move_of_a_suspended_tenant_locks_and_restores_no_process() -> None:
    kinds = [step.kind for step in rules.move_steps(going(away(held(0, 1)), 2, 3))]
    order = [StepKind.RECORD_INTENT, StepKind.SAVE, StepKind.RECORD_MOVE, StepKind.ATTACH, StepKind.COMMIT]
    assert [kinds.index(kind) for kind in order] == sorted(kinds.index(kind) for kind in order)
    assert not {StepKind.LOCK, StepKind.RESTORE, StepKind.UNLOCK} & set(kinds)


def test_a_tenant_cannot_resume_while_the_device_it_was_saved_on_is_absent() -> None:
    there = moved(away(held(0)), 1)
    check_room(there, NODE, {})
    with pytest.raises(VgpuError, match="was saved on device"):
        check_room(there, replace(NODE, devices=NODE.devices[1:]), {})
