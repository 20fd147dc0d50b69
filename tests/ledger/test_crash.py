"""kill -9 and power cuts: which acknowledged writes the next start finds."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger.samples import ledger_path
from tests.native.harness import TEST_BUILD
from vgpud.ledger import Ledger, LedgerState, RowTable
from vgpud.model.tenancy import State

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["intent", "original", "commit", "release", "forget"]
REACHED: dict[str, set[State | None]] = {
    "intent": {State.ALLOCATING, State.ACTIVE, State.RELEASING, None},
    "original": {State.ALLOCATING, State.ACTIVE, State.RELEASING, None},
    "commit": {State.ACTIVE, State.RELEASING, None},
    "release": {State.RELEASING, None},
    "forget": {None},
}


def churn(path: Path, first: int, writers: int, lines: int, environment: dict[str, str]) -> dict[int, str]:
    """Runs a writer and kills it after this many acknowledgements. Returns the last acknowledged verb of each
    number.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ledger.churn", str(path), str(first), str(writers)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    process.kill()
    said += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    words = [line.decode().split() for line in said if line.endswith(b"\n")]
    assert len(words) >= lines
    return {int(number): verb for verb, number in words}


def reopened(path: Path) -> tuple[LedgerState, set[str]]:
    """Returns what a start reads, and the devices with a recorded original setting."""

    async def work() -> tuple[LedgerState, set[str]]:
        async with await Ledger.open(path) as ledger:
            return await ledger.load(), {uuid for uuid, *_ in ledger.rows[RowTable.ORIGINALS]}

    return asyncio.run(work())


@pytest.mark.parametrize("writers", [1, 16])
def test_a_kill_loses_no_acknowledged_write(tmp_path: Path, writers: int) -> None:
    path = ledger_path(tmp_path)
    chance = random.Random(writers)
    last: dict[int, str] = {}
    revision = 0
    for start in range(4):
        last |= churn(path, 100_000 * start, writers, chance.randrange(1, 400), {})
        state, originals = reopened(path)
        found = {a.id: a.state for a in state.allocations}
        for number, verb in last.items():
            assert found.get(f"a{number}") in REACHED[verb], (number, verb)
            assert verb == "intent" or f"GPU-{number}" in originals
        assert state.revision > revision
        revision = state.revision


# a preloaded library that records the length of the write-ahead log at each sync
SHIM = TEST_BUILD / "libsynced.so"


@pytest.mark.parametrize("lines", [1, 2, 3, 21, 100])
def test_a_power_cut_loses_only_writes_that_finish_an_operation(tmp_path: Path, lines: int) -> None:
    """After a power cut only writes that finish an operation (commit, forget) may be missing.

    The test cuts the write-ahead log to its length at the last sync. There is one writer, because an intent
    of another writer would also sync this writer's commits. It makes few writes, so SQLite does not begin the
    log anew.
    """
    path = ledger_path(tmp_path)
    synced = tmp_path / "synced"
    last = churn(path, 0, 1, lines, {"LD_PRELOAD": str(SHIM), "SYNC_LOG": str(synced)})
    log = Path(f"{path}-wal")
    size = max((int(line) for line in synced.read_text().split()), default=0)
    assert size <= log.stat().st_size < 4 * 1024 * 1024
    os.truncate(log, size)
    Path(f"{path}-shm").unlink()
    state, originals = reopened(path)
    found = {a.id: a.state for a in state.allocations}
    for number, verb in last.items():
        # a write that finishes an operation may be lost; then the ledger has the durable write before it
        durable = {"commit": "original", "forget": "release"}.get(verb, verb)
        assert found.get(f"a{number}") in REACHED[durable], (number, verb)
        assert verb == "intent" or f"GPU-{number}" in originals


def test_intents_are_synced_to_disk_and_writes_that_finish_an_operation_are_not(tmp_path: Path) -> None:
    synced = tmp_path / "synced"
    last = churn(ledger_path(tmp_path), 0, 1, 100, {"LD_PRELOAD": str(SHIM), "SYNC_LOG": str(synced)})
    # the number of durable writes: intent, original and release
    durable = sum(n % 3 != 0 for n in last) + 2 * len(last)
    count = len(synced.read_text().split())
    assert durable - 3 <= count <= durable + 3, "at the start and at the cut, one or two more or less"
