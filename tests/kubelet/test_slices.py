"""ResourceSlices compared with their published definition. vgpud can grant every allocation that the
scheduler makes from them.
"""

import asyncio
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.kubelet.cluster import Cluster
from tests.planner.cards import h200, h200_node
from tests.simnode import ROOT
from vgpud import clock
from vgpud.model.device import Device, Health, Mig, MigProfile, Placement
from vgpud.model.device import Node as Snapshot
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import GIB, MIB
from vgpud.model.tenancy import Allocation, Mode, Owner, Request, Slice, State
from vgpud.planner.choose import choose
from vgpud.planner.terms import bare_name
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.model import Policy
from vgpud.serve.dra.cards import card_name, cards_of, target_of
from vgpud.serve.dra.claims import parts_of
from vgpud.serve.dra.publisher import Publisher
from vgpud.serve.dra.quantity import parse, show
from vgpud.serve.dra.slices import DRIVER, Node, semantic, specs

# a file with `same_as` gives another name to the node of another file, and has no devices of its own
PROFILES = [p for p in sorted((ROOT / "configs/sim").glob("*.toml")) if "same_as" not in p.read_text()]
NODE = Node("node-1", "580.159.04", "13.0")


def places(device: Device) -> Any:
    return tuple((p, bare_name(p.name), p.placements) for p in device.mig.profiles)


def policy_of(mode: str, auto: str = "quota") -> Policy:
    return Policy.model_validate(
        {"version": 1, "device": [{"mode": mode}], "dra": {"enabled": True, "auto": auto}}
    )


def publish(
    cluster: Cluster, node: Snapshot, policy: Policy, allocations: tuple[Allocation, ...] = ()
) -> Publisher:
    cards = cards_of(node.devices, policy, places, allocations)
    publisher = Publisher(cluster, "node-1", lambda: None)
    asyncio.run(publisher.publish(lambda able: specs(NODE, cards, able, cores=True)))
    return publisher


@pytest.mark.parametrize("minor", [34, 36])
@pytest.mark.parametrize("mode", ["mig", "mps", "preload", "exclusive", "auto", "unmanaged"])
@pytest.mark.parametrize("count", [1, 8, 10])
def test_resource_slices_match_the_published_form(minor: int, mode: str, count: int) -> None:
    cluster = Cluster(minor)
    publish(cluster, h200_node(count), policy_of(mode))
    devices, sets = cluster.pool()
    expected = {"mig": count * len(places_of_one()), "unmanaged": 0}.get(mode, count)
    assert len(devices) == expected
    assert len(sets) == (count if mode == "mig" else 0)
    assert {d["attributes"]["type"]["string"] for d in devices} <= {"mig", "quota", "compute", "card"}
    owners = {o["uid"] for s in cluster.slices_by_name.values() for o in s["metadata"]["ownerReferences"]}
    assert owners == {"uid-of-node-1"}


def places_of_one() -> list[Any]:
    (device,) = h200_node(1).devices
    return [at for profile in device.mig.profiles for at in profile.placements]


def test_resource_slices_are_written_only_on_a_change() -> None:
    cluster = Cluster()
    node, policy = h200_node(4), policy_of("preload")
    cards = cards_of(node.devices, policy, places, ())
    publisher = Publisher(cluster, "node-1", lambda: None)

    def build(able: Any) -> Any:
        return specs(NODE, cards, able, cores=False)

    asyncio.run(publisher.publish(build))
    before = len(cluster.requests)
    asyncio.run(publisher.publish(build))
    assert cluster.requests[before:] == ["list"]
    (only,) = cluster.slices_by_name.values()
    assert only["spec"]["pool"]["generation"] == 1
    cards = cards[:2]
    asyncio.run(publisher.publish(build))
    (only,) = cluster.slices_by_name.values()
    assert (only["spec"]["pool"]["generation"], len(only["spec"]["devices"])) == (2, 2)
    cluster.wipe()
    asyncio.run(publisher.publish(build))
    assert len(cluster.pool()[0]) == 2
    asyncio.run(publisher.withdraw())
    assert not cluster.slices_by_name


