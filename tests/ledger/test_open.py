"""Opening a ledger: only one process holds it, and a file that is damaged or has an unknown version is left
unchanged.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ledger.samples import active, allocation, event, ledger_path
from vgpud.ledger import Ledger, RowTable, files
from vgpud.ledger.schema import APPLICATION_ID, MIGRATIONS, version
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.rows import Row


def fill(path: Path, count: int = 3) -> None:
    async def work() -> None:
        async with await Ledger.open(path) as ledger:
            for number in range(count):
                await ledger.intent(allocation(number))
                await ledger.commit(active(allocation(number)), event(f"a{number}"))

    asyncio.run(work())


def leave_as_a_crash_does(path: Path) -> None:
    """Makes a ledger whose last changes are only in its -wal file."""
    fill(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("INSERT INTO meta VALUES ('note', 'only in the log')")
        connection.commit()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", path.parent / f"copy{suffix}")
    for suffix in ("", "-wal"):
        shutil.move(path.parent / f"copy{suffix}", f"{path}{suffix}")


def hashes(folder: Path) -> dict[str, str]:
    """Returns hashes of all files except the lock file, which changes with each attempt to lock it."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.suffix != ".lock"
    }


def refusal(path: Path) -> VgpuError:
    async def work() -> None:
        async with await Ledger.open(path):
            pass

    with pytest.raises(VgpuError) as caught:
        asyncio.run(work())
    return caught.value


def edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_a_new_ledger_has_wal_and_full_synchronous(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    fill(path, 0)
    with closing(files.connect(path)) as db:
        pragmas = {
            n: db.execute(f"PRAGMA {n}").fetchone()[0]
            for n in ("journal_mode", "synchronous", "foreign_keys")
        }
        assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        assert db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
        tables = db.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main'").fetchall()
    strict = {name for name, strict in tables if strict}
    assert strict == {"meta", "allocations", "events", "marks", *RowTable}
    assert path.stat().st_mode & 0o777 == 0o600


def test_changes_that_a_crash_left_in_sqlites_write_ahead_log_are_read(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    leave_as_a_crash_does(path)
    fill(path, 0)
    with closing(files.connect(path)) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'note'").fetchone() == ("only in the log",)


def test_a_second_daemon_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    program = (
        "import sys; from pathlib import Path; from vgpud.ledger import files;"
        " held = files.lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        error = refusal(path)
        assert error.code is ErrorCode.LEDGER_LOCKED
        assert f"process {holder.pid}" in error.sentence
        holder.kill()
    fill(path)  # the kernel has released the lock at the end of the process


def test_a_lock_that_outlives_its_recorded_holder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOOKS", 2)
    path = ledger_path(tmp_path)
    with subprocess.Popen(["true"]) as ended:
        pass
    with path.with_name(path.name + ".lock").open("w") as lock:
        lock.write(str(ended.pid))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        error = refusal(path)
    assert error.code is ErrorCode.LEDGER_LOCKED
    assert f"process {ended.pid}, which has ended" in error.sentence
    assert f"`fuser {path}.lock` names it" in error.hint


def test_a_ledger_is_opened_as_soon_as_the_child_of_a_killed_holder_has_closed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ledger_path(tmp_path)
    program = (
        "import os, sys; from pathlib import Path; from vgpud.ledger import files;"
        " held, child = files.lock(Path(sys.argv[1])), os.fork();"
        " child and print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        holder.wait()
        child_input, looks = holder.stdin, list[float]()

        def end_child(seconds: float) -> None:
            child_input.close()
            looks.append(seconds)
            time.sleep(seconds)

        monkeypatch.setattr(files, "time", SimpleNamespace(sleep=end_child))
        fill(path)
        assert looks, "the child had the lock"


def test_a_ledger_that_is_refused_at_the_start_is_left_unlocked(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    path.write_bytes(b"nonsense")
    assert refusal(path).code is ErrorCode.LEDGER_CORRUPT
    path.unlink()
    fill(path)


def test_a_newer_ledger_is_left_untouched(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    leave_as_a_crash_does(path)
    edit(path, f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    before = hashes(tmp_path)
    error = refusal(path)
    assert error.code is ErrorCode.LEDGER_NEWER
    assert f"version {len(MIGRATIONS) + 1}" in error.sentence
    assert hashes(tmp_path) == before


def test_a_newer_ledger_version_recorded_only_in_the_write_ahead_log_is_refused(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    fill(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", tmp_path / f"copy.db{suffix}")
    crashed = tmp_path / "copy.db"
    before = hashes(tmp_path)
    assert refusal(crashed).code is ErrorCode.LEDGER_NEWER
    assert hashes(tmp_path) == before


def overwrite(path: Path, at: int, text: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(text)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_bytes(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Damage of the first such bytes in the file."""

    def change(path: Path) -> None:
        overwrite(path, path.read_bytes().index(old), new)

    return change


DAMAGE = {
    "not a database": lambda path: path.write_bytes(b"hello" * 1000),
    "empty file": lambda path: path.write_bytes(b""),
    "header gone": lambda path: overwrite(path, 0, bytes(100)),
    "pages overwritten": lambda path: overwrite(path, 2 * 4096, b"\xff" * 8192),
    "cut short": truncate,
    "another program's": lambda path: edit(path, "PRAGMA application_id = 7"),
    "an id changed": change_bytes(b"a20r20", b"a2xr20"),
    "no UTF-8 in the schema": change_bytes(b"CREATE TABLE events", b"CREATE T\xffBLE events"),
    "no number in meta": lambda path: edit(path, "INSERT INTO meta VALUES ('revision_floor', 'x')"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_corrupt_ledger_is_left_untouched(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = ledger_path(tmp_path)
    fill(path, 40)
    damage(path)
    before = hashes(tmp_path)
    error = refusal(path)
    assert error.code is ErrorCode.LEDGER_CORRUPT
    assert str(path) in error.sentence
    assert error.hint
    assert hashes(tmp_path) == before


def test_a_write_ahead_log_without_its_ledger_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    leave_as_a_crash_does(path)
    path.unlink()
    before = hashes(tmp_path)
    assert refusal(path).code is ErrorCode.LEDGER_CORRUPT
    assert hashes(tmp_path) == before


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: edit(path, "UPDATE allocations SET slices = '[{}]' WHERE id = 'a1'"), "'a1'"),
        (change_bytes(b'"7GiB free of 80GiB"]]active', b'"7GiB free of 80GiB"]]acthve'), "acthve"),
        (change_bytes(b"LD_PRELOAD", b"\xffD_PRELOAD"), "'edits'"),
    ],
)
def test_a_corrupt_row_is_named_in_the_error(
    tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    path = ledger_path(tmp_path)
    fill(path)
    damage(path)

    async def work() -> None:
        async with await Ledger.open(path) as ledger:
            await ledger.load()

    with pytest.raises(VgpuError, match=named) as caught:
        asyncio.run(work())
    assert caught.value.code is ErrorCode.LEDGER_CORRUPT


def test_a_start_removes_the_files_of_a_first_start_that_was_interrupted(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    for suffix in (".new", ".new-wal", ".new-shm"):
        path.with_name(path.name + suffix).write_bytes(b"half a ledger")
    fill(path)
    assert set(hashes(tmp_path)) == {path.name}


# --- migrations

SECOND = ("ALTER TABLE originals ADD COLUMN note TEXT NOT NULL DEFAULT ''",)


def test_a_migration_of_the_ledger_keeps_existing_rows(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    fill(path)
    with closing(files.connect(path, (*MIGRATIONS, SECOND))) as db:
        assert version(db) == len(MIGRATIONS) + 1
        assert db.execute("SELECT count(*) FROM allocations").fetchone() == (3,)
        assert db.execute("SELECT count(note) FROM originals").fetchone() == (0,)
    assert refusal(path).code is ErrorCode.LEDGER_NEWER


def test_an_upgraded_ledger_of_version_5_has_drains_and_mig_records_in_tables_of_their_own(
    tmp_path: Path,
) -> None:
    path = ledger_path(tmp_path)
    with closing(files.connect(path, MIGRATIONS[:5])) as db:
        rows = [
            ("GPU-1", "compute_mode", "default"),
            ("GPU-1", "mig_mode", "off"),
            ("GPU-1", "drained", "yes"),
            ("GPU-1", "mig_instance 9@0:4", "absent"),
            ("GPU-1", "mig_instance 19@6:1", "absent"),
            ("GPU-1", "mig_compute_instance 9@0:4/0@1:1", "absent"),
            ("GPU-1", "mig_layout 9", "off"),
            ("GPU-1", "mig_layout 10", "9@0:4 9@0:4/0@1:1"),
            ("GPU-2", "mig_layout 3", "19@0:1"),
            ("GPU-2", "mig_layout 4", "-"),
        ]
        db.executemany("INSERT INTO originals VALUES (?, ?, ?)", rows)

    async def read() -> dict[str, list[Row]]:
        async with await Ledger.open(path) as ledger:
            return {table.value: sorted(found) for table, found in ledger.rows.items() if list(found)}

    assert asyncio.run(read()) == {
        "originals": [("GPU-1", "compute_mode", "default"), ("GPU-1", "mig_mode", "off")],
        "drains": [("GPU-1",)],
        "mig_instances": [("GPU-1", "19@6:1", ""), ("GPU-1", "9@0:4", ""), ("GPU-1", "9@0:4", "0@1:1")],
        "mig_layouts": [("GPU-1", "9@0:4 9@0:4/0@1:1")],
    }


def test_a_new_ledger_has_the_newest_version_at_once(tmp_path: Path) -> None:
    with closing(files.connect(ledger_path(tmp_path), (*MIGRATIONS, SECOND))) as db:
        assert version(db) == len(MIGRATIONS) + 1


def test_a_migration_that_fails_leaves_the_old_version_of_the_ledger(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    fill(path)
    broken = ("ALTER TABLE originals ADD COLUMN note TEXT", "ALTER TABLE nowhere ADD COLUMN note TEXT")
    with pytest.raises(VgpuError) as caught:
        files.connect(path, (*MIGRATIONS, broken))
    assert caught.value.code is ErrorCode.LEDGER_FAILED
    with closing(files.connect(path)) as db:
        assert version(db) == len(MIGRATIONS)
        columns = [row[1] for row in db.execute("PRAGMA table_info(originals)")]
    assert columns == ["device_uuid", "key", "value"]


# --- permissions


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process can only read. A test run by root switches to another user for this."""
    folder = tmp_path / "state"
    folder.mkdir()
    fill(ledger_path(folder))
    was = os.geteuid()
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == was and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    for file in folder.iterdir():
        file.chmod(0o644)
    folder.chmod(0o555)
    if was == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if was == 0:
            os.seteuid(was)
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["ledger.db", "other.db"])
def test_a_read_only_folder_of_the_ledger_is_reported(read_only_folder: Path, name: str) -> None:
    error = refusal(read_only_folder / name)
    assert error.code is ErrorCode.LEDGER_READ_ONLY
    assert str(read_only_folder / name) in error.sentence


def test_a_missing_folder_of_the_ledger_is_reported(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nowhere" / "ledger.db")
    assert error.code is ErrorCode.LEDGER_FAILED
    assert "does not exist" in error.sentence
