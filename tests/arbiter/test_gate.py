"""Reactions of a process to messages of the arbiter. A stand-in for the arbiter sends messages that the real
one would not send.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.arbiter.conftest import LONG, Card
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy

REGISTER, WELCOME, WANT, DONE, GRANT, REVOKE, CUT = 1, 2, 4, 5, 6, 7, 11
FREE, WATCH = 1, 2
OPEN_ENDED = 2**64 - 1
# the fields of a message to or from the arbiter: its head, a value, and the time slice's number, length,
# window, flags, devices and time of sending
MESSAGE = struct.Struct("<4IqQQQIIQ24x")
WINDOW_NS = 2_000_000


class Line:
    """The connection of one process to the arbiter, from its registration on."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.slot = 0
        line.settimeout(300)
        self.until(REGISTER, 0)
        self.say(WELCOME, 0)

    def say(self, kind: int, number: int, length_ns: int = 0, flags: int = 0) -> None:
        turn = (number, length_ns, WINDOW_NS, flags, 1, time.monotonic_ns())
        self.line.send(MESSAGE.pack(kind, layout.VERSION, self.slot, 1, 1, *turn))

    def until(self, kind: int, number: int) -> None:
        """Reads until a message of this kind about the time slice `number` arrives."""
        said: tuple[int, int] = (0, 0)
        while said != (kind, number):
            words = MESSAGE.unpack(self.line.recv(MESSAGE.size))
            said, self.slot = (words[0], words[5]), words[2]


@contextmanager
def stand_in(card: Card, *words: str) -> Iterator[Callable[[], AbstractContextManager[Line]]]:
    """Replaces the arbiter for one process. The yielded function waits until the process connects and wants a
    time slice.
    """
    lease = card.lease("a", SharePolicy.WORK_CONSERVING, 50)
    card.kill_arbiter()
    path = lease / layout.ARBITER_SOCKET
    path.unlink()

    @contextmanager
    def accept() -> Iterator[Line]:
        accepted, _ = listener.accept()
        with accepted:
            line = Line(accepted)
            line.until(WANT, 0)
            yield line

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(300)
        card.spin(lease, LONG, *words)
        yield accept


@pytest.fixture
def line(card: Card) -> Iterator[Line]:
    """The connection of a process that has endless work and wants a time slice."""
    with stand_in(card) as accept, accept() as line:
        yield line


def test_a_time_slice_without_pacing_ends_when_the_arbiter_revokes_it(line: Line) -> None:
    line.say(GRANT, 1, OPEN_ENDED, FREE)
    line.say(REVOKE, 1)
    line.until(DONE, 1)


def test_libvgpu_returns_a_time_slice_without_pacing_at_its_end(line: Line) -> None:
    line.say(GRANT, 1, 5_000_000, FREE)
    line.until(DONE, 1)


def test_a_later_grant_sets_the_end_of_an_open_ended_time_slice(line: Line) -> None:
    line.say(GRANT, 1, OPEN_ENDED)
    line.say(GRANT, 1, 5_000_000, WATCH)
    line.until(DONE, 1)
