"""The limits of the door with whole sessions. The door's clock stands still until the test sets it."""

import json
import re
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.e2e.conftest import NodeMaker
from tests.lease.conftest import eventually as until
from tests.remote.clients import ended, opened, say
from tests.remote.node import USER, RemoteNode

pytestmark = needs("root", "namespaces")

MIB = 1 << 20
_ECHO = (
    "import os, socket; made = socket.create_connection(os.environ['LUPINE_SERVER'].split(':'));"
    "lines = made.makefile('rb'); made.sendall(b'echo ready\\n');"
    "print(lines.readline().decode(), end='', flush=True);"
    "made.sendall(b'echo ' + b'z' * 2097152 + b'\\n'); print(len(lines.readline()))"
)

Standing = Callable[[str], RemoteNode]


@pytest.fixture
def standing(make_node: NodeMaker) -> Iterator[Standing]:
    """Makes a node with this text of [remote], whose door's clock stands still."""
    with ExitStack() as made:

        def make(policy: str) -> RemoteNode:
            remote = RemoteNode(make_node(), policy, stands=True)
            made.callback(remote.close)
            return remote

        yield make


def test_only_a_session_without_traffic_is_ended_after_the_idle_time(standing: Standing) -> None:
    remote = standing('idle = "1h"')
    idle, busy = (opened(remote, remote.grant(), "--memory", "1GiB") for _ in range(2))
    remote.set_clock(3000)
    assert say(busy, "echo busy") == "busy"
    remote.set_clock(3599)
    assert say(busy, "echo busy") == "busy"
    assert len(remote.held()) == 2
    remote.set_clock(3601)
    until(lambda: len(remote.held()) == 1)
    assert idle.stderr is not None
    said = "it was idle for 3600 s, and idle of [remote] allows no more (E203)"
    assert idle.stderr.readline() == f"vgpuctl: the remote session has ended: {said}\n"
    assert say(idle, "echo late") == "closed"
    assert say(busy, "echo still") == "still"
    assert remote.log.read_text().count("it was idle") == 1
    remote.set_clock(7300)
    until(lambda: not remote.held())
    for client in (idle, busy):
        client.kill()
        ended(client)


def test_a_session_is_held_to_its_byte_rate_and_does_not_slow_other_sessions(standing: Standing) -> None:
    remote = standing('bytes_per_second = "1MiB"')
    client = remote.client(remote.grant(), "--memory", "1GiB", command=[sys.executable, "-c", _ECHO])
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"  # the turned clock does not end its call
    other = opened(remote, remote.grant(), "--memory", "1GiB")
    seconds = 0.0
    while client.poll() is None:
        seconds += 0.25
        remote.set_clock(seconds)
        assert say(other, "echo hello") == "hello"
    said, errors = client.communicate()
    assert said == f"{2 * MIB + 1}\n", errors + remote.log.read_text()
    # 4 MiB take 4 s at 1 MiB a second; a burst of 0.25 s and the last piece of 256 KiB pass without a wait
    assert seconds >= 3.5
    other.kill()
    ended(other)


def test_the_users_quota_and_the_nodes_maximum_of_sessions_bound_remote_slices(standing: Standing) -> None:
    quota = f'[[quota]]\nusers = ["{USER}"]\nmax_memory = "2GiB"'
    remote = standing(f"max_sessions = 2\n{quota}")
    token = remote.grant()
    clients = [opened(remote, token, "--memory", "1GiB")]
    assert "would hold 3GiB, and its quota is 2GiB (E204)" in ended(remote.client(token, "--memory", "2GiB"))
    clients.append(opened(remote, token, "--memory", "1GiB"))
    refused = ended(remote.client(remote.grant(user="65534"), "--memory", "1GiB"))
    assert "the node has 2 remote sessions, which is its limit (E204)" in refused
    config = Path(remote.node.environment["VGPUD_CONFIG"])
    config.write_text(re.sub("max_memory = .*", 'max_memory = "1GiB"', config.read_text()))
    remote.node.ctl("policy", "reload")
    assert [say(client, "echo still") for client in clients] == ["still"] * 2
    assert len(remote.held()) == 2  # a reload ends no session
    for client in clients:
        client.kill()
        ended(client)


def test_a_remote_program_that_does_not_read_its_data_stops_only_itself(standing: Standing) -> None:
    remote = standing("")
    token, size = remote.grant(), 256 * MIB
    ask = (
        "import os, socket; made = socket.create_connection(os.environ['LUPINE_SERVER'].split(':'));"
        f"made.sendall(b'zeros {size}\\n'); print('asked', flush=True); input()"
    )
    other = opened(remote, token, "--memory", "1GiB")
    before = _memory(remote.door.pid)
    client = remote.client(token, "--memory", "1GiB", command=[sys.executable, "-c", ask])
    assert client.stdout is not None
    assert client.stdout.readline() == "asked\n"
    until(lambda: MIB < _relayed(remote, token) == _relayed(remote, token))
    assert _relayed(remote, token) < size / 2
    assert _memory(remote.door.pid) - before < 16 * MIB
    assert say(other, "echo hello") == "hello"
    for one in (client, other):
        one.kill()
        ended(one)


def _relayed(remote: RemoteNode, token: str) -> int:
    """The bytes that the door has passed on for the user's sessions."""
    remote.set_clock(remote.clock + 10)  # the door limits the rate of status calls
    shown, errors = remote.client(token, "-o", "json", verb="status").communicate(timeout=300)
    assert shown, errors
    return sum(int(one["bytes"]) for one in json.loads(shown)["sessions"])


def _memory(pid: int) -> int:
    """VmRSS in bytes (proc(5))."""
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1]) * 1024


@pytest.mark.parametrize(
    ("policy", "each"), [("", 32), ("max_connections = 64\n", 16)], ids=["handshakes", "connections"]
)
def test_silent_connections_of_four_networks_do_not_shut_out_a_client(
    standing: Standing, policy: str, each: int
) -> None:
    remote = standing(f"{policy}handshakes_per_second = 10000")
    with ExitStack() as held:
        silent = [
            held.enter_context(_connection(f"127.0.0.{10 + network}", remote.port))
            for network in range(4)
            for _ in range(each + 1)
        ]
        # three networks reach their maximum; the fourth gets the two places that are reserved for networks
        # with few connections
        until(lambda: len(_closed(silent)) == len(silent) - 3 * each - 2)
        client = opened(remote, remote.grant(), "--memory", "1GiB")
        client.kill()
        ended(client)


def _connection(address: str, port: int) -> socket.socket:
    made = socket.socket()
    made.bind((address, 0))
    made.connect(("127.0.0.1", port))
    return made


def _closed(connections: list[socket.socket]) -> list[socket.socket]:
    """The connections that the door has closed. The door sends nothing before the client does."""
    return select.select(connections, [], [], 0)[0]
