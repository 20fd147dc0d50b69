"""Clients that begin calls and do not end them: each user has a share of the calls, and connections without
progress are closed.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from tests.conditions import needs
from tests.e2e.support import eventually as wait_until
from tests.serve.fake_keeper import FakeLoaded
from tests.serve.http2 import Peer
from tests.serve.live import Live
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
from vgpud.model.errors import VgpuError
from vgpud.model.event import Event
from vgpud.serve.intake import Bounds
from vgpud.serve.server import MAX_REQUEST_BYTES

QUICK = Bounds(calls_per_user=6, calls_per_stranger=4, watches_per_user=2, messages_per_user=3, root=0)
EVER = 1e6


def bounded(**more: float) -> Live:
    live = Live(bounds=Bounds(**(vars_of(QUICK) | more)))  # type: ignore[arg-type]
    # The tests run as root. Removing root's own share makes vgpud treat it like an ordinary user.
    for shares in (live.server.intake.calls, live.server.intake.strangers_calls):
        shares.root = -1
    live.server.intake.watches.root = -1
    return live


def vars_of(bounds: Bounds) -> dict[str, float]:
    return {name: getattr(bounds, name) for name in Bounds.__slots__}


@pytest.fixture
def live() -> Iterator[Live]:
    made = bounded(message_seconds=EVER, reply_seconds=EVER)
    yield made
    made.close()


def reading(live: Live) -> int:
    return live.server.intake.receiving


@pytest.mark.parametrize(("door", "most"), [("ro", 4), ("tenant", 6)])
def test_unfinished_messages_of_a_user_are_bounded_in_number(live: Live, door: str, most: int) -> None:
    """Without the bound, 48 connections with 128 unfinished messages of 1 MiB each use 5 GB."""
    peer = Peer(getattr(live, door))
    for _ in range(12):
        peer.begin_message(peer.open("Plan"), MAX_REQUEST_BYTES, bytes(1000))
    calls = live.server.intake.strangers_calls if door == "ro" else live.server.intake.calls
    assert len(peer.ended_streams(12 - most)) == 12 - most
    assert calls.taken == most
    wait_until(lambda: reading(live) >= QUICK.messages_per_user)
    peer.open("Plan")
    peer.ended_streams(1)  # the end of this stream shows that the event loop has served every call before it
    # the server reads only `messages_per_user` messages of a user into memory at a time
    assert reading(live) == QUICK.messages_per_user
    peer.close()
    wait_until(lambda: calls.taken == 0)


@pytest.mark.parametrize(
    ("method", "service"),
    [
        ("GetNode", "vgpud.v1.Vgpud"),
        ("Watch", "vgpud.v1.Vgpud"),
        ("Check", "grpc.health.v1.Health"),
        ("ServerReflectionInfo", "grpc.reflection.v1alpha.ServerReflection"),
    ],
)
def test_a_message_unfinished_at_its_deadline_ends_its_connection(method: str, service: str) -> None:
    live = bounded(message_seconds=0.2, reply_seconds=0.2)
    try:
        for begun in (b"", b"x" * 100):
            peer = Peer(live.ro)
            stream = peer.open(method, service)
            if begun:
                peer.begin_message(stream, 1000, begun)
            assert peer.ends()
        wait_until(lambda: live.server.relay.peers.served == 0)
        wait_until(lambda: serves(live))
    finally:
        live.close()


def serves(live: Live) -> bool:
    """Returns whether a call is answered, and the node is well. The deadline is long, because a busy machine
    misses a short one.
    """
    with Client(live.ro, 300) as client, contextlib.suppress(VgpuError):
        return client.get_node().status == "well"
    return False


def test_a_reply_unread_at_its_deadline_ends_its_connection_and_no_other() -> None:
    live = bounded(message_seconds=EVER, reply_seconds=0.5)
    intake, peers = live.server.intake, live.server.relay.peers
    try:
        live.keeper.loaded = FakeLoaded(digest="y" * 3_000_000)
        with Client(live.ro, 300) as other:
            assert other.get_node().status == "well"
            silent = Peer(live.ro)
            # acknowledges the server's settings, because grpcio ends a connection that does not
            silent.read_frame()
            wait_until(lambda: peers.served == 2)
            silent.begin_message(silent.open("GetPolicy"), 0)
            wait_until(lambda: peers.served == 1)
            assert silent.ends()
            silent.close()
            wait_until(lambda: intake.strangers_calls.taken == 0 and not intake.unread_bytes)
            assert other.get_node().status == "well"
            assert peers.served == 1
            # the oldest connection is still `c1`, which `other` opened
            assert peers.oldest_of(os.geteuid()) == "c1"
    finally:
        live.close()


def test_open_watches_of_a_user_are_bounded_in_number(live: Live) -> None:
    peer = Peer(live.ro)
    for _ in range(5):
        peer.begin_message(peer.open("Watch"), 0)
        # the client does not send END_STREAM, so the call stays open in both directions
    watches = live.server.intake.watches
    wait_until(lambda: watches.taken == 2)
    assert len(peer.ended_streams(3)) == 3
    assert watches.taken == 2
    peer.close()
    wait_until(lambda: watches.taken == 0)


def test_unread_replies_of_a_user_are_bounded_in_bytes() -> None:
    live = bounded(message_seconds=EVER, reply_seconds=EVER, unread_bytes_per_user=5_000_000)
    try:
        live.keeper.loaded = FakeLoaded(digest="y" * 3_000_000)
        unread = live.server.intake.unread_bytes
        peers = [Peer(live.ro) for _ in range(2)]
        peers[0].begin_message(peers[0].open("GetPolicy"), 0)
        wait_until(lambda: 3_000_000 < unread[os.geteuid()] < 4_000_000)
        peers[1].begin_message(peers[1].open("GetPolicy"), 0)
        assert peers[1].ended_streams(1) == {1}
        assert 3_000_000 < unread[os.geteuid()] < 4_000_000
        for peer in peers:
            peer.close()
        wait_until(lambda: not unread)
    finally:
        live.close()


@pytest.mark.parametrize("window_bytes", [0, 10_000_000])  # the reply is stopped by HTTP/2; by full sockets
def test_a_stop_of_the_server_does_not_wait_for_an_unread_reply(window_bytes: int) -> None:
    live = bounded(message_seconds=EVER, reply_seconds=EVER)
    try:
        live.keeper.loaded = FakeLoaded(digest="y" * 3_000_000)
        silent = Peer(live.ro)
        silent.read_frame()
        stream = silent.open("GetPolicy")
        if window_bytes:
            silent.grant(stream, window_bytes)
        silent.begin_message(stream, 0)
        wait_until(lambda: live.server.intake.unread_bytes[os.geteuid()] > 3_000_000)
        live.stopped = True
        live.do(live.server.stop(0.1), 60)
        assert live.server.relay.peers.served == 0
        silent.close()
    finally:
        live.close()


FLOOD = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from tests.serve.http2 import Peer
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
peers = [Peer(Path(sys.argv[1])) for _ in range(64)]
for peer in peers:
    frames, connection = [], peer.socket
    peer.socket = SimpleNamespace(sendall=frames.append)
    for stream in [peer.open("GetNode") for _ in range(32)]:
        peer.begin_message(stream, 0)
        peer.end(stream)
    connection.sendall(b"".join(frames))
    peer.socket = connection
print("sent", flush=True); input()
"""


