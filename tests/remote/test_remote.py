"""Remote slices end to end: a door, sessions, a stand-in engine on the simulated node, and clients."""

import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.demo.node import Command
from tests.e2e.conftest import NodeMaker
from tests.lease.conftest import eventually as until
from tests.remote.node import CERTIFICATES, PROGRAM, RemoteNode
from tests.simnode import ROOT
from vgpud.remote import wire

pytestmark = needs("root", "namespaces")


@pytest.fixture
def short(make_node: NodeMaker) -> Iterator[RemoteNode]:
    """A node that keeps sessions of clients that have left for a tenth of a second."""
    made = RemoteNode(make_node(), 'grace = "100ms"\nmax_sessions_per_user = 2')
    yield made
    made.close()


def _say(client: Command, words: str) -> str:
    """Sends a line to the program of a client, and returns its answer."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(words + "\n")
    client.stdin.flush()
    return client.stdout.readline().strip()


def _opened(remote: RemoteNode, token: str, *options: str) -> Command:
    """A client whose program has a connection to the engine."""
    client = remote.client(token, *options)
    assert _say(client, "echo hello") == "hello", remote.log.read_text()
    return client


def _ended(client: Command) -> str:
    _, errors = client.communicate(timeout=300)
    return errors


def test_a_remote_program_is_held_to_its_slice_and_its_end_releases_it(remote: RemoteNode) -> None:
    client = remote.client(remote.grant(), "--memory", "4GiB", "--cores", "25")
    said, errors = client.communicate("alloc 1073741824\nalloc 8589934592\nexit 7\n", timeout=300)
    assert (client.returncode, said) == (7, "0\n2\n"), errors + remote.log.read_text()
    until(lambda: not remote.held())


def test_listings_and_audit_name_the_remote_user_and_the_address(remote: RemoteNode) -> None:
    client = _opened(remote, remote.grant(), "--memory", "1GiB", "--label", "night run")
    (held,) = remote.held()
    assert str(held["label"]).startswith("remote root/")
    assert str(held["label"]).endswith(" 127.0.0.1 night run")
    log = remote.node.log.read_text()
    assert any('"audit": "allocate"' in line and " 127.0.0.1 night run" in line for line in log.splitlines())
    client.kill()
    _ended(client)


def test_the_server_runs_as_the_grants_account_in_namespaces_of_its_own(remote: RemoteNode) -> None:
    client = _opened(remote, remote.grant(user="65534"), "--memory", "1GiB")
    assert _say(client, "uid") == "65534"
    assert _say(client, "interfaces") == "lo"
    assert _say(client, "pids").split()[0] == "1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 14833))  # the engine's port, on the host
    (held,) = remote.held()
    assert held["ownerUid"] == 65534
    client.kill()
    _ended(client)


def test_a_signal_to_the_client_reaches_the_program_and_is_the_exit_code(remote: RemoteNode) -> None:
    client = _opened(remote, remote.grant(), "--memory", "1GiB")
    client.send_signal(signal.SIGTERM)
    assert client.wait(timeout=300) == 128 + signal.SIGTERM
    until(lambda: not remote.held())


@pytest.mark.parametrize("spoil", [lambda secret: secret[::-1], lambda secret: "x" * 43, lambda secret: ""])
def test_a_foreign_token_is_refused(remote: RemoteNode, spoil: Callable[[str], str]) -> None:
    token = remote.grant()
    number, secret, pin = token.split(".")
    forged = spoil(secret)
    client = remote.client(f"{number}.{forged}.{pin}", "--memory", "1GiB")
    assert "(E201)" in _ended(client)
    assert client.returncode == 4
    assert remote.held() == []


def test_revoked_and_expired_tokens_are_refused(remote: RemoteNode) -> None:
    revoked, expired = remote.grant(), remote.grant("--expires", "0.001s")
    remote.node.ctl("remote", "revoke", revoked.split(".")[0])
    for token in (revoked, expired):
        assert "the grant was revoked or has expired (E201)" in _ended(
            remote.client(token, "--memory", "1GiB")
        )


def test_the_revocation_of_a_grant_ends_its_session(remote: RemoteNode) -> None:
    token = remote.grant()
    client = _opened(remote, token, "--memory", "1GiB")
    remote.node.ctl("remote", "revoke", "root")
    until(lambda: not remote.held())
    assert _say(client, "echo hello") == "closed"
    assert client.stderr is not None
    assert client.stderr.readline() == "vgpuctl: the remote session has ended before the command\n"
    assert _ended(client) == ""
    assert client.returncode == 0


def test_a_client_sends_nothing_to_a_door_with_another_certificate(remote: RemoteNode) -> None:
    number, secret, pin = remote.grant().split(".")
    client = remote.client(f"{number}.{secret}.{'0' * len(pin)}", "--memory", "1GiB")
    assert "is not the one that the token names (E201)" in _ended(client)
    assert remote.sessions.processes[1:] == []  # the first asked for the door's settings


def test_a_client_certificate_of_a_grant_opens_a_session(remote: RemoteNode) -> None:
    remote.node.ctl("remote", "grant", "0", "--certificate", str(CERTIFICATES / "client.pem"))
    proof = ["--ca", str(CERTIFICATES / "door.pem")]
    for name, wanted in (("client", 0), ("foreign", 32)):
        files = [
            "--certificate",
            str(CERTIFICATES / f"{name}.pem"),
            "--key",
            str(CERTIFICATES / f"{name}.key"),
        ]
        client = remote.client("", "--memory", "1GiB", *files, *proof, command=["true"])
        errors = _ended(client)
        assert client.returncode == wanted, errors


def test_a_grant_bounds_the_sums_of_its_slices(remote: RemoteNode) -> None:
    token = remote.grant("--memory", "3GiB", "--cores", "40", "--sessions", "2")
    first = _opened(remote, token, "--memory", "2GiB", "--cores", "20")
    for options, sentence in (
        (("--memory", "2GiB", "--cores", "10"), "would hold 4GiB, and may hold 3GiB"),
        (("--memory", "1GiB", "--cores", "30"), "would hold 50% of a device, and may hold 40%"),
    ):
        assert sentence in _ended(remote.client(token, *options))
    second = _opened(remote, token, "--memory", "1GiB", "--cores", "20")
    assert "has 2 sessions, and may have 2" in _ended(
        remote.client(token, "--memory", "1GiB", "--cores", "1")
    )
    for client in (first, second):
        client.kill()
        _ended(client)


def test_status_lists_the_sessions_of_the_user_alone(remote: RemoteNode) -> None:
    own, other = remote.grant(), remote.grant(user="65534")
    client = _opened(remote, own, "--memory", "1GiB")
    (held,) = remote.held()
    shown, _ = remote.client(own, verb="status").communicate(timeout=300)
    assert str(held["id"]) in shown
    shown, _ = remote.client(other, verb="status").communicate(timeout=300)
    assert str(held["id"]) not in shown
    client.kill()
    _ended(client)


def test_a_user_has_at_most_the_sessions_of_the_policy(short: RemoteNode) -> None:
    tokens = [short.grant() for _ in range(3)]
    clients = [_opened(short, token, "--memory", "1GiB") for token in tokens[:2]]
    assert "root has 2 sessions, and may have 2" in _ended(short.client(tokens[2], "--memory", "1GiB"))
    for client in clients:
        client.kill()
        _ended(client)
    until(lambda: not short.held())


@pytest.mark.parametrize("victim", ["client", "door", "session", "engine"])
def test_the_kill_of_any_process_releases_the_slice_and_leaves_no_process(
    short: RemoteNode, victim: str
) -> None:
    client = _opened(short, short.grant(), "--memory", "1GiB")
    assert _engine(short)
    if victim == "client":
        client.kill()
    elif victim == "door":
        short.door.kill()
    elif victim == "session":
        short.sessions.processes[-1].kill()
    else:
        for pid in _engine(short):
            with suppress(ProcessLookupError):  # it has ended with the first of them
                os.kill(pid, signal.SIGKILL)
    until(lambda: not short.held())
    until(lambda: not _engine(short))
    client.kill()
    _ended(client)


def test_a_session_outlives_a_kill_of_vgpud_and_is_released_at_its_end(short: RemoteNode) -> None:
    client = _opened(short, short.grant(), "--memory", "1GiB")
    short.node.kill()
    short.node.start()
    assert len(short.held()) == 1
    assert _say(client, "echo still") == "still"
    client.kill()
    _ended(client)
    until(lambda: not short.held())


def test_a_client_that_loses_its_control_connection_keeps_the_session(remote: RemoteNode) -> None:
    client = _opened(remote, remote.grant(), "--memory", "1GiB")
    for made in _connections(client.pid, remote.port):
        made.shutdown(socket.SHUT_RDWR)
        made.close()
    until(lambda: len(_connections(client.pid, remote.port)) == 1)  # the control connection, made again
    (held,) = remote.held()
    shown, _ = remote.client(remote.grant(), verb="status").communicate(timeout=300)
    assert str(held["id"]) in shown
    client.kill()
    _ended(client)


def test_the_files_of_the_client_package_need_only_the_standard_library(
    remote: RemoteNode, tmp_path: Path
) -> None:
    rules = (ROOT / "packaging/deb/debian/rules").read_text()
    words = re.search(r"for file in (__init__ ctl/.+?); do", rules, re.DOTALL)
    assert words is not None
    for name in words[1].replace("\\", "").split():
        copy = tmp_path / "vgpud" / f"{name}.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / "vgpud" / f"{name}.py").read_bytes())
    script = (ROOT / "packaging/deb/remote/vgpuctl").read_text()
    (tmp_path / "vgpuctl").write_text(script.replace("/usr/lib/vgpud-remote-client", str(tmp_path)))
    bare = [sys.executable, "-I", "-S", str(tmp_path / "vgpuctl")]  # -S: without installed packages
    place = [f"127.0.0.1:{remote.port}", "--library", str(tmp_path)]
    told = {"PATH": os.environ["PATH"], "VGPU_REMOTE_TOKEN": remote.grant()}
    done = subprocess.run(
        [*bare, "remote", "run", *place, "--memory", "1GiB", "--", *PROGRAM],
        env=told,
        input="echo bare\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "bare\n"), done.stderr
    other = subprocess.run([*bare, "ls"], env=told, capture_output=True, text=True, check=False)
    assert "'ls' needs the package vgpud" in other.stderr


def test_a_grant_needs_the_doors_certificate_first(remote: RemoteNode) -> None:
    (Path(remote.node.environment["VGPUD_CONFIG"]).parent / "remote" / "certificate.pem").unlink()
    refused = remote.node.ctl("remote", "grant", "0", check=False)
    assert "the door has no certificate yet, which a token must name (E106)" in refused.stderr
    assert remote.node.ctl_json("remote", "grants")["grants"] == []


@pytest.mark.parametrize(
    ("token", "options", "sentence"),
    [
        ("garbage", (), "what VGPU_REMOTE_TOKEN has is not a token"),
        ("a.b.c", ("--certificate", "x.pem"), "--key is missing"),
    ],
)
def test_a_client_says_what_is_wrong_before_it_connects(
    remote: RemoteNode, token: str, options: tuple[str, ...], sentence: str
) -> None:
    client = remote.client(token, *options, verb="status")
    assert sentence in _ended(client)
    assert client.returncode == 2


def test_a_client_that_leaves_before_the_reply_leaves_no_session(short: RemoteNode) -> None:
    token = short.grant()
    context = ssl.create_default_context(cafile=CERTIFICATES / "door.pem")
    plain = socket.create_connection(("127.0.0.1", short.port))
    with context.wrap_socket(plain, server_hostname="localhost") as made:
        made.sendall(wire.encode(wire.Open(token=token, memory="1GiB")))
        until(lambda: bool(short.held()))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
    until(lambda: not short.held())


def test_a_local_label_does_not_count_towards_a_grant(remote: RemoteNode) -> None:
    token = remote.grant("--sessions", "1", user="65534")
    forged = f"remote 65534/{token.split('.')[0]} 127.0.0.1"
    remote.node.ctl("alloc", "--memory", "1GiB", "--label", forged)
    name = subprocess.run(["id", "-nu", "65534"], capture_output=True, text=True, check=False).stdout.strip()
    remote.node.ctl("alloc", "--memory", "1GiB", "--label", forged.replace("65534", name or "65534", 1))
    client = _opened(remote, token, "--memory", "1GiB")
    client.kill()
    _ended(client)


def test_another_user_cannot_use_the_tunnel(remote: RemoteNode) -> None:
    report = [sys.executable, "-c", "import os; print(os.environ['LUPINE_SERVER'], flush=True); input()"]
    client = remote.client(remote.grant(), "--memory", "1GiB", command=report)
    assert client.stdout is not None
    port = client.stdout.readline().strip().rpartition(":")[2]
    probe = (
        "import socket, sys; made = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
        "made.sendall(b'echo mine\\n'); print(made.recv(100))"
    )
    words = [sys.executable, "-c", probe, port]
    other = subprocess.run(["setpriv", "--reuid=65534", *words], capture_output=True, text=True, check=False)
    assert "mine" not in other.stdout
    own = subprocess.run(words, capture_output=True, text=True, check=True)
    assert own.stdout == "b'mine\\n'\n"
    client.kill()
    _ended(client)


def test_an_honest_client_is_served_beside_garbage_and_half_open_connections(remote: RemoteNode) -> None:
    token = remote.grant()
    with ExitStack() as idle:
        for _ in range(200):  # connections that never speak, from another address
            made = idle.enter_context(socket.socket())
            made.bind(("127.0.0.9", 0))
            made.connect(("127.0.0.1", remote.port))
        for number in range(10_000):
            with suppress(OSError), socket.socket() as made:
                made.bind((f"127.0.0.{10 + number % 200}", 0))
                made.settimeout(5)
                made.connect(("127.0.0.1", remote.port))
                made.sendall(b"\x16\x03\x01" + os.urandom(60) if number % 2 else b"GET / HTTP/1.0\r\n\r\n")
        client = _opened(remote, token, "--memory", "1GiB")
        client.kill()
        _ended(client)
    assert remote.door.poll() is None
    descriptors = Path(f"/proc/{remote.door.pid}/fd")
    until(lambda: len(list(descriptors.iterdir())) < 40)
    assert "Traceback" not in remote.log.read_text()


@pytest.mark.parametrize(
    "line",
    [b"{}\n", b"[" * 5000 + b"\n", b"x" * 300_000, b'{"version":1,"call":"settings"}\n', b"\xff\n"],
    ids=["empty", "deep", "endless", "settings", "bytes"],
)
def test_a_call_that_is_none_is_refused(remote: RemoteNode, line: bytes) -> None:
    context = ssl.create_default_context(cafile=CERTIFICATES / "door.pem")
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", remote.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as made,
        suppress(OSError),  # the door does not read a line without end
    ):
        made.sendall(line)
        answer = made.recv(4096)
    assert answer == b"" or b'"error"' in answer
    assert remote.door.poll() is None
    assert "Traceback" not in remote.log.read_text()


def _engine(remote: RemoteNode) -> list[int]:
    """The processes of the engine on this node."""
    marker = f"VGPU_SIM_STATE={remote.node.environment['VGPU_SIM_STATE']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_engine = b"remote/engine.py" in (process / "cmdline").read_bytes()
            if is_engine and marker in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def _connections(pid: int, port: int) -> list[socket.socket]:
    """Copies of the sockets by which a process is connected to this port."""
    pidfd = os.pidfd_open(pid)
    found = []
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if not str(name.readlink()).startswith("socket:"):
                continue
            made = socket.socket(fileno=_taken(pidfd, int(name.name)))
            if made.family == socket.AF_INET and made.getpeername()[1] == port:
                found.append(made)
            else:
                made.close()
    os.close(pidfd)
    return found


def _taken(pidfd: int, number: int) -> int:
    """pidfd_getfd(2)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    made = int(libc.syscall(438, pidfd, number, 0))
    if made < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return made
