"""The relay alone: the identity of callers, connection limits, refusals."""

import asyncio
import errno
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from tests import oldkernel
from tests.conditions import needs, unmet
from tests.e2e.support import eventually as wait_until
from tests.otheruser import as_user, open_place
from tests.serve.live import Live
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
from vgpud.api.status import from_rpc_error
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Lifetime
from vgpud.serve import peers, relay
from vgpud.serve.arrivals import Arrivals
from vgpud.serve.gate import Gate
from vgpud.serve.pump import Pump
from vgpud.serve.relay import ConnectionLimits

AS_ANOTHER = """
import os, sys
from pathlib import Path
from vgpud.api.client import Client
from vgpud.api import status
from vgpud.api.gen import vgpud_pb2 as pb, vgpud_pb2_grpc
from vgpud.model.errors import VgpuError
try:
    with Client(Path(sys.argv[1]), 300) as client:
        held = client.allocate(pb.AllocateRequest(request_id="r", bind_to_caller=True))
        print(held.owner_uid, held.owner_gid, held.bound_pid == os.getpid())
except VgpuError as error:
    print(error.code.name, error.sentence)
"""
TENANTS = 60_123  # a gid that no group of the machine has


def as_another(path: Path, uid: int, gid: int, groups: str = "") -> str:
    done = subprocess.run(
        [
            *as_user(uid, gid, [int(group) for group in groups.split(",") if group]),
            *(sys.executable, "-c", AS_ANOTHER, str(path)),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.strip()


@needs("root")
def test_the_callers_uid_is_that_of_the_kernel(live: Live) -> None:
    live.tenant.chmod(0o666)
    assert as_another(live.tenant, 4242, 4243) == "4242 4243 True"
    assert live.keeper.requests[0].owner.uid == 4242


@needs("root")
def test_the_tenant_socket_admits_only_its_group(live: Live) -> None:
    os.chown(live.tenant, -1, TENANTS)
    assert as_another(live.tenant, 4242, 4243, "").startswith("NOT_ALLOWED uid 4242 may not open")
    assert as_another(live.tenant, 4242, 4243, str(TENANTS)) == "4242 4243 True"
    assert as_another(live.ro, 4242, 4243).startswith("NOT_ALLOWED uid 4242 may not call Allocate")


@needs("root")
def test_the_admin_socket_admits_only_root_whatever_its_mode(live: Live) -> None:
    live.admin.chmod(0o666)
    answer = as_another(live.admin, 4242, 4243)
    assert answer == "NOT_ALLOWED uid 4242 may not use the admin socket"
    assert live.keeper.requests == []


@needs("root")
def test_the_private_socket_admits_no_other_user(live: Live) -> None:
    private = live.run_dir / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    assert as_another(private / "grpc.sock", 4242, 4243).startswith(("NOT_ALLOWED", "UNREACHABLE"))


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    made.setblocking(False)
    return made


# Prints the identity of a running caller and of two callers that have ended. With clone3(2) the program gives
# a process of another user the pid of the second one.
IDENTIFIES = """
import ctypes, os, socket, struct, subprocess, sys
from vgpud.model.caller import Door
from vgpud.serve import peers, relay
CONNECTS = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
def of(pid):
    try:
        caller = peers.identify(listener.accept()[0], Door.TENANT)
        print(caller.uid == os.geteuid(), caller.process.pid == pid)
    except ProcessLookupError:
        print("ended")
def ended():
    child = subprocess.Popen([sys.executable, "-c", CONNECTS, sys.argv[1]])
    child.wait()
    return child.pid
here = socket.socket(socket.AF_UNIX)
here.connect(sys.argv[1])
of(os.getpid())
ended()
of(0)
number = ctypes.c_int(ended())
how = struct.pack("8Q", 0, 0, 0, 0, 17, 0, 0, 0) + struct.pack("2Q", ctypes.addressof(number), 1)
ours, theirs = socket.socketpair()
stranger = ctypes.CDLL(None).syscall(435, how, len(how))
if stranger == 0:
    os.setresuid(4343, 4343, 4343)
    theirs.send(b"x")
    theirs.recv(1)
    os._exit(0)
if stranger > 0:
    ours.recv(1)
of(0) if stranger > 0 else print("cannot choose pids")
ours.send(b"x")
"""


@needs("root", "namespaces")
@pytest.mark.parametrize("before", [[], oldkernel.words()], ids=["kernel", "kernel before 6.5"])
def test_a_peer_that_has_ended_is_not_taken_for_the_process_that_has_its_pid(
    tmp_path: Path, before: list[str]
) -> None:
    words = [*before, sys.executable, "-c", IDENTIFIES, str(tmp_path / "s")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    *told, last = done.stdout.splitlines()
    if last == "cannot choose pids":
        unmet("namespaces", last)
    assert [*told, last] == ["True True", "ended", "ended"]


def test_the_relay_never_uses_a_peer_name_twice() -> None:
    table = peers.PeerTable()
    caller = Caller(Door.READ, 7, 7, Lifetime())
    first = table.add(caller)
    assert table.caller(f"unix:/run/a%20b/{first}") == caller
    assert (table.connections_of(7), table.connections_of(8)) == (1, 0)
    table.remove(first)
    second = table.add(caller)
    assert first != second
    for stranger in (f"unix:/run/{first}", "unix:", "", f"ipv4:{second}:1"):
        with pytest.raises(VgpuError) as caught:
            table.caller(stranger)
        assert caught.value.code is ErrorCode.NOT_ALLOWED


def pumped() -> tuple[socket.socket, socket.socket, asyncio.Future[None]]:
    """Returns the caller's and grpcio's end of a pump, and a future that is done when the pump has ended."""
    loop = asyncio.get_running_loop()
    (near, near_inner), (far, far_inner) = pair(), pair()
    for end in (near, near_inner, far, far_inner):
        end.setblocking(False)
    ended = loop.create_future()
    Pump(loop, near_inner, far_inner, Gate(), lambda: ended.set_result(None))
    return near, far, ended


def test_the_relay_loses_no_byte_when_a_reader_is_slow() -> None:
    """Each direction carries far more data than the sockets hold. The relay buffers only a little of it."""

    async def carry() -> tuple[bool, int]:
        loop = asyncio.get_running_loop()
        near, far, ended = pumped()
        there, back = os.urandom(5_000_001), os.urandom(4_000_003)

        async def read(end: socket.socket, size: int) -> bytes:
            got = bytearray()
            while len(got) < size:
                got += await loop.sock_recv(end, 1 + len(got) % 70_000)
            return bytes(got)

        writing = [
            asyncio.ensure_future(loop.sock_sendall(near, there)),
            asyncio.ensure_future(loop.sock_sendall(far, back)),
        ]
        # the client does not read, so the writers must wait and the relay's memory must not grow
        await asyncio.sleep(0.05)
        held_up = sum(not task.done() for task in writing)
        got = await asyncio.gather(read(far, len(there)), read(near, len(back)))
        near.close()
        await asyncio.wait_for(ended, 300)
        assert await loop.sock_recv(far, 10) == b""
        far.close()
        return tuple(got) == (there, back), held_up

    assert asyncio.run(carry()) == (True, 2)


def test_an_answer_is_carried_though_grpcio_has_closed_and_takes_nothing_more() -> None:
    """The caller acknowledges something after grpcio has written its last answer and closed."""

    async def carry() -> bytes:
        near, far, ended = pumped()
        near.send(b"acknowledged")
        far.send(b"answer")
        far.close()
        await asyncio.wait_for(ended, 300)
        with near:
            return near.recv(100)

    assert asyncio.run(carry()) == b"answer"


@pytest.mark.parametrize("grace_seconds, whole", [(300.0, True), (0.0, False)])
def test_a_relay_closes_when_callers_have_taken_their_answers_or_the_grace_period_is_over(
    grace_seconds: float, whole: bool
) -> None:
    answer = os.urandom(100_000)  # more than one chunk of a pump, and less than a socket holds

    async def close(folder: Path) -> bytes:
        loop = asyncio.get_running_loop()
        inner = folder / "grpc.sock"
        with (
            listening(folder / "ro.sock") as door,
            listening(inner) as grpcio,
            socket.socket(socket.AF_UNIX) as caller,
        ):
            passed_on = relay.Relay({Door.READ: door}, inner, folder, ConnectionLimits())
            passed_on.start()
            caller.setblocking(False)
            await loop.sock_connect(caller, str(folder / "ro.sock"))
            served, _ = await loop.sock_accept(grpcio)
            served.send(answer)
            served.close()
            closing = asyncio.ensure_future(passed_on.close(grace_seconds))
            got = b""
            while part := await loop.sock_recv(caller, 10_000):
                got += part
            await closing
            return got

    with tempfile.TemporaryDirectory(prefix="vgs-", dir=open_place()) as folder:
        assert (asyncio.run(close(Path(folder))) == answer) == whole


def own_connection(path: Path) -> pb.NodeReply:
    """Makes a call on a connection that no other channel of this process uses."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        try:
            return VgpudStub(channel).GetNode(pb.GetNodeRequest(), timeout=300)
        except grpc.RpcError as error:
            raise from_rpc_error(error, path, 10) from None


def test_one_user_cannot_take_all_connections() -> None:
    live = Live(ConnectionLimits(total=3, per_uid=2, admin=1))
    try:
        with Client(live.tenant, 300) as one, Client(live.ro, 300) as two:
            assert (one.get_node().status, two.get_node().status) == ("well", "well")
            for path in (live.tenant, live.ro):
                with pytest.raises(VgpuError, match="has 2 connections open") as caught:
                    own_connection(path)
                assert caught.value.code is ErrorCode.NO_CAPACITY
            with Client(live.admin, 300) as admin:
                assert admin.get_node().status == "well"
        wait_until(lambda: live.server.relay.peers.served == 0)
        with Client(live.tenant, 300) as again:
            assert again.get_node().status == "well"
    finally:
        live.close()


@pytest.mark.parametrize("user", [0, 4242])
def test_a_connection_waits_while_the_kernel_does_not_name_its_process(
    live: Live, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    """As on a busy host, the first two queries for a connection's process get no answer from the kernel."""
    asked = 0

    def identify(connection: socket.socket, door: Door) -> Caller:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise OSError(errno.EBUSY, "no answer")
        return peers.identify(connection, door)

    monkeypatch.setattr(relay, "identify", identify)
    monkeypatch.setattr(relay, "user_of", lambda connection: user)
    assert own_connection(live.tenant).status == "well"
    assert asked == 3


CONNECTS = """
import os, socket, sys
path, uid, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
held = []
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX)); held[-1].connect(path)
print("connected", flush=True); input()
"""


def identified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that receives the uids of connections in the order in which the relay identifies
    them.
    """
    uids: list[int] = []

    def identify(connection: socket.socket, door: Door) -> Caller:
        found = peers.identify(connection, door)
        uids.append(found.uid)
        return found

    monkeypatch.setattr(relay, "identify", identify)
    return uids


@needs("root")
def test_a_user_that_connects_repeatedly_delays_no_connection_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attack: without the bound, four users that connect repeatedly reduce the speed of other users to 15
    to 29 percent.
    """
    live = Live()
    live.tenant.chmod(0o666)
    looked_at = identified(monkeypatch)
    go_on = threading.Event()
    live.loop.call_soon_threadsafe(go_on.wait)  # all connections wait in the listener's queue
    pipe, words = subprocess.PIPE, [sys.executable, "-c", CONNECTS, str(live.tenant)]
    callers = []
    try:
        for uid, count in (("4242", "300"), ("4243", "1")):
            callers.append(subprocess.Popen([*words, uid, count], stdin=pipe, stdout=pipe, text=True))
            assert callers[-1].stdout is not None and callers[-1].stdout.readline() == "connected\n"
        go_on.set()
        wait_until(lambda: 4243 in looked_at)
        assert looked_at.index(4243) < 200
        # 128 is the share of one user among waiting connections
        wait_until(lambda: looked_at.count(4242) >= 128)
    finally:
        go_on.set()
        for caller in callers:
            caller.communicate("\n")
        live.close()


@needs("root")
def test_users_whose_waiting_connections_reach_their_maximum_keep_no_other_user_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = Live(ConnectionLimits(arrivals=4, arrivals_per_user=2))
    live.tenant.chmod(0o666)
    looked_at = identified(monkeypatch)
    go_on = threading.Event()
    live.loop.call_soon_threadsafe(go_on.wait)  # all connections wait in the listener's queue
    pipe, words = subprocess.PIPE, [sys.executable, "-c", CONNECTS, str(live.tenant)]
    callers = []
    try:
        for uid, count in (("4242", "3"), ("4243", "3"), ("4244", "1")):
            callers.append(subprocess.Popen([*words, uid, count], stdin=pipe, stdout=pipe, text=True))
            assert callers[-1].stdout is not None and callers[-1].stdout.readline() == "connected\n"
        go_on.set()
        wait_until(lambda: len(looked_at) >= 4)
        assert sorted(looked_at) in ([4242, 4242, 4243, 4244], [4242, 4243, 4243, 4244])
    finally:
        go_on.set()
        for caller in callers:
            caller.communicate("\n")
        live.close()


def test_a_relay_that_is_closed_closes_the_connections_that_wait_for_their_turn() -> None:
    async def close() -> tuple[bool, bool]:
        arrivals = Arrivals(2, 2)
        one, other = socket.socketpair()
        with other:
            task: list[asyncio.Task[None]] = []

            def wait() -> asyncio.Task[None]:
                task.append(asyncio.get_running_loop().create_task(asyncio.sleep(1000)))
                return task[0]

            assert arrivals.add(7, one, wait) == ""
            arrivals.close()  # the relay is closed before the connection's task has run at all
            await asyncio.wait(task)
            return task[0].cancelled(), one.fileno() < 0

    assert asyncio.run(close()) == (True, True)


@needs("root")
def test_a_user_with_few_connections_is_admitted_even_if_others_hold_all() -> None:
    """When all connections are in use, the relay closes the oldest connection of the user with the most.
    Without this rule, a few users with 1024 idle connections each would keep all others out.
    """
    live = Live(ConnectionLimits(total=6, per_uid=4, admin=1))
    live.tenant.chmod(0o666)
    words = [sys.executable, "-c", HOLDS, str(live.tenant)]
    holders = []
    try:
        for uid in ("4242", "4243"):
            pipe = subprocess.PIPE
            holder = subprocess.Popen([*words, uid], stdin=pipe, stdout=pipe, text=True)
            holders.append(holder)
            assert holder.stdout is not None and holder.stdout.readline() == "3\n"
        wait_until(lambda: live.server.relay.peers.served == 6)
        answer = as_another(live.tenant, 4244, 4244)
        assert answer == "4244 4244 True"
        known = live.server.relay.peers
        assert sorted(known.connections_of(uid) for uid in (4242, 4243)) == [2, 3]
    finally:
        for holder in holders:
            holder.communicate("\n")
        live.close()


HOLDS = """
import os, socket, sys
uid = int(sys.argv[2]); os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
held = []
for _ in range(3):
    held.append(socket.socket(socket.AF_UNIX)); held[-1].connect(sys.argv[1])
    # the server ends a connection whose HTTP/2 handshake does not come
    held[-1].sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\x04" + bytes(5))
print(len(held), flush=True); input()
"""


def test_connection_limits_stay_below_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    lowered = ConnectionLimits().within_descriptors()
    assert lowered.total * 3 + lowered.admin * 3 + 128 <= 1024
    assert 4 <= lowered.per_uid < lowered.total
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**20, 2**20))
    assert ConnectionLimits().within_descriptors() == ConnectionLimits()


class NoDescriptors(socket.socket):
    """A listener whose first accepts fail with the error of the limit on open files."""

    failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_the_relay_recovers_when_descriptors_are_free_again(live: Live) -> None:
    relay = live.server.relay
    scarce = NoDescriptors(fileno=os.dup(relay.listening[Door.READ].fileno()))

    async def swap() -> None:
        relay.stop_accepting()
        relay.listening = {**relay.listening, Door.READ: scarce}
        relay.start()

    live.do(swap())
    with Client(live.ro, 300) as client:
        assert client.get_node().status == "well"
    assert scarce.failures == 0
    live.stop(0.2)
    scarce.close()


@pytest.fixture
def small_backlog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    live = Live()
    yield live
    live.close()


def test_the_relay_waits_while_the_backlog_of_the_grpc_server_is_full(small_backlog: Live) -> None:
    """A socket with a backlog of one that accepts late takes the place of grpcio's socket."""
    live = small_backlog
    relay = live.server.relay
    path = live.run_dir / "private" / "slow.sock"
    slow = socket.socket(socket.AF_UNIX)
    slow.bind(str(path))
    slow.listen(0)
    relay.onward = str(path)
    callers = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for number, caller in enumerate(callers):
        caller.connect(str(live.ro))
        caller.sendall(bytes([number]))
    wait_until(lambda: relay.peers.served == 4)
    got = set()
    slow.settimeout(300)
    accepted = []
    for _ in callers:
        end, name = slow.accept()
        accepted.append(end)
        got.add((end.recv(1), Path(name).name))
    assert {first for first, _ in got} == {bytes([number]) for number in range(4)}
    assert len({name for _, name in got}) == 4
    for end in (*callers, *accepted, slow):
        end.close()
    wait_until(lambda: relay.peers.served == 0)
    path.unlink()
    assert [left.name for left in path.parent.iterdir()] == ["grpc.sock"]


def test_requests_of_two_clients_are_attributed_to_their_own_callers(live: Live) -> None:
    with Client(live.ro, 300) as reader, Client(live.tenant, 300) as tenant:
        for number in range(20):
            tenant.allocate(pb.AllocateRequest(request_id=str(number)))
            with pytest.raises(VgpuError):
                reader.allocate(pb.AllocateRequest(request_id=f"no{number}"))
    assert [request.id for request in live.keeper.requests] == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    ("full", "why"),
    [(False, "No such file or directory"), (True, "it does not accept")],
    ids=["none", "full"],
)
def test_a_connection_is_closed_if_the_grpc_server_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool, why: str
) -> None:
    monkeypatch.setattr(relay, "_CONNECT_TRIES", 3)
    inner = tmp_path / "grpc.sock"

    async def main() -> None:
        made = relay.Relay({Door.READ: listening(tmp_path / "ro.sock")}, inner, tmp_path, ConnectionLimits())
        made.start()
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.setblocking(False)
                caller.connect(str(tmp_path / "ro.sock"))
                assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""
        assert made.peers.served == 0
        await made.close()

    with (
        capture_logs() as lines,
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as waits,
    ):
        if full:  # a connection that waits fills a backlog of 0
            server.bind(str(inner))
            server.listen(0)
            waits.connect(str(inner))
        asyncio.run(main())
    assert [line["why"] for line in lines] == [f"cannot reach the gRPC server: {why}"]
    assert {path.name for path in tmp_path.iterdir()} == {"ro.sock"} | ({"grpc.sock"} if full else set())