@needs("root")
def test_many_queued_calls_of_one_user_cancel_no_call_of_another() -> None:
    """Calls of one user wait for the event loop. If 1000 of them waited in grpcio, it would cancel calls at
    random, also those of other users.
    """
    live = Live()
    go_on = threading.Event()
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", FLOOD, str(live.ro)]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as flood:
        assert flood.stdin and flood.stdout
        try:
            wait_until(lambda: live.server.relay.peers.served == 64)
            live.loop.call_soon_threadsafe(go_on.wait)  # all calls arrive in one iteration of the event loop
            assert flood.stdout.readline() == "sent\n"
            with grpc.insecure_channel(f"unix:{live.admin}") as channel:
                calls = [VgpudStub(channel).GetNode.future(pb.GetNodeRequest()) for _ in range(30)]
                go_on.set()
                assert {call.result(300).status for call in calls} == {"well"}
            print(file=flood.stdin, flush=True)
        finally:
            go_on.set()
            flood.kill()
            live.close()


ASKS_ON_AND_ON = """
import os, sys
import grpc
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
with grpc.insecure_channel(f"unix:{sys.argv[1]}") as channel:  # imports more; it connects at the first call
    os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
    while True:
        calls = [VgpudStub(channel).ListEvents.future(pb.ListEventsRequest()) for _ in range(16)]
        for call in calls:
            call.exception()
"""


