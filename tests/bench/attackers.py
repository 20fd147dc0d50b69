"""`python -m tests.bench.attackers ATTACK RUN_DIR USERS`: users that attack vgpud until standard input ends.

Starts one process for each user, from uid 4242 up, in the group of vgpud's sockets. Each prints a line once
its attack is running. docs/security.md describes the sockets and their bounds.
"""

import json
import os
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from tests.serve.http2 import DATA, Peer
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
from vgpud.serve.runtime_wire import MAGIC, REQUEST, Verb

FIRST_UID = 4242
MESSAGE_BYTES = 1000 * 1000  # vgpud accepts up to 1 MiB
_STREAMS = 32
_METHODS = ("Plan", "Resize", "PlanDefrag", "Release")  # Plan has the same parser as Allocate
Done = Callable[[], None]


def nothing(run_dir: Path, stands: Done) -> None:
    stands()
    time.sleep(3600)


def computing(run_dir: Path, stands: Done) -> None:
    """Uses only the processor, to show the cost of attackers that do not call vgpud."""
    stands()
    while True:
        one, other = socket.socketpair()
        one.send(b"1")
        other.recv(1)
        one.close()
        other.close()


def idle_connections(run_dir: Path, stands: Done) -> None:
    """Each user holds 1024 connections, its maximum."""
    held = []
    for _ in range(1024):
        with suppress(OSError):
            held.append(_connected(run_dir / "vgpud.sock"))
    stands()
    time.sleep(3600)


def connects(run_dir: Path, stands: Done) -> None:
    """Each user holds its maximum of connections, and repeatedly opens one more, which is refused."""
    held = []
    for _ in range(1024):
        with suppress(OSError):
            held.append(_connected(run_dir / "vgpud.sock"))
    stands()
    while True:
        with suppress(OSError), _connected(run_dir / "vgpud.sock") as one:
            one.recv(1)


def configs(run_dir: Path, stands: Done) -> None:
    """Sends config.json files of a megabyte to runtime.sock, 16 at a time, again and again."""
    bodies = tuple(_configs())
    stands()
    while True:
        waiting = []
        for number in range(16):
            body = bodies[number % len(bodies)]
            with suppress(OSError):
                one = _connected(run_dir / "runtime.sock")
                one.settimeout(5)
                one.sendall(REQUEST.pack(MAGIC, Verb.PREPARE, 0, 2, len(body)) + b"c1" + body)
                waiting.append(one)
        for one in waiting:
            with suppress(OSError):
                while one.recv(65536):
                    pass
            one.close()


