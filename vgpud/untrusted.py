"""Sockets to callers that may pass descriptors (SCM_RIGHTS) which vgpud does not want.

The kernel closes descriptors that wait in a socket during the receiver's own recv(2), close(2) or exit. The
caller can make that close last as long as it likes: for a socket that lingers (SO_LINGER), and for a file of
the caller's own file system (FUSE), where not even a signal ends it. From Linux 6.16 vgpud has the kernel
refuse such descriptors. On an older kernel, and on connections made before vgpud took a listener from
systemd, vgpud receives no message with descriptors, and a keeper (native/arbiter/keeper.h) holds a copy of
each socket, so that vgpud's close is not the last one.
"""

import array
import errno
import os
import resource
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SO_PASSRIGHTS = 83  # value in asm-generic/socket.h, since Linux 6.16; Python's socket module lacks it
_MESSAGE = struct.Struct("=QQ")  # struct keeper_message: number, user
_UCRED = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid
# maximum of sockets given to a keeper; then vgpud starts another, since sockets that callers keep open add up
_MOST_HELD = 100_000
_SPARE_DESCRIPTORS = 16
# Maximum wait until a keeper reads a message. A keeper that was killed may not end, because one of its
# threads may wait in close(2).
_ANSWER_MILLISECONDS = 250
_UNKNOWN_USER = (1 << 64) - 1


def refuse_descriptors(listener: socket.socket) -> None:
    """Has the kernel refuse descriptors (EPERM) to callers that connect to this Unix socket from now on. A
    kernel before Linux 6.16 cannot, and nothing changes.
    """
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    if isinstance(listener, Untrusted):
        listener.may_pass = _may_pass(listener)


def has_descriptors(connection: socket.socket, size: int) -> bool:
    """Do descriptors come with the next `size` bytes? This look leaves them in the socket."""
    _, _, got, _ = connection.recvmsg(size, 0, socket.MSG_PEEK)
    return bool(got & socket.MSG_CTRUNC)


def _may_pass(connection: socket.socket) -> bool:
    """May the caller pass descriptors? It may if it connected before `refuse_descriptors`."""
    try:
        return bool(connection.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS))
    except OSError:
        return True


def start_helper(words: Sequence[str], stdin: int, stdout: int) -> "subprocess.Popen[bytes]":
    """Starts vgpu-arbiter as a keeper or a receiver (native/arbiter/receiver.h). Raises OSError."""
    # in a separate session, the helper gets no signals of vgpud's terminal
    return subprocess.Popen(
        words, executable=Untrusted.program, stdin=stdin, stdout=stdout, start_new_session=True
    )


class _Keeper:
    """A running keeper process. It ends after vgpud, or when all that it holds is closed after `leave`."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unbound = soft == resource.RLIM_INFINITY
        self._left = _MOST_HELD if unbound else min(_MOST_HELD, soft - _SPARE_DESCRIPTORS)
        pidfd = os.pidfd_open(os.getpid())
        try:
            with theirs:
                self._process = start_helper(["vgpu-keeper", "--keep"], theirs.fileno(), pidfd)
        finally:
            os.close(pidfd)

    def hold(self, number: int, user: int, descriptor: int) -> bool:
        """Sends the keeper a socket. Returns False if the keeper has ended, is full, or reads no messages."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        self._left -= 1
        return self._left >= 0 and self._tell(_MESSAGE.pack(number, user), rights)

    def drop(self, number: int) -> bool:
        """Has the keeper close its copy. Returns False if the keeper has ended, or reads no messages."""
        return self._tell(_MESSAGE.pack(number, 0))

    def has_ended(self) -> bool:
        return self._is_ready(0, 0)

    def leave(self) -> None:
        """Has the keeper close its copies. Another keeper takes over the sockets that are still open."""
        self._line.close()
        self._process.poll()

    def _tell(self, message: bytes, *rights: tuple[int, int, "array.array[int]"]) -> bool:
        while True:
            try:
                self._line.sendmsg([message], rights)
                return True
            except BlockingIOError:
                if not self._is_ready(select.POLLOUT, _ANSWER_MILLISECONDS):
                    return False
            except OSError:
                return False

    def _is_ready(self, events: int, milliseconds: int) -> bool:
        poll = select.poll()
        poll.register(self._line, events)  # POLLHUP is always reported
        return bool(poll.poll(milliseconds))