@needs("root")
def test_a_user_that_calls_all_the_time_gets_a_tenth_of_the_event_loops_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user lists events all the time. Without the bound it holds the event loop for 0.6 s at once, and
    other users have a fifth of their speed.
    """
    live = Live()
    began: list[float] = []

    async def last_events(count: int, user: int | None) -> tuple[Event, ...]:
        began.append(time.monotonic())
        end = time.thread_time() + COST_SECONDS
        while time.thread_time() < end:
            pass
        return ()

    monkeypatch.setattr(live.keeper, "last_events", last_events)
    words = [sys.executable, "-c", ASKS_ON_AND_ON, str(live.ro)]
    attacker = subprocess.Popen(words)
    try:
        wait_until(lambda: len(began) > 2 * ROUND)
        # without the bound, 16 calls could begin before the first of them is charged
        assert began[2 * ROUND] - began[ROUND] > 0.9 * ROUND * COST_SECONDS * 10
        with Client(live.admin, 300) as root:
            assert root.get_node().status == "well"
    finally:
        attacker.kill()
        attacker.wait()
        live.close()


CHANGES = """
import os, sys
import grpc
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
uid = int(sys.argv[2])
with grpc.insecure_channel(f"unix:{sys.argv[1]}") as channel:  # imports more; it connects at the first call
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
    asked = [pb.AllocateRequest(request_id=f"{uid}-{number}") for number in range(int(sys.argv[3]))]
    for call in [VgpudStub(channel).Allocate.future(one) for one in asked]:
        call.exception()
"""


@needs("root")
@pytest.mark.parametrize("change_seconds", [EVER, 0.01])
def test_changes_of_a_user_run_one_after_the_other_and_leave_time_for_other_users(
    change_seconds: float,
) -> None:
    """Without the bound, a user that allocates and releases with 16 calls at a time leaves other users 12 to
    16 % of their speed.
    """
    live = bounded(message_seconds=EVER, calls_per_user=16, change_seconds=change_seconds)
    live.tenant.chmod(0o666)
    live.keeper.gate = asyncio.Event()
    users = []

    def changes(uid: int, count: int) -> None:
        words = [sys.executable, "-c", CHANGES, str(live.tenant), str(uid), str(count)]
        users.append(subprocess.Popen(words))

    def begun(uid: int) -> int:
        return sum(request.owner.uid == uid for request in live.keeper.requests)

    try:
        changes(4242, 16)
        wait_until(lambda: live.server.intake.calls.taken == 16 and begun(4242) >= 1)
        changes(4243, 1)
        wait_until(lambda: begun(4243) == 1)
        if change_seconds == EVER:
            assert begun(4242) == 1
        else:
            wait_until(lambda: begun(4242) == 16)
        live.loop.call_soon_threadsafe(live.keeper.gate.set)
        wait_until(lambda: begun(4242) == 16)
        assert [user.wait(300) for user in users] == [0, 0]
    finally:
        for user in users:
            user.kill()
            user.wait()
        live.close()


COST_SECONDS, ROUND = 0.005, 10
