"""The process between the door and the sessions, which systemd starts for connections."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import oldkernel
from tests.conditions import needs
from tests.e2e.test_passed_descriptors import helpers_of
from tests.fusefile import never_written_back
from tests.lease.conftest import eventually
from tests.lingering import passes
from tests.native.harness import ARBITER


@needs("root", "fuse")
def test_systemd_has_no_connection_in_which_the_account_of_the_door_passes_files(tmp_path: Path) -> None:
    """An attack: systemd closed the connections above MaxConnections= itself, and waited for what the account
    had passed in them. Here the test has the socket of the unit.
    """
    words = [*oldkernel.words(), sys.executable, "-m", "vgpud.remote.accept"]
    environment = {**os.environ, "VGPUD_RUN_DIR": str(tmp_path), "VGPUD_ARBITER": str(ARBITER)}
    with socket.socket(socket.AF_UNIX) as systemd:
        systemd.bind(str(tmp_path / "session.sock"))
        systemd.listen()
        with subprocess.Popen(words, env=environment) as accepter, ExitStack() as at_end:
            at_end.callback(accepter.terminate)
            eventually((tmp_path / "remote.sock").exists)
            with never_written_back(tmp_path / "mount", 1) as (sockets, file):
                door = _connected(tmp_path)
                assert passes(door, b"x", next(sockets))
                refused, _ = systemd.accept()
                with refused, pytest.raises(BlockingIOError):
                    refused.recv(1, socket.MSG_DONTWAIT)
                with door:
                    assert door.recv(1) == b""  # the connection has ended with the one that systemd closed
                assert file.asked()  # its close waits, in the keeper
                with _connected(tmp_path) as door:
                    session, _ = systemd.accept()
                    with session, _asked(session) as of_session:
                        door.send(b"call")
                        assert of_session.recv(4) == b"call"
                        of_session.send(b"reply")
                        assert door.recv(5) == b"reply"
                    assert door.recv(1) == b""
    eventually(lambda: helpers_of(tmp_path) == [])


def _connected(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(folder / "remote.sock"))
    return made


def _asked(session: socket.socket) -> socket.socket:
    session.send(b"\0")
    _, (descriptor,), _, _ = socket.recv_fds(session, 1, 1)
    return socket.socket(fileno=descriptor)
