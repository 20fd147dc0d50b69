"""Sockets whose last close(2) waits for an hour. An attacker passes them to a program that expects none."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LINGER_SECONDS = 3600
_SO_PASSRIGHTS = 83  # value in asm-generic/socket.h, since Linux 6.16


def kernel_refuses_descriptors() -> bool:
    """Returns whether a receiver can refuse descriptors on this kernel (SO_PASSRIGHTS)."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        except OSError:
            return False
        return True


@contextmanager
def lingering() -> Iterator[socket.socket]:
    """Yields a TCP socket with SO_LINGER and with bytes that its peer does not read. When the block ends, no
    close of the socket waits any more.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as ours:
        # small buffers, so the bytes stay unsent
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        ours.connect(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            ours.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    ours.send(bytes(65536))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _LINGER_SECONDS))
            yield ours


def passes(line: socket.socket, word: bytes, last: socket.socket) -> bool:
    """Sends `word` and passes `last`, a lingering socket, so that the copy in the queue is the last one. The
    receiver is stopped meanwhile. If the kernel refuses the descriptor, sends `word` alone and returns False.
    """
    try:
        socket.send_fds(line, [word], [last.fileno()])
    except PermissionError:
        line.send(word)
        return False
    last.close()
    return True
