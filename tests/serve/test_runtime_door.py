"""The socket for container runtimes, with clients of every kind and a fake node behind it."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.clock import until
from tests.conditions import needs
from tests.fusefile import fuse_file, never_written_back
from tests.lingering import lingering
from tests.native.harness import ARBITER
from tests.otheruser import open_folder
from vgpud.inject.hooks import HookProgram
from vgpud.inject.specs import Specs
from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Edits, Lifetime, Request, State, Workload
from vgpud.pace import Pace
from vgpud.policy.model import RuntimeSettings
from vgpud.proc import start_ticks
from vgpud.serve import runtime, runtime_wire
from vgpud.serve.peers import PassedProcess
from vgpud.serve.runtime import RuntimeDoor, RuntimeLimits
from vgpud.serve.runtime_wire import FOR_PARENT, MAGIC, REPLY, REQUEST, Status, Verb, receive
from vgpud.serve.sockets import runtime_socket
from vgpud.untrusted import Untrusted, start_helper

ASKS = json.dumps({"annotations": {"vgpud.io/memory": "1GiB"}, "process": {"user": {"uid": 5, "gid": 6}}})


@pytest.fixture(autouse=True)
def helper_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untrusted, "program", ARBITER)
    monkeypatch.setattr(Untrusted, "_running", None)  # afterwards the keeper ends


@dataclass
class FakeContainers:
    specs: Specs
    started: list[Request] = field(default_factory=list)
    bound: list[tuple[str, Lifetime]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    error: Exception | None = None

    async def start(self, request: Request) -> Allocation:
        self.started.append(request)
        if self.error is not None:
            raise self.error
        return Allocation("a1", request, State.ACTIVE, (), edits=Edits(env=(("CUDA_VISIBLE_DEVICES", "G"),)))

    async def bind(self, allocation_id: str, caller: Caller, lifetime: Lifetime) -> None:
        self.bound.append((allocation_id, lifetime))

    def end(self, allocation_id: str, caller: Caller) -> None:
        self.ended.append(allocation_id)


@dataclass
class World:
    containers: FakeContainers
    path: Path

    async def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, str(self.path))
        return peer

    async def ask(
        self, verb: int, name: str = "c1", body: str = "", flags: int = 0, pidfd: int | None = None
    ) -> tuple[Status, str]:
        loop = asyncio.get_running_loop()
        with await self.connect() as peer:
            head = REQUEST.pack(MAGIC, verb, flags, len(name.encode()), len(body.encode()))
            socket.send_fds(peer, [head], [] if pidfd is None else [pidfd])
            await loop.sock_sendall(peer, name.encode() + body.encode())
            return await answer(peer)


async def answer(peer: socket.socket) -> tuple[Status, str]:
    loop = asyncio.get_running_loop()
    data = b""
    while part := await loop.sock_recv(peer, 65536):
        data += part
    magic, status, length = REPLY.unpack(data[: REPLY.size])
    assert (magic, length) == (MAGIC, len(data) - REPLY.size)
    return Status(status), data[REPLY.size :].decode()


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    held: socket.socket | None = None,
    opened: bool = True,
    limits: RuntimeLimits | None = None,
    environment: bool = False,
    group: Path | None = None,
) -> AsyncIterator[World]:
    """Serves runtime.sock in front of a fake node. `held` is a listening socket passed by systemd, if any.
    `opened` is the policy's [runtime] users. `group` is the control group of every process.
    """
    hook = folder / "vgpu-hook"
    hook.touch()
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    containers = FakeContainers(Specs(folder / "cdi", HookProgram(hook, run_dir)))
    passed = {} if held is None else {"runtime": held.dup()}
    door = RuntimeDoor(
        containers,
        runtime_socket(run_dir, "", passed),
        lambda pid, starter: f"of {pid}" if group is None else f"{group.stat().st_ino} {group}",
        lambda: RuntimeSettings(users=opened, environment=environment),
        limits,
    )
    door.start()
    yield World(containers, run_dir / "runtime.sock")
    await door.stop(1.0)
    assert (run_dir / "runtime.sock").exists() == (held is not None)


def run(folder: Path, scene: Any, **more: Any) -> None:
    async def play() -> None:
        async with world(folder, **more) as made:
            await asyncio.wait_for(scene(made), 300)

    asyncio.run(play())


def me() -> Lifetime:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return Lifetime(os.getpid(), ticks)


def test_a_prepared_container_has_its_allocation_in_its_oci_config(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        status, text = await made.ask(Verb.PREPARE, body=ASKS)
        assert status is Status.DONE and json.loads(text)["annotations"]["vgpud.io/prepared"] == "a1"
        (request,) = made.containers.started
        assert (request.memory_bytes, request.lifetime, request.label) == (GIB, me(), "c1")
        assert (request.owner.uid, request.owner.gid) == (5, 6)
        # a repeated call of the same process has the same request id; with another container name it has
        # another
        await made.ask(Verb.PREPARE, body=ASKS)
        await made.ask(Verb.PREPARE, name="c2", body=ASKS)
        ids = [one.id for one in made.containers.started]
        assert ids[0] == ids[1] != ids[2]

    run(tmp_path, scene)


def test_ignored_variables_of_an_image_are_logged(tmp_path: Path) -> None:
    """An image's variables cancel no annotation of the operator, and ask for nothing by themselves."""

    async def scene(made: World) -> None:
        asks = {"vgpud.io/memory": "1GiB"}
        for variable, annotations in (("VGPU_ALLOCATION", asks), ("VGPU_MEMORY", asks), ("VGPU_MEMORY", {})):
            body = {"process": {"env": [f"{variable}=80GiB"]}, "annotations": annotations}
            with capture_logs() as lines:
                await made.ask(Verb.PREPARE, body=json.dumps(body))
            (line,) = [one for one in lines if one["event"] == "container_variables_ignored"]
            assert line["ignored"] == (variable,)
        assert [request.memory_bytes for request in made.containers.started] == [1 << 30] * 2

    run(tmp_path, scene)


