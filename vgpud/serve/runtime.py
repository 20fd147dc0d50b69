"""Serves container runtimes on runtime.sock. Its clients are vgpu-runtime and vgpu-hook.

It does not use gRPC: a container's start should be delayed by milliseconds only, and the clients are C
programs. A client sends the config.json, and vgpud returns the edited one, so that vgpud needs no access to
bundles. The kernel identifies the caller; a pidfd identifies a container's init process.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import structlog

from vgpud import audit
from vgpud.inject.hooks import HookProgram
from vgpud.inject.oci import check_shape, edited, parsed, refused
from vgpud.inject.specs import Specs
from vgpud.inject.wish import Wish, check_keys, check_pod_asks, ignored_by, owner_of, pod_of, wish_of
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.shares import Shares
from vgpud.model.tenancy import Allocation, Lifetime, Owner, Request, workload_of
from vgpud.node.tenants.cgroups import group_owner
from vgpud.pace import Pace
from vgpud.policy.model import RuntimeSettings
from vgpud.proc import read_stat
from vgpud.serve.peers import Identities, user_of
from vgpud.serve.runtime_wire import Message, Status, Verb, packed, receive, reply
from vgpud.serve.sockets import RuntimeSocket

log = structlog.get_logger(__name__)

_ACCEPT_PAUSE_SECONDS = 0.1
_AUDITED_CHARACTERS = 128
# pause factor: users other than root get a tenth of the time of the reader thread and of receivers
_REST_FACTOR = 9.0
_NAME_CHARACTERS = 63
_SHOWN_CHARACTERS = 12  # length to which a container's id is shortened, as docker ps and podman ps show it

CgroupOf = Callable[[int, int], str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Limits of connections. Each connection carries one message and its reply."""

    total: int = 512
    per_user: int = 16
    for_root: int = 64
    receive_seconds: float = 5.0
    reply_seconds: float = 10.0


class Containers(Protocol):
    """What this server uses of the node. All methods raise VgpuError."""

    @property
    def specs(self) -> Specs: ...

    async def start(self, request: Request) -> Allocation: ...

    async def bind(self, allocation_id: str, caller: Caller, lifetime: Lifetime) -> None: ...

    def end(self, allocation_id: str, caller: Caller) -> None: ...


class Pods(Protocol):
    """The allocations that the kubelet requested. Each serves several containers in turn."""

    async def bind(self, allocation_id: str, init: Lifetime, pod: str) -> bool:
        """Records the init process of a container. Returns False if the kubelet did not request the
        allocation. Raises VgpuError.
        """
        ...


class RuntimeDoor:
    """Serves runtime.sock. `rules` returns the policy in force: which users may start containers, and which
    requests count.
    """

    def __init__(
        self,
        containers: Containers,
        door: RuntimeSocket,
        cgroup_of: CgroupOf,
        rules: Callable[[], RuntimeSettings],
        limits: RuntimeLimits | None = None,
        pods: Pods | None = None,
    ) -> None:
        self._containers = containers
        self._pods = pods
        self._door = door
        self._listener = door.listening
        self._cgroup_of = cgroup_of
        self._rules = rules
        self._limits = limits or RuntimeLimits()
        self._shares = Shares(self._limits.total, self._limits.per_user, self._limits.for_root)
        self._open: set[asyncio.Task[None]] = set()
        # config.json is parsed and written in this thread, so that the event loop can serve other callers.
        self._reader = ThreadPoolExecutor(1, "vgpud-config")
        self._pace = Pace(_REST_FACTOR)
        self._identities = Identities(Door.TENANT)
        self._read_seconds = 0.0  # processor time that the latest message took

    def start(self) -> None:
        self.follow_rules()
        self._listen()

    def follow_rules(self) -> None:
        """Opens the socket's file to users, or closes it, as the policy in force says."""
        self._door.open_to_group(self._rules().users)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new callers, and gives present callers `grace_seconds` to finish.

        Users can no longer connect, and each connection of a user that waits is accepted: systemd, if it has
        the listener, would close what waits when it stops the socket unit, and the files passed in it.
        """
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._rules().users:
            self._door.open_to_group(False)
            while self._accept():
                pass
        self._door.close()
        if self._open:
            await asyncio.wait(self._open, timeout=grace_seconds)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> bool:
        """Accepts a connection. Returns False if none waits, or the kernel gives no descriptor for it."""
        try:
            connection, _ = self._listener.accept()
        except ConnectionAbortedError:
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning(LogEvent.CONTAINER_RUNTIME_CONNECTION_NOT_ACCEPTED, why=error.strerror)
            # the listener stays readable, so without a pause the event loop would spin
            self._pause(_ACCEPT_PAUSE_SECONDS)
            return False
        connection.setblocking(False)
        try:
            user = user_of(connection)
        except OSError:
            connection.close()
            return True
        if not self._shares.take(user):
            _send_away(connection, self._full(user))
            return True
        task = asyncio.ensure_future(self._serve(connection, user))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return True

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(seconds, self._accept_again)

    def _full(self, user: int) -> VgpuError:
        have = f"{self._shares.taken_by(user)} containers being started, of {self._shares.taken} in all"
        return VgpuError(ErrorCode.NO_CAPACITY, f"uid {user} has {have}", "try again in a moment")

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._listen()

    async def _serve(self, connection: socket.socket, user: int) -> None:
        try:
            with connection:
                caller = await self._identities.of(connection, user)
                status, body = await self._answer(connection, caller)
                async with asyncio.timeout(self._limits.reply_seconds):
                    await reply(connection, status, body)
        except (OSError, TimeoutError) as error:
            # the reply could not be sent; the allocation is bound to the caller and ends with it
            log.debug(LogEvent.CONTAINER_RUNTIME_REPLY_NOT_SENT, why=str(error), uid=user)
        finally:
            self._shares.give_back(user)

    async def _answer(self, connection: socket.socket, caller: Caller) -> tuple[Status, bytes]:
        if not _is_root(caller) and not self._rules().users:
            audit.asked_by(caller, "runtime")
            audit.record("start container", refusal := _closed_to(caller))
            return Status.REFUSED, _told(refusal)
        try:
            async with asyncio.timeout(self._limits.receive_seconds):
                message = await receive(connection, caller.user, None if _is_root(caller) else self._pace)
        except TimeoutError:
            raise ConnectionAbortedError("the message did not end") from None
        except VgpuError as error:
            return Status.REFUSED, _refused(error, caller)
        try:
            known = _known(caller)
            # A message BIND or END has the id of the allocation, not of the container.
            container = message.id[:_AUDITED_CHARACTERS] if message.verb is Verb.PREPARE else ""
            audit.asked_by(known, "runtime", container=container)
            return await self._carry_out(known, message)
        except VgpuError as error:
            return Status.REFUSED, _refused(error, caller)
        except Exception as error:  # after a bug in vgpud the runtime must still get a reply
            log.exception(LogEvent.BUG_IN_CONTAINER_RUNTIME_CALL)
            sentence = f"a bug in vgpud raised {type(error).__name__}"
            bug = VgpuError(ErrorCode.BUG, sentence, "report this with the journal of vgpud")
            return Status.REFUSED, _told(bug)

    async def _aside(self, caller: Caller, work: Callable[..., T], *given: object) -> T:
        """Runs `work` in the reader thread, after earlier work of the same user.

        The thread and the event loop share Python's lock, so users other than root get only a part of the
        thread's time.
        """
        if _is_root(caller):
            return await self._read(work, *given)
        async with self._pace.turn(caller.user):
            try:
                return await self._read(work, *given)
            finally:
                self._pace.took(self._read_seconds)

    async def _read(self, work: Callable[..., T], *given: object) -> T:
        def timed() -> T:
            began = time.thread_time()
            try:
                return work(*given)
            finally:
                self._read_seconds = time.thread_time() - began

        return await asyncio.get_running_loop().run_in_executor(self._reader, timed)

    async def _carry_out(self, caller: Caller, message: Message) -> tuple[Status, bytes]:
        match message.verb:
            case Verb.PREPARE:
                return await self._prepare(caller, message)
            case Verb.BIND:
                await self._bind(caller, message)
            case Verb.END:
                self._containers.end(message.id, caller)
        return Status.DONE, b""

    async def _bind(self, caller: Caller, message: Message) -> None:
        init = self._init(caller, message)
        if self._pods is not None and _is_root(caller):
            pod = await self._aside(caller, _named_pod, message.body)
            if await self._pods.bind(message.id, init, pod):
                return
        await self._containers.bind(message.id, caller, init)

    async def _prepare(self, caller: Caller, message: Message) -> tuple[Status, bytes]:
        rules = self._rules()
        # Only a container of vgpu-runtime must make a request, because a Podman hook runs for every
        # container.
        must_ask = rules.must_ask and not message.for_parent
        ignored, asks = await self._aside(caller, understood, message.body, rules.environment, must_ask)
        if ignored:
            log.warning(
                LogEvent.CONTAINER_VARIABLES_IGNORED,
                container=message.id,
                ignored=ignored,
                hint="use annotations, or set environment = true in [runtime] of the policy",
                uid=caller.uid,
            )
        if asks is None:
            return Status.UNCHANGED, b""
        try:
            return await self._prepared(caller, message, asks)
        except VgpuError as error:
            hook = self._containers.specs.hook
            if not message.for_parent or hook is None:
                raise
            # The error is put into config.json, because Podman shows errors of its runtime but not the output
            # of its precreate hooks.
            text = _refused(error, caller).decode()
            return Status.DONE, await self._aside(caller, dumped, refused, asks.config, text, hook)

    async def _prepared(self, caller: Caller, message: Message, asks: "Asks") -> tuple[Status, bytes]:
        specs = self._containers.specs
        hook = _needed(specs.hook)
        owner = asks.owner if caller.is_admin else caller.owner
        starter = _parent(caller.process) if message.for_parent else caller.process
        request = _request(asks.wish, message, owner, starter)
        if caller.is_admin:
            request = replace(request, workload=workload_of(asks.pod))
        else:
            request = replace(request, quota_owner=caller.quota_owner)
        held = await self._containers.start(request)
        after = await self._aside(
            caller, dumped, edited, asks.config, held.id, held.edits, specs.driver, hook
        )
        return Status.DONE, after

    def _init(self, caller: Caller, message: Message) -> Lifetime:
        init = message.process
        if init is None:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                "the container's init has ended, or cannot be seen from vgpud's pid namespace",
                "see the runtime's own log for why it ended",
            )
        if not caller.is_admin and init.user != caller.user:
            raise VgpuError(
                ErrorCode.NOT_OWNER,
                f"process {init.pid} belongs to uid {init.user}, and the caller is uid {caller.user}",
                "bind the allocation to the init of its own container",
            )
        cgroup = self._cgroup_of(init.pid, caller.process.pid)
        # a control group that is not delegated to the user may hold processes of other users and of root
        if not caller.is_admin and (cgroup and group_owner(cgroup)) != caller.user:
            cgroup = ""
        return Lifetime(init.pid, init.start_ticks, cgroup)


def _is_root(caller: Caller) -> bool:
    return caller.uid in (0, os.geteuid())


def _known(caller: Caller) -> Caller:
    """The caller with its rights on this socket: root may do everything, others what the tenants' socket
    allows. Raises VgpuError(BAD_REQUEST) for an unknown process.
    """
    if caller.process.pid == 0:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "the calling process has ended, or cannot be seen from vgpud's pid namespace",
            "run the container runtime in vgpud's pid namespace or one below it",
        )
    return replace(caller, door=Door.ADMIN) if _is_root(caller) else caller


def _closed_to(caller: Caller) -> VgpuError:
    return VgpuError(
        ErrorCode.NOT_ALLOWED,
        f"uid {caller.uid} may not start containers with GPU slices by runtime.sock",
        "set users = true in [runtime] of the policy, or start the container as root",
    )


def _send_away(connection: socket.socket, refusal: VgpuError) -> None:
    """Sends a refusal without reading the caller's message, and without waiting."""
    with connection, suppress(OSError):
        connection.send(packed(Status.REFUSED, _told(refusal)))


def _request(wish: Wish, message: Message, owner: Owner, starter: Lifetime) -> Request:
    """The request for a container. Its id contains the container's id and the process that starts the
    container; its label is the wish's, or the container's name, or its short id.

    So a runtime that repeats its request gets the same allocation. A restarted container of the same name
    gets a new one, because the allocation of its earlier run is being released.
    """
    attempt = f"{starter.pid}.{starter.start_ticks}"
    shown, name = (
        "".join(c if c.isprintable() else "?" for c in text) for text in (message.id, message.name)
    )
    label = wish.label or name[:_NAME_CHARACTERS] or shown[:_SHOWN_CHARACTERS]
    request_id = f"oci-{attempt}-{shown}"
    return replace(wish, label=label).request(request_id, owner, lifetime=starter)


def _parent(process: Lifetime) -> Lifetime:
    """The parent of a Podman hook, which is Podman itself. Raises VgpuError(BAD_REQUEST) if the hook or its
    parent has ended.
    """
    stat = read_stat(process.pid)
    parent = read_stat(stat.parent) if stat is not None and stat.parent > 1 else None
    if stat is None or parent is None or stat.start_ticks != process.start_ticks:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "the process that starts the container has ended",
            "start the container again",
        )
    return Lifetime(parent.pid, parent.start_ticks)


