"""Drained devices, which accept no new allocations. Drains are recorded in the ledger, so that they last
beyond a restart.
"""

from collections.abc import Iterable

from vgpud.model.rows import Rows


class Drains:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __contains__(self, device_uuid: str) -> bool:
        return self._rows.get(device_uuid) is not None

    async def put(self, device_uuid: str, drained: bool) -> None:
        if drained:
            await self._rows.put((device_uuid,))
        else:
            await self._rows.drop(device_uuid)

    def of(self, device_uuids: Iterable[str]) -> frozenset[str]:
        return frozenset(uuid for uuid in device_uuids if uuid in self)
