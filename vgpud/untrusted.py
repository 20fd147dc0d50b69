"""Sockets to callers that may pass descriptors (SCM_RIGHTS) which vgpud does not want.

The kernel closes descriptors that wait in a socket within the receiver's own recv(2), close(2) or exit. That
close can wait for as long as the caller likes: for a socket that lingers (SO_LINGER), or without any end by a
signal for a file of the caller's own file system (FUSE). From Linux 6.16 the kernel refuses such descriptors.
On an older kernel, and on connections made before vgpud took a listener from systemd, vgpud receives no
message that has some, and a keeper (native/arbiter/keeper.h) holds a copy of each socket, so that no close of
vgpud's is the last one.
"""

import array
import errno
import os
import resource
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SO_PASSRIGHTS = 83  # value in asm-generic/socket.h, since Linux 6.16; Python's socket module lacks it
_MESSAGE = struct.Struct("=QQ")  # struct keeper_message: number, user
_UCRED = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid
# sockets that one keeper takes; then another one is started, since sockets that callers keep open add up
_MOST_HELD = 100_000
_SPARE_DESCRIPTORS = 64
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
    """Do descriptors come with the next `size` bytes? The kernel drops only its copies of them."""
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
    # the session of its own keeps a terminal's signals away
    return subprocess.Popen(
        words, executable=Untrusted.program, stdin=stdin, stdout=stdout, start_new_session=True
    )


class _Keeper:
    """A running keeper. It ends when vgpud has ended, or all that it holds is closed and this object gone."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = count()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unbound = soft == resource.RLIM_INFINITY
        self.left = _MOST_HELD if unbound else min(_MOST_HELD, soft - _SPARE_DESCRIPTORS)
        pidfd = os.pidfd_open(os.getpid())
        try:
            with theirs:
                self._process = start_helper(["vgpu-keeper", "--keep"], theirs.fileno(), pidfd)
        finally:
            os.close(pidfd)

    def hold(self, held: socket.socket, user: int) -> int:
        """Returns the number by which `drop` knows the socket. Raises OSError if the keeper has ended."""
        number = next(self._numbers)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held.fileno()]))
        self._line.sendmsg([_MESSAGE.pack(number, user)], [rights])
        self.left -= 1
        return number

    def drop(self, number: int) -> None:
        with suppress(OSError):
            self._line.send(_MESSAGE.pack(number, 0))


class Untrusted(socket.socket):
    """A Unix socket to a caller, or the listener of such sockets.

    A receive raises ConnectionAbortedError, and receives nothing, if descriptors came with the bytes.
    """

    program = Path("/usr/lib/vgpud/vgpu-arbiter")
    user_of: Callable[[int], int] = staticmethod(lambda uid: uid)  # the user to whom a uid counts
    may_pass = True
    _listens = True
    _running: _Keeper | None = None  # the keeper that takes sockets now
    _held: tuple[_Keeper, int] | None = None

    def keep(self) -> bool:
        """Has a keeper hold this socket, if callers may pass descriptors. Returns False if no keeper can be
        started. Called for a listener before a caller can connect.
        """
        if self.may_pass:
            self._hold(_UNKNOWN_USER)
        return self._held is not None or not self.may_pass

    def accept(self) -> tuple[socket.socket, Any]:
        made, address = super().accept()
        connection = Untrusted(made.family, made.type, made.proto, fileno=made.detach())
        connection._listens, connection.may_pass = False, _may_pass(connection)
        if connection.may_pass:
            # an urgent byte is passed over by a look, and dropped by a receive
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
            self.keep()
            connection._hold(_user_of(connection))
        return connection, address

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(self._looked(bufsize), flags)

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        return super().recv_into(buffer, self._looked(nbytes or memoryview(buffer).nbytes), flags)

    def close(self) -> None:
        kept = self.keep()
        held, self._held = self._held, None
        if (held is not None or not kept) and not self._listens:  # a listener may be systemd's, too
            with suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)  # the caller sees the end, although the keeper has a copy
        if not kept:
            self.detach()  # the descriptor stays open: its close could wait without end
        super().close()
        if held is not None:
            keeper, number = held
            keeper.drop(number)

    def _looked(self, size: int) -> int:
        """How many of the next `size` bytes can be received. Raises ConnectionAbortedError if descriptors
        came with them: the kernel drops only its copies of them when vgpud looks.
        """
        if not self.may_pass:
            return size
        data, _, got, _ = self.recvmsg(size, 0, socket.MSG_PEEK)
        if got & socket.MSG_CTRUNC:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the caller passed descriptors")
        return len(data)

    def _hold(self, user: int) -> None:
        """Has a keeper hold this socket, if none does. Nothing changes if no keeper can be started."""
        if self._held is not None or self.fileno() < 0:
            return
        for _ in range(2):  # the keeper may have been killed
            with suppress(OSError):
                keeper = Untrusted._running
                if keeper is None or keeper.left <= 0:
                    keeper = Untrusted._running = _Keeper()
                self._held = keeper, keeper.hold(self, user)
                return
            Untrusted._running = None


def _user_of(connection: socket.socket) -> int:
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Untrusted.user_of(uid)