def test_resource_slices_are_listed_again_only_after_their_watch_has_reported_a_change() -> None:
    cluster, changed = Cluster(), asyncio.Event()
    publisher = Publisher(cluster, "node-1", changed.set)
    cards = cards_of(h200_node(1).devices, policy_of("preload"), places, ())

    async def calls() -> list[str]:
        before = len(cluster.requests)
        await publisher.publish(lambda able: specs(NODE, cards, able, cores=True))
        return cluster.requests[before:]

    async def reported() -> None:
        await asyncio.wait_for(changed.wait(), 60)
        changed.clear()

    async def story() -> None:
        for _ in range(2):
            assert (await calls())[-1] == "create"
            await reported()  # vgpud's own writes
            assert await calls() == ["list"]
            assert await calls() == []
            cluster.wipe()
            await reported()
        publisher.close()

    asyncio.run(story())


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_cards_of_each_simulated_node_are_published_in_each_mode(path: Path) -> None:
    """The API server refuses a slice with two devices of the same name, which two profiles of one card could
    cause (RTX PRO 6000: +me and -me).
    """
    devices = cards_of_profile(path)
    everywhere = sum(len(p.placements) for d in devices for p in d.mig.profiles)
    for mode, minor in product(["mig", "mps", "preload", "exclusive", "auto"], [34, 36]):
        cluster, policy = Cluster(minor), policy_of(mode)
        publish(cluster, Snapshot(devices=devices), policy)
        names = [device["name"] for device in cluster.pool()[0]]
        assert len(names) == (everywhere if mode == "mig" else len(devices)), (mode, minor)
        for name in names:
            assert target_of(name, devices, policy, places) is not None, (mode, minor, name)


def cards_of_profile(path: Path) -> tuple[Device, ...]:
    """The devices of a file of configs/sim, with the fields that slices show."""
    found = tomllib.loads(path.read_text())
    devices = []
    for index, device in enumerate(found["device"]):
        card = found["card"][device["card"]]
        profiles = tuple(
            MigProfile(
                id=entry["id"],
                name=entry["name"],
                slice_count=entry["slices"],
                instance_count=entry["count"],
                sm_count=entry["sm"],
                memory_bytes=entry["memory_mib"] * MIB,
                placements=tuple(Placement(start, entry["size"]) for start in entry["starts"]),
            )
            for entry in card.get("mig", {}).get("profile", ())
        )
        made = h200(
            index,
            name=card["name"],
            memory_total_bytes=card["memory_total"],
            memory_reserved_bytes=card["memory_reserved"],
            mig=Mig(capable=bool(profiles), profiles=profiles),
        )
        devices.append(made)
    return tuple(devices)


@pytest.mark.parametrize("minor", [34, 36])
def test_a_claim_takes_the_smallest_mig_instance_that_fits(minor: int) -> None:
    cluster = Cluster(minor)
    publish(cluster, h200_node(8), policy_of("mig"))

    def profile_of(name: str, memory: str) -> str:
        claim = cluster.allocate(name, "mig", {"memory": memory})
        assert claim is not None
        (result,) = claim["status"]["allocation"]["devices"]["results"]
        by_name = {device["name"]: device for device in cluster.pool()[0]}
        return str(by_name[result["device"]]["attributes"]["profile"]["string"])

    assert profile_of("a", "30Gi") == "1g.35gb"
    assert profile_of("b", "1Gi") == "1g.18gb"
    assert profile_of("c", "60Gi") == "3g.71gb"
    assert profile_of("d", "1Gi") == "1g.18gb"
    # all four instances are on the first device: the small ones are placed where no large one can begin
    assert {r["device"].partition("-mig-")[0] for r in cluster.results()} == {"gpu-0"}


def test_the_pcie_root_of_a_device_is_published_if_it_is_known() -> None:
    """The devices have the attribute pcieRoot. A claim's matchAttribute compares it with that of other
    drivers' devices, for example of a network card.
    """
    node = h200_node(2)
    near = replace(node.devices[0], pcie_root="pci0000:16")
    cluster = Cluster()
    publish(cluster, replace(node, devices=(near, node.devices[1])), policy_of("preload"))
    roots = [d["attributes"].get("resource.kubernetes.io/pcieRoot") for d in cluster.pool()[0]]
    assert roots == [{"string": "pci0000:16"}, None]


def test_resource_slices_of_a_large_node_are_named_in_the_order_of_reading() -> None:
    """The scheduler reads slices in the order of their names. The eleventh slice must not come before the
    second.
    """
    cluster = Cluster()
    publish(cluster, h200_node(32), policy_of("mig"))
    assert len(cluster.slices_by_name) > 10
    sizes = [parse(device["capacity"]["memory"]["value"]) for device in cluster.pool()[0]]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("health", [Health.LOST, Health.SICK])
