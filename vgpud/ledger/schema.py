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
    # Separate tables for what was in `originals` besides original settings, and for what the servers for
    # Kubernetes kept in files. Of a device's layouts the newest is taken over; "-" was no layout.
    (
        "CREATE TABLE drains (device_uuid TEXT PRIMARY KEY NOT NULL) STRICT",
        """CREATE TABLE mig_instances (
            device_uuid TEXT NOT NULL,
            gpu_instance TEXT NOT NULL, -- profile@start:size
            compute_instance TEXT NOT NULL, -- in the same form; '' for the GPU instance itself
            PRIMARY KEY (device_uuid, gpu_instance, compute_instance)
        ) STRICT""",
        "CREATE TABLE mig_layouts (device_uuid TEXT PRIMARY KEY NOT NULL, layout TEXT NOT NULL) STRICT",
        "CREATE TABLE kubelet_holds (request_id TEXT PRIMARY KEY NOT NULL, hold TEXT NOT NULL) STRICT",
        "CREATE TABLE prepared_claims (claim_uid TEXT PRIMARY KEY NOT NULL, claim TEXT NOT NULL) STRICT",
        """CREATE TABLE containers (
            request_id TEXT NOT NULL,
            pid TEXT NOT NULL,
            start_ticks TEXT NOT NULL,
            boot_id TEXT NOT NULL,
            PRIMARY KEY (request_id, pid, start_ticks, boot_id)
        ) STRICT""",
        "INSERT INTO drains SELECT device_uuid FROM originals WHERE key = 'drained'",
        """INSERT INTO mig_instances SELECT device_uuid, substr(key, length('mig_instance ') + 1), ''
            FROM originals WHERE key GLOB 'mig_instance *'""",
        """INSERT INTO mig_instances
            SELECT device_uuid, substr(name, 1, instr(name, '/') - 1), substr(name, instr(name, '/') + 1)
            FROM (SELECT device_uuid, substr(key, length('mig_compute_instance ') + 1) AS name
                FROM originals WHERE key GLOB 'mig_compute_instance *')""",
        """INSERT INTO mig_layouts SELECT device_uuid, value FROM (
                SELECT device_uuid, value, max(CAST(substr(key, length('mig_layout ') + 1) AS INTEGER))
                FROM originals WHERE key GLOB 'mig_layout *' GROUP BY device_uuid)
            WHERE value != '-'""",
        "ALTER TABLE originals RENAME TO mixed_originals",
        """CREATE TABLE originals (
            device_uuid TEXT NOT NULL,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (device_uuid, key)
        ) STRICT""",
        """INSERT INTO originals SELECT device_uuid, key, value FROM mixed_originals
            WHERE key != 'drained' AND key NOT GLOB 'mig_instance *'
            AND key NOT GLOB 'mig_compute_instance *' AND key NOT GLOB 'mig_layout *'""",
        "DROP TABLE mixed_originals",
    ),
    ("ALTER TABLE containers ADD COLUMN cgroup TEXT NOT NULL DEFAULT ''",),
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
