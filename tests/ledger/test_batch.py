"""Group commit of the ledger: one transaction for many writes, with a result for each write."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.samples import allocation, event, ledger_path
from vgpud.ledger import Durability, Ledger, files
from vgpud.ledger.batch import Committer, Job
from vgpud.ledger.codec import encode_allocation
from vgpud.ledger.tables import UNSYNCED_REVISIONS, Tables
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind


class Bench:
    """A committer without its thread. It records the SQL statements that it executes."""

    def __init__(self, folder: Path) -> None:
        self.connection = files.connect(ledger_path(folder))
        self.committer = Committer(self.connection, ledger_path(folder))
        self.loop = asyncio.new_event_loop()
        self.sql: list[str] = []
        self.connection.set_trace_callback(self.sql.append)

    def job(self, operation: Callable[[Tables], Any], durability: Durability = Durability.POWER) -> Job:
        return Job(operation, durability, self.loop.create_future())

    def intent(self, number: int, request: int | None = None) -> Job:
        row = encode_allocation(allocation(number))
        if request is not None:
            row = row._replace(request_id=f"r{request}")
        return self.job(lambda tables: tables.begin(row))

    def ids(self) -> list[str]:
        return [row[0] for row in self.connection.execute("SELECT id FROM allocations ORDER BY rowid")]

    def count(self, statement: str) -> int:
        return sum(text.startswith(statement) for text in self.sql)

    def close(self) -> None:
        self.connection.close()
        self.loop.close()


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    with closing(Bench(tmp_path)) as made:
        yield made


def test_sixty_four_intents_at_once_are_written_in_one_commit(bench: Bench) -> None:
    jobs = [bench.intent(number) for number in range(64)]
    bench.committer.run(jobs)
    assert [job.error for job in jobs] == [None] * 64
    assert len(bench.ids()) == 64
    assert bench.count("COMMIT") == 1


def test_a_refused_write_does_not_fail_the_other_writes_of_its_batch(bench: Bench) -> None:
    jobs = [bench.intent(0), bench.intent(3, request=0), bench.intent(1, request=0)]
    bench.committer.run(jobs)
    assert [type(job.error) for job in jobs] == [type(None), VgpuError, type(None)]
    # the second write is refused, because another owner has its request id; the third is written
    assert bench.ids() == ["a0", "a1"]
    assert bench.count("COMMIT") == 1


def test_a_write_that_raises_midway_leaves_no_row(bench: Bench) -> None:
    def half(tables: Tables) -> None:
        tables.event(EventKind.DEVICE_CHANGED, "GPU-0", "half done")
        raise ZeroDivisionError

    def whole(tables: Tables) -> int:
        return tables.event(EventKind.DEVICE_CHANGED, "GPU-1", "done").revision

    for jobs in ([bench.job(half)], [bench.job(half), bench.job(whole)], [bench.job(whole)]):
        bench.committer.run(jobs)
        for job in jobs:
            broken = job.operation is half
            assert (job.error is not None) == broken
            if isinstance(job.error, VgpuError):
                assert job.error.code is ErrorCode.BUG
    subjects = bench.connection.execute("SELECT revision, subject FROM events").fetchall()
    assert subjects == [(1, "GPU-1"), (2, "GPU-1")]


def test_each_write_of_a_transaction_that_sqlite_rolled_back_is_retried_alone(bench: Bench) -> None:
    """After some errors SQLite itself rolls back all writes of the transaction."""

    def lose(tables: Tables) -> None:
        bench.connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    jobs = [bench.intent(0), bench.job(lose), bench.intent(2)]
    bench.committer.run(jobs)
    assert [job.error is None for job in jobs] == [True, False, True]
    assert isinstance(jobs[1].error, VgpuError) and jobs[1].error.code is ErrorCode.LEDGER_FAILED
    assert bench.ids() == ["a0", "a2"]


@pytest.mark.parametrize("count", [1, 5])
def test_a_full_disk_is_reported_and_the_next_write_succeeds(bench: Bench, count: int) -> None:
    limit = bench.connection.execute("PRAGMA max_page_count").fetchone()[0]
    pages = bench.connection.execute("PRAGMA page_count").fetchone()[0]
    bench.connection.execute(f"PRAGMA max_page_count = {pages}")
    jobs = [bench.intent(number) for number in range(100, 100 + 20 * count)]
    for first in range(0, len(jobs), count):
        bench.committer.run(jobs[first : first + count])
    errors = [job.error for job in jobs if job.error is not None]
    assert errors
    assert all(isinstance(e, VgpuError) and e.code is ErrorCode.LEDGER_FULL for e in errors)
    assert len(bench.ids()) == len(jobs) - len(errors)
    bench.connection.execute(f"PRAGMA max_page_count = {limit}")
    again = bench.intent(1)
    bench.committer.run([again])
    assert again.error is None


def test_revisions_of_a_transaction_that_failed_are_used_again(bench: Bench) -> None:
    pages = bench.connection.execute("PRAGMA page_count").fetchone()[0]
    bench.connection.execute(f"PRAGMA max_page_count = {pages}")
    job = bench.job(lambda t: t.event(EventKind.DEVICE_CHANGED, "GPU-0", "x" * 100_000))
    bench.committer.run([job])
    assert isinstance(job.error, VgpuError) and job.error.code is ErrorCode.LEDGER_FULL
    assert bench.committer.tables.revision == 0


def test_the_oldest_events_of_the_user_with_the_most_events_are_removed_first(bench: Bench) -> None:
    """Here 20 events are kept. The newest 8 of all are never removed, because watchers may need them."""
    tables = bench.committer.tables
    for user, count in ((0, 2), (1000, 9), (1001, 30)):
        for _ in range(count):
            tables.event(EventKind.DEVICE_CHANGED, f"GPU-{user}", "it changed", user)
    tables.prune(keep=20, newest=8)
    assert [len(tables.last_events(100, user)) for user in (0, 1000, 1001)] == [2, 5, 13]
    assert [one.revision for one in tables.last_events(100, 1000)] == [7, 8, 9, 10, 11]
    assert [one.revision for one in tables.events_after(28, 100)] == list(range(29, 42))
    with pytest.raises(VgpuError) as caught:  # events that a watcher from this revision needs are deleted
        tables.events_after(27, 100)
    assert caught.value.code is ErrorCode.BAD_REVISION
    tables.prune(keep=18, newest=8)
    assert tables.events_after(30, 100)[0].revision == 31


def test_a_batch_of_writes_has_the_durability_of_its_strictest_write(bench: Bench) -> None:
    def level() -> int:
        return int(bench.connection.execute("PRAGMA synchronous").fetchone()[0])

    def note(tables: Tables) -> None:
        tables.event(EventKind.DEVICE_CHANGED, "GPU-0", "it changed")

    bench.committer.run([bench.job(note, Durability.PROCESS)])
    assert level() == 1
    bench.committer.run([bench.job(note, Durability.PROCESS), bench.intent(1)])
    assert level() == 2
    bench.committer.run([bench.job(note, Durability.PROCESS)] * 2)
    assert level() == 1


def test_the_number_of_revisions_not_yet_synced_to_disk_is_bounded(bench: Bench) -> None:
    """After a reboot vgpud skips a constant number of revisions. It must be more than a power cut can
    lose.
    """

    def note(tables: Tables) -> None:
        tables.event(EventKind.DEVICE_CHANGED, "GPU-0", "it changed")

    unsynced = most = 0
    for size in (7, 250, 1) * 12:
        bench.sql.clear()
        bench.committer.run([bench.job(note, Durability.PROCESS) for _ in range(size)])
        synced = bench.connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        unsynced = 0 if synced else unsynced + size
        most = max(most, unsynced)
    assert 500 < most <= UNSYNCED_REVISIONS


def test_concurrent_callers_share_a_commit_of_the_ledger(tmp_path: Path) -> None:
    async def work() -> list[str]:
        async with await Ledger.open(ledger_path(tmp_path)) as ledger:
            await asyncio.gather(*[ledger.intent(allocation(n)) for n in range(300)])
            await asyncio.gather(*[ledger.commit(allocation(n), event(f"a{n}")) for n in range(300)])
            state = await ledger.load()
            assert sorted(a.revision for a in state.allocations) == list(range(1, 301))
            return [a.id for a in state.allocations]

    assert asyncio.run(work()) == [f"a{n}" for n in range(300)]


def test_a_cancelled_caller_does_not_disturb_other_callers_of_its_batch(tmp_path: Path) -> None:
    async def work() -> None:
        async with await Ledger.open(ledger_path(tmp_path)) as ledger:
            tasks = [asyncio.ensure_future(ledger.intent(allocation(n))) for n in range(20)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [result is None for result in done] == [False, True] * 10
            assert len((await ledger.load()).allocations) == 20

    asyncio.run(work())


def test_a_failure_of_the_ledgers_writer_thread_gives_every_waiting_caller_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committer.run() itself raises, as it does if a rollback fails or memory is short. All waiting callers
    get an error, and later callers are served.
    """

    async def work() -> None:
        async with await Ledger.open(ledger_path(tmp_path)) as ledger:
            with monkeypatch.context() as broken:

                def run(*_: object) -> None:
                    raise sqlite3.OperationalError("disk I/O error")

                broken.setattr(Committer, "run", run)
                with pytest.raises(VgpuError, match="disk I/O error") as failed:
                    await asyncio.wait_for(ledger.intent(allocation(0)), 300)
                assert failed.value.code is ErrorCode.LEDGER_FAILED
            await asyncio.wait_for(ledger.intent(allocation(1)), 300)

    asyncio.run(work())


def test_a_large_batch_needs_no_folder_for_temporary_files(bench: Bench) -> None:
    """Under ProtectSystem=strict no folder for temporary files is writable. SQLite's temporary files have
    names that begin with etilqs.
    """
    bench.committer.run([bench.intent(number) for number in range(64)])
    seen: set[str] = set()

    def look(tables: Tables) -> None:
        seen.update(str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
        tables.begin(encode_allocation(allocation(9999)))

    def rewrite(tables: Tables) -> None:
        bench.connection.execute("UPDATE allocations SET request = request || printf('%20000c', 'x')")

    jobs = [bench.job(rewrite), bench.job(rewrite), bench.job(look)]
    bench.committer.run(jobs)
    assert [job.error for job in jobs] == [None] * 3
    assert not any("etilqs" in name for name in seen)
