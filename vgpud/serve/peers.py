"""Who is at the other end of a socket, as the kernel says."""

import os
import select
import socket
import struct
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Lifetime

_UCRED = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid
_SO_PEERPIDFD = 77  # asm-generic/socket.h, since Linux 6.5; not in the socket module


def identify(connection: socket.socket, door: Door) -> Caller:
    """The process that called connect(2), from SO_PEERCRED. Raises OSError if the socket is gone.

    Its `process` has pid 0 if it has ended already, or lives in a pid namespace that is not below
    this one.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Caller(door, uid, gid, _lifetime(connection, pid))


def _lifetime(connection: socket.socket, pid: int) -> Lifetime:
    if pid <= 0:
        return Lifetime()
    try:
        pidfd = _pidfd(connection, pid)
    except OSError:  # ended, or no descriptors left
        return Lifetime()
    try:
        ticks = start_ticks(pid)
        # while the pidfd says that its process lives, nobody else can have had its pid
        return Lifetime() if ticks is None or _ended(pidfd) else Lifetime(pid, ticks)
    finally:
        os.close(pidfd)


def _pidfd(connection: socket.socket, pid: int) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel: a pid reused between connect and here is then not noticed
        return os.pidfd_open(pid)


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)), None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # the second field is the command in brackets, which may hold any character
    return int(stat.rpartition(b")")[2].split()[19])


class PeerTable:
    """Callers by the name that their onward connection is bound to.

    Names are never used twice in the life of a daemon, so a call that outlasts its connection is
    never taken for somebody else's.
    """

    def __init__(self) -> None:
        self._peers: dict[str, tuple[Caller, VgpuError | None]] = {}
        self._served_by_uid: Counter[int] = Counter()
        self._served = 0
        self._made = 0

    @property
    def served(self) -> int:
        return self._served

    @property
    def refused(self) -> int:
        return len(self._peers) - self._served

    def connections_of(self, uid: int) -> int:
        return self._served_by_uid[uid]

    def is_refused(self, name: str) -> bool:
        return self._peers[name][1] is not None

    def add(self, caller: Caller, refusal: VgpuError | None = None) -> str:
        """The name for its connection; with a `refusal`, that is what each of its calls is told."""
        self._made += 1
        name = f"c{self._made}"
        self._peers[name] = (caller, refusal)
        if refusal is None:
            self._count(caller.uid, 1)
        return name

    def remove(self, name: str) -> None:
        caller, refusal = self._peers.pop(name)
        if refusal is None:
            self._count(caller.uid, -1)

    def _count(self, uid: int, change: int) -> None:
        self._served += change
        self._served_by_uid[uid] += change
        if not self._served_by_uid[uid]:
            del self._served_by_uid[uid]

    def caller(self, grpc_peer: str) -> Caller:
        """By what grpc calls the peer, "unix:/folder/name", percent-encoded.

        Raises VgpuError: its refusal, or NOT_ALLOWED for one that did not come through the relay.
        """
        known = self._peers.get(unquote(grpc_peer).rpartition("/")[2])
        if known is None:
            raise VgpuError(
                ErrorCode.NOT_ALLOWED,
                "the caller cannot be named: its connection is closed, or did not come by a public socket",
                "call by ro.sock, vgpud.sock or admin.sock",
            )
        caller, refusal = known
        if refusal is not None:
            raise refusal
        return caller
