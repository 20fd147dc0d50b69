"""Which ids of which resource an allocation stands for: what the kubelet gave out, and to which pod.

Kept in a file beside the ledger, which knows nothing of ids: written whole before an allocation is
made, so that no allocation of the kubelet's is ever without. An entry without an allocation is harmless.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from vgpud.serve.statefile import StateFile


@dataclass(frozen=True, slots=True)
class Hold:
    """`pod` is "namespace/pod/container" of the first container seen with it, "" before that."""

    request_id: str
    resource: str
    ids: frozenset[str]
    pod: str = ""


class Holds(StateFile[Hold]):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "holds", Hold, lambda hold: hold.request_id)

    async def bind(self, hold: Hold, pod: str) -> Hold:
        """Names the pod, if none was named before."""
        named = hold if hold.pod else replace(hold, pod=pod)
        await self.put(named)
        return named

    def of(self, resource: str) -> tuple[Hold, ...]:
        return tuple(hold for hold in self if hold.resource == resource)

    def overlapping(self, resource: str, ids: Collection[str]) -> tuple[Hold, ...]:
        return tuple(hold for hold in self.of(resource) if not hold.ids.isdisjoint(ids))
