"""The door and a session beside connections of programs that are not clients."""

import json
import os
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from tests import prepared
from tests.conditions import needs
from tests.lease.conftest import eventually as until
from tests.remote.clients import ended, opened
from tests.remote.node import CERTIFICATES, RemoteNode
from vgpud.model.errors import ErrorCode

pytestmark = needs("root", "namespaces")


def test_another_local_user_cannot_use_the_clients_tunnel(remote: RemoteNode) -> None:
    report = [sys.executable, "-c", "import os; print(os.environ['LUPINE_SERVER'], flush=True); input()"]
    token = remote.grant()
    client = remote.client(token, "--memory", "1GiB", command=report)
    assert client.stdout is not None
    port = client.stdout.readline().strip().rpartition(":")[2]
    probe = (
        "import socket, sys; made = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
        "made.sendall(b'echo mine\\n'); print(made.recv(100))"
    )
    words = [sys.executable, "-I", "-S", "-c", probe, port]
    other = subprocess.run(["setpriv", "--reuid=65534", *words], capture_output=True, text=True, check=False)
    assert "mine" not in other.stdout
    leave = probe.replace("print(made.recv(100))", "made.close()")
    for _ in range(3):  # /proc/net/tcp lists a closed socket as root's
        subprocess.run(["setpriv", "--reuid=65534", *words[:-2], leave, port], check=False)
    shown, _ = remote.client(token, "-o", "json", verb="status").communicate(timeout=300)
    assert json.loads(shown)["sessions"][0]["bytes"] == 0
    own = subprocess.run(words, capture_output=True, text=True, check=True)
    assert own.stdout == "b'mine\\n'\n"
    client.kill()
    ended(client)


def test_a_client_is_served_while_others_send_garbage_or_leave_connections_half_open(
    remote: RemoteNode,
) -> None:
    token = remote.grant()
    with ExitStack() as idle:
        for _ in range(200):  # connections that never speak, from another address
            made = idle.enter_context(socket.socket())
            made.bind(("127.0.0.9", 0))
            made.connect(("127.0.0.1", remote.port))
        for number in range(2_000):
            with suppress(OSError), socket.socket() as made:
                made.bind((f"127.0.0.{10 + number % 200}", 0))
                made.settimeout(5)
                made.connect(("127.0.0.1", remote.port))
                made.sendall(b"\x16\x03\x01" + os.urandom(60) if number % 2 else b"GET / HTTP/1.0\r\n\r\n")
        client = opened(remote, token, "--memory", "1GiB")
        client.kill()
        ended(client)
    assert remote.door.poll() is None
    descriptors = Path(f"/proc/{remote.door.pid}/fd")
    until(lambda: len(list(descriptors.iterdir())) < 40)
    assert "Traceback" not in remote.log.read_text()


def test_a_client_whose_connection_the_door_closes_tries_nine_times_more(remote: RemoteNode) -> None:
    token = remote.grant()
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(60)
        remote.port = door.getsockname()[1]
        client = remote.client(token)
        for _ in range(10):
            door.accept()[0].close()
        assert "it closed the connection (E801)" in ended(client)


def test_an_invalid_call_to_the_remote_door_is_refused(remote: RemoteNode) -> None:
    context = ssl.create_default_context(cafile=CERTIFICATES / "door.pem")
    settings = b'{"version":2,"call":"settings"}\n'
    for line in (b"{}\n", b"[" * 5000 + b"\n", b"x" * 300_000, settings, b"\xff\n"):
        answer = b""
        with (
            socket.create_connection(("127.0.0.1", remote.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as made,
            suppress(OSError),  # the door closes the connection before the end of the line
        ):
            made.sendall(line)
            answer = made.recv(4096)
        assert answer == b"" or b'"error"' in answer, line[:40]
    assert remote.door.poll() is None
    assert "Traceback" not in remote.log.read_text()


def test_a_door_without_session_processes_ends_and_says_where_to_look(tmp_path: Path) -> None:
    files = ("--certificate", str(CERTIFICATES / "door.pem"), "--key", str(CERTIFICATES / "door.key"))
    environment = {**os.environ, "VGPUD_RUN_DIR": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("wb") as errors:
        door = prepared.program("vgpud.remote.door", files, environment, 0, errors.fileno())
    assert door.wait(300) == ErrorCode.UNREACHABLE.exit_code
    assert log.read_text() == (
        "vgpud-remote: the node cannot open remote sessions now (E801)\n"
        "hint: see the journal of vgpud-remote-session\n"
    )
