"""The door for OCI runtimes: runtime.sock, which vgpu-runtime and vgpu-hook call.

No gRPC here: a container's start is to cost milliseconds, and the callers are C programs. vgpud is sent
the config.json and sends back the one to use, so it needs no access to bundles. The caller is whom
the kernel names; a container's init is known by a pidfd.
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
from vgpud.inject.wish import Wish, check_pod_asks, ignored_by, owner_of, pod_of, wish_of
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.shares import Shares
from vgpud.model.tenancy import Allocation, Lifetime, Owner, Request
from vgpud.pace import Pace
from vgpud.policy.model import RuntimeSettings
from vgpud.proc import read_stat
from vgpud.serve.peers import identify
from vgpud.serve.runtime_wire import Message, Status, Verb, packed, receive, reply
from vgpud.serve.sockets import RuntimeSocket

log = structlog.get_logger(__name__)

_ACCEPT_PAUSE_SECONDS = 0.1
_AUDITED_CHARACTERS = 128
_REST_FACTOR = 9.0  # users beside root have a tenth of the reader's time
_SHOWN_CHARACTERS = 12  # of a container's id, as docker ps and podman ps show it

CgroupOf = Callable[[int, int], str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of connections, each of which is one message and its answer."""

    total: int = 512
    per_user: int = 16
    for_root: int = 64
    receive_seconds: float = 5.0
    reply_seconds: float = 10.0


class Containers(Protocol):
    """What this door needs of the node; all raise VgpuError."""

    @property
    def specs(self) -> Specs: ...

    async def start(self, request: Request) -> Allocation: ...

    async def bind(self, allocation_id: str, caller: Caller, lifetime: Lifetime) -> None: ...

    def end(self, allocation_id: str, caller: Caller) -> None: ...


class Pods(Protocol):
    """The kubelet's allocations, which are several containers' in turn."""

    async def bind(self, allocation_id: str, init: Lifetime, pod: str) -> bool:
        """False for an allocation that is not the kubelet's. Raises VgpuError."""
        ...


class RuntimeDoor:
    """`rules` are the policy in force: which users may start containers, and what asks for slices."""

    def __init__(
        self,
        containers: Containers,
        door: RuntimeSocket,
        cgroup_of: CgroupOf,
        rules: Callable[[], RuntimeSettings],
        limits: Limits | None = None,
        pods: Pods | None = None,
    ) -> None:
        self._containers = containers
        self._pods = pods
        self._door = door
        self._listener = door.listening
        self._cgroup_of = cgroup_of
        self._rules = rules
        self._limits = limits or Limits()
        self._shares = Shares(self._limits.total, self._limits.per_user, self._limits.for_root)
        self._open: set[asyncio.Task[None]] = set()
        # config.json is read and written here: the event loop serves the other callers meanwhile
        self._reader = ThreadPoolExecutor(1, "vgpud-config")
        self._pace = Pace(_REST_FACTOR)
        self._read_seconds = 0.0  # of the processor, for the latest message

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more callers, and gives those that are served `grace_seconds`."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._door.close()
        if self._open:
            await asyncio.wait(self._open, timeout=grace_seconds)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("cannot accept a container runtime", why=error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())  # it stays readable: without a pause this would spin
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._accept_again)
            return
        connection.setblocking(False)
        try:
            caller = identify(connection, Door.TENANT)
        except OSError:
            connection.close()
            return
        refusal = self._refusal(caller)
        if refusal is not None:
            _send_away(connection, refusal)
            return
        task = asyncio.ensure_future(self._serve(connection, caller))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def _refusal(self, caller: Caller) -> VgpuError | None:
        """Why this caller is not heard; else a share is taken for it."""
        if not _is_root(caller) and not self._rules().users:
            return VgpuError(
                ErrorCode.NOT_ALLOWED,
                f"uid {caller.uid} may not start containers with GPU slices by runtime.sock",
                "set users = true in [runtime] of the policy, or start the container as root",
            )
        if not self._shares.take(caller.user):
            return VgpuError(
                ErrorCode.NO_CAPACITY,
                f"uid {caller.user} has {self._shares.taken_by(caller.user)} containers on their way, of "
                f"{self._shares.taken} in all",
                "try again in a moment",
            )
        return None

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.start()

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        try:
            with connection:
                status, body = await self._answer(connection, caller)
                async with asyncio.timeout(self._limits.reply_seconds):
                    await reply(connection, status, body)
        except (OSError, TimeoutError) as error:  # what was allocated ends with the caller
            log.debug("a runtime went away", why=str(error), uid=caller.user)
        finally:
            self._shares.give_back(caller.user)

    async def _answer(self, connection: socket.socket, caller: Caller) -> tuple[Status, bytes]:
        try:
            async with asyncio.timeout(self._limits.receive_seconds):
                message = await receive(connection)
        except TimeoutError:
            raise ConnectionAbortedError("the message did not end") from None
        except VgpuError as error:
            return Status.REFUSED, _refused(error, caller)
        try:
            known = _known(caller)
            audit.asked_by(known, "runtime", container=message.id[:_AUDITED_CHARACTERS])
            return await self._carry_out(known, message)
        except VgpuError as error:
            return Status.REFUSED, _refused(error, caller)
        except Exception as error:  # a bug of ours must not leave the runtime waiting
            log.exception("runtime door failed")
            bug = VgpuError(ErrorCode.BUG, f"vgpud stumbled over {type(error).__name__}", "see its log")
            return Status.REFUSED, _told(bug)

    async def _aside(self, caller: Caller, work: Callable[..., T], *given: object) -> T:
        """`work` off the event loop, after what this user has there already.

        The thread and the loop share Python's lock, so users beside root have a part of the thread's time.
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
        # Podman sends each container through its hook, so only vgpu-runtime was asked for
        must_ask = rules.must_ask and not message.for_parent
        understood = await self._aside(caller, _understood, message.body, rules.environment, must_ask)
        ignored, asks = understood
        if ignored:
            log.warning(
                "variables of a container ask for nothing: they may be its image's",
                container=message.id,
                ignored=ignored,
                hint="use annotations, or set environment = true in [runtime] of the policy",
                uid=caller.uid,
            )
        if asks is None:
            return Status.UNCHANGED, b""
        config, wish, named = asks
        try:
            return await self._prepared(caller, message, config, wish, named)
        except VgpuError as error:
            hook = self._containers.specs.hook
            if not message.for_parent or hook is None:
                raise
            # Podman tells nobody what its precreate hooks say, but does tell what its runtime says
            text = _refused(error, caller).decode()
            return Status.DONE, await self._aside(caller, _dumped, refused, config, text, hook)

    async def _prepared(
        self, caller: Caller, message: Message, config: dict[str, Any], wish: Wish, named: Owner
    ) -> tuple[Status, bytes]:
        specs = self._containers.specs
        hook = _needed(specs.hook)
        owner = named if caller.is_admin else caller.owner
        starter = _parent(caller.process) if message.for_parent else caller.process
        request = _request(wish, message.id, owner, starter)
        if not caller.is_admin:
            request = replace(request, quota_owner=caller.quota_owner)
        held = await self._containers.start(request)
        after = await self._aside(caller, _dumped, edited, config, held.id, held.edits, specs.driver, hook)
        log.info(
            "container prepared", container=message.id, allocation=held.id, uid=caller.uid, owner=owner.uid
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
        return Lifetime(init.pid, init.start_ticks, self._cgroup_of(init.pid, caller.process.pid))


def _is_root(caller: Caller) -> bool:
    return caller.uid in (0, os.geteuid())


def _known(caller: Caller) -> Caller:
    """Root may do all here; others what they may by the tenants' socket. Raises VgpuError(BAD_REQUEST)."""
    if caller.process.pid == 0:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "the calling process has ended, or cannot be seen from vgpud's pid namespace",
            "run the container runtime in vgpud's pid namespace or one below it",
        )
    return replace(caller, door=Door.ADMIN) if _is_root(caller) else caller


