"""Opens the ledger's file: locks it for one process, checks it before it is opened for writing, and creates
it atomically.

A new ledger is built under another name, synced and renamed, so that a file with the ledger's name is always
complete and in WAL mode. A power cut during the first start leaves no file.
"""

import fcntl
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from vgpud.ledger import faults
from vgpud.ledger.schema import APPLICATION_ID, MIGRATIONS, Migration, migrate, version
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import start_ticks

_MAGIC = b"SQLite format 3\0"  # first bytes of a database: fileformat2.html, "Magic Header String"
_BUSY_SECONDS = 5.0
_LOOK_SECONDS, _LOOKS = 0.01, 500  # of the wait for a child of an ended holder


def lock(path: Path) -> int:
    """Locks the ledger for this process. Returns a descriptor; closing it unlocks.

    The lock file is never removed: otherwise two processes could hold locks on two files of the same name.
    Raises VgpuError: LEDGER_LOCKED, LEDGER_READ_ONLY, LEDGER_FULL, LEDGER_FAILED.
    """
    beside = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise faults.from_os(error, path) from error
    try:
        _take(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise _locked(path, holder) from None
    except OSError as error:
        os.close(descriptor)
        raise faults.from_os(error, path) from error
    return descriptor


def _take(descriptor: int) -> None:
    """Locks the file. A child that a killed holder was starting has the lock until its exec, which is awaited
    for a bounded time. Raises BlockingIOError.
    """
    for left in reversed(range(_LOOKS)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(descriptor)
            if not left or not holder.isdecimal() or start_ticks(int(holder)) is not None:
                raise
        time.sleep(_LOOK_SECONDS)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()


def _locked(path: Path, holder: str) -> VgpuError:
    who, hint = "another process", "stop the other vgpud first"
    if holder.isdecimal():
        who = f"process {holder}"
        if start_ticks(int(holder)) is None:
            who = f"a process that took it over from {who}, which has ended"
            hint = f"`fuser {path}.lock` names it"
    return VgpuError(
        ErrorCode.LEDGER_LOCKED,
        f"the ledger {path} is in use by {who}",
        f"{hint}, or set VGPUD_STATE_DIR of this vgpud to another directory",
    )


def connect(path: Path, migrations: tuple[Migration, ...] = MIGRATIONS) -> sqlite3.Connection:
    """Opens the ledger, and creates or migrates it if needed. The connection is in autocommit mode; only one
    thread at a time may use it.

    Raises VgpuError: LEDGER_CORRUPT or LEDGER_NEWER, and then leaves the file unchanged; LEDGER_READ_ONLY,
    LEDGER_FULL or LEDGER_FAILED.
    """
    try:
        if not os.access(path.parent, os.W_OK, effective_ids=True):
            raise faults.read_only(path)
        if path.exists():
            _inspect(path, len(migrations))
        else:
            _create(path, migrations)
        connection = _open(path)
        try:
            migrate(connection, migrations)
        except BaseException:
            connection.close()
            raise
        return connection
    except sqlite3.Error as error:
        raise faults.from_sqlite(error, path) from error
    except OSError as error:
        raise faults.from_os(error, path) from error


def _inspect(path: Path, newest: int) -> None:
    """Checks through a read-only connection that the file is an intact ledger of a known version.

    SQLite accepts an empty file as an empty database; vgpud reports it as an error.
    """
    with path.open("rb") as start:
        if start.read(len(_MAGIC)) != _MAGIC:
            raise faults.corrupt(path, "it is not a database")
    side_files = [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm")]
    before = [file for file in side_files if file.exists()]
    try:
        with closing(_connect(f"{path.absolute().as_uri()}?mode=ro")) as connection:
            _check(connection, path, newest)
    except BaseException:
        # Opening a file in WAL mode read-only creates empty side files, which are removed here.
        for file in side_files:
            if file not in before:
                file.unlink(missing_ok=True)
        raise


def _check(connection: sqlite3.Connection, path: Path, newest: int) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise faults.corrupt(path, "it is a database, but not vgpud's")
    found = version(connection)
    if found > newest:
        raise VgpuError(
            ErrorCode.LEDGER_NEWER,
            f"the ledger {path} has version {found}, and this vgpud knows versions up to {newest}",
            "install the newer vgpud again",
        )
    # quick_check does not compare the rows with the indexes: it accepts a table that has lost rows
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise faults.corrupt(path, str(verdict).splitlines()[-1])


def _create(path: Path, migrations: tuple[Migration, ...]) -> None:
    if path.with_name(path.name + "-wal").exists():
        # A new ledger is refused here, because SQLite would replay the changes in the old -wal file into it.
        raise faults.corrupt(path, "it is gone, but its -wal file is still there")
    new = path.with_name(path.name + ".new")
    for suffix in ("", "-wal", "-shm", "-journal"):
        new.with_name(new.name + suffix).unlink(missing_ok=True)
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(_connect(str(new), uri=False)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")
        migrate(connection, migrations)
    new.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _open(path: Path) -> sqlite3.Connection:
    connection = _connect(f"{path.absolute().as_uri()}?mode=rw")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    # Temporary tables are kept in memory: a service that can write only to its own folders has no place for
    # SQLite's temporary files.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA journal_mode = WAL")
    return connection


def _connect(target: str, *, uri: bool = True) -> sqlite3.Connection:
    return sqlite3.connect(
        target,
        uri=uri,
        timeout=_BUSY_SECONDS,
        isolation_level=None,  # autocommit mode, because vgpud begins and ends transactions itself
        # the connection is opened in one thread, and then used only by the writer's thread
        check_same_thread=False,
    )