@dataclass(frozen=True, slots=True)
class Asks:
    """What a config.json asks for: the request, the user of its process, and the pod as
    "namespace/pod/container" or "".
    """

    config: dict[str, Any]
    wish: Wish
    owner: Owner
    pod: str


def understood(body: bytes, environment: bool, must_ask: bool) -> tuple[tuple[str, ...], Asks | None]:
    """Reads config.json. Returns the variables that were ignored, and what it asks for, or None if it has no
    request.

    Raises VgpuError: every error in config.json is found before anything is allocated.
    """
    config = parsed(body)
    check_keys(config)
    wish, ignored = wish_of(config, environment), ignored_by(config, environment)
    if wish is None:
        if must_ask:
            check_pod_asks(config, environment)
        return ignored, None
    check_shape(config)
    return ignored, Asks(config, wish, owner_of(config), pod_of(config))


def _named_pod(state: bytes) -> str:
    """The pod's name in the container's state; "" if there is none. The name is for display only."""
    try:
        return pod_of(parsed(state)) if state else ""
    except VgpuError:
        return ""


def dumped(make: Callable[..., dict[str, Any]], *given: object) -> bytes:
    """The JSON text of the object that `make` returns. Raises what `make` raises."""
    return json.dumps(make(*given)).encode()


def _needed(hook: HookProgram | None) -> HookProgram:
    if hook is None:
        raise VgpuError(
            ErrorCode.HELPER_FAILED,
            "vgpu-hook is missing, so the end of this container would not be noticed",
            "install it, or name it in VGPUD_HOOK",
        )
    return hook


def _refused(error: VgpuError, caller: Caller) -> bytes:
    log.info(LogEvent.CONTAINER_RUNTIME_CALL_REFUSED, why=str(error), uid=caller.user, pid=caller.process.pid)
    return _told(error)


def _told(error: VgpuError) -> bytes:
    return "\n".join(filter(None, (str(error), f"hint: {error.hint}" if error.hint else ""))).encode()
