"""Copies bytes between two connected sockets on the event loop, in both directions, until one is closed.

It uses raw sockets and reader callbacks: one receive and one send for a message. Data is stored only if the
other side is slow, and then nothing more is read until the other side has taken that data. The caller's gate
(vgpud/serve/gate.py) says when more is read from the caller.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial

from vgpud.serve.gate import FRAME_SECONDS, FrameCounter, Gate

_CHUNK_BYTES = 32 * 1024  # size of a chunk: if it consists of frames of 9 bytes, counting them takes 1 ms


class Pump:
    """Copies between a caller, `near`, and grpcio, `far`. `ended` is called once, after both sockets are
    closed.
    """

    # One buffer is shared by all pumps: a chunk is sent or stored before the event loop runs other callbacks.
    _buffer = bytearray(_CHUNK_BYTES)
    _view = memoryview(_buffer)

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        near: socket.socket,
        far: socket.socket,
        gate: Gate,
        ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._near, self._far = near, far
        self._gate = gate
        self._frames = FrameCounter()
        self._ended = ended
        self._closed = False
        for source in (near, far):
            self._read(source)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for end in (self._near, self._far):
            self._loop.remove_reader(end)
            self._loop.remove_writer(end)
            end.close()
        self._ended()

    def taken(self) -> None:
        """Called when the event loop has taken a call of this connection from grpcio."""
        self._gate.taken()

    def _read(self, source: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(source, self._ask if source is self._near else self._answer)

    def _ask(self) -> None:
        if self._gate.is_open:
            self._carry(self._near, self._far)
        else:
            self._loop.remove_reader(self._near)
            self._gate.wait(partial(self._read, self._near))

    def _answer(self) -> None:
        self._carry(self._far, self._near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        began = time.thread_time()
        try:
            received = source.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = 0
        if received == 0:
            self.close()
            return
        calls, frames = self._frames.count(self._view[:received]) if source is self._near else (0, 0)
        sent = self._send(sink, self._view[:received])
        if sent < received and not self._closed:
            self._loop.remove_reader(source)
            self._loop.add_writer(sink, self._resume, source, sink, bytes(self._view[sent:received]))
        self._gate.passed(calls, time.thread_time() - began + frames * FRAME_SECONDS)

    def _resume(self, source: socket.socket, sink: socket.socket, rest: bytes) -> None:
        sent = self._send(sink, rest)
        if self._closed or sent == 0:
            return
        if sent < len(rest):
            self._loop.add_writer(sink, self._resume, source, sink, rest[sent:])
            return
        self._loop.remove_writer(sink)
        self._read(source)

    def _send(self, sink: socket.socket, data: memoryview | bytes) -> int:
        try:
            return sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except (BrokenPipeError, ConnectionResetError):
            self._lost(sink)
            return len(data)
        except OSError:
            self.close()
            return 0

    def _lost(self, sink: socket.socket) -> None:
        """The peer of `sink` has closed, and takes nothing more. The answers that grpcio wrote before it
        closed are still carried: its socket is read to the end.
        """
        if sink is self._near:
            self.close()
        else:
            self._loop.remove_reader(self._near)
