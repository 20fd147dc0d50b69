"""The end of a remote slice, caused by any of its processes and in any order."""

import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.conditions import needs
from tests.lease.conftest import eventually as until
from tests.remote.clients import connections_of, ended, engine_of, opened, say
from tests.remote.node import CERTIFICATES, USER, RemoteNode
from tests.simnode import ROOT
from vgpud.remote import wire
from vgpud.remote.grants import FILE

pytestmark = needs("root", "namespaces")


def _revoke(remote: RemoteNode, token: str) -> None:
    remote.node.ctl("remote", "revoke", token.partition(".")[0])


def _release(remote: RemoteNode, _: str) -> None:
    (held,) = remote.held()
    remote.node.ctl("release", "--force", held.id)


def _kill_engine(remote: RemoteNode, _: str) -> None:
    for pid in engine_of(remote):
        with suppress(ProcessLookupError):  # the process ended when an earlier one was killed
            os.kill(pid, signal.SIGKILL)


def _kill_session(remote: RemoteNode, _: str) -> None:
    remote.sessions.processes[-1].kill()


def _stop_door(remote: RemoteNode, _: str) -> None:
    remote.door.terminate()


_ASK = "ask the node's administrator for a new one: vgpuctl remote grant USER"
_CAUSES: dict[Callable[[RemoteNode, str], None], tuple[str, str, int]] = {
    _revoke: (f"grant GRANT of {USER} was revoked (E201)", _ASK, 4),
    RemoteNode.expire: (f"grant GRANT of {USER} has expired (E201)", _ASK, 4),
    _release: (
        "its slice was released on the node (E301)",
        "open another session, or ask the node's administrator why",
        6,
    ),
    _kill_engine: ("the engine's server has ended (E601)", wire.JOURNAL, 70),
    _kill_session: ("its process on the node has ended (E601)", wire.JOURNAL, 70),
    _stop_door: ("the door stops (E803)", "try again when vgpud-remote.service runs", 32),
}


def test_a_client_is_told_why_the_node_ends_its_session(remote: RemoteNode) -> None:
    for end, (sentence, hint, status) in _CAUSES.items():
        token = remote.grant()
        client = opened(remote, token, "--memory", "1GiB")
        end(remote, token)
        assert client.stdin is not None
        assert client.stderr is not None
        said = sentence.replace("GRANT", token.partition(".")[0])
        assert client.stderr.readline() == f"vgpuctl: the remote session has ended: {said}\n"
        until(lambda: not remote.held())
        until(lambda: not engine_of(remote))
        assert say(client, "echo hello") == "closed"
        client.stdin.write("exit 3\n")
        client.stdin.close()
        assert client.stderr.read() == f"hint: {hint}\n"
        assert client.wait(timeout=300) == status
    # the client has not tried to open its session again
    assert "no such session" not in remote.log.read_text()


def test_a_remote_program_that_succeeds_after_losing_its_slice_keeps_its_exit_code(
    remote: RemoteNode,
) -> None:
    token = remote.grant()
    client = opened(remote, token, "--memory", "1GiB")
    _revoke(remote, token)
    assert client.stderr is not None
    assert "was revoked (E201)" in client.stderr.readline()
    ended(client)
    assert client.returncode == 0


def test_a_client_is_told_that_a_restarted_door_does_not_know_its_session(remote: RemoteNode) -> None:
    client = opened(remote, remote.grant(), "--memory", "1GiB")
    remote.door.kill()
    remote.door.wait()
    remote.door = remote.start_door()
    assert client.stderr is not None
    said = "the door has no such session, or it belongs to another client (E306)"
    assert client.stderr.readline() == f"vgpuctl: the remote session has ended: {said}\n"
    client.kill()
    ended(client)


def test_a_session_goes_on_while_the_file_of_grants_cannot_be_read(remote: RemoteNode) -> None:
    token = remote.grant()
    client = opened(remote, token, "--memory", "1GiB")
    grants = Path(remote.node.environment["VGPUD_STATE_DIR"]) / FILE
    good = grants.read_text()
    grants.write_text(good[:-9])
    until(lambda: "remote_grants_not_read" in remote.log.read_text())
    refused = ended(remote.client("x" + token[1:], "--memory", "1GiB"))
    assert refused.startswith("vgpuctl: the node cannot read its grants (E706)\nhint: see the journal of ")
    assert (
        FILE not in refused
    )  # a client without a valid token gets this answer, too, so it must not name a file
    assert f"{FILE} cannot be used: expecting" in remote.log.read_text()
    assert say(client, "echo still") == "still"
    assert len(remote.held()) == 1
    grants.write_text(good)
    remote.node.ctl("remote", "revoke", USER)
    until(lambda: not remote.held())
    client.kill()
    ended(client)


