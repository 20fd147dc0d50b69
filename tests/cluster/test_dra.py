"""DRA claims on a real cluster, with the objects and steps of docs/kubernetes.md."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import OnPolicy
from tests.cluster.control import NODE
from tests.cluster.pods import MEMORY, Pods, container, pod
from tests.cluster.test_plugin import UNITS, mib, served
from tests.conditions import needs
from tests.e2e.support import eventually, simulate
from tests.kubelet.cluster import Cluster as Double
from tests.kubelet.test_slices import PROFILES, cards_of_profile, policy_of, publish
from tests.simnode import ROOT
from vgpud.model.device import Node as Snapshot

pytestmark = [
    needs("kubernetes", "containerd", "debian-archive", "python-index", "kubectl", "root"),
    pytest.mark.xdist_group("cluster"),
]
MANIFESTS = ROOT / "configs" / "kubernetes"
DRA = '[dra]\nenabled = true\nauto = "quota"\ncheck_seconds = 1\n'
KINDS = """version = 1
[[device]]
match = { index = 0 }
mode = "mps"
[[device]]
match = { index = 1 }
mode = "mig"
[[device]]
match = { index = 2 }
mode = "preload"
[[device]]
mode = "exclusive"
"""
QUOTA = 'version = 1\n[[device]]\nmode = "preload"\n'


@pytest.fixture
def with_dra(on_policy: OnPolicy) -> Any:
    """Returns a function that prepares the cluster for DRA as docs/kubernetes.md says, and starts vgpud."""

    def start(policy: str) -> Pods:
        pods = on_policy(policy)
        prepare(pods)
        # vgpud reads its kubeconfig only at its start
        pods.cluster.node.stop()
        # deletes the ResourceSlices of the earlier policy, because a claim must not get their devices
        pods.cluster.kubectl("delete", "resourceslices", "--all", "--wait=true")
        pods.cluster.node.start()
        eventually(lambda: slices(pods), "slices are published")
        return pods

    return start


def prepare(pods: Pods) -> None:
    """Follows the steps of docs/kubernetes.md, with a kubeconfig for the node."""
    call, config = pods.cluster.kubectl, str(pods.cluster.folder / "vgpud.conf")
    call("apply", "-f", str(MANIFESTS / "rbac.yaml"), "-f", str(MANIFESTS / "deviceclasses.yaml"))
    if Path(config).exists():
        return
    call("-n", "vgpud", "create", "serviceaccount", NODE)
    token = call("-n", "vgpud", "create", "token", NODE, "--duration", "8760h").stdout.strip()
    server = (
        "--server",
        pods.cluster.server,
        "--embed-certs",
        "--certificate-authority",
        str(pods.cluster.authority),
    )
    for words in (
        ("set-cluster", "c", *server),
        ("set-credentials", "vgpud", "--token", token),
        ("set-context", "c", "--cluster", "c", "--user", "vgpud"),
        ("use-context", "c"),
    ):
        call("config", f"--kubeconfig={config}", *words)


def slices(pods: Pods) -> list[Any]:
    return list(pods.cluster.get("resourceslices"))


def devices(pods: Pods) -> list[Any]:
    return [device for one in slices(pods) for device in one["spec"].get("devices", ())]


def template(name: str, device_class: str, memory: str = "", **request: Any) -> dict[str, Any]:
    exactly: dict[str, Any] = {"deviceClassName": device_class, **request}
    if memory:
        exactly["capacity"] = {"requests": {"memory": memory}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }


def claiming(name: str, claimed: str, whole: bool = False) -> dict[str, Any]:
    """A pod that sleeps and has a claim. `claimed` is the name of a claim template or, with `whole`, of an
    existing claim.
    """
    source = "resourceClaimName" if whole else "resourceClaimTemplateName"
    main = container("main")
    main["resources"] = {"claims": [{"name": "gpu"}]}
    return pod(name, main, resourceClaims=[{"name": "gpu", source: claimed}])


def running(pods: Pods, name: str) -> None:
    status = pods.until(name, "Running", "Failed", "Succeeded")
    assert status["phase"] == "Running", f"{name}: {status} {pods.events(name)}"


def ready(pods: Pods, name: str) -> bool:
    """Returns whether the claim's status says that each device of the pod is ready."""
    claims = [one["status"] for one in pods.cluster.get("resourceclaims")]
    (status,) = (one for one in claims if [pod["name"] for pod in one.get("reservedFor", ())] == [name])
    conditions = [one["conditions"] for one in status.get("devices", ())]
    said = [one["status"] for each in conditions for one in each if one["type"] == "Ready"]
    return said == ["True"] * len(status["allocation"]["devices"]["results"])


