"""Carries bytes between two connected sockets on the event loop, both ways, until either ends.

Raw sockets and reader callbacks: one receive and one send for a message, no copy kept unless the
other side is slow, and then no more is read until it has taken that.
"""

import asyncio
import socket
from collections.abc import Callable

_CHUNK_BYTES = 256 * 1024


class Pump:
    """`ended` is called once, after both sockets are closed."""

    # one buffer for all: a chunk is sent on, or copied, before the loop runs anything else
    _buffer = bytearray(_CHUNK_BYTES)
    _view = memoryview(_buffer)

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        near: socket.socket,
        far: socket.socket,
        ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._ends = (near, far)
        self._ended = ended
        self._closed = False
        loop.add_reader(near, self._carry, near, far)
        loop.add_reader(far, self._carry, far, near)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for end in self._ends:
            self._loop.remove_reader(end)
            self._loop.remove_writer(end)
            end.close()
        self._ended()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            received = source.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = 0
        if received == 0:
            self.close()
            return
        sent = self._send(sink, self._view[:received])
        if sent < received and not self._closed:
            self._loop.remove_reader(source)
            self._loop.add_writer(sink, self._resume, source, sink, bytes(self._view[sent:received]))

    def _resume(self, source: socket.socket, sink: socket.socket, rest: bytes) -> None:
        sent = self._send(sink, rest)
        if self._closed or sent == 0:
            return
        if sent < len(rest):
            self._loop.add_writer(sink, self._resume, source, sink, rest[sent:])
            return
        self._loop.remove_writer(sink)
        self._loop.add_reader(source, self._carry, source, sink)

    def _send(self, sink: socket.socket, data: memoryview | bytes) -> int:
        try:
            return sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.close()
            return 0