def test_a_kill_of_any_process_of_a_session_releases_the_slice_and_leaves_no_process(
    short: RemoteNode,
) -> None:
    token = short.grant()
    for victim in ("client", "session", "engine", "door"):
        client = opened(short, token, "--memory", "1GiB")
        assert engine_of(short), victim
        if victim == "client":
            client.kill()
        elif victim == "session":
            _kill_session(short, "")
        elif victim == "engine":
            _kill_engine(short, "")
        else:
            short.door.kill()
        until(lambda: not short.held())
        until(lambda: not engine_of(short))
        client.kill()
        ended(client)


def test_a_kill_of_the_remote_door_harms_no_local_tenant_and_the_next_door_serves(
    short: RemoteNode,
) -> None:
    words = [sys.executable, "-m", "vgpud.ctl", "run", "--memory", "1GiB", "--", "cat"]
    local = subprocess.Popen(
        words, env=short.node.environment, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert say(local, "hello") == "hello"
    (own,) = short.held()
    client = opened(short, short.grant(), "--memory", "1GiB")
    short.door.kill()
    short.door.wait()
    until(lambda: [one.id for one in short.held()] == [own.id])
    assert say(local, "still") == "still"
    client.kill()
    ended(client)
    short.door = short.start_door()
    again = opened(short, short.grant(), "--memory", "1GiB")
    for one in (again, local):
        one.kill()
        one.communicate()


def test_a_session_outlives_a_kill_of_vgpud_and_is_released_at_its_end(short: RemoteNode) -> None:
    client = opened(short, short.grant(), "--memory", "1GiB")
    short.node.kill()
    short.node.start()
    assert len(short.held()) == 1
    assert say(client, "echo still") == "still"
    client.kill()
    ended(client)
    until(lambda: not short.held())


def test_a_remote_program_that_ends_while_vgpud_is_down_keeps_its_exit_code(remote: RemoteNode) -> None:
    client = opened(remote, remote.grant(), "--memory", "1GiB")
    remote.node.kill()
    assert client.stdin is not None
    client.stdin.write("exit 3\n")
    assert ended(client) == ""
    assert client.returncode == 3
    until(lambda: "remote_slice_release_failed" in remote.log.read_text())
    until(lambda: remote.sessions.processes[-1].poll() is not None)
    remote.node.start()
    until(lambda: not remote.held())


def test_a_client_that_loses_its_control_connection_keeps_the_session(remote: RemoteNode) -> None:
    client = opened(remote, remote.grant(), "--memory", "1GiB")
    for made in connections_of(client.pid, remote.port):
        made.shutdown(socket.SHUT_RDWR)
        made.close()
    # the client has opened a new control connection
    until(lambda: len(connections_of(client.pid, remote.port)) == 1)
    (held,) = remote.held()
    shown, _ = remote.client(remote.grant(), verb="status").communicate(timeout=300)
    assert held.id in shown
    assert ended(client) == ""
    assert client.returncode == 0


def test_a_remote_slice_is_released_at_the_programs_end_and_not_after_the_grace_period(
    remote: RemoteNode,
) -> None:
    client = remote.client(remote.grant(), "--memory", "1GiB", command=["true"])
    assert ended(client) == ""
    assert client.returncode == 0
    until(lambda: not remote.held())
    until(lambda: "its client has ended it" in remote.log.read_text())


def test_a_client_that_disconnects_before_the_reply_leaves_no_session(short: RemoteNode) -> None:
    token = short.grant()
    context = ssl.create_default_context(cafile=CERTIFICATES / "door.pem")
    plain = socket.create_connection(("127.0.0.1", short.port))
    with context.wrap_socket(plain, server_hostname="localhost") as made:
        made.sendall(wire.encode(wire.Open(token=token, memory="1GiB")))
        until(lambda: bool(short.held()))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
    until(lambda: not short.held())