def test_the_documented_claims_are_prepared(with_dra: OnPolicy) -> None:
    pods = with_dra(KINDS + DRA)
    pods.cluster.kubectl("apply", "-f", str(MANIFESTS / "examples" / "dra.yaml"))
    status = pods.until("seven-gib", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", f"{status} {pods.events('seven-gib')}"
    assert "7168MiB" in pods.output("seven-gib")
    pods.create(
        claiming("third", "third"), claiming("either", "either"), claiming("cards", "four-cards", True)
    )
    for name in ("third", "either", "cards"):
        running(pods, name)
        eventually(
            partial(ready, pods, name), f"the status of {name}'s claim says that its devices are ready"
        )
    assert "35gb" in json.dumps(pods.held()), "the smallest MIG instance with 30 GiB"
    assert pods.cards("cards") == 4
    pods.create(claiming("less", "held-to-less"))
    running(pods, "less")
    assert pods.memory("less") == mib(7)


def test_pods_with_claims_keep_their_memory_while_vgpud_is_killed(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    pods.create(template("five", "vgpu-quota", "5Gi"), claiming("stays", "five"), claiming("goes", "five"))
    for name in ("stays", "goes"):
        running(pods, name)
    pods.cluster.node.kill()
    assert pods.memory("stays") == mib(5)
    pods.cluster.kubectl("delete", "pod", "goes", "--wait=false")
    pods.create(claiming("late", "five"))
    pods.cluster.node.start()
    running(pods, "late")
    eventually(lambda: len(pods.held()) == 2, "what the deleted pod had is released")
    assert pods.memory("stays") == mib(5)


def test_resource_slices_come_back_after_a_kill_of_the_kubelet_and_of_the_api_server(
    with_dra: OnPolicy,
) -> None:
    pods = with_dra(QUOTA + DRA)
    pods.create(template("five", "vgpu-quota", "5Gi"), claiming("p", "five"))
    running(pods, "p")
    before = len(devices(pods))
    for program in (pods.cluster.kubelet, pods.cluster.api):
        program.kill()
    pods.cluster.start_api()
    pods.cluster.kubelet.start()
    pods.create(claiming("later", "five"))
    running(pods, "later")
    eventually(lambda: len(devices(pods)) == before, "the devices are published again")
    assert pods.memory("p") == mib(5)


def test_claims_are_prepared_again_after_a_reboot(with_dra: OnPolicy) -> None:
    pods = with_dra(KINDS + DRA)
    pods.create(template("five", "vgpu-quota", "5Gi"), template("place", "vgpu-mig"))
    for name in ("five", "place"):
        pods.create(
            {**claiming(name, name), "spec": {**claiming(name, name)["spec"], "restartPolicy": "Always"}}
        )
        running(pods, name)
    before = {one["id"] for one in pods.held()}
    pods.cluster.reboot()
    for name in ("five", "place"):
        eventually(partial(pods.restarted, name), f"{name} runs again")
    assert {one["id"] for one in pods.held()} == before
    assert pods.memory("five") == mib(5)
    assert "MIG-" in pods.run("place", "/usr/bin/env")


def test_a_claim_whose_pod_is_deleted_by_force_is_released(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    pods.create(template("five", "vgpu-quota", "5Gi"), claiming("p", "five"))
    running(pods, "p")
    pods.delete("p", force=True)
    eventually(lambda: not pods.held(), "its allocation is released")


def test_a_drained_card_gets_no_new_claims_and_keeps_its_pods(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    pods.create(template("five", "vgpu-quota", "5Gi"), claiming("p", "five"))
    running(pods, "p")
    for index in range(8):
        pods.cluster.node.ctl("drain", str(index), check=False)
    eventually(lambda: all("drained" in json.dumps(one.get("taints")) for one in devices(pods)), "taints")
    pods.create(claiming("waits", "five"))
    eventually(
        lambda: "Unschedulable" in json.dumps(pods.status("waits")),
        "the scheduler finds no device without a taint",
    )
    assert pods.memory("p") == mib(5)
    for index in range(8):
        pods.cluster.node.ctl("undrain", str(index))
    running(pods, "waits")


def test_a_container_with_two_requests_does_not_start(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    two = template("two", "vgpu-quota", "5Gi")
    (one,) = two["spec"]["spec"]["devices"]["requests"]
    two["spec"]["spec"]["devices"]["requests"].append({**one, "name": "second"})
    pods.create(two, claiming("p", "two"))
    eventually(lambda: "E103" in pods.events("p"), "the pod's events say why")
    assert pods.phase("p") != "Running"


def test_the_account_of_one_node_cannot_write_objects_of_other_nodes(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    (one, *_) = slices(pods)
    other = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "other"},
        "spec": {**one["spec"], "nodeName": "node-2", "pool": {**one["spec"]["pool"], "name": "node-2"}},
    }
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "elsewhere", "namespace": "default"},
        "spec": template("", "vgpu-quota")["spec"]["spec"],
    }
    as_node = f"--kubeconfig={pods.cluster.folder}/vgpud.conf"

    def refused(*words: str, stdin: str = "") -> str:
        done = pods.cluster.kubectl(as_node, *words, stdin=stdin, check=False)
        assert done.returncode != 0
        return done.stderr

    slices_only = "vgpud of node node-1 may not write slices of node node-2"
    assert slices_only in refused("create", "-f", "-", stdin=json.dumps(other))
    pods.cluster.apply(other, claim)
    try:
        assert slices_only in refused("delete", "resourceslice", "other")
        written = json.dumps(pods.cluster.get("resourceclaim", "elsewhere"))
        words = ("replace", "--subresource=status", "-f", "-")
        assert "may not write the status of claims of other nodes" in refused(*words, stdin=written)
    finally:
        pods.cluster.kubectl("delete", "resourceslice", "other")


def test_a_renewed_token_is_read_without_a_restart(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    call, config = pods.cluster.kubectl, f"--kubeconfig={pods.cluster.folder}/vgpud.conf"
    call("-n", "vgpud", "delete", "serviceaccount", NODE)
    call("-n", "vgpud", "create", "serviceaccount", NODE)
    eventually(
        lambda: "logged in" in call(config, "get", "node", NODE, check=False).stderr,
        "the API server knows the token no more",
    )
    call("delete", "resourceslices", "--all", "--wait=true")
    eventually(lambda: " 401" in pods.cluster.node.log.read_text(), "vgpud is refused")
    token = call("-n", "vgpud", "create", "token", NODE).stdout.strip()
    call("config", config, "set-credentials", "vgpud", "--token", token)
    eventually(lambda: slices(pods), "slices are published again")


def test_a_pod_with_admin_access_sees_a_card_and_gets_no_allocation(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    label = "resource.kubernetes.io/admin-access"
    pods.cluster.kubectl("label", "namespace", "default", f"{label}=true")
    try:
        pods.create(template("five", "vgpu-quota", "5Gi"), claiming("p", "five"))
        pods.create(template("watch", "vgpu-quota", "2Mi", adminAccess=True), claiming("watcher", "watch"))
        running(pods, "p")
        running(pods, "watcher")
        assert "GPU 0" in pods.run("watcher", "/usr/bin/nvidia-smi", "-L")
        assert [one["workload"]["pod"] for one in pods.held()] == ["p"]
    finally:
        pods.clear()
        pods.cluster.kubectl("label", "namespace", "default", f"{label}-")


def test_the_status_of_a_pod_shows_that_its_card_is_unwell(with_dra: OnPolicy) -> None:
    """Before Kubernetes 1.36 only the taints of the cards show this."""
    pods = with_dra(QUOTA + DRA)
    pods.create(template("five", "vgpu-quota", "5Gi"), claiming("p", "five"))
    running(pods, "p")
    node = pods.cluster.node
    try:
        for index in range(8):
            simulate(node, "fault", "gpu-lost", "--device", str(index))
        eventually(lambda: "unwell" in json.dumps(devices(pods)), "the cards have taints")
        if pods.cluster.minor() >= 36:
            eventually(lambda: "Unhealthy" in json.dumps(pods.status("p")), "the pod's status says so")
    finally:
        simulate(node, "fault", "clear")
    eventually(lambda: "unwell" not in json.dumps(devices(pods)), "the cards are well again")


def test_an_extended_resource_of_a_device_class_is_granted_as_a_claim(with_dra: OnPolicy) -> None:
    pods = with_dra(KINDS + DRA)
    expression = 'device.driver == "gpu.vgpud.io" && device.attributes["gpu.vgpud.io"].type == "card"'
    pods.cluster.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "by-name"},
            "spec": {
                "selectors": [{"cel": {"expression": expression}}],
                "extendedResourceName": "example.com/gpu",
            },
        }
    )
    pods.create(pod("p", container("main", {"example.com/gpu": 1})))
    running(pods, "p")
    assert pods.cards("p") == 1


def test_vgpud_follows_feature_gates_that_are_turned_off_and_on(with_dra: OnPolicy) -> None:
    """Without DRAConsumableCapacity a shared card belongs to one claim, so no card is overcommitted."""
    pods = with_dra(KINDS + DRA)
    keys = {"allowMultipleAllocations", "consumesCounters"}

    def published() -> set[str]:
        return {key for device in devices(pods) for key in device} & keys

    eventually(lambda: published() == keys, "shared devices and places of instances are published")
    try:
        pods.cluster.restart_with_gates(False)
        eventually(lambda: devices(pods) and not published(), "only what one claim can have is published")
        pods.create(template("any", "vgpu-quota"), claiming("first", "any"))
        running(pods, "first")
        pods.create(claiming("second", "any"))
        eventually(lambda: "Unschedulable" in json.dumps(pods.status("second")), "the card is taken")
        pods.delete("first")
        running(pods, "second")
    finally:
        pods.clear()
        pods.cluster.restart_with_gates(True)
    eventually(lambda: published() == keys, "they are published again")
    pods.create(template("five", "vgpu-quota", "5Gi"), *(claiming(name, "five") for name in ("a", "b")))
    for name in ("a", "b"):
        running(pods, name)
        assert pods.memory(name) == mib(5)


def test_claims_and_extended_resources_share_a_node_without_overcommitment(with_dra: OnPolicy) -> None:
    """The memory of the device plugin is subtracted from the capacity that DRA publishes, and that of claims
    from the plugin's.
    """
    pods = with_dra(UNITS.replace('"auto"', '"preload"') + DRA)
    served(pods, 8 * 130)
    pods.create(template("ninety", "vgpu-quota", "90Gi"))
    for number in range(4):
        pods.create(
            claiming(f"claim{number}", "ninety"), pod(f"unit{number}", container("main", {MEMORY: 90}))
        )
    names = [f"{kind}{number}" for kind in ("claim", "unit") for number in range(4)]

    def placed(name: str) -> bool:
        """Returns whether the claim's pod runs, or an event says (E401) that the device plugin has filled the
        claim's card in the meantime.
        """
        return pods.phase(name) != "Pending" or "E401" in pods.events(name)

    eventually(lambda: all(map(placed, names)), "each pod has an outcome")
    assert all(pods.memory(name) == mib(90) for name in names if pods.phase(name) == "Running")
    taken = [part["deviceUuid"] for one in pods.held() for part in one["slices"]]
    assert len(taken) == len(set(taken)), "two of 90 GiB on one card"


def test_all_claims_of_a_storm_with_kills_of_vgpud_get_their_memory(with_dra: OnPolicy) -> None:
    pods = with_dra(QUOTA + DRA)
    pods.create(template("twenty", "vgpu-quota", "20Gi"))
    names = [f"storm{number}" for number in range(24)]
    pods.create(*(claiming(name, "twenty") for name in names))
    for _ in range(3):
        pods.cluster.node.kill()
        pods.cluster.node.start()
    for name in names:
        running(pods, name)
    assert {pods.memory(name) for name in names} == {mib(20)}


@pytest.mark.parametrize("mode", ["mig", "mps", "preload", "exclusive"])
def test_the_api_server_accepts_the_slices_of_each_simulated_node(with_dra: OnPolicy, mode: str) -> None:
    pods = with_dra(QUOTA + DRA)
    for path in PROFILES:
        double = Double(pods.cluster.minor())
        publish(double, Snapshot(devices=cards_of_profile(path)), policy_of(mode))
        for found in double.slices_by_name.values():
            made = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "spec": found["spec"]}
            made["metadata"] = {"name": f"dry-run-{found['metadata']['name']}"}
            pods.cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(made))
