"""Finds the user whose quota and connection limits a caller's uid counts against.

An unprivileged user has a range of subordinate uids besides its uid (subuid(5), 65 536 by default). It can
use them inside a user namespace, and outside by a set-uid file that it made inside. Both cases are traced to
the user: a namespace by its owner, a uid by its range.
"""

import array
import fcntl
import math
import os
import pwd
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vgpud import proc

_PIDFD_GET_USER_NAMESPACE = 0xFF09  # the ioctl _IO(0xFF, 9) of linux/pidfd.h, since Linux 6.11
_NS_GET_PARENT = 0xB702  # the ioctl NS_GET_PARENT of ioctl_ns(2)
_NS_GET_OWNER_UID = 0xB704
_MOST_NESTED = 33  # maximum of nested user namespaces: 32 (user_namespaces(7)), plus one
_SUBUID = Path("/etc/subuid")
_LOOK_UP_AGAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Range:
    user: str  # a login name or a uid, as in subuid(5)
    first: int
    count: int


class SubordinateUids:
    """The ranges of /etc/subuid. The file is read again after it has changed. Thread-safe.

    Login names are looked up in a separate thread, because a directory service can be slow and the event loop
    must not wait. `uid_of` is pwd.getpwnam(3): it raises KeyError for a name without an account.
    """

    def __init__(self, path: Path = _SUBUID, uid_of: Callable[[str], int] | None = None) -> None:
        self._path = path
        self._uid_of = uid_of or _uid_of
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._ranges: tuple[_Range, ...] = ()
        self._uids: dict[str, int] = {}  # uids by login name
        self._is_looking_up = False
        self._look_up_at = math.inf  # time at which names that got no answer are looked up again

    def user_of(self, uid: int) -> int:
        """The user to whose range `uid` belongs. Returns `uid` itself if it is in no range, or while the name
        of the range's user is not yet looked up. Does not wait for the directory service.
        """
        for one in self._current():
            if one.first <= uid < one.first + one.count:
                return int(one.user) if one.user.isdecimal() else self._uids.get(one.user, uid)
        return uid

    def _current(self) -> tuple[_Range, ...]:
        with self._lock:
            try:
                found = self._path.stat()
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen != self._seen:
                    self._ranges = _ranges(self._path.read_text(errors="replace"))
                    self._seen, self._look_up_at = seen, 0.0
            except OSError:  # /etc/subuid does not exist, so there are no ranges
                self._ranges, self._seen = (), None
            if not self._is_looking_up and time.monotonic() >= self._look_up_at:
                self._is_looking_up, self._look_up_at = True, math.inf
                names = {one.user for one in self._ranges if not one.user.isdecimal()}
                threading.Thread(target=self._look_up, args=(names,), name="subuid", daemon=True).start()
            return self._ranges

    def _look_up(self, names: set[str]) -> None:
        found = {}
        for name in names:
            with suppress(KeyError, OSError):
                found[name] = self._uid_of(name)
        with self._lock:
            # A name that gets no answer now keeps its earlier uid, because the directory service may be
            # unreachable.
            self._uids = {name: uid for name, uid in self._uids.items() if name in names} | found
            if len(self._uids) < len(names):
                self._look_up_at = min(self._look_up_at, time.monotonic() + _LOOK_UP_AGAIN_SECONDS)
            self._is_looking_up = False


def _ranges(text: str) -> tuple[_Range, ...]:
    parts = (line.strip().split(":") for line in text.splitlines())
    return tuple(
        _Range(part[0], int(part[1]), int(part[2]))
        for part in parts
        if len(part) == 3 and part[1].isdecimal() and part[2].isdecimal()
    )


def _uid_of(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


#: The host's ranges of subordinate uids, one object for the whole daemon.
SUBORDINATE = SubordinateUids()


def namespace_owner(pid: int) -> int | None:
    """The uid of the user that made the user namespace of a process; None for vgpud's own namespace or one
    that root made.

    If namespaces are nested, the outermost one that root did not make counts, because everything inside it
    was made with the rights of its owner. The caller opens a pidfd before the call, and checks with it
    afterwards that the process still runs. Raises OSError if the kernel gives no answer.
    """
    here = _identity(Path("/proc/self/ns/user").stat())
    namespace = _user_namespace(pid)
    owner = None
    for _ in range(_MOST_NESTED):
        try:
            if _identity(os.fstat(namespace)) == here:
                return owner
            made_by = _owner_uid(namespace)
            owner = made_by if made_by != 0 else owner
            outer = fcntl.ioctl(namespace, _NS_GET_PARENT)
        except OSError:  # EPERM: vgpud has no permission to see the parent namespace
            return owner
        finally:
            os.close(namespace)
        namespace = outer
    os.close(namespace)
    return owner


def _user_namespace(pid: int) -> int:
    def ask() -> int:
        with proc.PidFd(os.pidfd_open(pid)) as pidfd:
            try:
                return fcntl.ioctl(pidfd, _PIDFD_GET_USER_NAMESPACE)
            except OSError:  # older kernels lack this ioctl
                return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)

    return proc.aside(pid, ask, os.close)


def _owner_uid(namespace: int) -> int:
    answer = array.array("I", [0])
    fcntl.ioctl(namespace, _NS_GET_OWNER_UID, answer)
    return answer[0]


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
