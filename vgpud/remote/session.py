"""One remote session, as root, for a caller with a grant: has a slice made, and runs the engine's server.

entry.py calls it. The door is reachable from the network and unprivileged; this process has no network. It
trusts the door in one thing, the fingerprint of a client's certificate. The allocation is bound to this
process, so its end, for any reason, releases the slice. The server runs as the grant's account in its own
namespaces: no other process can reach its port, and it ends with this process.
"""

import array
import ctypes
import errno
import fcntl
import os
import pwd
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from vgpud import logs
from vgpud.api.client import Client
from vgpud.api.doors import SOCKET_NAMES
from vgpud.model.caller import Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import Percent, parse_bytes
from vgpud.model.tenancy import Isolation, Mode
from vgpud.policy.load import load
from vgpud.policy.remote import RemoteSettings
from vgpud.remote import wire
from vgpud.remote.engine import ENGINES, Engine
from vgpud.remote.grants import ASK_ANEW, Grant, Grants, Sizes, check_quota
from vgpud.settings import Settings, load_settings

if TYPE_CHECKING:
    from vgpud.api.gen import vgpud_pb2 as pb

log = structlog.get_logger(__name__)

LABEL = "remote"  # the first word of the label of a remote allocation

_READY_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 2.0  # interval between checks that the grant is still live, and that the slice still exists
_ANSWER_SECONDS = 5.0  # maximum time for which a check waits for vgpud
_POLL_SECONDS = 0.02
_CLONE_NEWNET = 0x40000000  # sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h
# PATH of the server; the rest of its environment comes from the slice and the engine
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def tell_settings(door: socket.socket) -> None:
    """Sends the door the table [remote] of the policy. Raises VgpuError."""
    door.sendall(wire.answer(_configured()[1].model_dump(mode="python")))


def serve(door: socket.socket, call: wire.Open, grant: Grant, grants: Grants) -> None:
    """Serves a caller whose token or certificate has been verified, until the session ends. Raises
    VgpuError and OSError.
    """
    settings, remote = _configured()
    if not remote.server:
        hint = "ask the node's administrator to set server in [remote]"
        raise VgpuError(ErrorCode.UNSUPPORTED, "this node makes no remote slices", hint)
    grant = _with_account(grant, settings.run_dir / SOCKET_NAMES[Door.TENANT])
    admin = settings.run_dir / SOCKET_NAMES[Door.ADMIN]
    with Client(admin) as client, Client(admin, _ANSWER_SECONDS) as looks:
        _run(door, client, looks, call, grant, grants, remote)


def log_failure(failure: VgpuError) -> None:
    with suppress(VgpuError):  # the failure to be logged may itself be that the settings cannot be loaded
        logs.configure(load_settings().level)
    log.warning(LogEvent.REMOTE_CALL_FAILED, why=str(failure))


def _configured() -> tuple[Settings, RemoteSettings]:
    settings = load_settings()
    logs.configure(settings.level)
    return settings, load(settings.policy_paths()).policy.remote


def _with_account(grant: Grant, tenants: Path) -> Grant:
    """Returns the grant with the present main group of its account, which may have changed since the grant
    was made. `tenants` is vgpud.sock. Raises VgpuError: ACCOUNT_UNKNOWN if the account does not exist,
    NOT_ALLOWED if it may open vgpud's sockets.
    """
    hint = "ask the node's administrator for a grant of another account: vgpuctl remote grant USER"
    try:
        account = pwd.getpwuid(grant.uid)
    except KeyError:
        sentence = f"grant {grant.id} is for uid {grant.uid}, which has no account on the node"
        raise VgpuError(ErrorCode.ACCOUNT_UNKNOWN, sentence, hint) from None
    if account.pw_uid == 0 or account.pw_gid == tenants.stat().st_gid:
        sentence = f"grant {grant.id} is for {account.pw_name}, who may open vgpud's sockets"
        raise VgpuError(ErrorCode.NOT_ALLOWED, sentence, hint)
    return replace(grant, gid=account.pw_gid)


@contextmanager
def _looking(client: Client, allocation_id: str) -> Iterator[threading.Event]:
    """Yields an event that is set when vgpud no longer has the slice, because an administrator has released
    it. A thread checks this, so that connections are passed even while vgpud does not answer. If vgpud does
    not answer, the slice counts as existing.
    """
    released, stopping = threading.Event(), threading.Event()

    def look() -> None:
        while not stopping.wait(_LOOK_SECONDS):
            try:
                client.get_allocation(allocation_id)
            except VgpuError as error:
                if error.code is ErrorCode.NO_SUCH_ALLOCATION:
                    released.set()
                    return
                client.close()  # the next call connects at once, without gRPC's back-off

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield released
    finally:
        stopping.set()
        thread.join()


