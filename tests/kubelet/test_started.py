"""The record of containers that run in the kubelet's allocations."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.kubelet.conftest import run
from tests.kubelet.double import PATIENCE_SECONDS
from tests.kubelet.test_containers import container
from vgpud.serve.kubelet import started
from vgpud.serve.kubelet.started import Started
from vgpud.serve.statefile import write_state


@pytest.mark.parametrize("write", ["add", "forget"])
def test_a_container_that_ends_while_its_record_is_written_is_recorded_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """vgpud must notice this end, or the allocation would stay until the next start of vgpud."""
    writing, goes_on = threading.Event(), threading.Event()

    def slow(path: Path, body: dict[str, Any]) -> None:
        writing.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        write_state(path, body)

    async def story() -> None:
        ended = asyncio.Event()
        record = Started(tmp_path / "containers.json", "boot", ended.set)
        with container() as other:
            await record.add("two", other)
            with container() as init:
                await record.add("one", init)
                monkeypatch.setattr(started, "write_state", slow)
                job = record.add("three", other) if write == "add" else record.forget("two")
                change = asyncio.ensure_future(job)
                assert await asyncio.to_thread(writing.wait, PATIENCE_SECONDS)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await ended.wait()
            goes_on.set()
            await change
            assert record.began("one") and not record.runs("one")
            assert record.runs("three") == (write == "add")
            assert record.runs("two") == (write == "add")
        record.close()

    run(story())