def test_drained_and_sick_devices_are_published_with_a_taint_that_gives_the_reason(health: Health) -> None:
    node, policy = h200_node(3), policy_of("preload")
    devices = (node.devices[0], replace(node.devices[1], health=health), node.devices[2])
    cluster = Cluster()
    publisher = Publisher(cluster, "node-1", lambda: None)

    def build(able: Any) -> Any:
        return specs(NODE, cards_of(devices, policy, places, (), {devices[0].uuid}), able, cores=True)

    asyncio.run(publisher.publish(build))
    taints = [[taint["key"] for taint in one.get("taints", ())] for one in cluster.pool()[0]]
    assert taints == [["gpu.vgpud.io/drained"], ["gpu.vgpud.io/unwell"], []]
    asyncio.run(publisher.publish(build))
    (only,) = cluster.slices_by_name.values()
    assert only["spec"]["pool"]["generation"] == 1, "what the server fills in is no difference"
    claims = [cluster.allocate(name, "quota", {"memory": "100Gi"}) for name in ("a", "b")]
    assert claims[0] is not None and claims[1] is None
    # without the feature gate the API server drops the taint, and the scheduler would use the device
    cluster.off = {"DRADeviceTaints"}
    publisher.ask_anew()
    asyncio.run(publisher.publish(build))
    assert len(cluster.pool()[0]) == 1


def test_the_publisher_notices_changed_feature_gates_and_versions_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed, real = 0.0, clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + passed)
    cluster = Cluster(34)
    cluster.off = {"DRAPartitionableDevices"}
    node, policy = h200_node(2), policy_of("mig")
    publisher = Publisher(cluster, "node-1", lambda: None)

    def publish_again() -> None:
        cards = cards_of(node.devices, policy, places, ())
        asyncio.run(publisher.publish(lambda able: specs(NODE, cards, able, cores=True)))

    publish_again()
    assert cluster.pool() == ([], {})
    assert "create" in cluster.requests and cluster.requests.count("replace") == 0, (
        "nothing unsafe was written"
    )
    cluster.off = set()
    passed += 600.0
    publish_again()
    assert len(cluster.pool()[1]) == 2
    # after the upgrade the API server refuses the old form, so the slices are deleted first, as Kubernetes
    # requires
    cluster.minor_version = 36
    cluster.wipe()
    with pytest.raises(VgpuError, match="422"):
        publish_again()
    publish_again()
    assert len(cluster.pool()[1]) == 2


def test_resource_slices_of_other_drivers_and_nodes_are_unchanged() -> None:
    cluster = Cluster()
    foreign = {"driver": "other.io", "nodeName": "node-1", "pool": {"generation": 9}}
    cluster.slices_by_name["x"] = {"metadata": {"name": "x"}, "spec": foreign}
    publisher = publish(cluster, h200_node(1), policy_of("preload"))
    asyncio.run(publisher.withdraw())
    assert list(cluster.slices_by_name) == ["x"]


def test_a_disabled_feature_gate_never_causes_overcommitment() -> None:
    """An API server drops the fields of a disabled feature gate silently: partitions would overlap, and
    capacity would be unlimited.
    """
    cluster = Cluster()
    cluster.off = {"DRAPartitionableDevices"}
    publish(cluster, h200_node(2), policy_of("mig"))
    assert cluster.pool() == ([], {})
    cluster.off = {"DRAConsumableCapacity"}
    publish(cluster, h200_node(2), policy_of("preload"))
    devices, _ = cluster.pool()
    assert len(devices) == 2
    assert all("requestPolicy" not in d["capacity"]["memory"] for d in devices)
    assert cluster.allocate("a", "quota") and cluster.allocate("b", "quota")
    assert cluster.allocate("c", "quota") is None


def test_devices_that_allocations_outside_of_dra_hold_are_not_published() -> None:
    node = h200_node(3)
    one, two, three = (d.uuid for d in node.devices)
    sick = replace(node.devices[2], health=Health.LOST)
    node = replace(node, devices=(*node.devices[:2], sick))
    held = (
        Allocation("a", Request("by-hand", Owner(0, 0)), State.ACTIVE, (Slice(one, Mode.PRELOAD, 40 * GIB),)),
        Allocation("b", Request("x", Owner(0, 0)), State.ACTIVE, (Slice(two, Mode.EXCLUSIVE, 140 * GIB),)),
        Allocation("c", Request("claim/u", Owner(0, 0)), State.ACTIVE, (Slice(one, Mode.PRELOAD, 50 * GIB),)),
    )
    cluster = Cluster()
    publish(cluster, node, policy_of("auto"), held)
    device, unwell = cluster.pool()[0]
    assert device["attributes"]["uuid"]["string"] == one
    assert unwell["attributes"]["uuid"]["string"] == three and unwell["taints"]
    left = parse(device["capacity"]["memory"]["value"])
    assert 0 <= node.devices[0].memory_usable_bytes - 40 * GIB - left < 2**21
    assert device["capacity"]["tenants"]["value"] == "63"


