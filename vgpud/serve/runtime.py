"""The door for OCI runtimes: runtime.sock, which vgpu-runtime and vgpu-hook call.

No gRPC here: a container's start is to cost milliseconds, and the callers are C programs. vgpud is sent
the config.json and sends back the one to use, so it needs no access to bundles. The caller is whom
the kernel names; a container's init is known by a pidfd.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from vgpud.inject.hooks import HookProgram
from vgpud.inject.oci import edited, refused
from vgpud.inject.specs import Specs
from vgpud.inject.wish import Wish, owner_of, wish_of
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Lifetime, Owner, Request
from vgpud.serve.peers import identify, start_ticks
from vgpud.serve.runtime_wire import Message, Status, Verb, receive, reply
from vgpud.serve.sockets import RuntimeSocket

log = structlog.get_logger(__name__)

_RECEIVE_SECONDS = 5.0
_ACCEPT_PAUSE_SECONDS = 0.1
_CONNECTIONS = 512
_PARENT_FIELD = 4 - 3  # counted after the command's closing bracket, proc(5)
_SHOWN_CHARACTERS = 12  # of a container's id, as docker ps and podman ps show it

CgroupOf = Callable[[int, int], str]


class Containers(Protocol):
    """What this door needs of the node; all raise VgpuError."""

    @property
    def specs(self) -> Specs: ...

    async def start(self, request: Request) -> Allocation: ...

    async def bind(self, allocation_id: str, caller: Caller, lifetime: Lifetime) -> None: ...

    def end(self, allocation_id: str, caller: Caller) -> None: ...


class RuntimeDoor:
    def __init__(self, containers: Containers, door: RuntimeSocket, cgroup_of: CgroupOf) -> None:
        self._containers = containers
        self._door = door
        self._listener = door.listening
        self._cgroup_of = cgroup_of
        self._open: set[asyncio.Task[None]] = set()

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
        if len(self._open) >= _CONNECTIONS:
            connection.close()  # the caller tries again
            return
        connection.setblocking(False)
        task = asyncio.ensure_future(self._serve(connection))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.start()

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                status, body = await self._answer(connection)
                await reply(connection, status, body)
            except OSError as error:  # what was allocated ends with the caller
                log.debug("a runtime went away", why=error.strerror)

    async def _answer(self, connection: socket.socket) -> tuple[Status, bytes]:
        try:
            caller = _caller(connection)
            async with asyncio.timeout(_RECEIVE_SECONDS):
                message = await receive(connection)
            return await self._carry_out(caller, message)
        except TimeoutError:
            raise ConnectionAbortedError("the message did not end") from None
        except VgpuError as error:
            log.info("container refused", why=str(error))
            return Status.REFUSED, _told(error)
        except Exception as error:  # a bug of ours must not leave the runtime waiting
            log.exception("runtime door failed")
            bug = VgpuError(ErrorCode.BUG, f"vgpud stumbled over {type(error).__name__}", "see its log")
            return Status.REFUSED, _told(bug)

    async def _carry_out(self, caller: Caller, message: Message) -> tuple[Status, bytes]:
        match message.verb:
            case Verb.PREPARE:
                return await self._prepare(caller, message)
            case Verb.BIND:
                await self._containers.bind(message.id, caller, self._init(caller, message))
            case Verb.END:
                self._containers.end(message.id, caller)
        return Status.DONE, b""

    async def _prepare(self, caller: Caller, message: Message) -> tuple[Status, bytes]:
        config = _parsed(message.body)
        try:
            return await self._prepared(caller, message, config)
        except VgpuError as error:
            hook = self._containers.specs.hook
            if not message.for_parent or hook is None:
                raise
            # Podman tells nobody what its precreate hooks say, but does tell what its runtime says
            log.info("container refused", why=str(error))
            return Status.DONE, json.dumps(refused(config, _told(error).decode(), hook)).encode()

    async def _prepared(
        self, caller: Caller, message: Message, config: dict[str, Any]
    ) -> tuple[Status, bytes]:
        wish = wish_of(config)
        if wish is None:
            return Status.UNCHANGED, b""
        specs = self._containers.specs
        hook = _needed(specs.hook)
        owner = owner_of(config) if caller.is_admin else Owner(caller.uid, caller.gid)
        starter = _parent(caller.process) if message.for_parent else caller.process
        held = await self._containers.start(_request(wish, message.id, owner, starter))
        after = edited(config, held.id, held.edits, specs.driver, hook)
        log.info("container prepared", container=message.id, allocation=held.id, uid=owner.uid)
        return Status.DONE, json.dumps(after).encode()

    def _init(self, caller: Caller, message: Message) -> Lifetime:
        ticks = start_ticks(message.pid) if message.pid else None
        if ticks is None:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                "the container's init has ended, or cannot be seen from vgpud's pid namespace",
                "see the runtime's own log for why it ended",
            )
        return Lifetime(message.pid, ticks, self._cgroup_of(message.pid, caller.process.pid))


def _caller(connection: socket.socket) -> Caller:
    """Root may do all here; others what they may by the tenants' socket. Raises VgpuError(BAD_REQUEST)."""
    caller = identify(connection, Door.TENANT)
    if caller.process.pid == 0:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "the calling process has ended, or cannot be seen from vgpud's pid namespace",
            "run the container runtime in vgpud's pid namespace or one below it",
        )
    return replace(caller, door=Door.ADMIN) if caller.uid in (0, os.geteuid()) else caller


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
    try:
        text = Path(f"/proc/{process.pid}/stat").read_bytes()
        pid = int(text[text.rindex(b")") + 2 :].split()[_PARENT_FIELD])
    except (OSError, ValueError):
        pid = 0
    ticks = start_ticks(pid) if pid > 1 else None
    if ticks is None or start_ticks(process.pid) != process.start_ticks:
        raise VgpuError(
            ErrorCode.BAD_REQUEST, "who starts the container has ended", "start the container anew"
        )
    return Lifetime(pid, ticks)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        config = json.loads(body)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise VgpuError(
            ErrorCode.BAD_REQUEST, "config.json is not a JSON object", "give the runtime a valid bundle"
        )
    return config


def _needed(hook: HookProgram | None) -> HookProgram:
    if hook is None:
        raise VgpuError(
            ErrorCode.HELPER_FAILED,
            "vgpu-hook is missing, so nobody would notice this container's end",
            "install it, or name it in VGPUD_HOOK",
        )
    return hook


def _told(error: VgpuError) -> bytes:
    return "\n".join(filter(None, (str(error), f"hint: {error.hint}" if error.hint else ""))).encode()