def _configs() -> Iterator[bytes]:
    asks = {"annotations": {"vgpud.io/memory": "1PiB"}, "process": {"user": {"uid": 1, "gid": 1}}}
    size = MESSAGE_BYTES
    values: dict[str, object] = {
        "arrays": [[]] * (size // 4),
        "numbers": [1] * (size // 3),
        "values within the bound": [["x" * 40] for _ in range(9_000)],
        "a long text": "x" * size,
        "escapes": "\u00e9\n" * (size // 8),
        "deep": json.loads("[" * 60 + "]" * 60),
        "keys": {f"k{number}": number for number in range(size // 16)},
    }
    for name, value in values.items():
        yield json.dumps({**asks, name: value}).encode()
    yield json.dumps({**asks, "process": {"env": ["A=" + "b" * 40] * 19_000}}).encode()
    yield json.dumps({"annotations": {"vgpud.io/" + "memoryy" * (size // 8): "1"}}).encode()
    yield json.dumps({"annotations": {"vgpud.io/memory": "9" * size}}).encode()


def unread_replies(run_dir: Path, stands: Done) -> None:
    """Requests replies of half a megabyte at runtime.sock and reads none. Each user holds 128 connections."""
    body = json.dumps({"annotations": {"vgpud.io/memory": "2MiB"}, "x": "y" * 500_000}).encode()
    held: list[socket.socket] = []
    told = False
    while True:
        with suppress(OSError):
            one = _connected(run_dir / "runtime.sock")
            one.setblocking(False)
            one.send(REQUEST.pack(MAGIC, Verb.PREPARE, 0, 2, len(body)) + b"c1" + body)
            held.append(one)
        if len(held) >= 128:
            if not told:
                stands()
            told = True
            held.pop(0).close()
            time.sleep(0.01)


def messages(run_dir: Path, stands: Done) -> None:
    """Sends gRPC messages of a megabyte, 16 calls at a time, repeatedly."""
    bodies = (
        b"\xf8\x3f\x01" * (MESSAGE_BYTES // 3),  # unknown fields
        b"\x0a\x02ab" * (MESSAGE_BYTES // 4),  # one text field, repeated
        b"\x0a" + _varint(MESSAGE_BYTES) + b"x" * MESSAGE_BYTES,  # one long text field
        b"\x32\x00" * (MESSAGE_BYTES // 2),  # one empty message, repeated
        # many text fields inside one message
        b"\x32" + _varint(MESSAGE_BYTES) + b"\x0a\x00" * (MESSAGE_BYTES // 2),
        bytes([0x3B]) * (MESSAGE_BYTES // 2),  # nested groups
    )
    import grpc  # imported only in this process, because grpc does not work after a fork

    stands()
    while True:
        with grpc.insecure_channel(f"unix:{run_dir / 'vgpud.sock'}") as channel:
            calls: list[Any] = []
            for number in range(96):
                call: Any = channel.unary_unary(f"/vgpud.v1.Vgpud/{_METHODS[number % len(_METHODS)]}")
                calls.append(call.future(bodies[number % len(bodies)], timeout=20))
            for call in calls:
                with suppress(grpc.RpcError):
                    call.result()


def watchers(run_dir: Path, stands: Done) -> None:
    """Each user has 64 watches, which read all events."""
    peers = [Peer(run_dir / "vgpud.sock") for _ in range(64 // _STREAMS)]
    for peer in peers:
        for _ in range(_STREAMS):
            stream = peer.open("Watch")
            peer.begin_message(stream, 0)
            peer.end(stream)
    stands()
    while True:
        ready, _, _ = select.select([peer.socket for peer in peers], [], [])
        for peer in peers:
            if peer.socket in ready:
                with suppress(TimeoutError):
                    kind, _, stream, data = peer.read_frame()
                    if kind == DATA and data:
                        peer.grant(stream, len(data))


def slow_http(run_dir: Path, stands: Done) -> None:
    """Each user has 60 connections to metrics.sock that never complete a request, and one that requests
    continuously.
    """
    held: list[socket.socket] = []
    stands()
    while True:
        with suppress(OSError):
            one = _connected(run_dir / "metrics.sock")
            one.send(b"GET /metrics HTTP/1.1\r\nX:" + b"y" * 4000)
            held.append(one)
        for one in held:
            with suppress(OSError):
                one.send(b"z")
        while len(held) > 60:
            held.pop(0).close()
        with suppress(OSError):
            one = _connected(run_dir / "metrics.sock")
            one.settimeout(2)
            one.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            while one.recv(65536):
                pass
            one.close()
        time.sleep(0.005)


def listings(run_dir: Path, stands: Done) -> None:
    """Each user lists 1000 events at ro.sock, 16 calls at a time."""
    with grpc.insecure_channel(f"unix:{run_dir}/ro.sock") as channel:
        encode = pb.ListEventsRequest.SerializeToString
        call = channel.unary_unary("/vgpud.v1.Vgpud/ListEvents", encode, lambda reply: reply)
        stands()
        while True:
            waiting = [call.future(pb.ListEventsRequest(last=1000)) for _ in range(16)]
            for one in waiting:
                with suppress(grpc.RpcError):
                    one.result()


def changes(run_dir: Path, stands: Done) -> None:
    """Each user allocates and releases, 16 calls at a time."""
    with grpc.insecure_channel(f"unix:{run_dir}/vgpud.sock") as channel:
        calls = VgpudStub(channel)
        stands()
        for turn in range(1 << 62):
            asked = [
                pb.AllocateRequest(
                    request_id=f"{os.getuid()}-{turn}-{n}", memory_bytes=2 << 20, isolation="quota"
                )
                for n in range(16)
            ]
            held = []
            for one in [calls.Allocate.future(each) for each in asked]:
                with suppress(grpc.RpcError):
                    held.append(one.result().id)
            for gone in [calls.Release.future(pb.ReleaseRequest(allocation_id=each)) for each in held]:
                with suppress(grpc.RpcError):
                    gone.result()


ATTACKS: dict[str, Callable[[Path, Done], None]] = {
    "nothing": nothing,
    "computing": computing,
    "idle connections": idle_connections,
    "connects": connects,
    "unread replies": unread_replies,
    "slow http": slow_http,
    "watchers": watchers,
    "configs": configs,
    "messages": messages,
    "listings": listings,
    "changes": changes,
}


def _connected(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(0.5)  # waits until the listener's queue has room
    one.connect(str(path))
    return one


def _varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += struct.pack("B", number & 0x7F | 0x80)
        number >>= 7
    return out + struct.pack("B", number)


def _stands() -> None:
    os.write(1, b"stands\n")


def main() -> None:
    name, run_dir, users = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    children = []
    for number in range(users):
        child = os.fork()
        if child == 0:
            os.setgroups([0])
            os.setresgid(0, 0, 0)
            uid = FIRST_UID + number
            os.setresuid(uid, uid, uid)
            # lowest priority, because the bench measures vgpud's work and not the competition for processors
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            try:
                ATTACKS[name](run_dir, _stands)
            finally:
                _stands()  # the bench waits for this line, even if vgpud has closed the attacker's connection
                os._exit(1)
        children.append(child)
    sys.stdin.read()
    for child in children:
        os.kill(child, 9)  # the child is not reaped yet, so its pid is still valid
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
