"""Reads facts about processes from /proc/PID (proc(5)), and handles pidfds, which distinguish a process from
a later one with the same pid.

When a function returns, the pid may already belong to a later process. A caller that acts on the answer opens
a pidfd first, and checks with the pidfd afterwards that the process is still alive.

A process can delay the kernel's answer to some of these questions: they wait for an exec that closes a file
of the process's own file system (FUSE), until that file system answers. On Linux 6.18 these questions wait:
stat, maps, environ, auxv, io, syscall, stack, wchan, the links exe, cwd, root and ns/*, and pidfd_getfd(2).
They are asked on threads that can be abandoned (`aside`). So are questions about the namespaces of a pidfd,
and about mem and cmdline, whose pages may be in such a file. The following do not wait: status, comm, cgroup,
mountinfo, uid_map, fd/, task/ and the owner of /proc/PID.
"""

import ctypes
import errno
import os
import re
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

_PIDFD_GETFD = 438  # system call number in asm-generic/unistd.h, the same on every architecture (Linux 5.6)
# maximum read from mountinfo: with 2500 mounts at long paths, which a user can make, the file has 73 MiB
_MOST_MOUNTINFO_BYTES = 1 << 20
_FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC
# A question is given up after 50 looks of 5 ms, that is 0.25 s if CPUs are idle. On a busy host a look takes
# longer, because the asker waits for a processor as the answering thread does: a fixed limit of 0.25 s
# refused a fifth of all questions at a load of 20 per core.
_LOOK_SECONDS, _LOOKS = 0.005, 50
_ANSWER_SECONDS = 2.0  # maximum wait for an answer, by the clock, because the event loop asks too
# A question is abandoned after its thread was found waiting in the kernel this many times in a row.
_LOOKS_HELD = 3
_LATELY_SECONDS = 10.0
_MOST_GROUPS = 512  # maximum number of control groups that are read below one group
_MOST_LEFT = 256  # maximum of abandoned threads that still wait for an answer
# Maximum of abandoned questions about the processes of one user: those whose threads still wait, and recent
# ones, because each costs its asker time.
_MOST_LEFT_OF_A_USER = 4
#: errors that prove nothing about the process: no descriptor, no memory, or no answer
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY})
T = TypeVar("T")
# line of /proc/PID/status with the real and the effective uid (proc_pid_status(5))
_UIDS = re.compile(rb"^Uid:\s*(\d+)\s+(\d+)", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Running:
    """A running process; `start_ticks` is field 22 of /proc/PID/stat (proc(5))."""

    name: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that vgpud needs."""

    pid: int
    state: str
    parent: int
    threads: int
    start_ticks: int
    flags: int = 0  # PF_* in the kernel's include/linux/sched.h

    @property
    def is_alive(self) -> bool:
        """False if the main thread of the process has ended; other threads may still run."""
        return self.state not in "ZXx"


def parse_stat(line: bytes) -> Stat | None:
    """Parses a line of /proc/PID/stat. The process chooses the bytes of the command in brackets, so fields
    are counted from the last bracket.
    """
    pid, _, rest = line.partition(b" (")
    fields = rest.rpartition(b")")[2].split()
    try:
        parent, threads, ticks, flags = (int(fields[at]) for at in (1, 17, 19, 6))
        return Stat(int(pid), fields[0].decode(), parent, threads, ticks, flags)
    except (ValueError, IndexError):
        return None


def look(pid: int) -> Stat | None:
    """The state of a process; None if it does not exist or cannot be read. Raises OSError with a number of
    SCARCE.
    """
    try:
        return parse_stat(_read_aside(pid, "stat"))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None


def read_stat(pid: int) -> Stat | None:
    """The state of a process; None if it does not exist, or if /proc cannot be read now."""
    try:
        return look(pid)
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """The start time of a living process; None if it does not exist, or if /proc cannot be read now."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None and stat.is_alive else None


def is_alive(pid: int, ticks: int) -> bool:
    """True if the process that started at `ticks` is alive, or if /proc cannot be read now."""
    try:
        stat = look(pid)
    except OSError:
        return True
    return stat is not None and stat.is_alive and stat.start_ticks == ticks


def ran_exec(pid: int, ticks: int) -> bool:
    """Has the process that started at `ticks` called exec? True also if it is gone or cannot be read.

    A container's init calls exec when the runtime starts its program (runtime-spec, "Lifecycle").
    """
    stat = read_stat(pid)
    return stat is None or stat.start_ticks != ticks or not stat.flags & _FORKED_WITHOUT_EXEC


def is_gone(pid: int, ticks: int) -> bool:
    """Have all threads of the process that started at `ticks` ended? False if /proc cannot be read now."""
    try:
        stat = look(pid)
    except OSError:
        return False
    return stat is None or stat.start_ticks != ticks or (not stat.is_alive and stat.threads <= 1)


def is_ending(pid: int) -> bool:
    """Has the main thread of the process ended, while other threads may still run? False for a process that
    /proc does not show, because it may be in another pid namespace.
    """
    stat = read_stat(pid)
    return stat is not None and not stat.is_alive


def has_ended(pid: int) -> bool:
    """Have all threads of the process ended, while its parent has not reaped it?

    Measured on an H200 (driver 580): an MPS server whose main thread had ended stayed in NVML's list for up
    to a tenth of a second, until its other threads had released the device.
    """
    stat = read_stat(pid)
    return stat is not None and not stat.is_alive and stat.threads <= 1


def session_of(pid: int) -> int | None:
    """The session of a process; None if the process does not exist."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def uids(pid: int) -> tuple[int, int] | None:
    """The real and effective uid of a process; None if they cannot be read."""
    try:
        found = _UIDS.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return None
    return (int(found[1]), int(found[2])) if found else None


def owner(pid: int) -> int | None:
    """The uid that owns /proc/PID: the effective uid, or root if the process is not dumpable."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def arguments(pid: int) -> list[bytes]:
    return _read(pid, "cmdline").split(b"\0")


def environment(pid: int) -> list[bytes]:
    """The initial environment of the process, as NAME=value entries."""
    return _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return _read_aside(pid, name)
    except OSError:
        return b""


def _read_aside(pid: int, name: str) -> bytes:
    return aside(pid, Path(f"/proc/{pid}/{name}").read_bytes)


class _Worker:
    """A thread that answers questions one after the other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="proc", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def waits_in_kernel(self) -> bool:
        """Does the thread wait in the kernel, and not for a processor or Python's lock? False if that cannot
        be read now.
        """
        try:
            stat = parse_stat(Path(f"/proc/self/task/{self._thread.native_id}/stat").read_bytes())
        except OSError:
            return False
        return stat is not None and stat.state == "D"

    def _run(self) -> None:
        while True:
            self._work.get()()


class Aside:
    """Asks the kernel questions about processes. Thread-safe. It keeps as many threads as were ever in use at
    the same time.
    """

    def __init__(
        self, user_of: Callable[[int], int] = lambda uid: uid, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.user_of = user_of
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        #: Pid and user of each abandoned question that has no answer yet.
        self._left: dict[threading.Lock, tuple[int, int]] = {}
        # time and user of questions that were abandoned recently
        self._lately: deque[tuple[float, int]] = deque()

    def ask(self, pid: int, question: Callable[[], T], forget: Callable[[T], None] = lambda _: None) -> T:
        """Asks one question on a worker thread: see the function `aside`."""
        # The user is looked up before the lock is taken, because the user directory may be slow.
        user = self._user(pid) if self._left or self._lately else None
        with self._lock:
            if self._refuses(pid, user):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            worker = self._idle.pop() if self._idle else None
        answers: list[T | BaseException] = []
        done = threading.Lock()
        done.acquire()
        worker = worker or _Worker()

        def work() -> None:
            try:
                answer: T | BaseException = question()
            except BaseException as error:
                answer = error
            with self._lock:
                answers.append(answer)
                self._idle.append(worker)
                is_late = self._left.pop(done, None) is not None
            done.release()
            if is_late and not isinstance(answer, BaseException):
                forget(answer)

        worker.do(work)
        if not self._wait(done, worker):
            user = self._user(pid) if user is None else user
            with self._lock:
                if not answers:
                    self._left[done] = pid, user
                    self._lately.append((self._clock(), user))
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def _wait(self, done: threading.Lock, worker: _Worker) -> bool:
        """Waits for the answer. Returns False if there is none after _LOOKS looks or _ANSWER_SECONDS, or once
        the worker was found waiting in the kernel _LOOKS_HELD times in a row.
        """
        held, end = 0, self._clock() + _ANSWER_SECONDS
        for _ in range(_LOOKS):
            if done.acquire(timeout=_LOOK_SECONDS):
                return True
            held = held + 1 if worker.waits_in_kernel() else 0
            if held >= _LOOKS_HELD or self._clock() >= end:
                break
        return False

    def _refuses(self, pid: int, user: int | None) -> bool:
        """Must the question be refused? `user` is None if there was no abandoned question when the caller
        checked.
        """
        while self._lately and self._lately[0][0] < self._clock() - _LATELY_SECONDS:
            self._lately.popleft()
        if len(self._left) >= _MOST_LEFT or any(pid == left for left, _ in self._left.values()):
            return True
        if user is None or user == 0:
            return False
        waiting = sum(user == one for _, one in self._left.values())
        lately = sum(user == one for _, one in self._lately)
        return max(waiting, lately) >= _MOST_LEFT_OF_A_USER

    def _user(self, pid: int) -> int:
        """The user of the process's real uid. The owner of its /proc files is not used: it is root if the
        process is not dumpable.
        """
        return self.user_of((uids(pid) or (0, 0))[0])


_aside = Aside()


def count_users_by(user_of: Callable[[int], int]) -> None:
    """Sets `user_of`, which maps a uid to the user to which it counts. The processes of one user may delay
    only a few questions.
    """
    _aside.user_of = user_of


def aside(pid: int, question: Callable[[], T], forget: Callable[[T], None] = lambda _: None) -> T:
    """Runs `question` about the process on another thread. Returns its result or raises its error. If the
    result comes too late, it is passed to `forget`, which must not raise; a late error is dropped.

    Raises OSError: EBUSY if the kernel does not answer, if an earlier question about the process still waits,
    or if too many questions wait, of this user or of all users.
    """
    return _aside.ask(pid, question, forget)


def executable(pid: int) -> Path | None:
    """The program of the process, even if an upgrade has removed its file (proc(5) appends " (deleted)").
    None if the process does not exist, is a kernel thread, or may not be read by vgpud. Raises OSError with a
    number of SCARCE.
    """
    try:
        return Path(str(aside(pid, Path(f"/proc/{pid}/exe").readlink)).removesuffix(" (deleted)"))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None


def mounts_at(pid: int, place: str) -> list[str]:
    """The roots, within their file systems, of the mounts at `place` in the process's mount namespace. Only
    the first MiB of mountinfo is read. Empty if it cannot be read.
    """
    try:
        with Path(f"/proc/{pid}/mountinfo").open("rb") as file:
            *lines, _ = file.read(_MOST_MOUNTINFO_BYTES).split(b"\n")
    except OSError:
        return []
    # columns: mount id, parent, device, root, mount point
    rows = [line.split(b" ", 5) for line in lines]
    return [row[3].decode(errors="replace") for row in rows if len(row) > 4 and row[4] == place.encode()]


def mount_namespace(pid: int) -> Path | None:
    """The mount namespace of a process; None if it cannot be read, because the process has ended or vgpud has
    no right to read it.
    """
    try:
        return aside(pid, Path(f"/proc/{pid}/ns/mnt").readlink)
    except OSError:
        return None


def members_of(cgroup: Path) -> list[int]:
    """The pids in a control group and in the groups below it. Reads at most _MOST_GROUPS groups, because a
    user can make any number of groups in one that is delegated to it.
    """
    found: list[int] = []
    groups = deque([cgroup])
    for _ in range(_MOST_GROUPS):
        if not groups:
            break
        folder = groups.popleft()
        with suppress(OSError):  # the cgroup was removed meanwhile, or its path is too long
            text = (folder / "cgroup.procs").read_text()
            found += [int(line) for line in text.split() if line != "0"]
            with os.scandir(folder) as entries:
                below = (folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                groups.extend(islice(below, _MOST_GROUPS - len(groups)))
    return found


def pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


class PidFd:
    """A pidfd (pidfd_open(2)) that closes like a file object."""

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
        """Sends a signal; does nothing if the process has ended."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return

    def copy_of(self, descriptor: int) -> int:
        """Copies an open descriptor of the process into this one (pidfd_getfd(2)). Raises OSError."""
        got = int(_libc.syscall(_PIDFD_GETFD, self._fd, descriptor, 0))
        if got < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return got


def session_members(session: int) -> Iterator[PidFd]:
    """A pidfd of each process of a session but its leader; the caller closes it.

    getsid(2) does not wait for a process in exec, as its stat does. The session is read again after opening,
    so that a pidfd of a living process of another session is not returned.
    """
    for pid in pids():
        if pid == session or session_of(pid) != session:
            continue
        try:
            pidfd = PidFd(os.pidfd_open(pid))
        except OSError:  # the process has ended, or no descriptor is free
            continue
        if session_of(pid) == session:
            yield pidfd
        else:
            pidfd.close()


def pin(pid: int, ticks: int) -> PidFd | None:
    """Opens a pidfd of the process that started at `ticks`; None if the process has ended. Raises OSError
    with a number of SCARCE.

    The start time is read after the pidfd is opened, so the pidfd cannot be that of a later process.
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
    """As `pin`, but also None if no pidfd can be opened now."""
    try:
        return pin(running.pid, running.start_ticks)
    except OSError:
        return None


def has_exited(pidfd: int | PidFd, wait_seconds: float = 0) -> bool:
    """Waits up to `wait_seconds` for the process to exit. A process whose threads have all ended has exited,
    whether its parent has reaped it or not.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_seconds * 1000))
