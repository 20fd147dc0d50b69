"""Reads from the kubelet's PodResources API which containers hold which ids."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from vgpud.api.gen.kubelet import podresources_v1_pb2 as pb
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.serve.kubelet import wire

log = structlog.get_logger(__name__)

_METHOD = "/v1.PodResourcesLister/List"
_TIMEOUT_SECONDS = 5.0
Life = tuple[int, int]  # inode and time of change of a socket that a process has bound


def life_of(socket: Path) -> Life | None:
    """A value that identifies the process that has bound the socket; None if there is no socket."""
    try:
        found = socket.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class Held:
    """The ids of one resource that one container holds. `pod` is "namespace/pod/container"."""

    pod: str
    resource: str
    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Listing:
    """The ids that containers hold, and the active pods ("namespace/pod"), including those without ids.

    Plain init containers are not listed, even if they hold ids (kubernetes/kubernetes,
    pkg/kubelet/apis/podresources/server_v1.go); from Kubernetes 1.34 on, neither are pods that have ended.
    """

    held: tuple[Held, ...]
    pods: frozenset[str]
    containers: frozenset[str] = frozenset()  # containers as "namespace/pod/container"
    # The first container that uses each CDI device of a claim, by the device's name.
    users: Mapping[str, str] = field(default_factory=dict)

    def holder(self, resource: str, ids: frozenset[str]) -> str:
        """The first container with one of these ids; "" if no listed container has one."""
        return next((h.pod for h in self.held if h.resource == resource and not h.ids.isdisjoint(ids)), "")

    def has_pods_beside_static(self, node_name: str) -> bool:
        """True if a listed pod comes from the API server. The kubelet learns of these pods all at once, and
        until then lists the static ones. A static pod's name ends with that of the node
        (kubernetes/kubernetes, pkg/kubelet/config/common.go, generatePodName).
        """
        return any(not pod.endswith(f"-{node_name}") for pod in self.pods)

    def is_init_of_active(self, container: str) -> bool:
        """True if "namespace/pod/container" is a plain init container of a listed pod."""
        return container.rpartition("/")[0] in self.pods and container not in self.containers


class Pods:
    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._trouble = ""

    def life(self) -> Life | None:
        """Identifies the kubelet process that answers. A starting kubelet answers before it takes plugins."""
        return life_of(self._socket)

    async def list(self) -> Listing | None:
        """The kubelet's list; None if the kubelet does not answer, which proves nothing about any pod."""
        try:
            reply = await wire.ask(
                self._socket,
                _METHOD,
                pb.ListPodResourcesRequest(),
                pb.ListPodResourcesResponse,
                _TIMEOUT_SECONDS,
            )
        except VgpuError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                log.warning(LogEvent.PODS_NOT_LISTED_NOTHING_RELEASED, why=str(error))
            return None
        self._trouble = ""
        return listing_of(reply)


def listing_of(reply: pb.ListPodResourcesResponse) -> Listing:
    names = {f"{pod.namespace}/{pod.name}": pod.containers for pod in reply.pod_resources}
    containers = frozenset(f"{pod}/{one.name}" for pod, listed in names.items() for one in listed)
    return Listing(held_in(reply), frozenset(names), containers, _users_in(reply))


def _users_in(reply: pb.ListPodResourcesResponse) -> dict[str, str]:
    found: dict[str, str] = {}
    for pod in reply.pod_resources:
        for container in pod.containers:
            for dynamic in container.dynamic_resources:
                for device in (one for claim in dynamic.claim_resources for one in claim.cdi_devices):
                    found.setdefault(device.name, f"{pod.namespace}/{pod.name}/{container.name}")
    return found


def held_in(reply: pb.ListPodResourcesResponse) -> tuple[Held, ...]:
    """The ids that containers hold. Entries that the kubelet split by NUMA node are joined."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for pod in reply.pod_resources:
        for container in pod.containers:
            name = f"{pod.namespace}/{pod.name}/{container.name}"
            for devices in container.devices:
                found[name, devices.resource_name].update(devices.device_ids)
    return tuple(Held(pod, resource, frozenset(ids)) for (pod, resource), ids in found.items())
