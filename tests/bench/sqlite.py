"""A baseline: one durable commit of a row of similar size, without the ledger."""

import sqlite3
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.common import Row, latency_row

WARM = 400  # commits after which SQLite reuses its log from the start, so the log no longer grows
_ROW_BYTES = 1600


class BareCommits:
    """WAL and synchronous=FULL, with two unique columns as in the ledger."""

    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "bare.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("CREATE TABLE t (id TEXT UNIQUE, request_id TEXT UNIQUE, body TEXT) STRICT")
        self._body = "x" * _ROW_BYTES
        self._number = 0
        for _ in range(WARM):
            self.commit()
        self.seconds: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def commit(self) -> float:
        """Commits a row and returns the seconds."""
        self._number += 1
        row = (f"a{self._number:06d}", f"r{self._number:06d}", self._body)
        began = time.perf_counter()
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("INSERT INTO t VALUES (?, ?, ?)", row)
        self._db.execute("COMMIT")
        return time.perf_counter() - began

    def measure(self, count: int) -> None:
        self.seconds += [self.commit() for _ in range(count)]

    def row(self) -> Row:
        return latency_row("bare SQLite commit, synchronous=FULL", self.seconds, sum(self.seconds))