def test_overcommitted_memory_is_published_and_bounded_for_each_claim() -> None:
    cluster = Cluster()
    rule = {"mode": "preload", "preload": {"memory_overcommit": 1.5}}
    node = h200_node(1)
    publish(cluster, node, Policy.model_validate({"version": 1, "device": [rule]}))
    assert cluster.allocate("a", "quota", {"memory": "150Gi"}) is None
    assert cluster.allocate("b", "quota", {"memory": "100Gi"})
    assert cluster.allocate("c", "quota", {"memory": "100Gi"})
    assert cluster.allocate("d", "quota", {"memory": "100Gi"}) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7Gi", 7 * GIB),
        ("1.5Gi", 3 * GIB // 2),
        ("10", 10),
        ("100m", 1),
        ("2e3", 2000),
        ("1k", 1000),
        ("0", 0),
    ],
)
def test_kubernetes_quantities_are_printed_and_parsed(text: str, value: int) -> None:
    assert parse(text) == value
    assert parse(show(value)) == value


@pytest.mark.parametrize("text", ["", "-1", "1GiB", "Gi", "1e999", "1" * 65, "0x10", "1 Gi"])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(VgpuError):
        parse(text)


def test_versions_in_resource_slices_are_semantic_versions() -> None:
    assert [semantic(t) for t in ("580.159.04", "13.0", "9", "", "x.1")] == [
        "580.159.4",
        "13.0.0",
        "9.0.0",
        "",
        "",
    ]


# --- property: the planner grants every claim that the scheduler allocates from the slices

ASKS = st.lists(
    st.tuples(
        st.sampled_from(["512Mi", "3Gi", "7Gi", "20Gi", "70Gi", "", "1"]),
        st.sampled_from(["", "10", "33", "50", "100"]),
        st.integers(0, 10_000),
        st.booleans(),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(["mig", "mps", "preload", "exclusive"]), asks=ASKS, minor=st.sampled_from([34, 36])
)
def test_every_device_choice_of_the_scheduler_can_be_allocated(
    mode: str, asks: list[Any], minor: int
) -> None:
    node, policy = h200_node(2), policy_of(mode)
    kind = {"mig": "mig", "mps": "compute", "preload": "quota", "exclusive": "card"}[mode]
    cluster = Cluster(minor)
    publish(cluster, node, policy)
    use: dict[str, DeviceUse] = {}
    held: dict[str, tuple[Slice, ...]] = {}
    for number, (memory, cores, pick, ends) in enumerate(asks):
        if ends and held:
            name = sorted(held)[pick % len(held)]
            for piece in held.pop(name):
                use[piece.device_uuid] = use[piece.device_uuid].without_slice(piece)
            del cluster.claims["ns", name]
            continue
        capacity = {"memory": memory} if memory else {}
        if cores and kind in ("compute", "quota"):
            capacity["cores"] = cores
        wanted = sorted(d["name"] for d in cluster.pool()[0])[pick % len(cluster.pool()[0])]
        name = f"c{number}"
        claim = cluster.allocate(name, kind, capacity, among=lambda d, w=wanted: d["name"] == w)
        if claim is None:
            continue
        uid = claim["metadata"]["uid"]
        (part,), _ = parts_of(claim, uid, "node-1", lambda n: target_of(n, node.devices, policy, places))
        decision = choose(part.request, node, policy, use)
        assert decision.refusal is None, (decision.refusal, part)
        for piece in decision.slices:
            use[piece.device_uuid] = use.get(piece.device_uuid, EMPTY).with_slice(piece)
            if piece.mig is not None:
                assert part.results[0].device.endswith(f"-{piece.mig.placement.start}")
        held[name] = decision.slices
    event(f"{mode}: {min(len(held), 4)} or more held")


def test_device_names_are_dns_labels_and_resolve_to_devices() -> None:
    node, policy = h200_node(2), policy_of("mig")
    odd = replace(node.devices[0], uuid="GPU-" + "F" * 80)
    assert len(card_name(odd)) <= 63
    cluster = Cluster()
    publish(cluster, replace(node, devices=(odd, node.devices[1])), policy)
    for device in cluster.pool()[0]:
        target = target_of(device["name"], (odd, node.devices[1]), policy, places)
        assert target is not None
        assert target.place is not None
        assert device["attributes"]["profile"]["string"] == target.place.name
        assert device["attributes"]["uuid"]["string"] == target.device.uuid[:64]
    assert target_of("gpu-unknown", node.devices, policy, places) is None
    assert DRIVER.endswith("vgpud.io")
