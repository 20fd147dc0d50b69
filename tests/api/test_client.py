"""The API client before it reaches a daemon: its imports, and its choice of a socket."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ctl.daemon import Daemon
from vgpud.api import sockets
from vgpud.api.client import Client
from vgpud.api.sockets import choose_socket
from vgpud.model.caller import Door
from vgpud.model.errors import ErrorCode, VgpuError


def test_importing_the_client_loads_no_grpc() -> None:
    code = (
        "import sys, vgpud.api.client as c; c.Client().close();"
        "print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("VGPUD_SOCKET", raising=False)
    monkeypatch.setenv("VGPUD_RUN_DIR", str(tmp_path))
    return tmp_path


def test_a_client_uses_the_socket_that_the_environment_names(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VGPUD_SOCKET", "/some/where.sock")
    assert {choose_socket(door) for door in Door} == {Path("/some/where.sock")}


def test_root_uses_the_admin_socket(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert {choose_socket(door) for door in Door} == {run_dir / "admin.sock"}


def test_a_member_of_group_vgpu_connects_to_vgpud_sock(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (run_dir / "vgpud.sock").touch()
    assert {choose_socket(door) for door in Door} == {run_dir / "vgpud.sock"}


def test_a_user_outside_group_vgpu_connects_to_ro_sock(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert choose_socket(Door.READ) == run_dir / "ro.sock"
    (run_dir / "vgpud.sock").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert choose_socket(Door.READ) == run_dir / "ro.sock"
    with pytest.raises(VgpuError, match="uid 1000 may not open") as caught, Client() as client:
        client.release("a")
    assert caught.value.code is ErrorCode.NOT_ALLOWED
    assert "usermod" in caught.value.hint
    with pytest.raises(VgpuError) as caught, Client() as client:
        client.drain_device("GPU-1")
    assert caught.value.hint == "call as root", "the group would not help"


@pytest.mark.parametrize(
    ("is_booted", "command"), [(True, "systemctl status vgpud"), (False, "pgrep -a vgpud")]
)
def test_a_missing_socket_is_reported_as_an_unreachable_daemon(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, is_booted: bool, command: str
) -> None:
    monkeypatch.setattr(sockets, "SYSTEMD", run_dir if is_booted else run_dir / "none")
    with pytest.raises(VgpuError) as caught, Client() as client:
        client.get_node()
    assert caught.value.code is ErrorCode.UNREACHABLE
    assert str(run_dir) in caught.value.sentence
    assert command in caught.value.hint


def test_a_socket_without_a_listener_is_reported_as_an_unreachable_daemon(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(VgpuError) as caught, Client(path) as client:
        client.get_node()
    assert caught.value.code is ErrorCode.UNREACHABLE
    with Client(path) as client, pytest.raises(VgpuError) as caught:
        next(client.watch())
    assert caught.value.code is ErrorCode.UNREACHABLE


def test_each_client_opens_its_own_connection() -> None:
    """By default the channels of one process to one address share a connection. A new client could then get a
    connection to a vgpud that has been restarted since.
    """
    with tempfile.TemporaryDirectory(prefix="vgpud-") as folder:  # a short path, as a Unix socket needs
        server = Daemon(Path(folder) / "vgpud.sock")
        server.start()
        with Client(server.socket) as one, Client(server.socket) as other:
            one.get_node()
            other.get_node()
            assert connections(server.socket) == 2
        server.stop()


def connections(socket: Path) -> int:
    """Returns the number of connections on the server's socket: those in state SS_CONNECTED, 3
    (proc_net_unix(5)).
    """
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(row[5] == "03" and row[-1] == str(socket) for row in rows)
