"""Sockets to callers that may pass descriptors (SCM_RIGHTS) which vgpud does not want.

The kernel closes a passed descriptor that the receiver does not take within the receiver's own recv(2) or
close(2). The last close of a TCP socket with SO_LINGER and unsent bytes waits for as long as the caller
chose.
"""

import errno
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SO_PASSRIGHTS = 83  # value in asm-generic/socket.h, since Linux 6.16; Python's socket module lacks it
_WAIT_SECONDS = 0.001  # longest wait of a call for sockets that the caller passed
_NO_WAIT_SECONDS = 0.0001  # a call that takes less has not waited


def refuse_descriptors(listener: socket.socket) -> None:
    """Has the kernel refuse descriptors (EPERM) to callers that connect to this Unix socket from now on. A
    kernel before Linux 6.16 cannot, and nothing changes.
    """
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise


def _may_pass(connection: socket.socket) -> bool:
    """May the caller pass descriptors? It may if it connected before `refuse_descriptors`."""
    try:
        return bool(connection.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS))
    except OSError:
        return True


def interrupt_waits() -> None:
    """Bounds the waits of all Untrusted sockets, which only the main thread may use from now on. It takes the
    timer ITIMER_REAL of the process, and is called in the main thread.
    """
    # the kernel interrupts no wait by a signal that has no handler
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, False)
    Untrusted.is_interrupted = True


class Untrusted(socket.socket):
    """A Unix socket to a caller, or the listener of such sockets.

    A receive raises ConnectionAbortedError if the kernel dropped descriptors that came with the bytes.
    """

    is_interrupted = False  # see interrupt_waits
    may_pass = True  # without descriptors in the queue no call waits
    in_all_seconds = 0.0  # how long calls on all sockets waited for descriptors that the kernel dropped
    waited_seconds = 0.0  # the same, on this socket

    def accept(self) -> tuple[socket.socket, Any]:
        made, address = super().accept()
        connection = Untrusted(made.family, made.type, made.proto, fileno=made.detach())
        connection.may_pass = _may_pass(connection)
        return connection, address

    def recvmsg(
        self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        """As that of a socket. It raises nothing for descriptors that were dropped."""
        with self._bounded():
            return super().recvmsg(bufsize, ancbufsize, flags)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        if not self.may_pass:
            return super().recv(bufsize, flags)
        data, _, got, _ = self.recvmsg(bufsize, 0, flags)
        _refuse(got)
        return data

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        if not self.may_pass:
            return super().recv_into(buffer, nbytes, flags)
        view = memoryview(buffer)
        with self._bounded():
            size, _, got, _ = self.recvmsg_into((view[: nbytes or len(view)],), 0, flags)
        _refuse(got)
        return size

    def close(self) -> None:
        if not self.may_pass:
            super().close()
            return
        with self._bounded():
            super().close()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Interrupts the wait of a call again and again, since a signal that comes before the wait does not
        end it. While a signal is pending the kernel waits for no socket.
        """
        began, ran = time.perf_counter(), time.thread_time()
        if self.is_interrupted:
            signal.setitimer(signal.ITIMER_REAL, _WAIT_SECONDS, _WAIT_SECONDS)
        try:
            yield
        finally:
            if self.is_interrupted:
                signal.setitimer(signal.ITIMER_REAL, 0)
            # processor time counts in full: the kernel frees what was passed, such as the pages of a memfd
            took = max(min(time.perf_counter() - began, _WAIT_SECONDS), time.thread_time() - ran)
            if took >= _NO_WAIT_SECONDS:
                self.waited_seconds += took
                Untrusted.in_all_seconds += took


def _refuse(flags: int) -> None:
    if flags & socket.MSG_CTRUNC:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the caller passed descriptors")


def waited_seconds(connection: socket.socket) -> float:
    """How long vgpud has waited for what the caller passed, up to now."""
    return connection.waited_seconds if isinstance(connection, Untrusted) else 0.0
