"""The shipped manifests have only known fields, request only names that vgpud publishes, and grant only
permissions that it uses.
"""

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conditions import needs, unmet
from tests.kubelet import official
from tests.kubelet.cluster import Cluster
from tests.kubelet.shapes import problems
from tests.kubelet.test_slices import policy_of, publish
from tests.planner.cards import h200_node
from vgpud import __version__
from vgpud.policy.kubelet import KubeletSettings
from vgpud.serve.dra.parameters import parse
from vgpud.serve.dra.quantity import parse as quantity
from vgpud.serve.dra.slices import DRIVER
from vgpud.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
CLUSTER = ("rbac.yaml", "deviceclasses.yaml")
FILES = sorted([*(FOLDER / name for name in CLUSTER), *(FOLDER / "examples").glob("*.yaml")])


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def every(kind: str) -> list[dict[str, Any]]:
    return [d for path in FILES for d in documents(path) if d["kind"] == kind]


def devices() -> list[dict[str, Any]]:
    """One device of each type that vgpud publishes."""
    found = []
    for mode in ("mig", "mps", "preload", "exclusive"):
        cluster = Cluster()
        publish(cluster, h200_node(4), policy_of(mode))
        found += cluster.pool()[0]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_field_of_the_manifests_is_in_the_schema(path: Path) -> None:
    assert {d["metadata"].get("name"): problems(d) for d in documents(path) if problems(d)} == {}


def test_the_schema_refuses_wrong_manifests() -> None:
    pod = next(d for d in every("Pod"))
    container = {**pod["spec"]["containers"][0], "imagee": "x", "command": "nvidia-smi"}
    broken = {**pod, "spec": {**pod["spec"], "containers": [container]}}
    assert len(problems(broken)) == 2
    assert problems({"apiVersion": "resource.k8s.io/v1beta1", "kind": "DeviceClass"})


def test_cel_expressions_name_published_attributes() -> None:
    text = "\n".join(path.read_text() for path in FILES)
    attributes = {name for device in devices() for name in device["attributes"]}
    capacities = {name for device in devices() for name in device["capacity"]}
    used = set(re.findall(r'device\.attributes\["gpu\.vgpud\.io"\]\.(\w+)', text))
    used |= set(re.findall(r"matchAttribute: gpu\.vgpud\.io/(\w+)", text))
    assert used
    assert used <= attributes
    assert set(re.findall(r'device\.capacity\["gpu\.vgpud\.io"\]\.(\w+)', text)) <= capacities


def test_each_device_type_has_a_device_class_that_claims_use() -> None:
    types = {device["attributes"]["type"]["string"] for device in devices()}
    expressions = {
        d["metadata"]["name"]: d["spec"]["selectors"][0]["cel"]["expression"] for d in every("DeviceClass")
    }
    of_class = {name: re.search(r'type == "(\w+)"', text)[1] for name, text in expressions.items()}  # type: ignore[index]
    assert set(of_class.values()) == types
    assert all(f'device.driver == "{DRIVER}"' in text for text in expressions.values())
    for request in requests():
        options = [request["exactly"]] if "exactly" in request else request["firstAvailable"]
        for option in options:
            kind = of_class[option["deviceClassName"]]
            asked = option.get("capacity", {}).get("requests", {})
            assert all(quantity(amount) > 0 for amount in asked.values())
            fitting = [d for d in devices() if d["attributes"]["type"]["string"] == kind]
            assert any(asked.keys() <= device["capacity"].keys() for device in fitting)


def requests() -> list[dict[str, Any]]:
    specs = [d["spec"] for d in every("ResourceClaim")]
    specs += [d["spec"]["spec"] for d in every("ResourceClaimTemplate")]
    return [request for spec in specs for request in spec["devices"]["requests"]]


def test_opaque_parameters_of_the_manifests_are_accepted() -> None:
    configs = [
        c for d in every("ResourceClaimTemplate") for c in d["spec"]["spec"]["devices"].get("config", ())
    ]
    assert configs
    for config in configs:
        assert config["opaque"]["driver"] == DRIVER
        parse(config["opaque"]["parameters"])


def test_the_cluster_role_has_exactly_the_rights_in_use() -> None:
    """Compares the cluster role with the calls in vgpud/serve/dra/api.py. The verb is part of each method
    name of the official client.
    """
    verbs = {"list": "list", "create": "create", "replace": "update", "delete": "delete", "get": "get"}
    source = (ROOT / "vgpud/serve/dra/api.py").read_text()
    calls = re.findall(r'_objects\(\s*"(\w+?)_\w+",[^)]*?_(SLICES|CLAIMS)', source)
    used = {(f"resource{plural.lower()}", verbs[verb]) for verb, plural in calls} | {("nodes", "get")}
    # a watch is a list with another option, and the status of a claim is a subresource
    used |= {("resourceslices", "watch"), ("resourceclaims/status", "update")}
    used |= {("resourceclaims/driver", f"{nodes}-node:update") for nodes in ("associated", "arbitrary")}
    used.discard(("resourceclaims", "update"))
    (role,) = every("ClusterRole")
    granted = {(r, v) for rule in role["rules"] for r in rule["resources"] for v in rule["verbs"]}
    assert granted == used
    (binding,) = every("ClusterRoleBinding")
    (namespace,) = every("Namespace")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    # each node has its own service account in this namespace
    assert binding["subjects"][0]["name"] == f"system:serviceaccounts:{namespace['metadata']['name']}"


