"""The SQL of each operation on the tables, which runs inside the caller's transaction.

Only the writer thread calls these methods. `revision` is the last revision that was used; a caller that rolls
a transaction back must also restore `revision`.
"""

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass

from vgpud.ledger.codec import AllocationRow, Outcome, collector_paused, decode_allocation
from vgpud.ledger.rows import KEYS, RowTable
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.marks import Mark, MarkKind
from vgpud.model.rows import Row
from vgpud.model.tenancy import Allocation

EVENTS_KEPT = 10_000
# Number of the newest events that are kept for all users together, so that a watcher can reconnect.
NEWEST_KEPT = 5_000
# Maximum of revisions without a sync; the next batch is then synced. A power cut loses at most these, and a
# new boot skips as many, so that no revision is used twice.
UNSYNCED_REVISIONS = 1_000
# the columns of an event, in the order of Event's fields
_EVENT = "revision, kind, subject, sentence, unix_ns, user"
# The columns are in the order of AllocationRow.
_SELECT = (
    "SELECT id, request_id, request_digest, owner_uid, owner_gid, created_unix_ns, request, reasons,"
    " state, revision, slices, edits, failure, suspended, cause, paused FROM allocations ORDER BY rowid"
)
_INSERT = (
    "INSERT INTO allocations (id, request_id, request_digest, owner_uid, owner_gid, created_unix_ns,"
    " request, reasons, state, revision, slices, edits, failure, suspended, cause, paused)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# `place` numbers the events of each user from the newest one.
_PRUNE = (
    "DELETE FROM events WHERE revision IN (SELECT revision FROM (SELECT revision, row_number() OVER"
    " (PARTITION BY user ORDER BY revision DESC) AS place FROM events WHERE revision <= ?)"
    " ORDER BY place DESC, revision LIMIT ?) RETURNING revision"
)
_UPDATE = (
    "UPDATE allocations SET state = ?, slices = ?, edits = ?, failure = ?, suspended = ?, cause = ?,"
    " paused = ?, revision = coalesce(?, revision) WHERE id = ?"
)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a start reads from the ledger; `boot_id` is "" in a new ledger.

    `released` has the ids of released allocations whose events are still kept, oldest first.
    """

    allocations: tuple[Allocation, ...]
    revision: int
    boot_id: str
    released: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


class Tables:
    """The tables of the ledger, on one connection. It counts the revisions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        newest = self._one("SELECT max(revision) FROM events") or 0
        self.revision = max(int(newest), int(self._meta("revision_floor", "0")))

    def load(self) -> LedgerState:
        rows = self._db.execute(_SELECT)
        with collector_paused():
            allocations = tuple([decode_allocation(AllocationRow(*row)) for row in rows])
        released = self._db.execute(
            "SELECT subject FROM events WHERE kind = ? ORDER BY revision",
            (EventKind.ALLOCATION_RELEASED.value,),
        ).fetchall()
        return LedgerState(
            allocations=allocations,
            revision=self.revision,
            boot_id=self._meta("boot_id", ""),
            released=tuple([subject for (subject,) in released]),
            marks=tuple(self._marks()),
        )

    def _marks(self) -> Iterator[Mark]:
        kinds = {kind.value: kind for kind in MarkKind}
        rows = self._db.execute(
            "SELECT allocation_id, kind, subject, amount, sentence, since_unix_ns FROM marks"
        )
        for allocation_id, kind, *rest in rows:
            if kind in kinds:  # kinds that only a newer vgpud knows are skipped
                yield Mark(allocation_id, kinds[kind], *rest)

    def mark(self, mark: Mark, event: Event) -> int:
        """Writes a mark. An allocation has at most one mark of each kind. Returns the event's revision."""
        if self._one("SELECT id FROM allocations WHERE id = ?", mark.allocation_id) is None:
            raise _missing(mark.allocation_id)
        row = (
            mark.allocation_id,
            mark.kind.value,
            mark.subject,
            mark.amount,
            mark.sentence,
            mark.since_unix_ns,
        )
        self._db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?, ?)", row)
        return self._event(event)

    def unmark(self, mark: Mark, event: Event) -> int:
        key = (mark.allocation_id, mark.kind.value)
        self._db.execute("DELETE FROM marks WHERE allocation_id = ? AND kind = ?", key)
        return self._event(event)

    def begin(self, row: AllocationRow) -> None:
        try:
            self._db.execute(_INSERT, row)
        except sqlite3.IntegrityError as error:
            raise self._taken(row, error) from None

    def change(self, allocation_id: str, outcome: Outcome) -> None:
        """Updates an allocation's row without a new revision."""
        done = self._db.execute(_UPDATE, (*outcome, None, allocation_id))
        if done.rowcount == 0:
            raise _missing(allocation_id)

    def rebind(self, allocation_id: str, request: str) -> None:
        done = self._db.execute("UPDATE allocations SET request = ? WHERE id = ?", (request, allocation_id))
        if done.rowcount == 0:
            raise _missing(allocation_id)

    def commit(self, allocation_id: str, outcome: Outcome, event: Event) -> int:
        """Updates an allocation's row. Returns the new revision, which the allocation and the event share."""
        done = self._db.execute(_UPDATE, (*outcome, self.revision + 1, allocation_id))
        if done.rowcount == 0:
            raise _missing(allocation_id)
        return self._event(event)

    def forget(self, allocation_id: str, event: Event | None) -> int | None:
        """Deletes an allocation's row. Returns the event's revision; None if there was no event or no row."""
        done = self._db.execute("DELETE FROM allocations WHERE id = ?", (allocation_id,))
        self._db.execute("DELETE FROM marks WHERE allocation_id = ?", (allocation_id,))
        if event is None or done.rowcount == 0:
            return None
        return self._event(event)

    def rows(self, table: RowTable) -> list[Row]:
        """All rows of a table, in the order of their last change."""
        return self._db.execute(f"SELECT * FROM {table.value} ORDER BY rowid").fetchall()  # noqa: S608

    def write_row(self, table: RowTable, key: Row, row: Row | None) -> None:
        """Replaces the row of a key, or deletes it if `row` is None."""
        equal = " AND ".join(f"{column} = ?" for column in KEYS[table])
        self._db.execute(f"DELETE FROM {table.value} WHERE {equal}", key)  # noqa: S608
        if row is not None:
            places = ", ".join("?" * len(row))
            self._db.execute(f"INSERT INTO {table.value} VALUES ({places})", row)  # noqa: S608

    def event(self, kind: EventKind, subject: str, sentence: str, user: int = 0) -> Event:
        event = Event(self.revision + 1, kind, subject, sentence, time.time_ns(), user)
        self._event(event)
        return event

    def events_after(self, revision: int, most: int) -> tuple[Event, ...]:
        oldest = int(self._meta("pruned_through", "0"))
        if not oldest <= revision <= self.revision:
            raise VgpuError(
                ErrorCode.BAD_REVISION,
                f"the events after revision {revision} are not all kept: watches can begin at "
                f"revisions {oldest} to {self.revision}",
                "list everything once, then watch from the revision of that list",
            )
        rows = self._db.execute(
            f"SELECT {_EVENT} FROM events WHERE revision > ? ORDER BY revision LIMIT ?",  # noqa: S608
            (revision, most),
        )
        return tuple([_event(row) for row in rows])

    def last_events(self, count: int, user: int | None) -> tuple[Event, ...]:
        asked, parameters = ("", (count,)) if user is None else ("WHERE user = ?", (user, count))
        rows = self._db.execute(
            f"SELECT {_EVENT} FROM events {asked} ORDER BY revision DESC LIMIT ?",  # noqa: S608
            parameters,
        )
        return tuple([_event(row) for row in rows])[::-1]

    def set_boot_id(self, boot_id: str) -> int:
        """Records the boot id. Returns the last revision. After a reboot, as many revisions are skipped as a
        power cut can have lost.
        """
        known = self._meta("boot_id", "")
        if known not in ("", boot_id):
            self.revision += UNSYNCED_REVISIONS
            self._set_meta("revision_floor", str(self.revision))
        self._set_meta("boot_id", boot_id)
        return self.revision

    def note_sync(self) -> None:
        """Writes something, because SQLite does not sync a transaction without changes."""
        self._set_meta("synced_unix_ns", str(time.time_ns()))

    def prune(self, keep: int = EVENTS_KEPT, newest: int = NEWEST_KEPT) -> None:
        """Deletes events until `keep` are left. The `newest` stay. Of the older ones, the user with the most
        events loses the oldest of them first, so that no user's events displace the history of another.
        """
        excess = int(self._one("SELECT count(*) FROM events") or 0) - keep
        if excess <= 0:
            return
        window = self._one("SELECT revision FROM events ORDER BY revision DESC LIMIT 1 OFFSET ?", newest) or 0
        deleted = [int(revision) for (revision,) in self._db.execute(_PRUNE, (window, excess))]
        pruned_through = max([int(self._meta("pruned_through", "0")), *deleted])
        self._set_meta("pruned_through", str(pruned_through))

    def _event(self, event: Event) -> int:
        self.revision += 1
        self._db.execute(
            f"INSERT INTO events ({_EVENT}) VALUES (?, ?, ?, ?, ?, ?)",  # noqa: S608
            (self.revision, event.kind.value, event.subject, event.sentence, event.unix_ns, event.user),
        )
        return self.revision

    def _taken(self, row: AllocationRow, error: sqlite3.IntegrityError) -> VgpuError:
        holder = self._one(
            "SELECT id FROM allocations WHERE owner_uid = ? AND request_id = ?", row.owner_uid, row.request_id
        )
        if holder is None:
            return VgpuError(
                ErrorCode.BUG,
                f"the ledger cannot record allocation {row.id!r}: {error}",
                "report this with the journal of vgpud",
            )
        return VgpuError(
            ErrorCode.REQUEST_ID_REUSED,
            f"request id {row.request_id!r} already belongs to allocation {holder!r}",
            "use a new request id, or leave it out",
        )

    def _one(self, sql: str, *parameters: str | int) -> str | int | None:
        row = self._db.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    def _meta(self, key: str, default: str) -> str:
        value = self._one("SELECT value FROM meta WHERE key = ?", key)
        return default if value is None else str(value)

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO meta (key, value) VALUES (?, ?)"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )


def _event(row: tuple[int, str, str, str, int, int]) -> Event:
    revision, kind, subject, sentence, unix_ns, user = row
    try:
        return Event(revision, EventKind(kind), subject, sentence, unix_ns, user)
    except ValueError:
        raise VgpuError(
            ErrorCode.LEDGER_CORRUPT,
            f"event {revision} in the ledger is of unknown kind {kind!r}",
            "restore the state directory from a backup",
        ) from None


def _missing(allocation_id: str) -> VgpuError:
    return VgpuError(
        ErrorCode.NO_SUCH_ALLOCATION,
        f"allocation {allocation_id!r} is not in the ledger",
        "list the allocations that exist with vgpuctl ls",
    )
