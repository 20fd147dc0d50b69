"""The sockets that the keeper process (native/arbiter/keeper.h) closes at once, and those that it closes on a
thread of their user.
"""

import fcntl
import os
import socket
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.fusefile import never_written_back
from tests.lease.conftest import eventually
from tests.native.harness import ARBITER

ATTACKER, OTHER = 7, 8


class Keeper:
    """A running keeper process that holds sockets for this process."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = count()
        holder = os.pidfd_open(os.getpid())
        words = ["vgpu-keeper", "--keep"]
        with theirs:
            self.process = subprocess.Popen(words, executable=ARBITER, stdin=theirs.fileno(), stdout=holder)
        os.close(holder)
        eventually(lambda: b"vgpu-keeper" in Path(f"/proc/{self.process.pid}/comm").read_bytes())
        self._without = self._descriptors()

    def _descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def keeps_none(self) -> bool:
        return self._descriptors() == self._without

    def close(self, one: socket.socket, user: int) -> None:
        """Gives the socket to the keeper to close. Returns when the keeper has it."""
        number = next(self._numbers)
        socket.send_fds(self.line, [struct.pack("=QQ", number, user)], [one.fileno()])
        one.close()
        eventually(lambda: fcntl.ioctl(self.line, termios.TIOCOUTQ, bytes(4)) == bytes(4))
        self.line.send(struct.pack("=QQ", number, 0))

    def end(self) -> None:
        self.line.close()
        self.process.wait()


@contextmanager
def with_a_close_that_waits(folder: Path, sockets: int) -> Iterator[tuple[Keeper, Iterator[socket.socket]]]:
    """Yields a keeper in which the close of a socket of user ATTACKER hangs, and `sockets` further sockets
    whose close would hang.
    """
    keeper = Keeper()
    with never_written_back(folder, 1 + sockets) as (nested, file):
        keeper.close(next(nested), ATTACKER)
        assert file.asked()
        eventually(keeper.keeps_none)
        yield keeper, nested
    keeper.end()


KINDS = pytest.mark.parametrize(
    "kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET], ids=["stream", "packets"]
)


@needs("root", "fuse")
@KINDS
def test_connections_without_passed_files_are_closed_while_another_close_of_their_user_hangs(
    tmp_path: Path, kind: socket.SocketKind
) -> None:
    """An attack: if the keeper closed these connections only after the hanging close, the connections and the
    bytes in their queues would take memory until then.
    """
    with with_a_close_that_waits(tmp_path / "mount", 0) as (keeper, _):
        for sizes in [(), (1,), (0, 60000, 0), (60000, 60000, 1)]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
            with ours:
                for size in sizes:
                    ours.send(bytes(size))
                keeper.close(theirs, ATTACKER)
                eventually(keeper.keeps_none)


@needs("root", "fuse")
@KINDS
def test_a_passed_file_behind_other_bytes_is_closed_on_the_thread_of_its_user(
    tmp_path: Path, kind: socket.SocketKind
) -> None:
    before: list[tuple[int, ...]] = [(), (1,), (0,), (0, 0, 1, 0), (60000, 60000)]
    with with_a_close_that_waits(tmp_path / "mount", len(before)) as (keeper, nested):
        for number, sizes in enumerate(before):
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
            with ours, next(nested) as file:
                for size in sizes:
                    ours.send(bytes(size))
                socket.send_fds(ours, [b"x"], [file.fileno()])
            keeper.close(theirs, OTHER + number)
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
            with ours:
                keeper.close(theirs, ATTACKER)
        eventually(keeper.keeps_none)  # the keeper serves on


def test_a_keeper_that_its_holder_gives_up_closes_its_copies_and_ends_no_connection() -> None:
    """A holder that replaces its keeper closes its line to the old one. The old keeper then ends, and the
    connections stay open, because the holder still has them.
    """
    keeper = Keeper()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(keeper.line, [struct.pack("=QQ", 0, ATTACKER)], [theirs.fileno()])
        keeper.end()
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
        theirs.send(b"y")
        assert ours.recv(1) == b"y"
