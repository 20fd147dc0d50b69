"""Processes told apart from later ones with the same pid, and signals that reach only the right one."""

import ctypes
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PIDFD_GETFD = 438  # asm-generic/unistd.h, the same on every architecture (Linux 5.6)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Running:
    """A helper that runs: `start_ticks` is field 22 of /proc/PID/stat (proc(5))."""

    name: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that matter here."""

    pid: int
    state: str
    session: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"  # proc(5): zombie, dead


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
        """Does nothing to a process that is gone."""
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


def parse_stat(line: str) -> Stat | None:
    """The command name in it may hold blanks and brackets, so the fields count from its last one."""
    pid, _, rest = line.partition(" (")
    fields = rest.rpartition(")")[2].split()
    try:
        return Stat(int(pid), fields[0], int(fields[3]), int(fields[19]))
    except (ValueError, IndexError):
        return None


def read_stat(pid: int) -> Stat | None:
    """None where there is no such process."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether it is this process that has the pid, and more than a zombie."""
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.alive


def open_pidfd(running: Running) -> PidFd | None:
    """None if that process is gone. Checked after opening, so it cannot name a later one."""
    try:
        pidfd = PidFd(os.pidfd_open(running.pid))
    except OSError:
        return None
    if is_alive(running.pid, running.start_ticks):
        return pidfd
    pidfd.close()
    return None


def has_exited(pidfd: PidFd, wait_seconds: float) -> bool:
    """Waits for at most so long; a zombie has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_seconds * 1000))


def session_members(session: int) -> Iterator[Running]:
    """The living processes of a session but its leader."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = read_stat(int(entry.name))
            if stat is not None and stat.session == session and stat.pid != session and stat.alive:
                yield Running("", stat.pid, stat.start_ticks)
