"""The audit trail of a cluster's changes: one line for each change, with its pod or claim."""

from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from tests.kubelet.conftest import node_in, run
from tests.kubelet.test_dra import dra_in
from vgpud.api.gen.kubelet import deviceplugin_v1beta1_pb2 as dp
from vgpud.api.gen.kubelet import dra_v1_pb2 as dra_pb

UNITS = "vgpud.io/memory-gib"
# Each call of the kubelet, and whether it changes an allocation.
CHANGES = {
    "GetDevicePluginOptions": False,
    "ListAndWatch": False,
    "GetPreferredAllocation": False,
    "Allocate": True,
    "PreStartContainer": False,
    "NodePrepareResources": True,
    "NodeUnprepareResources": True,
}


def trail(lines: list[Any], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(key) for key in keys) for line in lines if "audit" in line]


def test_every_call_of_the_kubelet_is_classified_for_the_audit_trail() -> None:
    services = (
        dp.DESCRIPTOR.services_by_name["DevicePlugin"],
        dra_pb.DESCRIPTOR.services_by_name["DRAPlugin"],
    )
    assert {method.name for service in services for method in service.methods} == CHANGES.keys()


def test_each_change_in_a_pods_life_leaves_one_audit_line_with_the_pods_name(short: Path) -> None:
    """An Allocate call does not name its pod, and PodResources does. The audit line of the binding has the
    allocation's id.
    """
    found: list[Any] = []

    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            with capture_logs() as lines:
                await node.kubelet.admit("default/train", UNITS, 2, container="fetch", init=True)
                (first,) = node.kubelet.held.values()
                await node.kubelet.admit("default/train", UNITS, 3, reusable=tuple(first))
                await node.until(lambda: any(hold.pod for hold in node.door.allocator.holds))
                node.kubelet.end("default/train")
                await node.until(lambda: ("release",) in trail(lines, "audit"))
            found.extend(lines)

    run(story())
    pod = "default/train/main"
    assert trail(found, "audit", "outcome", "door", "pod", "reason") == [
        ("allocate", "done", "kubelet", None, None),
        ("resize", "done", "kubelet", None, None),
        ("bind", "done", "vgpud", pod, "the kubelet's PodResources names it"),
        ("release", "done", "vgpud", pod, "no pod holds it"),
    ]
    assert len(set(trail(found, "allocation", "owner"))) == 1


def test_calls_that_change_nothing_leave_no_audit_line(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            endpoint = node.kubelet.endpoints[UNITS]
            with capture_logs() as lines:
                await endpoint.call("GetDevicePluginOptions", dp.Empty(), dp.DevicePluginOptions)
                asked = dp.PreferredAllocationRequest()
                asked.container_requests.add(available_deviceIDs=sorted(endpoint.healthy), allocation_size=2)
                await endpoint.call("GetPreferredAllocation", asked, dp.PreferredAllocationResponse)
                await endpoint.call(
                    "PreStartContainer", dp.PreStartContainerRequest(), dp.PreStartContainerResponse
                )
            assert trail(lines, "audit") == []
            assert node.allocations == ()

    run(story())


def test_each_change_in_a_claims_life_leaves_one_audit_line_with_the_claims_name(short: Path) -> None:
    found: list[Any] = []

    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            with capture_logs() as lines:
                claims = [dra.cluster.allocate(name, "quota", {"memory": "1Gi"}) for name in ("a", "b")]
                for claim in claims:
                    assert claim is not None
                    await dra.prepare(claim)
                    await dra.prepare(claim)
                assert claims[0] is not None
                assert await dra.unprepare(claims[0]) == ""
                assert await dra.unprepare(claims[0]) == ""
                del dra.cluster.claims["ns", "b"]
                await dra.until(lambda: trail(lines, "audit").count(("release",)) == 2)
            found.extend(lines)

    run(story())
    assert trail(found, "audit", "outcome", "door", "reason") == [
        ("allocate", "done", "dra", None),
        ("allocate", "done", "dra", None),
        ("release", "done", "dra", None),
        ("release", "done", "vgpud", "its claim is gone from the cluster"),
    ]
    assert [claim for (claim,) in trail(found, "claim")[:2]] == ["ns/a", "ns/b"]
