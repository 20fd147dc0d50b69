"""Which pod holds what, from the kubelet's PodResources API: a list, or that it could not be had."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import structlog

from vgpud.api.gen.kubelet import podresources_v1_pb2 as pb
from vgpud.model.errors import VgpuError
from vgpud.serve.kubelet import wire

log = structlog.get_logger(__name__)

_METHOD = "/v1.PodResourcesLister/List"
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """The ids of one resource that one container has; `pod` is "namespace/pod/container"."""

    pod: str
    resource: str
    ids: frozenset[str]


class Pods:
    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._trouble = ""

    async def list(self) -> tuple[Held, ...] | None:
        """None where the kubelet does not answer: that says nothing of any pod."""
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
                log.warning("which pods hold what is not known, nothing is released", why=str(error))
            return None
        self._trouble = ""
        return held_in(reply)


def held_in(reply: pb.ListPodResourcesResponse) -> tuple[Held, ...]:
    """What the kubelet splits by NUMA node is one again."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for pod in reply.pod_resources:
        for container in pod.containers:
            name = f"{pod.namespace}/{pod.name}/{container.name}"
            for devices in container.devices:
                found[name, devices.resource_name].update(devices.device_ids)
    return tuple(Held(pod, resource, frozenset(ids)) for (pod, resource), ids in found.items())
