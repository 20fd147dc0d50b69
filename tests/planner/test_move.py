"""The requirements and the steps of a move.

test_move_suspended.py tests moves of suspended tenants.
"""

from dataclasses import replace
from typing import Any

import pytest

from vgpud.model.device import Device, Link
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.plan import StepKind
from vgpud.model.tenancy import Allocation, Mode, Owner, Request, Slice, State
from vgpud.planner import move as rules
from vgpud.planner.terms import all_terms
from vgpud.planner.use import use_of
from vgpud.policy.model import Policy

from .cards import h200, node_of

GIB = 1 << 30
NODE = replace(node_of(*(h200(i) for i in range(6))), driver_version="580.159.04")
UUIDS = [device.uuid for device in NODE.devices]


def held(*devices: int, name: str = "a", gib: int = 10, request: str = "r") -> Allocation:
    slices = tuple(Slice(UUIDS[i], Mode.PRELOAD, gib * GIB) for i in devices)
    return Allocation(name, Request(request, Owner(0, 0)), State.ACTIVE, slices)


def going(allocation: Allocation, *to: int, others: tuple[Allocation, ...] = ()) -> Allocation:
    terms = all_terms(Policy(), NODE)
    ends = rules.ends_of(allocation, [UUIDS[i] for i in to])
    slices = rules.going(allocation, ends, NODE, use_of([allocation, *others]), terms, {})
    return replace(allocation, slices=slices, state=State.SUSPENDING)


def test_a_move_holds_room_on_source_and_destination() -> None:
    use = use_of([going(held(0, 1), 0, 3)])
    assert {UUIDS.index(uuid): one.memory_bytes // GIB for uuid, one in use.items()} == {0: 10, 1: 10, 3: 10}


@pytest.mark.parametrize("to", [(1,), (0, 1, 2), (2, 2), (1, 2), (2, 0)])
def test_an_impossible_destination_is_refused(to: tuple[int, ...]) -> None:
    with pytest.raises(VgpuError) as refused:
        rules.ends_of(held(0, 1), [UUIDS[i] for i in to])
    assert refused.value.code is ErrorCode.BAD_REQUEST


def test_a_move_of_an_allocation_with_several_slices_names_the_slice() -> None:
    assert rules.ends_of(held(0, 1), [UUIDS[4]], UUIDS[1]) == (UUIDS[0], UUIDS[4])
    with pytest.raises(VgpuError):
        rules.ends_of(held(0, 1), [UUIDS[4]], UUIDS[2])


@pytest.mark.parametrize(
    ("there", "code"),
    [
        ({"name": "NVIDIA A100"}, ErrorCode.UNSUPPORTED),
        ({"memory_total_bytes": 80 * GIB}, ErrorCode.UNSUPPORTED),
        ({"mig": replace(h200(1).mig, current=True)}, ErrorCode.UNSUPPORTED),
    ],
)
def test_a_move_to_a_card_that_cannot_take_the_tenant_is_refused(
    there: dict[str, Any], code: ErrorCode
) -> None:
    devices: list[Device] = [h200(0), replace(h200(1), **there)]
    node = replace(NODE, devices=tuple(devices))
    with pytest.raises(VgpuError) as refused:
        rules.going(held(0), [UUIDS[1]], node, {}, all_terms(Policy(), node), {})
    assert refused.value.code is code


def test_a_move_of_a_tenant_that_cannot_move_is_refused() -> None:
    with pytest.raises(VgpuError, match=r"575\.57\.08"):
        rules.check_movable(held(0), replace(NODE, driver_version="575.57.08"))
    with pytest.raises(VgpuError, match="kubelet"):
        rules.check_movable(held(0, request="kubelet/x"), NODE)
    rules.check_movable(held(0), NODE)


def test_a_move_chooses_the_engine_before_it_stops_the_tenant_and_saves_memory_before_it_is_recorded() -> (
    None
):
    kinds = [step.kind for step in rules.move_steps(going(held(0, 1), 2, 3))]
    order = [
        StepKind.RECORD_INTENT,
        StepKind.CHOOSE_ENGINE,
        StepKind.LOCK,
        StepKind.SAVE,
        StepKind.RECORD_MOVE,
    ]
    order += [StepKind.ATTACH, StepKind.RESTORE, StepKind.UNLOCK, StepKind.COMMIT, StepKind.UNAPPLY_MODE]
    assert [kinds.index(kind) for kind in order] == sorted(kinds.index(kind) for kind in order)


def test_of_target_devices_one_near_the_allocations_other_slices_comes_first() -> None:
    near = {(UUIDS[0], UUIDS[4]): Link.NVLINK, (UUIDS[4], UUIDS[0]): Link.NVLINK}
    node = replace(NODE, links=near)
    ends = rules.ends_by_nearness(held(0, 1), UUIDS[1], node, {}, spread=False)
    assert ends[0] == UUIDS[4]
    assert set(ends) == set(UUIDS) - {UUIDS[0], UUIDS[1]}


def test_of_target_devices_the_fuller_comes_first_unless_the_strategy_is_spread() -> None:
    use = use_of([held(3, name="b")])
    ends = rules.ends_by_nearness(held(0), UUIDS[0], NODE, use, spread=False)
    assert ends[0] == UUIDS[3]
    assert rules.ends_by_nearness(held(0), UUIDS[0], NODE, use, spread=True)[-1] == UUIDS[3]
