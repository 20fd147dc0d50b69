"""The schema of the ledger: the tables, as a list of migrations.

The file's `user_version` is the number of migrations applied. Pending migrations and the new number are one
durable transaction, so that a crash leaves the old version intact.
"""

import sqlite3

# Value of PRAGMA application_id, which identifies the type of the file: "vgpu" in ASCII.
APPLICATION_ID = 0x76677075

Migration = tuple[str, ...]

MIGRATIONS: tuple[Migration, ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
        """CREATE TABLE allocations (
            id TEXT NOT NULL UNIQUE,
            request_id TEXT NOT NULL,
            request_digest TEXT NOT NULL, -- SHA-256 of the request without the process it is bound to
            owner_uid INTEGER NOT NULL,
            owner_gid INTEGER NOT NULL,
            created_unix_ns INTEGER NOT NULL,
            request TEXT NOT NULL, -- JSON, like reasons, slices and edits
            reasons TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN (
                'allocating', 'active', 'resizing', 'suspending', 'suspended', 'resuming', 'releasing',
                'failed'
            )),
            revision INTEGER NOT NULL,
            slices TEXT NOT NULL,
            edits TEXT NOT NULL,
            failure TEXT NOT NULL,
            suspended TEXT NOT NULL, -- JSON: processes that wait
            UNIQUE (owner_uid, request_id) -- nobody can take the ids that another user will want
        ) STRICT""",
        """CREATE TABLE originals (
            device_uuid TEXT NOT NULL,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (device_uuid, key)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE events (
            revision INTEGER PRIMARY KEY,
            kind TEXT NOT NULL,
            subject TEXT NOT NULL,
            sentence TEXT NOT NULL,
            unix_ns INTEGER NOT NULL
        ) STRICT""",
    ),
    (
        """ALTER TABLE allocations ADD COLUMN cause TEXT NOT NULL DEFAULT 'hand'
            CHECK (cause IN ('hand', 'idle', 'turn'))""",
    ),
    (
        """CREATE TABLE marks (
            allocation_id TEXT NOT NULL,
            kind TEXT NOT NULL,
            subject TEXT NOT NULL,
            amount INTEGER NOT NULL,
            sentence TEXT NOT NULL,
            since_unix_ns INTEGER NOT NULL,
            PRIMARY KEY (allocation_id, kind)
        ) STRICT, WITHOUT ROWID""",
    ),
    ("ALTER TABLE allocations ADD COLUMN paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1))",),
    # the user to whom the event is counted; earlier events are counted to root
    (
        "ALTER TABLE events ADD COLUMN user INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX events_of_user ON events (user)",
    ),
)


def version(connection: sqlite3.Connection) -> int:
    """The number of migrations that were applied to the file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Migrates the file to the newest version. If a statement fails, nothing is changed.

    Precondition: `connection` is in autocommit mode, with synchronous=FULL.
    """
    done = version(connection)
    if done >= len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for migration in migrations[done:]:
            for statement in migration:
                connection.execute(statement)
        # the number is formatted into the text, because a PRAGMA takes no parameters
        connection.execute(f"PRAGMA user_version = {len(migrations):d}")
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