class Untrusted(socket.socket):
    """A Unix socket to a caller, or the listener of such sockets.

    A receive raises ConnectionAbortedError, and receives nothing, if descriptors came with the bytes.
    """

    program = Path("/usr/lib/vgpud/vgpu-arbiter")
    user_of: Callable[[int], int] = staticmethod(lambda uid: uid)  # the user to whom a uid counts
    may_pass = True
    _listens = True
    _user = _UNKNOWN_USER
    _number = 0
    _numbers = count(1)
    _running: _Keeper | None = None
    # the sockets that the keeper holds, or if none runs, the next keeper is to hold
    _held: ClassVar[WeakSet["Untrusted"]] = WeakSet()

    def keep(self) -> bool:
        """Has a keeper hold this socket, if callers may pass descriptors. Returns False if no keeper can be
        started. Called for a listener before a caller can connect.
        """
        if not self.may_pass or self.fileno() < 0:
            return True
        renew_ended_keeper()
        is_new = self not in Untrusted._held
        if is_new:
            Untrusted._held.add(self)
            self._number = next(Untrusted._numbers)
        if Untrusted._running is None or (is_new and not self._hold_by(Untrusted._running)):
            _renew()
        return Untrusted._running is not None

    def accept(self) -> tuple[socket.socket, Any]:
        made, address = super().accept()
        connection = Untrusted(made.family, made.type, made.proto, fileno=made.detach())
        connection._listens, connection.may_pass = False, _may_pass(connection)
        if connection.may_pass:
            # without SO_OOBINLINE, a look (recv with MSG_PEEK) skips an urgent byte, and a receive drops it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
            connection._user = _user_of(connection)
            self.keep()
            connection.keep()
        return connection, address

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(self._looked(bufsize), flags)

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        return super().recv_into(buffer, self._looked(nbytes or memoryview(buffer).nbytes), flags)

    def close(self) -> None:
        kept = self.keep()
        held = self in Untrusted._held
        Untrusted._held.discard(self)
        if held and not self._listens:  # a listener may be systemd's, too
            with suppress(OSError):
                # the caller sees that the connection ends, although the keeper still has a copy of the socket
                self.shutdown(socket.SHUT_RDWR)
        if not kept:
            # without a keeper, the descriptor is left open, because its close could wait without end
            self.detach()
        super().close()
        if held and Untrusted._running is not None and not Untrusted._running.drop(self._number):
            _renew()

    def _looked(self, size: int) -> int:
        """How many of the next `size` bytes can be received. Raises ConnectionAbortedError if descriptors
        came with them; this look leaves the descriptors in the socket.
        """
        if not self.may_pass:
            return size
        data, _, got, _ = self.recvmsg(size, 0, socket.MSG_PEEK)
        if got & socket.MSG_CTRUNC:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the caller passed descriptors")
        return len(data)

    def _hold_by(self, keeper: _Keeper) -> bool:
        return keeper.hold(self._number, self._user, self.fileno())


def renew_ended_keeper() -> None:
    """If the keeper has ended, starts another that holds the same sockets. Accept and close do the same."""
    if Untrusted._running is not None and Untrusted._running.has_ended():
        _renew()


def _renew() -> None:
    """Has a new keeper hold all sockets of `_held`. If that fails, no keeper runs and no socket is held."""
    if Untrusted._running is not None:
        Untrusted._running.leave()
    Untrusted._running = None
    with suppress(OSError):
        keeper = _Keeper()
        if all(one._hold_by(keeper) for one in tuple(Untrusted._held) if one.fileno() >= 0):
            Untrusted._running = keeper
        else:
            keeper.leave()


def _user_of(connection: socket.socket) -> int:
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Untrusted.user_of(uid)
