"""The user whose quota and connection limits a caller counts against.

An unprivileged user has a range of subordinate uids besides its uid (subuid(5), 65 536 by default). It can
use them inside a user namespace, and outside by a set-uid file that it made inside. Both are traced to the
user: the namespace by its owner, the uid by its range.
"""

import array
import fcntl
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from vgpud import proc

_PIDFD_GET_USER_NAMESPACE = 0xFF09  # _IO(0xFF, 9), linux/pidfd.h, since Linux 6.11
_NS_GET_PARENT = 0xB702  # ioctl_ns(2)
_NS_GET_OWNER_UID = 0xB704
_MOST_NESTED = 33  # user namespaces nest 32 deep at most, user_namespaces(7)
_SUBUID = Path("/etc/subuid")


@dataclass(frozen=True, slots=True)
class _Range:
    user: str
    first: int
    count: int


class SubordinateUids:
    """The ranges of /etc/subuid, read again after a change of the file."""

    def __init__(self, path: Path = _SUBUID) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._ranges: tuple[_Range, ...] = ()

    def user_of(self, uid: int) -> int:
        """The user whose range has `uid`; `uid` itself if it is in no range."""
        for one in self._current():
            if one.first <= uid < one.first + one.count:
                return _uid_of(one.user, uid)
        return uid

    def _current(self) -> tuple[_Range, ...]:
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen != self._seen:
                self._ranges = _ranges(self._path.read_text(errors="replace"))
                self._seen = seen
        except OSError:  # without the file there are no ranges
            self._ranges, self._seen = (), None
        return self._ranges


def _ranges(text: str) -> tuple[_Range, ...]:
    parts = (line.strip().split(":") for line in text.splitlines())
    return tuple(
        _Range(part[0], int(part[1]), int(part[2]))
        for part in parts
        if len(part) == 3 and part[1].isdecimal() and part[2].isdecimal()
    )


def _uid_of(user: str, otherwise: int) -> int:
    """subuid(5) names a user by login name or by uid."""
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        return otherwise


def namespace_owner(pid: int) -> int | None:
    """The uid that made the user namespace of a process; None for vgpud's namespace or one of root.

    Of nested namespaces the outermost that is not root's counts, because everything inside it was made with
    its owner's rights. The caller opens a pidfd before, and sees by it afterwards
    that the process still runs. Raises OSError where the kernel does not answer.
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
        except OSError:  # EPERM: vgpud may not see the parent
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
            except OSError:  # an older kernel
                return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)

    return proc.aside(pid, ask, os.close)


def _owner_uid(namespace: int) -> int:
    answer = array.array("I", [0])
    fcntl.ioctl(namespace, _NS_GET_OWNER_UID, answer)
    return answer[0]


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def login_group(uid: int, otherwise: int) -> int:
    """The group of a user's account; `otherwise` if the uid has no account."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return otherwise
