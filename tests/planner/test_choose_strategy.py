"""Which of several fitting devices is chosen."""

import pytest

from vgpud.model.device import Link, Node
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import GIB, MIB
from vgpud.model.tenancy import MODE_OF, Isolation, Mode, Request
from vgpud.planner.choose import choose
from vgpud.planner.use import DeviceUse
from vgpud.policy.model import Policy

from .cards import (
    AUTO,
    COMPUTE,
    H200_USABLE,
    HARDWARE,
    QUOTA,
    h200,
    h200_node,
    node_of,
    policy,
    request,
    used,
    used_mig,
)

SPREAD = policy(strategy="spread")


def taken(
    wanted: Request, node: Node, rules: Policy = AUTO, use: dict[str, DeviceUse] | None = None
) -> list[int]:
    decision = choose(wanted, node, rules, use or {})
    assert decision.refusal is None, decision.refusal
    return sorted(int(piece.device_uuid.removeprefix("GPU-")) for piece in decision.slices)


HALF = {"GPU-1": used(Mode.PRELOAD, 30 * GIB), "GPU-2": used(Mode.PRELOAD, 100 * GIB)}


def test_strategy_pack_takes_the_fullest_device_that_fits() -> None:
    assert taken(request(memory=10 * GIB), h200_node(4), AUTO, HALF) == [2]
    assert taken(request(memory=50 * GIB), h200_node(4), AUTO, HALF) == [1]
    assert taken(request(memory=120 * GIB), h200_node(4), AUTO, HALF) == [0]


def test_strategy_spread_takes_the_emptiest_device() -> None:
    full = {**HALF, "GPU-0": used(Mode.PRELOAD, 31 * GIB)}
    assert taken(request(memory=10 * GIB), h200_node(3), SPREAD, full) == [1]
    assert taken(request(memory=10 * GIB), h200_node(4), SPREAD, full) == [3]


def test_strategy_pack_prefers_a_device_whose_mode_the_policy_fixes_over_a_free_card() -> None:
    rules = policy({"index": 2, "mode": "preload"})
    assert taken(request(memory=GIB), h200_node(4), rules) == [2]
    whole = policy({"index": 3, "mode": "exclusive"})
    assert taken(request(), h200_node(4), whole) == [3]


def test_a_device_in_the_preferred_mode_wins_over_one_in_another_possible_mode() -> None:
    use = {"GPU-0": used(Mode.MPS, 100 * GIB)}
    assert taken(request(memory=GIB), h200_node(2), AUTO, use) == [1]
    assert taken(request(memory=GIB, isolation=COMPUTE), h200_node(2), AUTO, use) == [0]


def test_a_whole_device_request_gets_the_smallest_free_card() -> None:
    node = node_of(h200(0), h200(1, memory_total_bytes=80 * GIB), h200(2))
    assert taken(request(), node) == [1]


@pytest.mark.parametrize(
    ("held", "index"),
    [
        # the 1g instance at slice 6 of device 1 already prevents a 3g at slice 4, so another 1g costs less
        # there
        ({"GPU-1": used_mig((19, 6))}, 1),
        # a 3g and three 1g instances leave a gap on device 0 in which only a 1g fits, so a 1g there prevents
        # nothing
        ({"GPU-0": used_mig((9, 4), (19, 0), (19, 1), (19, 2)), "GPU-1": used_mig((19, 6))}, 0),
    ],
)
def test_a_mig_slice_goes_to_the_device_where_it_costs_the_fewest_placements(
    held: dict[str, DeviceUse], index: int
) -> None:
    node = node_of(*(h200(i, mig_on=True) for i in range(3)))
    assert taken(request(mig_profile="1g.18gb"), node, AUTO, held) == [index]


def test_strategy_spread_puts_a_mig_slice_on_the_device_with_most_placements() -> None:
    node = node_of(*(h200(i, mig_on=True) for i in range(3)))
    held = {"GPU-0": used_mig((19, 6)), "GPU-1": used_mig((9, 4))}
    assert taken(request(isolation=HARDWARE), node, SPREAD, held) == [2]


