"""Sets of devices, compared with brute force."""

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from vgpud.model.device import Link, Node
from vgpud.model.tenancy import Mode, Slice
from vgpud.planner.locality import nearest, nearest_devices
from vgpud.planner.verdict import Fit

from .cards import h200, h200_node, node_of


@st.composite
def situations(draw: st.DrawFn) -> tuple[Node, list[Fit]]:
    devices = [h200(i, numa_node=draw(st.sampled_from([0, 1, None]))) for i in range(draw(st.integers(2, 8)))]
    links = {}
    for a, b in combinations(devices, 2):
        if draw(st.integers(0, 3)):
            links[a.uuid, b.uuid] = links[b.uuid, a.uuid] = draw(st.sampled_from(Link))
    fits = [Fit(d, Mode.EXCLUSIVE, Slice(d.uuid, Mode.EXCLUSIVE, 1), (i,), "") for i, d in enumerate(devices)]
    return node_of(*devices, links=links), fits


def cost(node: Node, chosen: tuple[Fit, ...]) -> tuple[int, int, int]:
    order = list(Link)
    links = [node.links.get((a.device.uuid, b.device.uuid), Link.UNKNOWN) for a, b in combinations(chosen, 2)]
    return (
        sum(link is not Link.NVLINK for link in links),
        len({fit.device.numa_node for fit in chosen}),
        sum(order.index(link) for link in links),
    )


@settings(deadline=None)
@given(situations(), st.data())
def test_of_up_to_eight_devices_the_nearest_set_is_chosen(
    situation: tuple[Node, list[Fit]], data: st.DataObject
) -> None:
    node, fits = situation
    count = data.draw(st.integers(1, len(fits)))
    chosen = nearest(node, fits, count)
    assert len({fit.device.uuid for fit in chosen}) == count
    if count == 1:
        assert chosen == (fits[0],)
    else:
        assert cost(node, chosen) == min(cost(node, other) for other in combinations(fits, count))


def test_among_many_devices_the_search_finds_a_group_joined_by_links() -> None:
    group = {3, 8, 11, 15, 17}
    devices = [h200(i, numa_node=0) for i in range(20)]
    links = {
        (a.uuid, b.uuid): Link.NVLINK if {a.index, b.index} <= group else Link.SYSTEM
        for a in devices
        for b in devices
    }
    fits = [Fit(d, Mode.EXCLUSIVE, Slice(d.uuid, Mode.EXCLUSIVE, 1), (i,), "") for i, d in enumerate(devices)]
    chosen = nearest(node_of(*devices, links=links), fits, 5)
    assert {fit.device.index for fit in chosen} == group


def test_devices_joined_by_a_bridge_across_numa_nodes_are_preferred() -> None:
    devices = [h200(i, numa_node=i // 2) for i in range(4)]
    links = {(a.uuid, b.uuid): Link.NODE for a in devices for b in devices}
    links |= {(devices[a].uuid, devices[b].uuid): Link.NVLINK for a, b in ((1, 2), (2, 1))}
    fits = [Fit(d, Mode.EXCLUSIVE, Slice(d.uuid, Mode.EXCLUSIVE, 1), (i,), "") for i, d in enumerate(devices)]
    assert [fit.device.index for fit in nearest(node_of(*devices, links=links), fits, 2)] == [1, 2]


def test_required_devices_are_completed_with_their_nearest_neighbours() -> None:
    devices = [h200(i) for i in range(8)]
    pair = {("GPU-1", "GPU-6"), ("GPU-6", "GPU-1")}
    links = {
        (a.uuid, b.uuid): Link.NVLINK if (a.uuid, b.uuid) in pair else Link.SYSTEM
        for a, b in permutations(devices, 2)
    }
    node, uuids = node_of(*devices, links=links), [device.uuid for device in devices]
    assert nearest_devices(node, uuids, ["GPU-6"], 2) == ("GPU-6", "GPU-1")
    assert set(nearest_devices(node, uuids, [], 2)) == {"GPU-1", "GPU-6"}
    assert nearest_devices(node, uuids, ["GPU-2"], 3)[0] == "GPU-2"


def test_without_links_first_the_numa_node_and_then_the_order_of_devices_decides() -> None:
    node = h200_node(8)  # four devices to a NUMA node
    uuids = [f"GPU-{i}" for i in (5, 0, 1, 6, 7)]
    assert nearest_devices(node, uuids, [], 3) == ("GPU-5", "GPU-6", "GPU-7")
    assert nearest_devices(node, uuids[:2], ["GPU-0"], 5) == ("GPU-0", "GPU-5")
    assert nearest_devices(node, (), (), 1) == ()