def _run(
    door: socket.socket,
    client: Client,
    looks: Client,
    call: wire.Open,
    grant: Grant,
    grants: Grants,
    remote: RemoteSettings,
) -> None:
    """Makes the slice, runs its server until the session ends, and releases the slice."""
    held = _allocate(client, call, grant, grants)
    engine = ENGINES[remote.engine]
    try:
        _leave_network()
        with _running(held, grant, engine, remote.server) as server:
            _wait_ready(server, engine, door)
            door.sendall(wire.answer({"allocation": held.id, "user": grant.user}))
            log.info(
                LogEvent.REMOTE_SESSION_OPENED, allocation=held.id, user=grant.user, address=call.address
            )
            with _looking(looks, held.id) as released:
                cause = _relay(door, server, engine, grants, grant, released)
                if cause is not None:
                    with suppress(OSError):  # the door has left
                        door.sendall(wire.refusal(cause))
    finally:
        _release(client, held.id)
    why = "the door closed the session" if cause is None else cause.sentence
    log.info(LogEvent.REMOTE_SESSION_ENDED, allocation=held.id, user=grant.user, why=why)


def _release(client: Client, allocation_id: str) -> None:
    """Releases the slice. A failure is only logged, because the end of this process releases the slice too,
    and the failure is not the cause for which the session has ended.
    """
    try:
        client.release(allocation_id, True)
    except VgpuError as error:
        if error.code is not ErrorCode.NO_SUCH_ALLOCATION:  # an administrator has released it
            log.warning(LogEvent.REMOTE_SLICE_RELEASE_FAILED, allocation=allocation_id, why=str(error))


def _allocate(client: Client, call: wire.Open, grant: Grant, grants: Grants) -> "pb.Allocation":
    """Asks vgpud for a slice of the grant's account. The label contains the grant's id, so that all slices of
    a grant can be counted.
    """
    from vgpud.api.gen import vgpud_pb2 as pb

    sizes = _sizes(call, grant)
    with grants.counting(grant.id):
        held = list(_held(client, grant))
        if call.isolation != Isolation.DEVICE:
            check_quota(grant, sizes, held)
        request = pb.AllocateRequest(
            count=1,
            memory_bytes=sizes.memory_bytes,
            share_percent=sizes.cores_percent,
            isolation=call.isolation,
            priority=call.priority,
            label=" ".join(filter(None, (_label(grant), call.address, call.label))),
            bind_to_caller=True,
            owner_uid=grant.uid,
            owner_gid=grant.gid,
        )
        # a plan has no slices if vgpud refuses the request; `allocate` then raises the reason
        planned = client.plan(request).slices
        check_quota(grant, _sizes_of(planned), held, _form(planned))
        made = client.allocate(request)
        try:
            # the slices may differ from the plan
            check_quota(grant, _sizes_of(made.slices), held, _form(made.slices))
            grants.find(call.token, call.certificate)  # the grant may have been revoked meanwhile
        except VgpuError:
            client.release(made.id, True)
            raise
    return made


def _label(grant: Grant) -> str:
    return f"{LABEL} {grant.user}/{grant.id}"


def _held(client: Client, grant: Grant) -> Iterable[Sizes]:
    for one in client.list_allocations().allocations:
        # an allocation of another user may have the same label
        if one.owner_uid == grant.uid and f"{one.label} ".startswith(f"{_label(grant)} "):
            yield _sizes_of(one.slices)


def _sizes_of(slices: "Iterable[pb.Slice]") -> Sizes:
    parts = list(slices)
    cores = [part.share_percent if part.HasField("share_percent") else 100.0 for part in parts]
    return Sizes(sum(part.memory_bytes for part in parts), sum(cores))


def _form(slices: "Iterable[pb.Slice]") -> str:
    """Returns "MIG profile ..." or "a whole device" for slices that may be larger than the request; "" for
    others.
    """
    for part in slices:
        if part.mig.profile_name:
            return f"MIG profile {part.mig.profile_name}"
        if part.mode == Mode.EXCLUSIVE:
            return "a whole device"
    return ""


def _sizes(call: wire.Open, grant: Grant) -> Sizes:
    """Returns the requested sizes. A size that the caller leaves out is the grant's limit, except in a
    request for a whole device, which needs no sizes.
    """
    if call.isolation == Isolation.DEVICE and not call.memory and not call.cores:
        return Sizes(None, None)
    memory = parse_bytes(call.memory) if call.memory else grant.max_memory_bytes
    cores = Percent.parse(call.cores).value if call.cores else grant.max_cores_percent
    return Sizes(memory, None if cores is None else min(cores, 100.0))


