"""Translates errors of SQLite and the file system into numbered errors."""

import errno
import os
import sqlite3
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import show_bytes

_START_EMPTY = (
    "restore the state directory from a backup, or move the ledger away with its -wal file"
    " to start with an empty one"
)


def corrupt(path: Path, why: str) -> VgpuError:
    return VgpuError(ErrorCode.LEDGER_CORRUPT, f"the ledger {path} cannot be read: {why}", _START_EMPTY)


def full(path: Path) -> VgpuError:
    free, size = _space(path)
    return VgpuError(
        ErrorCode.LEDGER_FULL,
        f"no space left for the ledger {path}: {show_bytes(free)} free of {show_bytes(size)}",
        "free some space on that file system and try again",
    )


def read_only(path: Path) -> VgpuError:
    return VgpuError(
        ErrorCode.LEDGER_READ_ONLY,
        f"the ledger {path} cannot be written: its directory is read-only for uid {os.geteuid()}",
        "mount the state directory read-write and give it to the user that vgpud runs as",
    )


def failed(
    path: Path, why: str, hint: str = "see the log of vgpud and the kernel for the cause"
) -> VgpuError:
    return VgpuError(ErrorCode.LEDGER_FAILED, f"the ledger {path} failed: {why}", hint)


def from_os(error: OSError, path: Path) -> VgpuError:
    """The numbered error for an OSError on a file beside the ledger."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(path)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return read_only(path)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return failed(path, "its directory does not exist", f"create {path.parent}")
    return failed(path, (error.strerror or str(error)).lower())


def from_sqlite(error: sqlite3.Error, path: Path) -> VgpuError:
    """The numbered error for an SQLite error, by its extended result code (rescode.html in SQLite's
    documentation).
    """
    name = str(getattr(error, "sqlite_errorname", ""))
    # On a full disk, growing the -shm file or a sync can fail first. SQLite reports that as an I/O error.
    blocked = name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")) and _space(path)[0] == 0
    if blocked or name == "SQLITE_FULL":
        return full(path)
    # text that is not UTF-8 is an error of Python's module, which has no result code
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or (not name and "UTF-8" in str(error)):
        return corrupt(path, str(error).partition(" with text")[0])
    if name == "SQLITE_READONLY_DBMOVED":
        return failed(path, "the file was moved or removed while in use", "restart vgpud")
    if name.startswith("SQLITE_READONLY"):
        return read_only(path)
    if name.startswith("SQLITE_BUSY"):
        return failed(path, "another program holds it locked", "close what has the file open")
    return failed(path, f"{error} ({name or type(error).__name__})")


def _space(path: Path) -> tuple[int, int]:
    """Free and total bytes of the ledger's file system; (0, 0) if they cannot be read."""
    try:
        told = os.statvfs(path.parent)
    except OSError:
        return 0, 0
    return told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize
