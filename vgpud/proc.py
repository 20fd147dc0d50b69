"""Processes: what /proc/PID says of them (proc(5)), and pidfds, which tell one from a later one of its pid.

What a function answers for a pid may be of a later process when it returns. A caller that acts on the answer
opens a pidfd before it asks, and sees by the pidfd afterwards that the process still lives.

A process decides how long some of these files answer: an exec that closes a file of the process's own file
system (FUSE) holds them until the file system answers (seen on Linux 6.18). They are read on threads that are
left behind.
"""

import ctypes
import errno
import os
import re
import select
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType

_PIDFD_GETFD = 438  # asm-generic/unistd.h, the same on every architecture (Linux 5.6)
_MOST_MOUNTS = 2000
_PATIENCE_SECONDS = 0.25
_MOST_LEFT = 256  # threads that wait for the kernel
_MOST_LEFT_OF_A_USER = 4
#: Errors that say nothing of the process: no descriptor, no memory, or no answer.
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY})
_UIDS = re.compile(rb"^Uid:\s*(\d+)\s+(\d+)", re.MULTILINE)  # real, effective: proc_pid_status(5)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Running:
    """A helper that runs: `start_ticks` is field 22 of /proc/PID/stat (proc(5))."""

    name: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that vgpud needs."""

    pid: int
    state: str
    parent: int
    session: int
    threads: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """False when its main thread has ended: other threads may still run."""
        return self.state not in "ZXx"


def parse_stat(line: bytes) -> Stat | None:
    """The command in brackets is any bytes that the process chooses; fields count from the last bracket."""
    pid, _, rest = line.partition(b" (")
    fields = rest.rpartition(b")")[2].split()
    try:
        return Stat(
            int(pid), fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[17]), int(fields[19])
        )
    except (ValueError, IndexError):
        return None


def look(pid: int) -> Stat | None:
    """None where there is no such process. Raises OSError of SCARCE."""
    try:
        return parse_stat(_aside.read(pid, "stat"))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None


def read_stat(pid: int) -> Stat | None:
    """None where there is no such process, or where nothing can be read at present."""
    try:
        return look(pid)
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Start time of a living process; None where there is none, or where nothing can be read at present."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None and stat.is_alive else None


def is_alive(pid: int, ticks: int) -> bool:
    """Is the process that started at `ticks` alive? True where nothing can be read at present."""
    try:
        stat = look(pid)
    except OSError:
        return True
    return stat is not None and stat.is_alive and stat.start_ticks == ticks


def is_ending(pid: int) -> bool:
    """Its main thread has ended; other threads may still run. False for a process that cannot be seen: it may
    be of another pid namespace."""
    stat = read_stat(pid)
    return stat is not None and not stat.is_alive


def has_ended(pid: int) -> bool:
    """All of its threads have ended, and its parent has not collected it.

    Measured on an H200 (driver 580): an MPS server whose main thread had ended stayed in NVML's list for up
    to a tenth of a second, until its other threads had given the device back.
    """
    stat = read_stat(pid)
    return stat is not None and not stat.is_alive and stat.threads <= 1


def uids(pid: int) -> tuple[int, int] | None:
    """Real and effective; None where they cannot be read."""
    found = _UIDS.search(_read(pid, "status"))
    return (int(found[1]), int(found[2])) if found else None


def owner(pid: int) -> int | None:
    """The uid that owns /proc/PID: the effective one, or root's where the process cannot be dumped."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def arguments(pid: int) -> list[bytes]:
    return _read(pid, "cmdline").split(b"\0")


def environment(pid: int) -> list[bytes]:
    """What it was started with, NAME=value each."""
    return _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return _aside.read(pid, name)
    except OSError:
        return b""


class _Aside:
    """Reads files of /proc/PID, each for at most _PATIENCE_SECONDS of its caller's time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, int] = {}  # pid -> owner, whose file has not been answered yet

    def read(self, pid: int, name: str) -> bytes:
        """Raises OSError; EBUSY where the kernel does not answer, or has not answered an earlier look at the
        process, and where too many looks at the user's processes, or at all, wait."""
        uid = owner(pid)
        with self._lock:
            of_user = Counter(self._left.values())[uid] if uid else 0
            if pid in self._left or of_user >= _MOST_LEFT_OF_A_USER or len(self._left) >= _MOST_LEFT:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        answers: list[bytes | OSError] = []
        done = threading.Event()

        def work() -> None:
            try:
                answer: bytes | OSError = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError as error:
                answer = error
            with self._lock:
                answers.append(answer)
                self._left.pop(pid, None)
            done.set()

        threading.Thread(target=work, name="proc", daemon=True).start()
        done.wait(_PATIENCE_SECONDS)
        with self._lock:
            if not answers:
                self._left[pid] = uid or 0
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if isinstance(answers[0], OSError):
            raise answers[0]
        return answers[0]


_aside = _Aside()


def executable(pid: int) -> Path | None:
    """The program, also one whose file an upgrade has removed (proc(5): " (deleted)" follows the name)."""
    try:
        return Path(str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)"))
    except OSError:
        return None


def mounts_at(pid: int, place: str) -> list[str]:
    """What is mounted at `place` for the process: the mounts' roots within their file systems."""
    try:
        with Path(f"/proc/{pid}/mountinfo").open(encoding="utf-8", errors="replace") as lines:
            # mount id, parent, device, root, mount point
            rows = [line.split(" ", 5) for line in islice(lines, _MOST_MOUNTS)]
    except OSError:
        return []
    return [row[3] for row in rows if len(row) > 4 and row[4] == place]


def mount_namespace(process: int | str) -> Path | None:
    """None where it cannot be read: the process has ended, or vgpud may not look at it."""
    try:
        return Path(f"/proc/{process}/ns/mnt").readlink()
    except OSError:
        return None


def pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def session_members(session: int) -> Iterator[Running]:
    """The living processes of a session without its leader."""
    for stat in filter(None, map(read_stat, pids())):
        if stat.session == session and stat.pid != session and stat.is_alive:
            yield Running("", stat.pid, stat.start_ticks)


class PidFd:
    """A pidfd (pidfd_open(2)) with the life of a file object."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "PidFd":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, number: signal.Signals) -> None:
        """Does nothing to a process that has ended."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return

    def copy_of(self, descriptor: int) -> int:
        """A descriptor of ours for that open file of the process (pidfd_getfd(2)). Raises OSError."""
        got = int(_libc.syscall(_PIDFD_GETFD, self._fd, descriptor, 0))
        if got < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return got


def pin(pid: int, ticks: int) -> PidFd | None:
    """A pidfd of the process that started at `ticks`; None when it has ended. Raises OSError of SCARCE.

    The start time is read after opening, so the pidfd cannot be a later process's.
    """
    try:
        pidfd = PidFd(os.pidfd_open(pid))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None
    try:
        stat = look(pid)
    except OSError:
        pidfd.close()
        raise
    if stat is not None and stat.is_alive and stat.start_ticks == ticks:
        return pidfd
    pidfd.close()
    return None


def open_pidfd(running: Running) -> PidFd | None:
    """As `pin`, but None where nothing can be opened at present."""
    try:
        return pin(running.pid, running.start_ticks)
    except OSError:
        return None


def has_exited(pidfd: int | PidFd, wait_seconds: float = 0) -> bool:
    """Waits for at most so long; a process with all threads ended has exited, collected or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_seconds * 1000))