def _leave_network() -> None:
    """Moves this process into a new network namespace, which has only a loopback interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        request = array.array("B", struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(made, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sh14x", request)[1]
        fcntl.ioctl(made, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


@contextmanager
def _running(
    held: "pb.Allocation", grant: Grant, engine: Engine, program: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs the server as the grant's account.

    The server is pid 1 of its pid namespace: if it ends, the kernel kills all processes of the namespace.
    setpriv and unshare, which start it, end with their parents. The server has no supplementary groups:
    members of `vgpu` may open vgpud.sock, where the grant's limits do not apply.
    """
    if shutil.which(program) is None:
        sentence = f"the engine's server {program} is not a program"
        raise VgpuError(ErrorCode.HELPER_FAILED, sentence, "install it, or correct server in [remote]")
    # env(1) sets the LD_ variables, and runs as the account: they would change the programs that run as root.
    # Other variables are not on the command line of env(1), because all users can read a command line.
    of_slice = {**held.edits.env, **held.edits.host_env}
    own = {"PATH": _PATH, "LANG": "C.UTF-8", **of_slice, **engine.server_environment()}
    words = [
        *(
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ),
        *("setpriv", f"--reuid={grant.uid}", f"--regid={grant.gid}", "--clear-groups", "--no-new-privs"),
        *("--bounding-set=-all", "--inh-caps=-all", "--pdeathsig=KILL"),
        *("env", *(f"{name}={own.pop(name)}" for name in list(own) if name.startswith("LD_")), program),
    ]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, cwd="/", env=own) as server:
        try:
            yield server
        finally:
            server.kill()


def _wait_ready(server: "subprocess.Popen[bytes]", engine: Engine, door: socket.socket) -> None:
    until = time.monotonic() + _READY_SECONDS
    left = select.poll()
    left.register(door, select.POLLRDHUP)
    while True:
        if left.poll(0):
            raise ConnectionResetError(errno.ECONNRESET, "the door has left")
        if server.poll() is not None:
            sentence = f"the engine's server ended with {server.returncode} before it listened"
            raise VgpuError(ErrorCode.HELPER_FAILED, sentence, wire.JOURNAL)
        try:
            _connect(engine).close()
            return
        except OSError:
            if time.monotonic() >= until:
                sentence = f"the engine's server does not listen within {_READY_SECONDS:g} s"
                raise VgpuError(ErrorCode.HELPER_TIMEOUT, sentence, wire.JOURNAL) from None
        time.sleep(_POLL_SECONDS)


def _connect(engine: Engine) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", engine.port), _CONNECT_SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _relay(
    door: socket.socket,
    server: "subprocess.Popen[bytes]",
    engine: Engine,
    grants: Grants,
    grant: Grant,
    released: threading.Event,
) -> VgpuError | None:
    """Passes the door a connection to the server for each byte that it sends. Returns the cause of the end:
    that of the server, the grant or the slice; None if the door closed the connection. While the file of
    grants cannot be read, the grant as it was last read counts.
    """
    told = False
    pidfd = os.pidfd_open(server.pid)
    try:
        poll = select.poll()
        poll.register(door, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while True:
            try:
                found, told = grants.get(grant.id), False
            except VgpuError as error:
                if not told:
                    log.error(LogEvent.REMOTE_GRANTS_NOT_READ, why=str(error))
                found, told = grant, True
            if found is None or found.expired:
                how = "was revoked" if found is None else "has expired"
                return VgpuError(ErrorCode.NOT_ALLOWED, f"grant {grant.id} of {grant.user} {how}", ASK_ANEW)
            grant = found
            ready = {descriptor for descriptor, _ in poll.poll(_LOOK_SECONDS * 1000)}
            if pidfd in ready:
                return VgpuError(ErrorCode.HELPER_FAILED, "the engine's server has ended", wire.JOURNAL)
            if door.fileno() in ready and not _pass_one(door, engine):
                return None
            if released.is_set():
                hint = "open another session, or ask the node's administrator why"
                return VgpuError(ErrorCode.NO_SUCH_ALLOCATION, "its slice was released on the node", hint)
    finally:
        os.close(pidfd)


def _pass_one(door: socket.socket, engine: Engine) -> bool:
    """Answers one byte of the door. Returns False if the door has closed the connection."""
    if not door.recv(1):
        return False
    try:
        with _connect(engine) as made:
            socket.send_fds(door, [wire.CONNECT], [made.fileno()])
    except (ConnectionError, TimeoutError):  # the answer has no connection, because the server refuses it
        door.sendall(wire.CONNECT)
    return True
