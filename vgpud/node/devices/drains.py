"""Drained devices, which accept no new allocations. Drains are recorded in the ledger, so that they last
beyond a restart.
"""

from collections.abc import Iterable

from vgpud.modes.base import Originals

_KEY = "drained"


class Drains:
    def __init__(self, originals: Originals | None = None) -> None:
        """If `originals` is None, drains are lost when the daemon stops."""
        self._originals = originals
        self._drained: set[str] = set()

    def __contains__(self, device_uuid: str) -> bool:
        if self._originals is not None:
            return self._originals.recall(device_uuid, _KEY) is not None
        return device_uuid in self._drained

    async def put(self, device_uuid: str, drained: bool) -> None:
        if self._originals is None:
            (self._drained.add if drained else self._drained.discard)(device_uuid)
        elif drained:
            await self._originals.remember(device_uuid, _KEY, "yes")
        else:
            await self._originals.drop(device_uuid, _KEY)

    def of(self, device_uuids: Iterable[str]) -> frozenset[str]:
        return frozenset(uuid for uuid in device_uuids if uuid in self)
