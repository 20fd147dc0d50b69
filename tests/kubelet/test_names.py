"""The names of pod, claim and container that an allocation gets from the cluster, for the device plugin and
for claims.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from tests.kubelet.conftest import node_in, run
from tests.kubelet.double import kubelet
from tests.kubelet.test_audit import trail
from tests.kubelet.test_containers import container, start
from tests.kubelet.test_dra import dra_in
from tests.node.world import ROOT
from vgpud.model.tenancy import Allocation, Workload

UNITS = "vgpud.io/memory-gib"


def named_events(keeper: Any) -> list[str]:
    return [e.sentence for e in keeper.store.latest(20) if e.kind == "allocation_named"]


def workloads(allocations: tuple[Allocation, ...]) -> list[Workload]:
    return [allocation.request.workload for allocation in allocations]


def test_an_allocation_gets_the_names_of_its_pod_from_the_hook_of_the_container(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            node.kubelet.listing_fails = True
            ids = [f"{device.uuid}::0" for device in node.world.keeper.listings.describe().node.devices[:1]]
            await node.kubelet.allocate(UNITS, ids)
            assert workloads(node.allocations) == [Workload()]
            with container() as init:
                await start(node, "ml/train-0/main", init)
                (held,) = node.allocations
                assert held.request.workload == Workload("ml", "train-0", "main")
                assert named_events(node.world.keeper) == [
                    f"allocation {held.id}: it belongs to pod ml/train-0/main"
                ]
                # a second container does not rename the allocation, and the names are not part of the request
                await start(node, "ml/train-0/sidecar", init)
                nameless = replace(held.request, workload=Workload())
                assert (await node.world.keeper.allocate(nameless)).id == held.id
                assert workloads(node.allocations) == [Workload("ml", "train-0", "main")]

    run(story())


def test_the_names_of_a_pod_are_durable_and_on_every_line_of_its_audit_trail(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("ml/train-0", UNITS, 2)
            await node.until(lambda: workloads(node.allocations) == [Workload("ml", "train-0", "main")])
            assert workloads((await node.world.ledger.load()).allocations) == workloads(node.allocations)
            with capture_logs() as lines:
                (held,) = node.allocations
                await node.world.keeper.resize(held.id, ROOT, 3 * 2**30, None)
            assert trail(lines, "audit", "pod") == [("resize", "ml/train-0/main")]
            node.kubelet.end("ml/train-0")
            await node.until(lambda: not node.allocations)
            (gone,) = [e for e in node.world.keeper.store.latest(20) if e.kind == "allocation_released"]
            assert gone.sentence.endswith(", of pod ml/train-0/main")

    run(story())


def test_a_claims_allocation_has_the_names_of_claim_pod_and_container(short: Path) -> None:
    async def story() -> None:
        async with kubelet(short / "k") as listing, dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("weights", "quota", {"memory": "7Gi"}, pod="infer-0")
            assert claim is not None
            assert not (await dra.prepare(claim)).error
            keeper = dra.world.keeper
            (held,) = tuple(keeper.book)
            assert held.request.workload == Workload("ns", "infer-0", "", "weights")
            # only PodResources has the container's name
            listing.active.add("ns/infer-0")
            listing.claimed["ns/infer-0", "server"] = ("weights", [held.cdi_name])
            whole = Workload("ns", "infer-0", "server", "weights")
            await dra.until(lambda: named_events(keeper))
            (sentence,) = named_events(keeper)
            assert workloads(tuple(keeper.book)) == [whole]
            assert sentence == f"allocation {held.id}: it belongs to pod ns/infer-0/server, claim ns/weights"
            # the kubelet repeats its call, and gets the same allocation
            assert not (await dra.prepare(claim)).error
            assert len(tuple(keeper.book)) == 1

    run(story())
