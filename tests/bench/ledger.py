"""The ledger beside bare SQLite commits: intents of 1, 16 and 64 callers, commits, loading."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from tests.bench.common import Report, at_once, latency_row
from tests.bench.samples import UUIDS, active, allocation, event
from tests.bench.sqlite import WARM, BareCommits
from vgpud.ledger import Ledger
from vgpud.ledger.batch import Committer, Job
from vgpud.model.tenancy import Allocation

_LOADED = 10_000
_TURN = 50  # size of the blocks in which bare commits and intents alternate, because the disk's speed varies


def run(calls: int) -> Report:
    """Makes `calls` calls for one caller, and four times as many for many callers."""
    report = Report("ledger")
    with tempfile.TemporaryDirectory(prefix="vgpud-bench-") as folder:
        asyncio.run(_one_caller(report, Path(folder), calls))
        asyncio.run(_many_callers(report, Path(folder), 4 * calls))
        asyncio.run(_load(report, Path(folder)))
    return report


async def _one_caller(report: Report, folder: Path, calls: int) -> None:
    ready = [allocation(n) for n in range(WARM + calls)]
    intents: list[float] = []
    with BareCommits(folder) as bare:
        async with await Ledger.open(folder / "one.db") as ledger:
            await at_once(1, WARM, partial(_intent, ledger, ready))
            for first in range(WARM, WARM + calls, _TURN):
                bare.measure(_TURN)
                for wanted in ready[first : first + _TURN]:
                    began = time.perf_counter()
                    await ledger.intent(wanted)
                    intents.append(time.perf_counter() - began)
            commits, _ = await at_once(1, calls, partial(_commit, ledger, [active(one) for one in ready]))
        yardstick = report.add(bare.row())
    row = report.add(latency_row("intent, 1 caller", intents, sum(intents)))
    over = (row.p50_us or 0.0) - (yardstick.p50_us or 0.0)
    report.value("intent over the bare commit, p50", over, "us", "aim: within 60")
    report.add(latency_row("commit (not synced by itself), 1 caller", commits, sum(commits)))


async def _many_callers(report: Report, folder: Path, calls: int) -> None:
    async with await Ledger.open(folder / "many.db") as ledger:
        first = 0
        for clients in (16, 64):
            ready = [allocation(first + n) for n in range(calls)]
            first += calls
            with counted_batches() as sizes:
                seconds, elapsed = await at_once(clients, calls, partial(_intent, ledger, ready))
            mean = sum(sizes) / len(sizes)
            report.add(latency_row(f"intent, {clients} callers", seconds, elapsed, f"{mean:.1f} a sync"))


@contextmanager
def counted_batches() -> Iterator[list[int]]:
    """Yields a list that receives the size of each transaction during the block."""
    sizes: list[int] = []
    original = Committer.run

    def run(committer: Committer, jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))
        original(committer, jobs)

    with mock.patch.object(Committer, "run", run):
        yield sizes


async def _intent(ledger: Ledger, ready: Sequence[Allocation], _: int, number: int) -> None:
    await ledger.intent(ready[number])


async def _commit(ledger: Ledger, ready: Sequence[Allocation], _: int, number: int) -> None:
    await ledger.commit(ready[number], event(ready[number].id))


async def fill(path: Path, count: int, uuids: tuple[str, ...]) -> None:
    """Fills a ledger with this number of active allocations."""
    async with await Ledger.open(path) as ledger:
        wanted = [allocation(n, uuids) for n in range(count)]
        await asyncio.gather(*[ledger.intent(one) for one in wanted])
        await asyncio.gather(*[ledger.commit(active(one), event(one.id)) for one in wanted])


async def _load(report: Report, folder: Path) -> None:
    path = folder / "load.db"
    await fill(path, _LOADED, UUIDS)
    began = time.perf_counter()
    async with await Ledger.open(path) as ledger:
        opened = time.perf_counter()
        state = await ledger.load()
        loaded = time.perf_counter()
    assert len(state.allocations) == _LOADED
    report.value(f"open with {_LOADED} allocations", (opened - began) * 1e3, "ms")
    report.value(f"load {_LOADED} allocations", (loaded - opened) * 1e3, "ms", "aim: 300")
