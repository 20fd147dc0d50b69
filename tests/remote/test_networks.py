"""A node and a client in networks of their own. Only the door is reachable from the other one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.e2e.conftest import NodeMaker
from tests.lease.conftest import eventually as until
from tests.remote.clients import ended, engine_of, opened, say
from tests.remote.networks import CLIENT, Networks
from tests.remote.node import USER, RemoteNode

pytestmark = needs("root", "namespaces", "networks")


@pytest.fixture
def networks() -> Iterator[Networks]:
    made = Networks()
    yield made
    made.close()


@pytest.fixture
def apart(make_node: NodeMaker, networks: Networks) -> Iterator[RemoteNode]:
    made = RemoteNode(make_node(), networks=networks)
    yield made
    made.close()


def test_a_client_of_another_network_has_a_slice_and_sees_only_the_door(apart: RemoteNode) -> None:
    token = apart.grant()
    client = opened(apart, token, "--memory", "1GiB")
    assert _listening(apart.door.pid) == [apart.port]
    (held,) = apart.held()
    assert held.label.endswith(f" {CLIENT}")
    shown, _ = apart.client(token, "-o", "json", verb="status").communicate(timeout=300)
    assert json.loads(shown)["sessions"][0]["address"] == CLIENT
    processes = (apart.door.pid, client.pid, *engine_of(apart))
    networks = {Path(f"/proc/{pid}/ns/net").readlink() for pid in processes}
    assert len(networks) == 3  # the engine's server is in a network of its own
    _, errors = client.communicate("exit 7\n", timeout=300)
    assert client.returncode == 7, errors


def _listening(pid: int) -> list[int]:
    """The ports on which a process listens in the network of the process `pid` (proc(5))."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return [int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"]


def test_clients_of_another_network_without_a_valid_token_are_refused(apart: RemoteNode) -> None:
    revoked, expired, good = apart.grant(), apart.grant(), apart.grant()
    apart.node.ctl("remote", "revoke", revoked.split(".")[0])
    apart.expire(expired)
    number, _, pin = good.split(".")
    for token in (revoked, expired, f"{number}.{'x' * 43}.{pin}"):
        assert "(E201)" in ended(apart.client(token, "--memory", "1GiB"))
    assert apart.held() == []


def test_a_session_of_a_client_that_is_cut_off_ends_with_its_grant(
    apart: RemoteNode, networks: Networks
) -> None:
    client = opened(apart, apart.grant(), "--memory", "1GiB")
    networks.cut()
    client.kill()
    ended(client)
    assert len(apart.held()) == 1  # the door has no notice that the client has ended
    apart.node.ctl("remote", "revoke", USER)
    until(lambda: not apart.held())
    until(lambda: not engine_of(apart))
    assert "Traceback" not in apart.log.read_text()


def test_a_remote_program_sees_its_connection_closed_when_the_door_is_killed(apart: RemoteNode) -> None:
    client = opened(apart, apart.grant(), "--memory", "1GiB")
    apart.door.kill()
    until(lambda: not apart.held())
    assert say(client, "echo hello") == "closed"
    apart.door.wait()
    client.kill()
    ended(client)
