"""The ledger's tables of rows of text, each with a copy in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import StrEnum

from vgpud.model.rows import Row


class RowTable(StrEnum):
    """The tables, by their names in the file."""

    ORIGINALS = "originals"
    DRAINS = "drains"
    MIG_INSTANCES = "mig_instances"
    MIG_LAYOUTS = "mig_layouts"
    KUBELET_HOLDS = "kubelet_holds"
    PREPARED_CLAIMS = "prepared_claims"
    CONTAINERS = "containers"


# the columns that are the key of a row, the first ones of the table
KEYS: dict[RowTable, tuple[str, ...]] = {
    RowTable.ORIGINALS: ("device_uuid", "key"),
    RowTable.DRAINS: ("device_uuid",),
    RowTable.MIG_INSTANCES: ("device_uuid", "gpu_instance", "compute_instance"),
    RowTable.MIG_LAYOUTS: ("device_uuid",),
    RowTable.KUBELET_HOLDS: ("request_id",),
    RowTable.PREPARED_CLAIMS: ("claim_uid",),
    RowTable.CONTAINERS: ("request_id", "pid", "start_ticks", "boot_id"),
}
# the tables whose new rows precede a change of a device, and so must survive a power cut
BEFORE_EFFECTS = frozenset(
    {RowTable.ORIGINALS, RowTable.DRAINS, RowTable.MIG_INSTANCES, RowTable.MIG_LAYOUTS}
)


class LedgerRows:
    """Implements model.rows.Rows. Changes are made one after the other, also if a caller is cancelled.

    `write` makes a change in the ledger: it replaces the row of a key by a row, or deletes it (None).
    """

    def __init__(
        self,
        table: RowTable,
        rows: Iterable[Row],
        write: Callable[[RowTable, Row, Row | None], Awaitable[None]],
    ) -> None:
        self._table = table
        self._write = write
        self._width = len(KEYS[table])
        self._rows = {row[: self._width]: row for row in rows}
        self._writing = asyncio.Lock()
        self.changes = 0

    def __iter__(self) -> Iterator[Row]:
        return iter(tuple(self._rows.values()))

    def get(self, *key: str) -> Row | None:
        return self._rows.get(key)

    async def put(self, row: Row) -> None:
        await asyncio.shield(self._change(row[: self._width], row))

    async def drop(self, *key: str) -> None:
        await asyncio.shield(self._change(key, None))

    async def _change(self, key: Row, row: Row | None) -> None:
        async with self._writing:
            # the rows are compared only now, because earlier changes of the row are written first
            if self._rows.get(key) == row:
                return
            await self._write(self._table, key, row)
            self.changes += 1
            self._rows.pop(key, None)
            if row is not None:
                self._rows[key] = row
