"""Limits what a user's connections send on to grpcio: the number of calls that wait there, the event loop's
time for their bytes, and grpcio's time for their frames.

grpcio has one queue of calls for all connections, from which the event loop takes one at a time. If the queue
is longer than `grpc.server.max_pending_requests`, grpcio cancels new calls at random, also those of other
users. So the relay counts the calls that it passes on. While a user has MOST_QUEUED calls in the queue, the
relay reads nothing from that user's connections.

grpcio reads all connections with a few threads. A frame of a few bytes can cost it as much as a message, or
an answer (PING, SETTINGS). So each frame is charged to its user.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from vgpud import clock

MOST_QUEUED = 8
# time after which a call counts as taken: a call that grpcio refuses, or that its caller resets, is never
# taken
_QUEUED_SECONDS = 1.0
_TIME_SHARE = 0.2  # part of the event loop's time that may be spent on the bytes of one user
_TIME_AT_ONCE_SECONDS = 0.005
# time of the event loop charged for each frame, which allows 4000 frames a second for each user; a call by
# grpcio or grpc-go has about six
FRAME_SECONDS = 0.00005
_LOOK_SECONDS = 0.01

_PREFACE_BYTES = 24  # length of HTTP/2's connection preface: RFC 9113, 3.4
_HEAD_BYTES = 9  # length of a frame's head, RFC 9113, 4.1: payload length in 3 bytes, type, flags, stream
_HEADERS = 1


class FrameCounter:
    """Counts the frames that a client sends, and among them those that open a stream.

    For a peer that does not speak HTTP/2 the counts mean nothing; grpcio closes such a connection.
    """

    def __init__(self) -> None:
        self._skip = _PREFACE_BYTES  # bytes until the next frame head begins
        self._cut = b""  # the beginning of a frame head whose end has not arrived yet

    def count(self, piece: memoryview) -> tuple[int, int]:
        """The numbers of streams and of frames in the next bytes. A frame is counted when its head is
        complete.
        """
        if self._cut:
            piece = memoryview(self._cut + piece)
            self._cut = b""
        opened, frames, at, end = 0, 0, self._skip, len(piece)
        while at + _HEAD_BYTES <= end:
            opened += piece[at + 3] == _HEADERS
            frames += 1
            at += _HEAD_BYTES + int.from_bytes(piece[at : at + 3], "big")
        if at < end:
            self._cut, at = bytes(piece[at:]), end
        self._skip = at - end
        return opened, frames


class Gate:
    """Decides when more is read from one user's connections. Root's gate is always open."""

    def __init__(self, always_open: bool = False) -> None:
        self._always_open = always_open
        self._queued: deque[float] = deque()  # times at which calls in the queue were passed on
        self._waiting: deque[Callable[[], None]] = deque()
        self._debt_seconds, self._debt_at = 0.0, 0.0
        self._look: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._always_open or (self._room() > 0 and self._debt() < _TIME_AT_ONCE_SECONDS)

    def wait(self, resume: Callable[[], None]) -> None:
        """Calls `resume` when the gate is open. Waiting connections are resumed one after the other."""
        self._waiting.append(resume)
        self._look_later()

    def passed(self, calls: int, seconds: float) -> None:
        """Records that `calls` calls were passed on to grpcio, and that this took `seconds` of the event
        loop's and of grpcio's time.
        """
        if not self._always_open:
            self._queued.extend([clock.now()] * calls)
            self._debt_seconds = self._debt() + seconds
            if not self.is_open:
                # the timer also keeps this object, so that a user that connects again still has its debt
                self._look_later()

    def taken(self) -> None:
        """Records that the event loop has taken one of the calls from grpcio's queue."""
        if self._queued:
            self._queued.popleft()
        self._resume(1)

    def _room(self) -> int:
        oldest = clock.now() - _QUEUED_SECONDS
        while self._queued and self._queued[0] <= oldest:
            self._queued.popleft()
        return MOST_QUEUED - len(self._queued)

    def _debt(self) -> float:
        now = clock.now()
        self._debt_seconds = max(0.0, self._debt_seconds - _TIME_SHARE * (now - self._debt_at))
        self._debt_at = now
        return self._debt_seconds

    def _resume(self, count: int) -> None:
        if self._waiting and self.is_open:
            for _ in range(min(count, len(self._waiting))):
                self._waiting.popleft()()

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._looked)

    def _looked(self) -> None:
        self._look = None
        self._resume(MOST_QUEUED)
        if self._waiting or not self.is_open:
            self._look_later()
