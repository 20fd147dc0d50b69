"""Relays connections from the public sockets to grpcio, which cannot identify its caller on a Unix socket.

The relay accepts a connection, gets the peer's credentials from the kernel, and connects to grpcio from a
socket with a unique name. grpcio reports this name as the peer, and the server looks the caller up by it.
"""

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog

from vgpud import clock
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.pace import Pace
from vgpud.proc import SCARCE
from vgpud.serve.arrivals import Arrivals
from vgpud.serve.gate import Gate
from vgpud.serve.peers import PeerTable, identify, name_in, patiently, user_of
from vgpud.serve.pump import Pump

log = structlog.get_logger(__name__)

_ACCEPTS_AT_ONCE = 8  # maximum of connections accepted in one go, because other callers wait meanwhile
# pause factor: connections of all users except root together get a tenth of the event loop's time
_ARRIVAL_REST_FACTOR = 9
_CLOSED_PAUSE_SECONDS = 0.005
_ACCEPT_PAUSE_SECONDS = 0.1
_COMPLAIN_SECONDS = 60.0
_REFUSED_KEPT = 16
_REFUSED_SECONDS = 1.0
_CONNECT_RETRY_SECONDS = 0.01
_CONNECT_TRIES = 500
# each connection takes the caller's socket, the relay's socket to grpcio, and grpcio's socket
_DESCRIPTORS_PER_CONNECTION = 3
_DESCRIPTORS_KEPT = 128  # descriptors that are kept for everything else in the daemon
# errors of accept(2) after which a later attempt can succeed
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of open connections. The admin socket has `admin` connections in addition.

    `arrivals` limits accepted connections that wait for their turn; the processes of a job may all connect at
    once. `per_stranger`: a connection at ro.sock is refused if its user (except root) has this many
    connections at all sockets.
    """

    total: int = 4096
    per_uid: int = 1024
    admin: int = 64
    per_stranger: int = 64
    arrivals: int = 1024
    arrivals_per_user: int = 128

    def within_descriptors(self) -> "ConnectionLimits":
        """The limits, lowered to what RLIMIT_NOFILE permits, so that connections are refused before EMFILE
        occurs.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        room = max(8, (soft - _DESCRIPTORS_KEPT - self.arrivals) // _DESCRIPTORS_PER_CONNECTION - self.admin)
        return replace(self, total=min(self.total, room), per_uid=min(self.per_uid, max(4, room // 2)))


class Relay:
    """Serves the sockets in `listening` until it is closed, and passes each connection on to `onward`, the
    socket of grpcio. In `folder` each connection to grpcio gets a socket name of its own, which identifies
    the caller to grpcio.
    """

    def __init__(
        self,
        listening: Mapping[Door, socket.socket],
        onward: Path,
        folder: Path,
        limits: ConnectionLimits,
    ) -> None:
        self.peers = PeerTable()
        self.listening = listening
        self.onward = str(onward)
        self._folder = folder
        self._limits = limits
        self._pumps: dict[str, Pump] = {}  # pump of each connection, by the connection's name to grpcio
        self._gates: WeakValueDictionary[int, Gate] = WeakValueDictionary()  # gate of each user
        self._none_joined = asyncio.Event()  # set when the last pump has ended
        self._connecting: set[asyncio.Task[None]] = set()
        self._arrivals = Arrivals(limits.arrivals, limits.arrivals_per_user)
        self._pace = Pace(_ARRIVAL_REST_FACTOR)
        self._accepting = False
        self._complained: dict[LogEvent, float] = {}

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def start(self) -> None:
        self._accepting = True
        for door, listener in self.listening.items():
            self._loop.add_reader(listener, self._accept, door, listener)

    def stop_accepting(self) -> None:
        self._accepting = False
        for listener in self.listening.values():
            self._loop.remove_reader(listener)

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Closes every connection. If grpcio has closed its ends, callers have `grace_seconds` to take what
        it wrote before; a connection ends when its caller has taken that.
        """
        if self._accepting:
            self.stop_accepting()
        self._arrivals.close()
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if self._pumps:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._none_joined.wait()
        for pump in tuple(self._pumps.values()):
            pump.close()

    def drop(self, grpc_peer: str) -> None:
        """Closes the connection that grpc knows by this name, and so ends all its calls."""
        pump = self._pumps.get(name_in(grpc_peer))
        if pump is not None:
            self._complain(
                LogEvent.SLOW_CONNECTION_DROPPED,
                "ended a connection whose caller sends no message or takes no reply",
            )
            pump.close()

    def taken(self, grpc_peer: str) -> None:
        """Records that the event loop has taken a call of this connection from grpcio."""
        pump = self._pumps.get(name_in(grpc_peer))
        if pump is not None:
            pump.taken()

    # --- accepting connections

    def _accept(self, door: Door, listener: socket.socket) -> None:
        closed = False
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                self._accept_failed(door, listener, error)
                return
            connection.setblocking(False)
            closed |= not self._arrived(connection, door)
        if closed:
            # the listener pauses, because callers whose connections were closed may connect again at once
            self._pause(door, listener, _CLOSED_PAUSE_SECONDS)

    def _arrived(self, connection: socket.socket, door: Door) -> bool:
        """Starts to identify the caller: root's at once, others' in their turn. Returns False if this or
        another connection was closed.
        """
        try:
            user = user_of(connection)
        except OSError:
            connection.close()
            return False
        if user in (0, os.geteuid()):
            self._keep(self._welcome(connection, door)).add_done_callback(
                lambda done: connection.close() if done.cancelled() else None
            )
            return True
        why = self._arrivals.add(
            user, connection, lambda: self._keep(self._welcome_in_turn(user, connection, door))
        )
        if why:
            self._complain(LogEvent.CONNECTION_CLOSED_TOO_MANY_WAITING, f"closed a connection: {why}")
        return not why

    async def _welcome_in_turn(self, user: int, connection: socket.socket, door: Door) -> None:
        async def welcome() -> None:
            async with self._pace.turn(user):
                began = time.thread_time()
                try:
                    caller = identify(connection, door)
                    self._arrivals.remove(user, connection)
                    self._forward(connection, caller)
                finally:
                    self._pace.took(time.thread_time() - began)

        try:
            await patiently(welcome)
        except OSError as error:
            self._arrivals.remove(user, connection)
            self._close_unidentified(connection, error)

    async def _welcome(self, connection: socket.socket, door: Door) -> None:
        async def welcome() -> None:
            self._forward(connection, identify(connection, door))

        try:
            await patiently(welcome)
        except OSError as error:
            self._close_unidentified(connection, error)

    def _close_unidentified(self, connection: socket.socket, error: OSError) -> None:
        if error.errno in SCARCE:
            self._complain(
                LogEvent.CALLER_OF_CONNECTION_NOT_IDENTIFIED,
                f"closed a connection: the kernel gives no information about its process: {error.strerror}",
            )
        connection.close()

    def _accept_failed(self, door: Door, listener: socket.socket, error: OSError) -> None:
        self._complain(
            LogEvent.CONNECTION_NOT_ACCEPTED,
            f"cannot accept a connection: {error.strerror}",
            door=door.name.lower(),
        )
        if error.errno in _SCARCE:
            # the listener stays readable, so without a pause the event loop would spin
            self._pause(door, listener, _ACCEPT_PAUSE_SECONDS)

    def _pause(self, door: Door, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._accept_again, door, listener)

    def _accept_again(self, door: Door, listener: socket.socket) -> None:
        if self._accepting:
            self._loop.add_reader(listener, self._accept, door, listener)

    def _forward(self, connection: socket.socket, caller: Caller) -> None:
        """Connects the caller to grpcio, or closes the connection. Raises nothing."""
        refusal = self._refusal(caller)
        if refusal is not None:
            self._complain(LogEvent.CALLER_CONNECTION_REFUSED, f"refused a connection: {refusal.sentence}")
            if self.peers.refused >= _REFUSED_KEPT:
                connection.close()
                return
        try:
            onward = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self._complain(
                LogEvent.CONNECTION_NOT_FORWARDED, f"cannot forward a connection: {error.strerror}"
            )
            connection.close()
            return
        onward.setblocking(False)
        name = self.peers.add(caller, refusal)
        if not self._try_connect(onward, name, connection):

            def ended(done: asyncio.Task[None]) -> None:
                # a task that was cancelled before its first step does not see the cancellation itself
                if done.cancelled():
                    self._abandon(onward, name, connection)

            self._keep(self._connect_patiently(onward, name, connection)).add_done_callback(ended)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def _refusal(self, caller: Caller) -> VgpuError | None:
        """Why this caller is refused, or None. A refused caller is connected for a short time, so that its
        call gets the error.
        """
        limits = self._limits
        if caller.door is Door.ADMIN:
            if caller.uid not in (0, os.geteuid()):
                return _not_root(caller.uid)
            allowed = limits.total + limits.admin
        else:
            allowed = limits.total
            stranger = caller.door is Door.READ and caller.uid not in (0, os.geteuid())
            most = min(limits.per_uid, limits.per_stranger) if stranger else limits.per_uid
            if self.peers.connections_of(caller.user) >= most:
                return _too_many(f"uid {caller.user} has {most} connections open")
        if self.peers.served >= allowed and not self._made_room(caller):
            return _too_many(f"vgpud has {self.peers.served} connections open")
        return None

    def _made_room(self, caller: Caller) -> bool:
        """If all connections are in use, closes the oldest connection of the user with the most, to make room
        for a user with fewer. Returns True if there is room.
        """
        user, count = self.peers.greediest()
        if count <= self.peers.connections_of(caller.user) + 1:
            return False
        oldest = self.peers.oldest_of(user)
        if oldest not in self._pumps:  # the oldest connection's own connection to grpcio is not complete yet
            return False
        self._complain(
            LogEvent.OLDEST_CONNECTION_CLOSED,
            f"ended the oldest of {count} connections of uid {user}: others have fewer",
        )
        self._pumps[oldest].close()
        return True

    def _complain(self, event: LogEvent, why: str, **words: str) -> None:
        """Logs a problem once per minute for each event, so that callers cannot flood the log."""
        now = clock.now()
        if now - self._complained.get(event, -_COMPLAIN_SECONDS) >= _COMPLAIN_SECONDS:
            self._complained[event] = now
            log.warning(event, why=why, **words)

    # --- connecting to grpcio

    def _try_connect(self, onward: socket.socket, name: str, connection: socket.socket) -> bool:
        """Connects to grpcio. Returns False if grpcio's backlog is full, which is temporary. On any other
        error closes both ends.
        """
        try:
            self._connect(onward, name)
        except BlockingIOError:
            return False
        except OSError as error:
            self._complain(
                LogEvent.CONNECTION_NOT_FORWARDED, f"cannot reach the gRPC server: {error.strerror}"
            )
            self._abandon(onward, name, connection)
            return True
        self._join(onward, name, connection)
        return True

    def _connect(self, onward: socket.socket, name: str) -> None:
        path = self._folder / name
        if not onward.getsockname():
            onward.bind(str(path))
        onward.connect(self.onward)
        # removes the socket's name: the kernel keeps the socket as long as the connection exists
        path.unlink()

    async def _connect_patiently(self, onward: socket.socket, name: str, connection: socket.socket) -> None:
        for _ in range(_CONNECT_TRIES):
            await asyncio.sleep(_CONNECT_RETRY_SECONDS)
            if self._try_connect(onward, name, connection):
                return
        self._complain(LogEvent.CONNECTION_NOT_FORWARDED, "cannot reach the gRPC server: it does not accept")
        self._abandon(onward, name, connection)

    def _abandon(self, onward: socket.socket, name: str, connection: socket.socket) -> None:
        (self._folder / name).unlink(missing_ok=True)
        onward.close()
        connection.close()
        self.peers.remove(name)

    def _join(self, onward: socket.socket, name: str, connection: socket.socket) -> None:
        def ended() -> None:
            del self._pumps[name]
            if not self._pumps:
                self._none_joined.set()
            self.peers.remove(name)

        user = self.peers.user(name)
        gate = self._gates.setdefault(user, Gate(always_open=user == 0))
        self._none_joined.clear()
        pump = self._pumps[name] = Pump(self._loop, connection, onward, gate, ended)
        if self.peers.is_refused(name):
            self._loop.call_later(_REFUSED_SECONDS, pump.close)


def _not_root(uid: int) -> VgpuError:
    return VgpuError(
        ErrorCode.NOT_ALLOWED,
        f"uid {uid} may not use the admin socket",
        "use vgpud.sock or ro.sock, or call as root",
    )


def _too_many(sentence: str) -> VgpuError:
    return VgpuError(
        ErrorCode.NO_CAPACITY,
        f"{sentence}, no more are accepted",
        "close connections that are not needed, or send several calls over one connection",
    )
