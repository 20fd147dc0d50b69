"""vgpud's device plugin with a real kubelet, scheduler and containerd."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import OnPolicy
from tests.cluster.pods import MEMORY, Pods, container, pod
from tests.conditions import needs
from tests.e2e.support import eventually
from tests.simnode import ROOT

pytestmark = [
    needs("kubernetes", "containerd", "debian-archive", "python-index", "kubectl", "root"),
    pytest.mark.xdist_group("cluster"),
]
POLICY = """version = 1
[[device]]
mode = "auto"
"""
UNITS = f'{POLICY}[[kubelet.resource]]\nname = "{MEMORY}"\nkind = "memory"\n'
CARDS = f'{POLICY}[[kubelet.resource]]\nname = "vgpud.io/gpu"\nkind = "card"\n'
GPU = "vgpud.io/gpu"


def documented_policy() -> str:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (resources,) = re.findall(r"```toml\n(\[\[kubelet.resource\]\].*?)```", page, re.DOTALL)
    return f"{POLICY}{resources}"


def mib(gibibytes: int) -> int:
    return gibibytes * 1024


def served(pods: Pods, least: int = 1, resource: str = MEMORY) -> None:
    eventually(lambda: pods.allocatable(resource) >= least, f"the node has {least} {resource}")


def test_the_documented_pods_run_with_what_they_ask_for(on_policy: OnPolicy) -> None:
    pods = on_policy(documented_policy())
    for resource in ("vgpud.io/gpu", "vgpud.io/quarter", MEMORY, "nvidia.com/mig-1g.18gb"):
        served(pods, 1, resource)
    pods.cluster.kubectl("apply", "-f", str(ROOT / "configs/kubernetes/examples/device-plugin.yaml"))
    for name in ("seven-gib", "quarter", "mig", "two-cards"):
        status = pods.until(name, "Succeeded", "Failed")
        assert status["phase"] == "Succeeded", f"{name}: {status} {pods.events(name)}"
    assert "7168MiB" in pods.output("seven-gib")
    assert "MIG 1g.18gb" in pods.output("mig")
    assert "GPU1" in pods.output("two-cards")


def test_a_container_with_two_resources_does_not_start(on_policy: OnPolicy) -> None:
    pods = on_policy(documented_policy())
    served(pods, 2)
    served(pods, 1, "vgpud.io/quarter")
    pods.create(pod("p", container("main", {MEMORY: 2, "vgpud.io/quarter": 1})))
    eventually(lambda: "E103" in pods.events("p"), "the pod's events say why")
    assert pods.phase("p") != "Running"


#: GiB of the init containers, GiB of the containers, and GiB of the pod's allocation while its containers run
INITS = [
    ((2,), (1,), 2),
    ((1,), (2,), 2),
    ((1, 3), (2,), 3),
    ((3, 1), (2,), 3),
    ((0, 2), (2,), 2),
    ((1,), (1, 2), 2),
]


@pytest.mark.parametrize(("inits", "mains", "largest"), INITS)
def test_each_container_has_its_memory_whatever_the_order_of_init_containers(
    on_policy: OnPolicy, inits: tuple[int, ...], mains: tuple[int, ...], largest: int
) -> None:
    def asks(gibibytes: int) -> dict[str, int]:
        return {MEMORY: gibibytes} if gibibytes else {}

    pods = on_policy(UNITS)
    served(pods, 100)
    before = [container(f"init{n}", asks(size), ends=True) for n, size in enumerate(inits)]
    pods.create(pod("p", *(container(f"main{n}", asks(size)) for n, size in enumerate(mains)), init=before))
    status = pods.until("p", "Running", "Failed")
    assert status["phase"] == "Running", f"{status} {pods.events('p')}"
    eventually(
        lambda: all("running" in one["state"] for one in pods.status("p")["containerStatuses"]), "all run"
    )
    shown = [pods.mib(one["containerID"]) for one in pods.status("p")["containerStatuses"]]
    assert all(found >= mib(size) for found, size in zip(shown, mains, strict=True)), shown
    assert max(shown) == mib(largest)
    pods.delete("p", force=True)
    eventually(lambda: not pods.held(), "the pod's allocations are released")


def test_a_sidecar_keeps_its_slice_beside_the_container_after_it(on_policy: OnPolicy) -> None:
    pods = on_policy(UNITS)
    served(pods, 100)
    sidecar = container("side", {MEMORY: 2}, restartPolicy="Always")
    pods.create(pod("p", container("main", {MEMORY: 3}), init=[sidecar]))
    assert pods.until("p", "Running", "Failed")["phase"] == "Running", pods.events("p")
    assert pods.memory("p") == mib(3)
    (side,) = pods.status("p")["initContainerStatuses"]
    assert pods.mib(side["containerID"]) == mib(2)


def test_the_allocation_of_an_init_container_alone_stays_while_it_runs(on_policy: OnPolicy) -> None:
    pods = on_policy(
        UNITS.replace("[[kubelet.resource]]", "[kubelet]\nrelease_seconds = 1\n[[kubelet.resource]]")
    )
    served(pods, 100)
    pods.create(pod("p", container("main"), init=[container("only", {MEMORY: 2})]))
    eventually(lambda: running_init(pods), "the init container runs")
    name = running_init(pods)
    for _ in range(3):
        assert pods.mib(name) == mib(2)
    assert len(pods.held()) == 1


def running_init(pods: Pods) -> str:
    found = pods.status("p").get("initContainerStatuses", [])
    if not found or "running" not in found[0]["state"]:
        return ""
    return str(found[0]["containerID"])


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 1), (1, 2)])
def test_a_pod_whose_init_container_has_whole_cards_gets_as_many_as_its_containers_need(
    on_policy: OnPolicy, first: int, second: int
) -> None:
    pods = on_policy(CARDS)
    served(pods, 8, GPU)
    pods.create(pod("p", container("main", {GPU: second}), init=[container("init", {GPU: first}, ends=True)]))
    status = pods.until("p", "Running", "Failed")
    assert status["phase"] == "Running", f"{status} {pods.events('p')}"
    assert pods.cards("p") == max(first, second)


def test_pods_keep_their_memory_while_vgpud_is_killed(on_policy: OnPolicy) -> None:
    pods = on_policy(UNITS)
    served(pods, 100)
    node = pods.cluster.node
    for name in ("stays", "goes"):
        pods.create(pod(name, container("main", {MEMORY: 5})))
    for name in ("stays", "goes"):
        assert pods.until(name, "Running", "Failed")["phase"] == "Running", pods.events(name)
    node.kill()
    eventually(lambda: pods.allocatable() == 0, "the kubelet sees that the plugin is away")
    assert pods.memory("stays") == mib(5)
    pods.delete("goes", force=True)
    node.start()
    served(pods, 100)
    eventually(lambda: len(pods.held()) == 1, "what the deleted pod had is released")
    assert pods.memory("stays") == mib(5)


def test_pods_keep_their_slices_while_the_kubelet_and_the_api_server_are_killed(on_policy: OnPolicy) -> None:
    pods = on_policy(UNITS)
    served(pods, 100)
    pods.create(pod("p", container("main", {MEMORY: 5})))
    assert pods.until("p", "Running", "Failed")["phase"] == "Running", pods.events("p")
    (before,) = pods.held()
    for program in (pods.cluster.kubelet, pods.cluster.api):
        program.kill()
    pods.cluster.start_api()
    pods.cluster.kubelet.start()
    pods.create(pod("later", container("main", {MEMORY: 3})))
    assert pods.until("later", "Running", "Failed")["phase"] == "Running", pods.events("later")
    assert pods.memory("p") == mib(5)
    assert before["id"] in [one["id"] for one in pods.held()]


def test_pods_run_again_on_their_slices_after_a_reboot(on_policy: OnPolicy) -> None:
    pods = on_policy(documented_policy())
    asked = {"units": (MEMORY, 5), "card": (GPU, 1), "mig": ("nvidia.com/mig-1g.18gb", 1)}
    for name, (resource, amount) in asked.items():
        served(pods, amount, resource)
        pods.create(pod(name, container("main", {resource: amount}), restartPolicy="Always"))
        assert pods.until(name, "Running", "Failed")["phase"] == "Running", pods.events(name)
    before = {one["id"] for one in pods.held()}
    pods.cluster.reboot()
    for name in asked:
        eventually(partial(pods.restarted, name), f"{name} runs again")
    assert {one["id"] for one in pods.held()} == before
    assert pods.memory("units") == mib(5)
    assert pods.cards("card") == 1
    assert "MIG-" in pods.run("mig", "/usr/bin/env")


def test_a_pod_that_is_deleted_by_force_releases_its_slice(on_policy: OnPolicy) -> None:
    pods = on_policy(UNITS)
    served(pods, 100)
    pods.create(pod("p", container("main", {MEMORY: 5})))
    assert pods.until("p", "Running", "Failed")["phase"] == "Running", pods.events("p")
    pods.delete("p", force=True)
    eventually(lambda: not pods.held(), "its allocation is released")


def test_a_container_that_its_runtime_lost_before_its_start_keeps_no_memory(on_policy: OnPolicy) -> None:
    """runc has made the init process of the container, which waits for ever for a start that does not
    come.
    """
    pods = on_policy(f"{UNITS}[kubelet]\nrelease_seconds = 1\ncheck_seconds = 1\n")
    served(pods, 100)
    lost = pods.cluster.folder / "lose"
    lost.touch()
    pods.create(pod("p", container("main", {MEMORY: 5})))
    status = pods.until("p", "Failed", "Succeeded", "Running")
    assert status["phase"] == "Failed", f"{status} {pods.events('p')}"
    lines = [json.loads(line) for line in pods.cluster.node.log.read_text().splitlines() if '"bind"' in line]
    (init, *_) = [
        line["init"] for line in reversed(lines) if line.get("pod") == "default/p/main" and "init" in line
    ]
    command = Path(f"/proc/{init}/cmdline")
    try:
        assert "init" in command.read_text().split("\0")
        eventually(lambda: not pods.held(), "its memory is free")
        assert "init" in command.read_text().split("\0"), "the lost process is still there"
    finally:
        lost.unlink()
        os.kill(init, signal.SIGKILL)


def test_a_deployment_that_fits_no_card_stops_failing_at_the_kubelets_next_report(
    on_policy: OnPolicy,
) -> None:
    """The free memory of the node is enough for one more pod, but no single card has room for it. Pods fail
    until the kubelet reports the smaller offer that vgpud makes after the first failure.
    """
    pods = on_policy(UNITS)
    served(pods, 8 * 130)
    for number in range(8):
        pods.create(pod(f"big{number}", container("main", {MEMORY: 100})))
    for number in range(8):
        assert pods.until(f"big{number}", "Running", "Failed")["phase"] == "Running"
    one: dict[str, Any] = pod("x", container("main", {MEMORY: 60}))
    labels = {"app": "wide"}
    spec = {**one["spec"], "restartPolicy": "Always"}
    pods.cluster.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "wide", "namespace": "default"},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        }
    )

    def of(word: str) -> int:
        found = pods.cluster.get("pods", "-l", "app=wide")
        return sum(1 for one in found if word in json.dumps(one["status"]))

    eventually(lambda: of("UnexpectedAdmissionError") and of("Unschedulable"), "the pod waits")
    assert pods.allocatable() < 8 * 100 + 60
    pods.delete("big0", force=True)
    eventually(lambda: of('"phase": "Running"') == 1, "it runs when a card has room")
