"""Group commit: many operations in one transaction, each with a separate result."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from vgpud.ledger import faults
from vgpud.ledger.tables import UNSYNCED_REVISIONS, Tables
from vgpud.model.errors import ErrorCode, VgpuError

Operation = Callable[[Tables], Any]


class Durability(IntEnum):
    """The failure that an acknowledged write survives. The package's docstring explains the two levels."""

    PROCESS = 0  # the write survives the end of the process, also by kill -9
    POWER = 1  # the write also survives a crash of the kernel and a power cut


_SYNCHRONOUS = {Durability.PROCESS: "NORMAL", Durability.POWER: "FULL"}


@dataclass(slots=True, eq=False)
class Job:
    """One submitted operation; the writer thread fills in `result` or `error`."""

    operation: Operation
    durability: Durability
    future: "asyncio.Future[Any]"
    result: Any = None
    error: BaseException | None = None

    def deliver(self) -> None:
        """Gives the result to the caller. Runs in the event loop's thread. If the call was cancelled, the
        result is dropped.
        """
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Committer:
    """Runs batches of jobs on one connection, in one thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self._path = path
        self.tables = Tables(connection)
        self._synced = self.tables.revision
        self._level: Durability | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs the jobs. Afterwards each has a committed result, or an error and no effect.

        An operation that raises VgpuError is rolled back to its own savepoint. If SQLite itself fails, for
        example on a full disk, the whole transaction may be lost; each job is then tried again in a separate
        transaction.
        """
        mark = self.tables.revision
        try:
            self._begin(self._durability(jobs))
            if len(jobs) == 1:
                self._attempt_alone(jobs[0])
            else:
                for job in jobs:
                    self._attempt(job)
            if self._db.in_transaction:
                self._db.execute("COMMIT")
            if self._level is Durability.POWER and self.tables.revision > mark:
                # SQLite does not sync a transaction without changes; this transaction contains an event, so
                # it was synced
                self._synced = self.tables.revision
        except sqlite3.Error as error:
            self._roll_back(mark)
            if len(jobs) == 1:
                jobs[0].error = faults.from_sqlite(error, self._path)
                return
            for job in jobs:
                job.result = job.error = None
                self.run([job])

    def prune(self) -> None:
        """Deletes old events. If that fails, they stay until the next call."""
        mark = self.tables.revision
        try:
            self._begin(Durability.PROCESS)
            self.tables.prune()
            self._db.execute("COMMIT")
        except sqlite3.Error:
            self._roll_back(mark)

    def fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Fails all operations after an unexpected error of `run`, so that no caller waits forever."""
        for job in jobs:
            job.error = faults.failed(self._path, f"its writer failed: {error}")
            job.error.__cause__ = error

    def close(self) -> None:
        self._db.close()

    def _durability(self, jobs: Sequence[Job]) -> Durability:
        # each operation uses at most one revision
        if self.tables.revision + len(jobs) - self._synced > UNSYNCED_REVISIONS:
            return Durability.POWER
        return max(job.durability for job in jobs)

    def _begin(self, durability: Durability) -> None:
        if durability is not self._level:
            # SQLite ignores this pragma inside a transaction, so it is set before
            self._db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
            self._level = durability
        self._db.execute("BEGIN IMMEDIATE")

    def _attempt_alone(self, job: Job) -> None:
        mark = self.tables.revision
        self._evaluate(job)
        if job.error is not None:
            self._roll_back(mark)

    def _attempt(self, job: Job) -> None:
        mark = self.tables.revision
        self._db.execute("SAVEPOINT job")
        self._evaluate(job)
        if job.error is not None:
            self._db.execute("ROLLBACK TO job")
            self.tables.revision = mark
        self._db.execute("RELEASE job")

    def _evaluate(self, job: Job) -> None:
        try:
            job.result = job.operation(self.tables)
        except sqlite3.Error:
            raise
        except VgpuError as error:
            job.error = error
        except Exception as error:  # an operation that fails unexpectedly must not end the writer thread
            job.error = VgpuError(
                ErrorCode.BUG,
                f"an operation of the ledger failed: {error!r}",
                "report this with the journal of vgpud",
            )
            job.error.__cause__ = error

    def _roll_back(self, revision: int) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self.tables.revision = revision
