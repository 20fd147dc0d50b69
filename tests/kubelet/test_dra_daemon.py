"""A whole vgpud on a simulated node, with the official client, and doubles of API server and kubelet."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.clock import until
from tests.conditions import needs, unmet
from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker, node_maker
from tests.kubelet import official
from tests.kubelet.cluster import DRIVER, Cluster, HttpCluster
from tests.kubelet.double import PATIENCE_SECONDS
from tests.kubelet.test_dra import call
from tests.kubelet.test_slices import places_of_one
from tests.simnode import ROOT
from vgpud.api.gen.kubelet import dra_v1_pb2 as dra
from vgpud.api.gen.kubelet import pluginregistration_v1_pb2 as registration

POLICY = """version = 1
[[device]]
match = { index = 0 }
mode = "mig"
[[device]]
mode = "preload"
[dra]
enabled = true
check_seconds = 1
"""


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as make:
        yield make


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, HttpCluster]]:
    made = Cluster()
    served = HttpCluster(made)
    yield made, served
    served.close()


def node_of(make_node: NodeMaker, served: HttpCluster) -> DemoNode:
    return join(make_node("h200x8", POLICY), served)


def join(node: DemoNode, served: HttpCluster) -> DemoNode:
    """Makes a node that is not started a node of the cluster."""
    path = official.client()
    if path is None:
        unmet("python-index", official.why)
    (node.folder / "kubeconfig").write_text(served.kubeconfig)
    (node.folder / "k" / "plugins_registry").mkdir(parents=True)
    node.environment |= {
        "PYTHONPATH": f"{path}:{ROOT}",
        "VGPUD_KUBELET_DIR": str(node.folder / "k"),
        "VGPUD_KUBECONFIG": str(node.folder / "kubeconfig"),
        "VGPUD_NODE_NAME": "node-1",
        # the client writes the certificates of the kubeconfig there, and a killed vgpud leaves them
        "TMPDIR": str(node.folder),
    }
    return node


async def published(cluster: Cluster, count: int) -> None:
    await until(lambda: len(cluster.pool()[0]) == count)


async def ask(node: DemoNode, verb: str, claim: dict[str, Any]) -> Any:
    """Calls the driver as the kubelet does, and repeats the call until it succeeds."""
    about = claim["metadata"]
    request = getattr(dra, f"Node{verb}ResourcesRequest")()
    request.claims.add(namespace=about["namespace"], name=about["name"], uid=about["uid"])
    registrar = node.folder / "k" / "plugins_registry" / f"{DRIVER}-reg.sock"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                info = await call(
                    registrar,
                    "pluginregistration.Registration/GetInfo",
                    registration.InfoRequest(),
                    registration.PluginInfo,
                )
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
    found = await call(
        Path(info.endpoint),
        f"k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/Node{verb}Resources",
        request,
        getattr(dra, f"Node{verb}ResourcesResponse"),
    )
    return found.claims[about["uid"]]


def held(node: DemoNode) -> dict[str, dict[str, Any]]:
    return {item["requestId"]: item for item in node.ctl_json("ls")["items"]}


@needs("python-index")
def test_a_claim_is_prepared_on_the_device_that_the_scheduler_chose(
    make_node: NodeMaker, cluster: tuple[Cluster, HttpCluster]
) -> None:
    made, served = cluster
    node = node_of(make_node, served)
    node.start(fault_point="allocate.commit")

    async def story() -> None:
        await published(made, 7 + len(places_of_one()))
        part = made.allocate("part", "quota", {"memory": "7Gi"})
        assert part is not None
        with pytest.raises(grpc.aio.AioRpcError):  # vgpud is killed during this call, so the call fails
            await ask(node, "Prepare", part)
        assert node.daemon is not None
        await asyncio.to_thread(node.daemon.wait, 30)
        await asyncio.to_thread(node.start)
        assert (await ask(node, "Prepare", part)).error == ""
        found = held(node)
        assert list(found) == [claim_id(part)]
        spec = node.folder / "cdi" / f"vgpud.io-vgpu_{found[claim_id(part)]['id']}.json"
        assert "libvgpu.so" in spec.read_text()
        # the claim gets the upper half of a device, which vgpud itself would not choose first
        upper = made.allocate("upper", "mig", among=lambda d: d["name"].endswith("mig-3g-71gb-4"))
        assert made.allocate("no", "mig", among=lambda d: d["name"].endswith("mig-1g-18gb-5")) is None
        lower = made.allocate("lower", "mig", among=lambda d: d["name"].endswith("mig-4g-71gb-0"))
        assert upper is not None
        assert lower is not None
        assert [(await ask(node, "Prepare", claim)).error for claim in (upper, lower)] == ["", ""]
        found = held(node)
        got = [found[claim_id(claim)]["slices"][0]["mig"] for claim in (upper, lower)]
        names = [(mig["profileName"], mig["placement"].get("start", 0)) for mig in got]
        assert names == [("3g.71gb", 4), ("4g.71gb", 0)]
        for claim in (part, upper, lower):
            assert (await ask(node, "Unprepare", claim)).error == ""
        assert held(node) == {}
        assert list((node.folder / "cdi").glob("*.json")) == []
        assert list((node.run_dir / "leases").iterdir()) == []

    asyncio.run(story())
    assert node.stop() == 0


def claim_id(claim: dict[str, Any]) -> str:
    return f"claim/{claim['metadata']['uid']}"
