"""Identifies the process at the other end of a socket by the kernel's credentials."""

import asyncio
import errno
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from vgpud import proc
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Lifetime, Owner
from vgpud.node.tenants.users import SUBORDINATE, namespace_owner
from vgpud.pace import Pace

_UCRED = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid
# line with the pid in the fdinfo of a pidfd (pidfd_open(2))
_FDINFO_PID = re.compile(rb"^Pid:\s*(-?\d+)$", re.MULTILINE)
_SO_PEERPIDFD = 77  # value in asm-generic/socket.h, since Linux 6.5; Python's socket module lacks it
# Number of attempts to identify a process, and the pause between them. The total is 12 s, because
# vgpud.proc asks nothing about a user's processes for 10 s after four questions without an answer.
_TRIES, _RETRY_SECONDS = 120, 0.1
# pause factor: users other than root get a tenth of the event loop's time for identifying their processes
_REST_FACTOR = 9.0
T = TypeVar("T")


def user_of(connection: socket.socket) -> int:
    """The user whose uid called connect(2), which the kernel knows at once. Raises OSError if the socket was
    closed.
    """
    return SUBORDINATE.user_of(_credentials(connection)[1])


def identify(connection: socket.socket, door: Door) -> Caller:
    """The process that called connect(2), from SO_PEERPIDFD.

    Before Linux 6.5 it is the process that has the peer's pid at this call, if it has the peer's uid, too.
    Its `process` has pid 0 if it is in a pid namespace that is not below vgpud's.

    Raises OSError if the socket is gone, or if the kernel does not say which user made the process's user
    namespace: the uid alone could be a subordinate one, which would get a quota of its own. Errors in
    vgpud.proc.SCARCE are temporary. A process that has ended cannot be identified.
    """
    pid, uid, gid = _credentials(connection)
    process, made_by = _process(connection, pid, uid)
    user = SUBORDINATE.user_of(uid if made_by is None else made_by)
    if user == uid:
        return Caller(door, uid, gid, process)
    return Caller(door, uid, gid, process, Owner(user, gid))


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks about a process, again and again while the kernel does not answer: the host is busy, the process
    is in an exec, or no descriptor is free. Raises OSError, of vgpud.proc.SCARCE after 12 s.
    """
    for _ in range(_TRIES - 1):
        try:
            return await ask()
        except OSError as error:
            if error.errno not in proc.SCARCE:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
    return await ask()


class Identities:
    """Identifies the callers of one door: root's at once, others' in turns of the users and within a tenth of
    the event loop's time.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._pace = Pace(_REST_FACTOR)

    def user_of(self, connection: socket.socket) -> int:
        """As the function of that name."""
        return user_of(connection)

    async def of(self, connection: socket.socket, user: int) -> Caller:
        """Identifies the caller, in turn with others of `user`. Raises OSError as `identify` does."""

        async def ask() -> Caller:
            if user in (0, os.geteuid()):
                return identify(connection, self._door)
            async with self._pace.turn(user):
                began = time.thread_time()
                try:
                    return identify(connection, self._door)
                finally:
                    self._pace.took(time.thread_time() - began)

        return await patiently(ask)


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def _process(connection: socket.socket, pid: int, uid: int) -> tuple[Lifetime, int | None]:
    """The peer's process, and the user that made its user namespace. `uid` is the effective uid at
    connect(2).
    """
    if pid <= 0:
        return Lifetime(), None
    pidfd = _pidfd(connection, pid, uid)
    try:
        stat, made_by = proc.look(pid), _made_by(pid)
        # while the process of the pidfd lives, no other process can have its pid
        if stat is None or proc.has_exited(pidfd):
            raise ProcessLookupError(errno.ESRCH, "the peer has ended")
        return Lifetime(pid, stat.start_ticks), made_by
    finally:
        os.close(pidfd)


def _made_by(pid: int) -> int | None:
    """As namespace_owner, but returns None if vgpud has no permission to ask. Raises OSError."""
    try:
        return namespace_owner(pid)
    except PermissionError:  # vgpud does not run as root
        return None


