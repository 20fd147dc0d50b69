"""Pods on the cluster, and the questions that tests ask about them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.cluster.control import NODE, Cluster
from tests.e2e.support import eventually
from tests.runtime.containerd import IMAGE
from tests.runtime.cri import Cri

#: names of the image in configs/kubernetes/examples
IMAGES = ("docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04",)
SMI = ("/usr/bin/nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader")
MEMORY = "vgpud.io/memory-gib"


def container(name: str, limits: Mapping[str, int] | None = None, ends: bool = False, **more: Any) -> Any:
    """A container that asks for resources. It ends by itself, or sleeps."""
    command = (
        ["/usr/bin/nvidia-smi", "-L"] if ends and limits else ["/usr/bin/sleep", "0" if ends else "3600"]
    )
    return {
        "name": name,
        "image": IMAGE,
        "command": command,
        "resources": {"limits": dict(limits or {})},
        **more,
    }


def pod(name: str, *containers: Any, init: Sequence[Any] = (), **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "initContainers": list(init),
            "containers": list(containers),
            **spec,
        },
    }


@dataclass
class Pods:
    cluster: Cluster
    cri: Cri

    def create(self, *pods: Mapping[str, Any]) -> None:
        self.cluster.apply(*pods)

    def status(self, name: str) -> Any:
        return self.cluster.get("pod", name)["status"]

    def phase(self, name: str) -> str:
        return str(self.status(name).get("phase"))

    def until(self, name: str, *phases: str) -> Any:
        """Waits until the pod is in one of the phases. Returns its status."""
        eventually(lambda: self.phase(name) in phases, f"pod {name} is {' or '.join(phases)}")
        return self.status(name)

    def restarted(self, name: str) -> bool:
        """Returns whether the pod's first container runs again after its first end. Fails if the pod has
        ended.
        """
        status = self.status(name)
        assert status["phase"] not in ("Failed", "Succeeded"), f"{status} {self.events(name)}"
        (first, *_) = status["containerStatuses"]
        return bool(first["restartCount"] and "running" in first["state"])

    def events(self, name: str) -> str:
        found = self.cluster.get("events", f"--field-selector=involvedObject.name={name}")
        return "\n".join(event.get("message", "") for event in found)

    def run(self, name: str, *words: str) -> str:
        """Runs a program in the pod's first container."""
        (first, *_) = self.status(name)["containerStatuses"]
        return self.cri.run(first["containerID"].partition("://")[2], *words)

    def mib(self, container_id: str) -> int:
        """The memory of the container's card by nvidia-smi. The simulated driver does not know device nodes
        and shows all cards to each container, but limits only the container's own.
        """
        shown = self.cri.run(container_id.partition("://")[2], *SMI)
        return min(int(line.split()[0]) for line in shown.splitlines())

    def memory(self, name: str) -> int:
        """The MiB that the pod's first container has."""
        return self.mib(self.status(name)["containerStatuses"][0]["containerID"])

    def cards(self, name: str) -> int:
        """The number of devices that CUDA shows to the pod's first container."""
        shown = self.run(name, "/usr/bin/env").splitlines()
        (visible,) = [line for line in shown if line.startswith("CUDA_VISIBLE_DEVICES=")]
        return len(visible.split(","))

    def output(self, name: str) -> str:
        """What the ended pod's main container printed."""
        uid = self.cluster.get("pod", name)["metadata"]["uid"]
        (log,) = (self.cluster.folder / "pods").glob(f"default_{name}_{uid}/main/*.log")
        return "\n".join(line.split(" ", 3)[3] for line in log.read_text().splitlines())

    def delete(self, *names: str, force: bool = False) -> None:
        words = ("--force", "--grace-period=0") if force else ("--wait=true",)
        self.cluster.kubectl("delete", "pod", "--ignore-not-found", *names, *words)

    def clear(self) -> None:
        self.cluster.kubectl("delete", "pods", "--all", "--wait=true")
        for kind in ("resourceclaims", "resourceclaimtemplates", "deployments"):
            self.cluster.kubectl("delete", kind, "--all", "--wait=true")

    def allocatable(self, resource: str = MEMORY) -> int:
        """The node's amount of a resource, in whole units; 0 if the node lacks it."""
        return int(self.cluster.get("node", NODE)["status"]["allocatable"].get(resource, "0"))

    def held(self) -> list[Any]:
        """vgpud's allocations."""
        return list(json.loads(self.cluster.node.ctl("ls", "-o", "json").stdout)["items"])
