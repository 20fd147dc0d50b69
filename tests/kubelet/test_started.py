"""The record of the containers that run in allocations of the kubelet."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kubelet.conftest import run
from tests.kubelet.double import PATIENCE_SECONDS
from tests.kubelet.test_containers import container
from tests.ledger.test_rows import Disk
from vgpud.ledger.rows import LedgerRows, RowTable
from vgpud.model.tenancy import Lifetime
from vgpud.serve.kubelet.started import Started


@pytest.mark.parametrize("write", ["add", "forget"])
def test_a_container_that_ends_while_its_ledger_row_is_written_is_recorded_as_ended(
    write: str,
) -> None:
    """If vgpud missed this end, the allocation would stay until the next start of vgpud."""

    async def story() -> None:
        ended, disk = asyncio.Event(), Disk()
        disk.goes_on.set()
        record = Started(LedgerRows(RowTable.CONTAINERS, (), disk.write), "boot", ended.set)
        with container() as other:
            await record.add("two", other)
            with container() as init:
                await record.add("one", init)
                disk.writing.clear()
                disk.goes_on.clear()
                job = record.add("three", other) if write == "add" else record.forget("two")
                change = asyncio.ensure_future(job)
                await disk.writing.wait()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await ended.wait()
            disk.goes_on.set()
            await change
            assert record.began("one") and not record.runs("one")
            assert record.runs("three") == (write == "add")
            assert record.runs("two") == (write == "add")
        record.close()

    run(story())


def test_ledger_rows_of_ended_containers_are_deleted_when_another_container_starts(tmp_path: Path) -> None:
    """The rows of a running container, of one whose control group still exists, and of other allocations
    stay.
    """
    (standing := tmp_path / "standing").mkdir()

    async def story() -> None:
        disk = Disk()
        disk.goes_on.set()
        rows = LedgerRows(RowTable.CONTAINERS, [("one", "1", "1", "an earlier boot", "")], disk.write)
        record = Started(rows, "boot", lambda: None)

        async def begin(request_id: str, init: Lifetime, group: Path) -> Lifetime:
            begun = replace(init, cgroup=f"1 {group}")
            await record.add(request_id, begun)
            return begun

        def kept() -> set[Lifetime]:
            return {Lifetime(int(row[1]), int(row[2]), row[4]) for row in rows}

        with container() as init:
            other = await begin("two", init, tmp_path / "gone")
        with container() as init:
            walled = await begin("one", init, standing)
        with container() as init:
            running = await begin("one", init, tmp_path / "running")
            for number in range(5):
                with container() as again:
                    last = await begin("one", again, tmp_path / str(number))
            assert kept() == {other, walled, running, last}
            with container() as again:
                last = await begin("one", again, standing)
            assert kept() == {other, running, last}
            assert Started(rows, "boot", lambda: None).runs("one")
        with container() as first, container() as second:
            pair = await asyncio.gather(
                begin("one", first, tmp_path / "a"), begin("one", second, tmp_path / "b")
            )
            assert kept() == {other, last, *pair}
        record.close()
        assert Started(rows, "boot", lambda: None).began("one")

    run(story())