@dataclass(frozen=True, slots=True)
class PassedProcess:
    """A process that a caller passed as a pidfd. `user` is the user to whom the process is counted."""

    pid: int
    start_ticks: int
    user: int


def passed_process(pidfd: int) -> PassedProcess | None:
    """The process of a pidfd; None if the descriptor is no pidfd, or if the process has ended, is not in
    this pid namespace, or the kernel does not say which user made its user namespace.
    """
    try:
        found = _FDINFO_PID.search(Path(f"/proc/self/fdinfo/{pidfd}").read_bytes())
        pid = int(found[1]) if found else 0
        if pid <= 0:
            return None
        uids, stat, made_by = proc.uids(pid), proc.read_stat(pid), _made_by(pid)
    except OSError:
        return None
    if uids is None or stat is None or proc.has_exited(pidfd):
        return None
    return PassedProcess(pid, stat.start_ticks, SUBORDINATE.user_of(uids[0] if made_by is None else made_by))


def _pidfd(connection: socket.socket, pid: int, uid: int) -> int:
    """Opens a pidfd of the peer. Raises OSError if the peer has ended. Before Linux 6.5 the kernel gives only
    the peer's pid; the process with that pid is accepted only if it has the peer's uid.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    pidfd = os.pidfd_open(pid)
    if (uids := proc.uids(pid)) is not None and uids[1] == uid:
        return pidfd
    os.close(pidfd)
    raise ProcessLookupError(errno.ESRCH, "the peer's pid is another process's by now")


class PeerTable:
    """The callers, by the name to which the relay binds the socket of each connection.

    The daemon never uses a name twice, so a call that outlives its connection is never attributed to another
    caller.
    """

    def __init__(self) -> None:
        self._peers: dict[str, tuple[Caller, VgpuError | None]] = {}
        self._served_by_user: Counter[int] = Counter()
        self._served = 0
        self._made = 0

    @property
    def served(self) -> int:
        return self._served

    @property
    def refused(self) -> int:
        return len(self._peers) - self._served

    def connections_of(self, user: int) -> int:
        return self._served_by_user[user]

    def greediest(self) -> tuple[int, int]:
        """The user with the most connections, and their number. Root is not counted."""
        others = ((user, count) for user, count in self._served_by_user.items() if user != 0)
        return max(others, key=lambda one: one[1], default=(0, 0))

    def oldest_of(self, user: int) -> str:
        """The name of this user's oldest connection; "" if the user has none."""
        own = (name for name, (caller, refusal) in self._peers.items() if caller.user == user and not refusal)
        return next(own, "")

    def user(self, name: str) -> int:
        return self._peers[name][0].user

    def is_refused(self, name: str) -> bool:
        return self._peers[name][1] is not None

    def add(self, caller: Caller, refusal: VgpuError | None = None) -> str:
        """Adds a caller and returns the name for its connection. With a `refusal`, each call of the caller is
        answered with that error.
        """
        self._made += 1
        name = f"c{self._made}"
        self._peers[name] = (caller, refusal)
        if refusal is None:
            self._count(caller.user, 1)
        return name

    def remove(self, name: str) -> None:
        caller, refusal = self._peers.pop(name)
        if refusal is None:
            self._count(caller.user, -1)

    def _count(self, user: int, change: int) -> None:
        self._served += change
        self._served_by_user[user] += change
        if not self._served_by_user[user]:
            del self._served_by_user[user]

    def caller(self, grpc_peer: str) -> Caller:
        """The caller of a gRPC call, from grpc's name of the peer: "unix:/folder/name", percent-encoded.

        Raises VgpuError: the caller's refusal, or NOT_ALLOWED for a peer that did not connect through the
        relay.
        """
        known = self._peers.get(name_in(grpc_peer))
        if known is None:
            raise VgpuError(
                ErrorCode.NOT_ALLOWED,
                "the caller cannot be identified: its connection is closed, or not by a public socket",
                "call by ro.sock, vgpud.sock or admin.sock",
            )
        caller, refusal = known
        if refusal is not None:
            raise refusal
        return caller


def name_in(grpc_peer: str) -> str:
    """The name of the relay's connection, from grpc's name of the peer."""
    return unquote(grpc_peer).rpartition("/")[2]
