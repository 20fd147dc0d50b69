"""Changes of rows are written in their order, even those of cancelled calls."""

import asyncio

import pytest

from vgpud.ledger.rows import LedgerRows, RowTable
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.rows import Row


class Disk:
    """A table whose writes wait until `goes_on` is set."""

    def __init__(self) -> None:
        self.written: list[Row | None] = []
        self.writing, self.goes_on = asyncio.Event(), asyncio.Event()
        self.fails = False

    async def write(self, table: RowTable, key: Row, row: Row | None) -> None:
        self.writing.set()
        await self.goes_on.wait()
        if self.fails:
            raise VgpuError(ErrorCode.LEDGER_FULL, "no space left", "free some space")
        self.written.append(row)

    def rows(self, *before: Row) -> LedgerRows:
        return LedgerRows(RowTable.KUBELET_HOLDS, before, self.write)


def test_a_row_change_that_is_cancelled_during_its_write_is_still_written() -> None:
    async def story() -> None:
        disk = Disk()
        rows = disk.rows()
        cancelled = asyncio.ensure_future(rows.put(("first", "1")))
        await disk.writing.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        second = asyncio.ensure_future(rows.put(("second", "2")))
        disk.goes_on.set()
        await second
        assert disk.written == list(rows) == [("first", "1"), ("second", "2")]

    asyncio.run(story())


def test_a_value_put_while_another_is_being_written_is_written_after_it() -> None:
    async def story() -> None:
        disk = Disk()
        rows = disk.rows(("r", "old"))
        first = asyncio.ensure_future(rows.put(("r", "new")))
        await disk.writing.wait()
        second = asyncio.ensure_future(rows.put(("r", "old")))
        await asyncio.sleep(0)
        disk.goes_on.set()
        await asyncio.gather(first, second)
        assert disk.written == [("r", "new"), ("r", "old")]
        assert list(rows) == [("r", "old")]

    asyncio.run(story())


def test_readers_see_a_changed_row_and_the_change_count_together_after_the_write() -> None:
    async def story() -> None:
        disk = Disk()
        rows = disk.rows()
        change = asyncio.ensure_future(rows.put(("r", "1")))
        await disk.writing.wait()
        assert (list(rows), rows.changes) == ([], 0)
        disk.goes_on.set()
        await change
        assert (list(rows), rows.changes) == ([("r", "1")], 1)

    asyncio.run(story())


def test_a_failed_write_leaves_the_rows_in_memory_unchanged() -> None:
    async def story() -> None:
        disk = Disk()
        rows = disk.rows(("r", "1"))
        disk.fails = True
        disk.goes_on.set()
        for change in (rows.put(("r", "2")), rows.drop("r")):
            with pytest.raises(VgpuError):
                await change
        assert (list(rows), rows.changes) == ([("r", "1")], 0)

    asyncio.run(story())
