"""The ledger's interface for the rest of vgpud."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from vgpud.ledger import faults, files
from vgpud.ledger.batch import Committer, Durability
from vgpud.ledger.codec import encode_allocation, encode_outcome
from vgpud.ledger.rows import BEFORE_EFFECTS, LedgerRows, RowTable
from vgpud.ledger.tables import LedgerState, Tables
from vgpud.ledger.writer import Writer
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.marks import Mark
from vgpud.model.rows import Row
from vgpud.model.tenancy import Allocation, State

T = TypeVar("T")
# the states that are intents on an existing allocation
_INTENTS = (State.RESIZING, State.SUSPENDING, State.RESUMING, State.RELEASING)


class Ledger:
    """Keeps allocations, events and the tables in `rows` on disk. One event loop uses it.

    A method that writes returns when its write survives the failures of its `durability`. After a VgpuError
    (LEDGER_FULL, LEDGER_READ_ONLY, LEDGER_CORRUPT, LEDGER_FAILED) nothing is written; the methods work again
    when the cause is removed. A write whose call is cancelled may still be made.
    """

    def __init__(self, writer: Writer, lock: int, rows: Mapping[RowTable, Iterable[Row]]) -> None:
        self._writer = writer
        self._lock: int | None = lock
        self.rows = {table: LedgerRows(table, found, self.write_row) for table, found in rows.items()}

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Opens and locks the ledger at `path`. Precondition: its directory exists.

        Raises VgpuError: LEDGER_LOCKED (with the holder's pid), LEDGER_NEWER and LEDGER_CORRUPT (the file
        stays as it is), LEDGER_READ_ONLY, LEDGER_FULL, LEDGER_FAILED.
        """
        committer, lock, rows = await asyncio.to_thread(_open, path)
        return cls(Writer(committer, asyncio.get_running_loop()), lock, rows)

    async def close(self) -> None:
        """Writes all submitted operations, and unlocks the file."""
        await self._writer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def load(self) -> LedgerState:
        """Reads all allocations, in the order of creation, and the other state. Raises
        VgpuError(LEDGER_CORRUPT) too.
        """
        return await self._do(Tables.load, Durability.PROCESS)

    async def intent(self, allocation: Allocation, *, durability: Durability = Durability.POWER) -> None:
        """Records an intent. An allocation in state ALLOCATING is new, in any other state it exists. A
        suspended allocation that is moved stays suspended.

        For an existing allocation the state, slices, edits, failure, suspended, cause and paused are written.
        Raises VgpuError: REQUEST_ID_REUSED, NO_SUCH_ALLOCATION.
        """
        if allocation.state is State.ALLOCATING:
            row = encode_allocation(allocation)
            return await self._do(lambda tables: tables.begin(row), durability)
        if allocation.state in _INTENTS or (allocation.state is State.SUSPENDED and allocation.moves):
            outcome = encode_outcome(allocation)
            return await self._do(lambda tables: tables.change(allocation.id, outcome), durability)
        raise VgpuError(
            ErrorCode.BUG,
            f"an intent cannot have state {allocation.state.value}: allocation {allocation.id}",
            "report this with the journal of vgpud",
        )

    async def rebind(self, allocation: Allocation, *, durability: Durability = Durability.PROCESS) -> None:
        """Records the process to which an allocation is bound, and its workload's names. Raises
        VgpuError(NO_SUCH_ALLOCATION).
        """
        request = encode_allocation(allocation).request
        await self._do(lambda tables: tables.rebind(allocation.id, request), durability)

    async def commit(
        self, allocation: Allocation, event: Event, *, durability: Durability = Durability.PROCESS
    ) -> Allocation:
        """Records an outcome. The allocation and the event get the next revision.

        The state, slices, edits, failure, suspended, cause and paused are written; request and reasons stay
        as the intent wrote them. `event.revision` is ignored. Raises VgpuError(NO_SUCH_ALLOCATION).
        """
        outcome = encode_outcome(allocation)
        revision = await self._do(lambda tables: tables.commit(allocation.id, outcome, event), durability)
        return replace(allocation, revision=revision)

    async def forget(
        self, allocation_id: str, event: Event | None, *, durability: Durability = Durability.PROCESS
    ) -> Event | None:
        """Deletes an allocation. Returns the event with its revision; None without an allocation or event."""
        revision = await self._do(lambda tables: tables.forget(allocation_id, event), durability)
        return None if event is None or revision is None else replace(event, revision=revision)

    async def mark(self, mark: Mark, event: Event, *, durability: Durability = Durability.PROCESS) -> Event:
        """Records a mark of an allocation; it replaces an earlier mark of the same kind. Returns the event
        with its revision. Raises VgpuError(NO_SUCH_ALLOCATION).
        """
        return replace(event, revision=await self._do(lambda tables: tables.mark(mark, event), durability))

    async def unmark(self, mark: Mark, event: Event, *, durability: Durability = Durability.PROCESS) -> Event:
        """Deletes a mark. Returns the event with its revision."""
        return replace(event, revision=await self._do(lambda tables: tables.unmark(mark, event), durability))

    async def write_row(self, table: RowTable, key: Row, row: Row | None) -> None:
        """Replaces the row of a key in the file, or deletes it if `row` is None. For `rows` only."""
        before_effect = row is not None and table in BEFORE_EFFECTS
        durability = Durability.POWER if before_effect else Durability.PROCESS
        await self._do(lambda tables: tables.write_row(table, key, row), durability)

    async def event(
        self,
        kind: EventKind,
        subject: str,
        sentence: str,
        user: int = 0,
        *,
        durability: Durability = Durability.PROCESS,
    ) -> Event:
        """Writes an event, which is counted to `user`. Returns it with its revision and time."""
        return await self._do(lambda tables: tables.event(kind, subject, sentence, user), durability)

    async def events_after(self, revision: int, most: int) -> tuple[Event, ...]:
        """The first `most` kept events with a revision greater than `revision`. Raises
        VgpuError(BAD_REVISION) if an event after that revision was deleted, or the revision is not used yet.
        """
        return await self._do(lambda tables: tables.events_after(revision, most), Durability.PROCESS)

    async def last_events(self, count: int, user: int | None = None) -> tuple[Event, ...]:
        """The latest `count` kept events (of `user`, if it is given), oldest first."""
        return await self._do(lambda tables: tables.last_events(count, user), Durability.PROCESS)

    async def answer(self) -> None:
        """Returns once the writer thread has finished all earlier operations. Writes nothing."""
        await self._do(lambda tables: None, Durability.PROCESS)

    async def sync(self) -> None:
        """Makes all earlier writes survive a power cut."""
        await self._do(Tables.note_sync, Durability.POWER)

    async def set_boot_id(self, boot_id: str) -> int:
        """Records the boot id. Returns the last revision; if the boot is a new one, revisions are skipped."""
        return await self._do(lambda tables: tables.set_boot_id(boot_id), Durability.POWER)

    async def _do(self, operation: Callable[[Tables], T], durability: Durability) -> T:
        return cast(T, await self._writer.submit(operation, durability))


def _open(path: Path) -> tuple[Committer, int, dict[RowTable, list[Row]]]:
    lock = files.lock(path)
    try:
        connection = files.connect(path)
        try:
            committer = Committer(connection, path)
            return committer, lock, {table: committer.tables.rows(table) for table in RowTable}
        except sqlite3.Error as error:
            connection.close()
            raise faults.from_sqlite(error, path) from error
        except BaseException:
            connection.close()
            raise
    except BaseException as error:
        os.close(lock)
        # a text in place of a number, or bytes that are not UTF-8 in SQLite's message
        if isinstance(error, ValueError):
            raise faults.corrupt(path, str(error)) from error
        raise
