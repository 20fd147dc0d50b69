"""Records the device ids and the pod of each allocation that the kubelet requested.

The records are in a table of the ledger. A record is written before its allocation is made, so that each
such allocation has one. A record without an allocation is harmless.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from vgpud.model.rows import Rows
from vgpud.serve.documents import Documents


@dataclass(frozen=True, slots=True)
class Hold:
    """The ids of an allocation. `pod` is "namespace/pod/container" of the first container that was seen with
    it; "" until then. `newcomers` are the pods that were new in the kubelet's list when the allocation was
    made: one of them asked for it.
    """

    request_id: str
    resource: str
    ids: frozenset[str]
    pod: str = ""
    newcomers: frozenset[str] = frozenset()


class Holds(Documents[Hold]):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, Hold, lambda hold: hold.request_id)

    async def bind(self, hold: Hold, pod: str) -> Hold:
        """Records the pod, unless one is recorded already."""
        named = hold if hold.pod else replace(hold, pod=pod)
        await self.put(named)
        return named

    def of(self, resource: str) -> tuple[Hold, ...]:
        return tuple(hold for hold in self if hold.resource == resource)

    def overlapping(self, resource: str, ids: Collection[str]) -> tuple[Hold, ...]:
        return tuple(hold for hold in self.of(resource) if not hold.ids.isdisjoint(ids))