@pytest.mark.parametrize("name", ["vgpud-own-node", "vgpud-own-claims"])
def test_admission_policies_limit_each_write_to_the_accounts_own_node(name: str) -> None:
    (role,) = every("ClusterRole")
    (policy,) = (one for one in every("ValidatingAdmissionPolicy") if one["metadata"]["name"] == name)
    (binding,) = (one for one in every("ValidatingAdmissionPolicyBinding") if one["metadata"]["name"] == name)
    assert binding["spec"] == {"policyName": name, "validationActions": ["Deny"]}
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    (resource,) = rule["resources"]
    written = {v for one in role["rules"] if resource in one["resources"] for v in one["verbs"]}
    assert {word.lower() for word in rule["operations"]} == written & {"create", "update", "delete"}
    (condition,) = policy["spec"]["matchConditions"]
    (group,) = every("ClusterRoleBinding")[0]["subjects"]
    assert condition["expression"] == f'"{group["name"]}" in request.userInfo.groups'
    named = {one["name"] for one in policy["spec"]["variables"]}
    used = set(re.findall(r"variables\.(\w+)", str(policy["spec"])))
    assert used == named
    assert f'"{DRIVER}"' in str(policy["spec"])


def test_every_right_to_write_has_an_admission_policy() -> None:
    (role,) = every("ClusterRole")
    policies = every("ValidatingAdmissionPolicy")
    held = {
        r
        for one in policies
        for rule in one["spec"]["matchConstraints"]["resourceRules"]
        for r in rule["resources"]
    }
    written = {"create", "update", "delete"}
    assert {r for one in role["rules"] if written & set(one["verbs"]) for r in one["resources"]} == held


def test_the_manuals_pods_request_resources_of_the_manuals_policy() -> None:
    manual = (ROOT / "docs/kubernetes.md").read_text()
    found = re.findall(r'\[\[kubelet\.resource\]\]\nname = "(\S+)".*\nkind = "(\w+)".*\n(parts = 4)?', manual)
    rules = [{"name": name, "kind": kind} | ({"parts": 4} if parts else {}) for name, kind, parts in found]
    settings = KubeletSettings.model_validate({"resource": rules})
    assert [rule.kind for rule in settings.resource] == ["card", "mig", "part", "memory"]
    names = {rule.name_of("1g.18gb") for rule in settings.resource}
    asked = {
        name
        for pod in every("Pod")
        for container in pod["spec"]["containers"]
        for name in container["resources"].get("limits", {})
    }
    assert asked == names


def test_the_drop_in_of_the_unit_gives_vgpud_access_to_the_kubelets_folders() -> None:
    parser = configparser.ConfigParser()
    parser.read(FOLDER / "vgpud.service.d" / "50-kubernetes.conf")
    assert parser["Service"]["ReadWritePaths"] == f"-{Settings().kubelet_dir}"
    assert set(parser["Service"]["RestrictAddressFamilies"].split()) == {"AF_INET", "AF_INET6"}
    # the unit denies every address, and systemd allows an address that is in both lists
    # (systemd.resource-control(5))
    assert parser["Service"]["IPAddressAllow"] == "any"


def test_the_chart_has_the_objects_of_the_cluster_and_nothing_to_render() -> None:
    """Text without braces is rendered unchanged."""
    chart = yaml.safe_load((FOLDER / "chart" / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "vgpud")
    assert chart["version"] == chart["appVersion"] == __version__
    templates = {path.name: path.read_text() for path in (FOLDER / "chart" / "templates").iterdir()}
    assert templates == {name: (FOLDER / name).read_text() for name in CLUSTER}
    assert not any("{{" in text for text in templates.values())


@needs("kubectl")
def test_the_kustomization_renders_the_objects_of_the_cluster() -> None:
    done = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True, check=True)
    rendered = [(d["kind"], d["metadata"]["name"]) for d in yaml.safe_load_all(done.stdout)]
    shipped = [(d["kind"], d["metadata"]["name"]) for name in CLUSTER for d in documents(FOLDER / name)]
    assert sorted(rendered) == sorted(shipped)


HELM_LINT = """
import ctypes, sys
helm = ctypes.CDLL(sys.argv[1])
handle, answer = ctypes.c_ulonglong(), ctypes.c_char_p()
assert helm.helm_sdkpy_config_create(b"vgpud", b"", b"", b"{}", ctypes.byref(handle)) == 0
assert helm.helm_sdkpy_lint(handle, sys.argv[2].encode(), ctypes.byref(answer)) == 0
print(answer.value.decode())
"""
INFORMATION = 1  # helm.sh/helm/v4/pkg/chart/v2/lint/support: information 1, warning 2, error 3


def worst_of_helm_lint(chart: Path) -> int:
    """The result of `helm lint`, which renders the chart's templates and parses the result."""
    library = official.helm() or unmet("python-index", official.why)
    words = [sys.executable, "-c", HELM_LINT, str(library), str(chart)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["TotalChartsLinted"] == 1
    return max(int(message["Severity"]) for message in found["Messages"])


@needs("python-index")
def test_helm_lints_and_renders_the_chart(tmp_path: Path) -> None:
    assert worst_of_helm_lint(FOLDER / "chart") == INFORMATION
    broken = tmp_path / "chart"
    shutil.copytree(FOLDER / "chart", broken)
    (broken / "templates" / "rbac.yaml").write_text("kind: {{ .Values.nothing.at.all }}\n")
    assert worst_of_helm_lint(broken) > INFORMATION