def _send_away(connection: socket.socket, refusal: VgpuError) -> None:
    """Without a word of the caller being read, and without waiting for it."""
    with connection, suppress(OSError):
        connection.send(packed(Status.REFUSED, _told(refusal)))


def _request(wish: Wish, container: str, owner: Owner, starter: Lifetime) -> Request:
    """Named by the container and by who starts it.

    A runtime that asks again gets the same allocation. A container that is started again under its old
    name does not: what its last life held is on its way out.
    """
    attempt = f"{starter.pid}.{starter.start_ticks}"
    shown = "".join(c if c.isprintable() else "?" for c in container)
    label = wish.label or shown[:_SHOWN_CHARACTERS]
    request_id = f"oci-{attempt}-{shown}"
    return replace(wish, label=label).request(request_id, owner, lifetime=starter)


def _parent(process: Lifetime) -> Lifetime:
    """Of a Podman hook: Podman itself. Raises VgpuError(BAD_REQUEST) if it is gone."""
    stat = read_stat(process.pid)
    parent = read_stat(stat.parent) if stat is not None and stat.parent > 1 else None
    if stat is None or parent is None or stat.start_ticks != process.start_ticks:
        raise VgpuError(
            ErrorCode.BAD_REQUEST, "who starts the container has ended", "start the container anew"
        )
    return Lifetime(parent.pid, parent.start_ticks)


def _understood(
    body: bytes, environment: bool, must_ask: bool
) -> tuple[tuple[str, ...], tuple[dict[str, Any], Wish, Owner] | None]:
    """The variables that are ignored; and config.json, what it asks for, and the user that its process is, or
    None if it asks for nothing.

    Raises VgpuError: whatever is wrong with it is told before anything is allocated.
    """
    config = parsed(body)
    wish, ignored = wish_of(config, environment), ignored_by(config, environment)
    if wish is None:
        if must_ask:
            check_pod_asks(config, environment)
        return ignored, None
    check_shape(config)
    return ignored, (config, wish, owner_of(config))


def _named_pod(state: bytes) -> str:
    """ "" where the state does not name one: what a container runs under does not depend on it."""
    try:
        return pod_of(parsed(state)) if state else ""
    except VgpuError:
        return ""


def _dumped(make: Callable[..., dict[str, Any]], *given: object) -> bytes:
    return json.dumps(make(*given)).encode()


def _needed(hook: HookProgram | None) -> HookProgram:
    if hook is None:
        raise VgpuError(
            ErrorCode.HELPER_FAILED,
            "vgpu-hook is missing, so nobody would notice this container's end",
            "install it, or name it in VGPUD_HOOK",
        )
    return hook


def _refused(error: VgpuError, caller: Caller) -> bytes:
    log.info("container refused", why=str(error), uid=caller.user, pid=caller.process.pid)
    return _told(error)


def _told(error: VgpuError) -> bytes:
    return "\n".join(filter(None, (str(error), f"hint: {error.hint}" if error.hint else ""))).encode()