def ring(
    *pairs: tuple[int, int], near: Link = Link.NVLINK, far: Link = Link.SYSTEM
) -> dict[tuple[str, str], Link]:
    """Links of eight devices in four pairs: `near` within a pair, `far` between all others."""
    links = {(f"GPU-{a}", f"GPU-{b}"): far for a in range(8) for b in range(8) if a != b}
    for a, b in pairs:
        links[f"GPU-{a}", f"GPU-{b}"] = links[f"GPU-{b}", f"GPU-{a}"] = near
    return links


def test_the_devices_of_one_allocation_are_on_one_numa_node() -> None:
    use = {"GPU-1": used(Mode.MPS, GIB)}
    assert taken(request(count=4), h200_node(8), AUTO, use) == [4, 5, 6, 7]


def test_the_devices_of_one_allocation_have_the_nearest_links() -> None:
    node = node_of(*(h200(i, numa_node=0) for i in range(8)), links=ring((1, 6), (3, 4)))
    assert taken(request(count=2), node) == [1, 6]


def test_of_several_devices_the_numa_node_counts_before_links_and_links_before_packing() -> None:
    node = node_of(*(h200(i) for i in range(8)), links=ring((3, 4), (5, 6)))
    use = {"GPU-0": used(Mode.PRELOAD, 90 * GIB), "GPU-1": used(Mode.PRELOAD, 90 * GIB)}
    assert taken(request(memory=GIB, count=2), node, AUTO, use) == [5, 6]


def test_several_devices_without_links_are_chosen_by_how_well_they_fit() -> None:
    node = node_of(*(h200(i, numa_node=None) for i in range(8)))
    use = {"GPU-5": used(Mode.PRELOAD, 90 * GIB), "GPU-7": used(Mode.PRELOAD, 90 * GIB)}
    assert taken(request(memory=GIB, count=2), node, AUTO, use) == [5, 7]


def test_of_many_devices_the_search_chooses_ones_on_the_same_numa_node() -> None:
    devices = [h200(i, numa_node=i % 2) for i in range(16)]
    assert taken(request(count=8), node_of(*devices)) == [0, 2, 4, 6, 8, 10, 12, 14]


def test_of_equal_devices_the_one_with_the_lowest_index_is_taken() -> None:
    assert taken(request(), node_of(*(h200(i) for i in (3, 1, 2)))) == [1]


def test_the_reason_for_a_device_that_was_not_chosen_names_the_chosen_one() -> None:
    decision = choose(request(), h200_node(2), AUTO, {})
    assert decision.reasons[1].sentence == (
        "it fits (mode exclusive, the whole card with 139.8GiB), but device 0 in mode exclusive fits better"
    )
    three = choose(request(count=2), h200_node(3), AUTO, {})
    assert three.reasons[2].sentence.endswith(
        "but devices 0, 1 in mode exclusive lie nearer to each other or fit better"
    )
    short = choose(request(count=3), node_of(h200(0), h200(1), h200(2, mig_on=True)), AUTO, {})
    assert short.reasons[0].sentence.endswith(
        "but too few others fit in the same mode: 3 devices are requested"
    )


@pytest.mark.parametrize("isolation", [QUOTA, COMPUTE])
def test_memory_is_allocated_up_to_the_last_byte(isolation: Isolation) -> None:
    mode = MODE_OF[isolation]
    use = {"GPU-0": used(mode, 100 * GIB)}
    grain = MIB if mode is Mode.MPS else 1  # the mode's unit of memory
    left = (H200_USABLE - 100 * GIB) // grain * grain
    assert taken(request(memory=left, isolation=isolation), h200_node(1), AUTO, use) == [0]
    more = choose(request(memory=left + grain, isolation=isolation), h200_node(1), AUTO, use)
    assert more.refusal is not None
    assert more.refusal.code is ErrorCode.NO_CAPACITY
