"""The record of containers that run in the kubelet's allocations."""

import asyncio

import pytest

from tests.kubelet.conftest import run
from tests.kubelet.double import PATIENCE_SECONDS
from tests.kubelet.test_containers import container
from tests.ledger.test_rows import Disk
from vgpud.ledger.rows import LedgerRows, RowTable
from vgpud.serve.kubelet.started import Started


@pytest.mark.parametrize("write", ["add", "forget"])
def test_a_container_that_ends_while_its_record_is_written_is_recorded_as_ended(
    write: str,
) -> None:
    """vgpud must notice this end, or the allocation would stay until the next start of vgpud."""

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