def test_a_container_prepared_by_a_hook_is_bound_to_the_hooks_parent_process(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        await made.ask(Verb.PREPARE, body=ASKS, flags=FOR_PARENT)
        assert made.containers.started[0].lifetime.pid == os.getppid()
        made.containers.error = VgpuError(ErrorCode.NO_CAPACITY, "it is full", "wait")
        status, text = await made.ask(Verb.PREPARE, body=ASKS, flags=FOR_PARENT)
        hook = json.loads(text)["hooks"]["createRuntime"][0]
        assert status is Status.DONE and hook["args"][-2:] == ["refuse", "it is full (E401)\nhint: wait"]

    run(tmp_path, scene)


def test_runtime_sock_answers_refusals_and_internal_errors(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.containers.error = VgpuError(ErrorCode.NO_CAPACITY, "it is full", "wait")
        assert await made.ask(Verb.PREPARE, body=ASKS) == (Status.REFUSED, "it is full (E401)\nhint: wait")
        made.containers.error = RuntimeError("oh")
        status, text = await made.ask(Verb.PREPARE, body=ASKS)
        assert status is Status.REFUSED and "E901" in text
        for body in ("", "{", "[]", "3", '{"process": 3}'):
            status, text = await made.ask(Verb.PREPARE, body=body)
            assert status is Status.REFUSED and "E103" in text
        assert await made.ask(Verb.PREPARE, body="{}") == (Status.UNCHANGED, "")

    run(tmp_path, scene)


@pytest.mark.parametrize("mark", ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"])
def test_a_pods_container_that_asks_for_nothing_is_refused(tmp_path: Path, mark: str) -> None:
    """If the container engine has dropped the pod's annotations, a container that is not refused would start
    without a GPU and without an error.
    """

    def config(env: list[str], *devices: str, **annotations: str) -> str:
        linux = {"devices": [{"path": path} for path in devices]}
        process = {"env": env}
        return json.dumps(
            {"annotations": {mark: "container", **annotations}, "process": process, "linux": linux}
        )

    async def scene(made: World) -> None:
        # the second environment is an attack: the image sets the variable by ENV
        for env in ([], ["VGPU_ALLOCATION=a1"]):
            status, text = await made.ask(Verb.PREPARE, body=config(env))
            assert status is Status.REFUSED
            assert "asks for no GPU slice (E103)" in text and "pod_annotations" in text
        unchanged = (
            # the first container has its allocation by the allocation's CDI device
            config(["VGPU_ALLOCATION=a1"], "/dev/nvidia0"),
            config(["VGPU_COUNT=0"]),  # a sidecar without a slice, beside a container with one
            config([], **{"io.container.manager": "libpod"}),
            json.dumps({"annotations": {mark: "sandbox"}}),
        )
        for body in unchanged:
            assert await made.ask(Verb.PREPARE, body=body) == (Status.UNCHANGED, "")
        assert await made.ask(Verb.PREPARE, body=config([]), flags=FOR_PARENT) == (Status.UNCHANGED, "")
        assert made.containers.started == []

    run(tmp_path, scene, environment=True)


@pytest.mark.parametrize("name", ["train-0", "\x1b[31m", "x" * 300])
def test_a_pods_container_gives_its_allocation_the_names_of_the_cluster(tmp_path: Path, name: str) -> None:
    names = {"sandbox-namespace": "ml", "sandbox-name": name, "container-name": "main"}
    annotations = {f"io.kubernetes.cri.{key}": word for key, word in names.items()}
    body = json.dumps({"annotations": {**annotations, "vgpud.io/memory": "1GiB"}, "process": {"user": {}}})

    async def scene(made: World) -> None:
        assert (await made.ask(Verb.PREPARE, body=body))[0] is Status.DONE
        (request,) = made.containers.started
        shown = Workload("ml", name, "main") if name.isprintable() and len(name) < 256 else Workload()
        assert request.workload == shown

    run(tmp_path, scene)


# Passes the FUSE file sys.argv[2] over the socket sys.argv[1], and prints the answer. This is a program of
# its own, because each child of the process that has the file closes a copy of it, and waits.
PASS_FILE = """
import os, socket, sys
from vgpud.serve.runtime_wire import MAGIC, REQUEST, Verb
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect(sys.argv[1])
    file = os.open(sys.argv[2], os.O_RDWR)
    socket.send_fds(peer, [REQUEST.pack(MAGIC, Verb.BIND, 0, 2, 0)], [file])
    peer.sendall(b"a1")
    print(peer.recv(65536), flush=True)
"""


@needs("root", "fuse")
def test_a_passed_descriptor_whose_close_hangs_does_not_block_runtime_sock(tmp_path: Path) -> None:
    """An attack: the file system does not answer the close of a descriptor that came with a message."""
    with fuse_file(tmp_path / "mount", "flush") as file:

        async def scene(made: World) -> None:
            words = [sys.executable, "-c", PASS_FILE, str(made.path), str(file.path)]
            attackers.append(attacker := subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            assert attacker.stdout is not None
            assert "E103" in await asyncio.to_thread(attacker.stdout.readline)
            assert await asyncio.to_thread(file.asked)
            own = os.pidfd_open(os.getpid())
            assert (await made.ask(Verb.BIND, name="a1", pidfd=own))[0] is Status.DONE
            os.close(own)

        attackers: list[subprocess.Popen[str]] = []
        run(tmp_path, scene)
    for attacker in attackers:
        attacker.communicate()


@needs("root", "fuse")
def test_passed_descriptors_whose_close_hangs_take_no_places_of_other_users(tmp_path: Path) -> None:
    async def process_of(user: int, descriptor: int) -> PassedProcess | None:
        """Sends a message of `user` that passes `descriptor`, so that the receiver closes the last copy.
        Returns the process that the message names.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            socket.send_fds(theirs, [REQUEST.pack(MAGIC, Verb.BIND, 0, 0, 0)], [descriptor])
            os.close(descriptor)
            return (await receive(ours, user)).process

    def itself() -> int:
        return os.pidfd_open(os.getpid())

    async def attack() -> None:
        with never_written_back(tmp_path / "mount", 8) as (sockets, _):
            for one in sockets:
                assert await process_of(7, one.detach()) is None
            with pytest.raises(VgpuError, match="uid 7 has 8 messages"):
                await process_of(7, itself())
            for user in (8, 0):
                process = await process_of(user, itself())
                assert process is not None
                assert process.pid == os.getpid()
        # uid 7 may send again when the hanging closes have ended; the event loop must run until then
        await until(lambda: not runtime_wire._receivers.taken_by(7))
        assert await process_of(7, itself()) is not None
        await until(lambda: not runtime_wire._receivers.taken_by(7))

    asyncio.run(attack())


@needs("root", "fuse")
def test_a_message_whose_receive_hangs_delays_no_messages_of_other_users(tmp_path: Path) -> None:
    """An attack: the kernel closes a second descriptor before the process that receives it can answer."""
    pace = Pace(0.0)

    async def attack() -> None:
        own = os.pidfd_open(os.getpid())
        with contextlib.ExitStack() as stack:
            sockets, file = stack.enter_context(never_written_back(tmp_path / "mount", 1))
            tasks = []
            for user, more in ((7, [next(sockets)]), (8, [])):
                ours, theirs = map(stack.enter_context, socket.socketpair())
                ours.setblocking(False)
                descriptors = [own, *(one.fileno() for one in more)]
                socket.send_fds(theirs, [REQUEST.pack(MAGIC, Verb.BIND, 0, 0, 0)], descriptors)
                for one in more:
                    one.close()
                tasks.append(asyncio.ensure_future(receive(ours, user, pace)))
                if more:
                    assert await asyncio.to_thread(file.asked)
            async with asyncio.timeout(300):
                assert (await tasks[1]).process is not None
            assert not tasks[0].done()
        with pytest.raises(ConnectionAbortedError):
            await tasks[0]
        await until(lambda: not any(map(runtime_wire._receivers.taken_by, (7, 8))))
        os.close(own)

    asyncio.run(attack())


def test_the_receiver_of_a_cancelled_message_ends_although_a_lingering_socket_delays_it() -> None:
    """An attack: eight users send eight messages like this one each. If their receivers did not end, vgpud
    could receive no descriptor of any other user.
    """

    async def attack() -> None:
        own = os.pidfd_open(os.getpid())
        ours, theirs = socket.socketpair()
        with ours, theirs, lingering() as second:
            ours.setblocking(False)
            socket.send_fds(theirs, [REQUEST.pack(MAGIC, Verb.BIND, 0, 0, 0)], [own, own, second.fileno()])
            second.close()
            task = asyncio.ensure_future(receive(ours, 7))
            await until(lambda: fcntl.ioctl(ours, termios.FIONREAD, bytes(4)) == bytes(4))
            assert runtime_wire._receivers.taken_by(7) == 1
            task.cancel()  # as the deadline of the message does
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not runtime_wire._receivers.taken_by(7))
        os.close(own)

    asyncio.run(attack())


def test_a_message_with_a_second_descriptor_behind_the_pidfd_passes_none_to_vgpud() -> None:
    """An attack: vgpud would hold the last copy of the second descriptor, whose close may wait."""
    caller, theirs = socket.socketpair()
    ours, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    with caller, theirs, ours:
        socket.send_fds(caller, [REQUEST.pack(MAGIC, Verb.BIND, 0, 0, 0)], [pidfd, caller.fileno()])
        with answers:
            words = [str(ARBITER), "--receive", str(REQUEST.size)]
            subprocess.run(words, stdin=theirs.fileno(), stdout=answers.fileno(), check=False)
        assert socket.recv_fds(ours, REQUEST.size, 8)[:2] == (b"", [])
    os.close(pidfd)


def test_bind_uses_the_process_of_the_passed_pidfd(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        pidfd = os.pidfd_open(os.getpid())
        assert (await made.ask(Verb.BIND, name="a1", pidfd=pidfd))[0] is Status.DONE
        assert made.containers.bound == [("a1", Lifetime(me().pid, me().start_ticks, f"of {os.getpid()}"))]
        for wrong in (None, 0):  # a message without a descriptor, and one whose descriptor is not a pidfd
            status, text = await made.ask(Verb.BIND, name="a1", pidfd=wrong)
            assert status is Status.REFUSED and "E103" in text
        os.close(pidfd)
        assert (await made.ask(Verb.END, name="a1"))[0] is Status.DONE
        assert made.containers.ended == ["a1"]

    run(tmp_path, scene)


@pytest.mark.parametrize(
    "head",
    [
        REQUEST.pack(1, 1, 0, 0, 0),
        REQUEST.pack(MAGIC, 9, 0, 0, 0),
        REQUEST.pack(MAGIC, 1, 0, 1 << 20, 0),
        REQUEST.pack(MAGIC, 1, 0, 0, 1 << 30),
    ],
)
def test_a_malformed_message_to_runtime_sock_is_refused(tmp_path: Path, head: bytes) -> None:
    async def scene(made: World) -> None:
        with await made.connect() as peer:
            await asyncio.get_running_loop().sock_sendall(peer, head)
            status, text = await answer(peer)
        assert status is Status.REFUSED and "E103" in text
        assert made.containers.started == []

    run(tmp_path, scene)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_connection_that_cannot_be_accepted_does_not_close_runtime_sock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [number]
    accept = Untrusted.accept

    def fails_once(listener: Untrusted) -> Any:
        if failures:
            raise OSError(failures.pop(), os.strerror(number))
        return accept(listener)

    async def scene(made: World) -> None:
        assert await made.ask(Verb.PREPARE, body="{}") == (Status.UNCHANGED, "")
        assert not failures

    monkeypatch.setattr(Untrusted, "accept", fails_once)
    with capture_logs() as lines:
        run(tmp_path, scene)
    failed = [line["why"] for line in lines if line["event"] == "container_runtime_connection_not_accepted"]
    assert failed == (["Too many open files"] if number == errno.EMFILE else [])


@needs("root")
def test_silent_and_closed_connections_to_runtime_sock_do_not_hold_up_others(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        silent = [await made.connect() for _ in range(20)]
        with await made.connect() as cut:
            await asyncio.get_running_loop().sock_sendall(cut, REQUEST.pack(MAGIC, 1, 0, 2, 500)[:7])
        assert await made.ask(Verb.PREPARE, body="{}") == (Status.UNCHANGED, "")
        for peer in silent:
            peer.close()

    run(tmp_path, scene)


def test_a_connection_made_while_vgpud_is_down_is_served_by_the_next_vgpud(tmp_path: Path) -> None:
    async def play() -> None:
        (tmp_path / "run").mkdir()
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(str(tmp_path / "run" / "runtime.sock"))
            held.listen()
            held.setblocking(False)
            async with world(tmp_path, held) as first:
                assert await first.ask(Verb.PREPARE, body="{}") == (Status.UNCHANGED, "")
            with await first.connect() as peer:  # the server that starts next must serve this connection
                await asyncio.get_running_loop().sock_sendall(peer, REQUEST.pack(MAGIC, 1, 0, 2, 2) + b"c1{}")
                async with world(tmp_path, held):
                    assert await answer(peer) == (Status.UNCHANGED, "")

    asyncio.run(asyncio.wait_for(play(), 300))


def test_at_its_end_vgpud_leaves_no_connection_of_a_user_for_systemd(tmp_path: Path) -> None:
    """systemd closes what waits on its sockets when their units stop, and the files that callers passed."""

    async def play() -> None:
        (tmp_path / "run").mkdir()
        path = tmp_path / "run" / "runtime.sock"
        with socket.socket(socket.AF_UNIX) as held, contextlib.ExitStack() as stack:
            held.bind(str(path))
            held.listen(1024)
            held.setblocking(False)
            async with world(tmp_path, held):
                assert path.stat().st_mode & 0o777 == 0o660
                for _ in range(100):  # the event loop does not run before the stop
                    stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(BlockingIOError):
                held.accept()

    asyncio.run(asyncio.wait_for(play(), 300))


def config_asking(**more: object) -> str:
    return json.dumps({"annotations": {"vgpud.io/memory": "1GiB"}, **more})


@pytest.mark.parametrize(
    "body",
    [
        config_asking(x=0).replace("0}", "[" * 700 + "]" * 700 + "}"),
        config_asking(x=0).replace("0}", "9" * 5000 + "}"),
        json.dumps({"annotations": {"vgpud.io/count": "9" * 5000}}),
        config_asking(x=[[]] * 240_000),
        config_asking(process={"env": [f"A={number}" for number in range(80_000)]}),
        json.dumps({"Annotations": {"vgpud.io/memory": "1GiB"}}),
        json.dumps({"proce\u017fs": {"env": ["VGPU_MEMORY=1GiB"]}}),
        config_asking(process={"ENV": []}),
        config_asking(linux={"uidmappings": []}),
        config_asking(hooks=3),
        config_asking(hooks={"poststop": [3]}),
        config_asking(process={"env": [3]}),
        config_asking(process=[]).replace("[]", '"x"'),
        config_asking(linux={"devices": [3]}),
        config_asking(linux={"resources": {"devices": 3}}),
        config_asking(mounts={"destination": "/"}),
    ],
)
def test_a_config_of_the_wrong_shape_is_refused_before_anything_is_allocated(
    tmp_path: Path, body: str
) -> None:
    async def scene(made: World) -> None:
        status, text = await made.ask(Verb.PREPARE, body=body)
        assert status is Status.REFUSED and "E103" in text
        assert made.containers.started == []

    run(tmp_path, scene)


def test_a_message_above_one_mebibyte_is_refused_by_its_header(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        with await made.connect() as peer:
            head = REQUEST.pack(MAGIC, Verb.PREPARE, 0, 2, (1 << 20) + 1)
            await asyncio.get_running_loop().sock_sendall(peer, head)
            status, text = await answer(peer)
        assert status is Status.REFUSED and "1048577 bytes" in text

    run(tmp_path, scene)


def test_the_refusal_of_a_huge_request_is_short(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        for body in (
            json.dumps({"annotations": {"vgpud.io/" + "memoryy" * 100_000: "1"}}),
            json.dumps({"annotations": {"vgpud.io/memory": "9" * 900_000}}),
            config_asking(process={"user": {"uid": "9" * 900_000}}),
        ):
            status, text = await made.ask(Verb.PREPARE, body=body)
            assert status is Status.REFUSED and len(text) < 2500

    run(tmp_path, scene)


def test_config_json_is_decoded_and_encoded_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work on a large config.json must not delay other callers."""
    places: list[threading.Thread] = []

    def noted(real: Any, *given: Any) -> Any:
        places.append(threading.current_thread())
        return real(*given)

    for name in ("parsed", "wish_of", "edited"):
        monkeypatch.setattr(runtime, name, partial(noted, getattr(runtime, name)))

    async def scene(made: World) -> None:
        assert (await made.ask(Verb.PREPARE, body=ASKS))[0] is Status.DONE
        assert len(places) == 3 and threading.current_thread() not in places

    run(tmp_path, scene)


@needs("root")
def test_connections_with_unread_replies_end_and_leave_room_for_other_users(tmp_path: Path) -> None:
    """Without the bound, 512 unread replies prevent root from starting containers."""
    limits = RuntimeLimits(total=4, per_user=4, for_root=2, reply_seconds=0.2)
    large = config_asking(x="y" * 700_000)

    async def scene(made: World) -> None:
        loop = asyncio.get_running_loop()
        unread = []
        for _ in range(6):
            peer = await made.connect()
            unread.append(peer)
            await loop.sock_sendall(peer, REQUEST.pack(MAGIC, Verb.PREPARE, 0, 2, len(large)) + b"c1")
            await loop.sock_sendall(peer, large.encode())
        await until(lambda: len(made.containers.started) == 6, "all places are taken, root's included")
        answered = False
        while not answered:
            with contextlib.suppress(ConnectionResetError):
                answered = (await made.ask(Verb.PREPARE, body="{}"))[0] is Status.UNCHANGED
            await asyncio.sleep(0.05)
        for peer in unread:
            peer.close()

    run(tmp_path, scene, limits=limits)


AS_USER = """
import os, socket, sys
uid = int(sys.argv[4]); os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.socket(socket.AF_UNIX)); held[-1].connect(sys.argv[1])
held[-1].settimeout(300)
print(held[-1].recv(4096)[12:].decode().splitlines()[0] if sys.argv[3] == "read" else "connected", flush=True)
input()
"""


@contextlib.asynccontextmanager
async def another_user(made: World, connections: int, then: str, uid: int = 4242) -> AsyncIterator[str]:
    """Starts a process of `uid` with this many connections. Yields the first line of the answer to the last
    connection.
    """
    words = [sys.executable, "-c", AS_USER, str(made.path), str(connections), then, str(uid)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    try:
        yield (await child.stdout.readline()).decode().strip()
    finally:
        await child.communicate(b"\n")


def opened_to_all(made: World) -> None:
    made.path.chmod(0o666)


@pytest.fixture(name="open_folder")
def made_open_folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made


@needs("root")
def test_silent_connections_of_a_user_leave_room_for_root(open_folder: Path) -> None:
    async def scene(made: World) -> None:
        opened_to_all(made)
        async with another_user(made, 5, "read") as told:
            assert told == "uid 4242 has 4 containers being started, of 4 in all (E401)"
            assert await made.ask(Verb.PREPARE, body="{}") == (Status.UNCHANGED, "")

    run(open_folder, scene, limits=RuntimeLimits(total=4, per_user=4, for_root=1))


@needs("root")
def test_silent_connections_of_a_user_leave_room_for_other_users(open_folder: Path) -> None:
    async def scene(made: World) -> None:
        opened_to_all(made)
        async with another_user(made, 5, "read") as told:
            assert told == "uid 4242 has 2 containers being started, of 2 in all (E401)"
            async with another_user(made, 3, "read", uid=4343) as said:
                assert said == "uid 4343 has 2 containers being started, of 4 in all (E401)"

    run(open_folder, scene, limits=RuntimeLimits(total=8, per_user=2, for_root=1))


@needs("root")
def test_the_runtime_door_is_closed_to_users_unless_the_policy_opens_it(open_folder: Path) -> None:
    async def scene(made: World) -> None:
        opened_to_all(made)
        with capture_logs() as lines:
            async with another_user(made, 1, "read") as told:
                assert told == "uid 4242 may not start containers with GPU slices by runtime.sock (E201)"
        (trail,) = [line for line in lines if "audit" in line]
        assert [trail[key] for key in ("door", "uid", "outcome")] == ["runtime", 4242, "NOT_ALLOWED"]
        assert await made.ask(Verb.PREPARE, body="{}") == (Status.UNCHANGED, "")

    run(open_folder, scene, opened=False)


BINDS_ROOTS = """
import os, socket, sys
from vgpud.serve.runtime_wire import MAGIC, REQUEST, Verb
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
peer = socket.socket(socket.AF_UNIX); peer.settimeout(300); peer.connect(sys.argv[1])
for pid in (1, os.getpid()):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(sys.argv[1])
        socket.send_fds(peer, [REQUEST.pack(MAGIC, Verb.BIND, 0, 2, 0)], [os.pidfd_open(pid)])
        peer.sendall(b"a1")
        print(peer.recv(4096)[12:].decode().partition(chr(10))[0])
"""


@needs("root")
def test_a_user_cannot_bind_a_process_of_another_user(open_folder: Path) -> None:
    async def scene(made: World) -> None:
        opened_to_all(made)
        words = [sys.executable, "-c", BINDS_ROOTS, str(made.path)]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=300)
        refusal, accepted = done.stdout.split("\n")[:2]
        assert refusal == "process 1 belongs to uid 0, and the caller is uid 4242 (E202)", done.stderr
        assert accepted == "" and len(made.containers.bound) == 1

    run(open_folder, scene)


@needs("root")
def test_the_helper_process_that_receives_a_users_descriptor_starts_in_the_users_turn(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack: each message with a descriptor costs vgpud the start of a process."""
    paces: list[Pace] = []
    paced: list[bool] = []

    def made_pace(rest_factor: float) -> Pace:
        paces.append(Pace(rest_factor))
        return paces[-1]

    def start(*given: Any) -> "subprocess.Popen[bytes]":
        paced.append(any(pace._turn.locked() for pace in paces))
        return start_helper(*given)

    monkeypatch.setattr(runtime, "Pace", made_pace)
    monkeypatch.setattr(runtime_wire, "start_helper", start)

    async def scene(made: World) -> None:
        opened_to_all(made)
        await made.ask(Verb.BIND, name="a1")
        assert paced == []  # no descriptor, no process
        own = os.pidfd_open(os.getpid())
        await made.ask(Verb.BIND, name="a1", pidfd=own)
        os.close(own)
        assert paced == [False]
        words = [sys.executable, "-c", BINDS_ROOTS, str(made.path)]
        await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=300)
        assert paced == [False, True, True]

    run(open_folder, scene)


@needs("root")
@pytest.mark.parametrize("owner_uid", [0, 4242])
def test_the_control_group_of_a_users_container_counts_only_if_it_is_delegated_to_the_user(
    open_folder: Path, owner_uid: int
) -> None:
    """An attack: the user's process is in the group of a service, beside processes of root. All processes of
    a container's group can be ended, and get its memory limit.
    """
    group = open_folder / "group"
    group.mkdir()
    os.chown(group, owner_uid, owner_uid)

    async def scene(made: World) -> None:
        opened_to_all(made)
        words = [sys.executable, "-c", BINDS_ROOTS, str(made.path)]
        await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=300)
        ((_, lifetime),) = made.containers.bound
        assert lifetime.cgroup == (f"{group.stat().st_ino} {group}" if owner_uid else "")

    run(open_folder, scene, group=group)
