"""Stands between the public sockets and grpcio, which cannot name its caller on a Unix socket.

It accepts, asks the kernel who the peer is, and connects onwards from a socket bound to a name of
its own, which is what grpcio then reports as the peer. The server looks that name up.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from vgpud.model.caller import Caller, Door
from vgpud.serve.peers import PeerTable, identify
from vgpud.serve.pump import Pump

log = structlog.get_logger(__name__)

_ACCEPTS_AT_ONCE = 32
_ACCEPT_PAUSE_SECONDS = 0.1
_COMPLAIN_SECONDS = 60.0
_CONNECT_RETRY_SECONDS = 0.01
_CONNECT_TRIES = 500
_DESCRIPTORS_PER_CONNECTION = 3  # the caller's, ours onwards, grpcio's
_DESCRIPTORS_KEPT = 128  # for everything else in the daemon
# accept(2): worth a later try
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections are kept open; the admin socket has `admin` more of its own."""

    total: int = 4096
    per_uid: int = 1024
    admin: int = 64

    def within_descriptors(self) -> "Limits":
        """Lowered to what RLIMIT_NOFILE leaves room for, so that refusals come before EMFILE does."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        room = max(8, (soft - _DESCRIPTORS_KEPT) // _DESCRIPTORS_PER_CONNECTION - self.admin)
        return Limits(min(self.total, room), min(self.per_uid, max(4, room // 2)), self.admin)


def refusal_frames(sentence: str) -> bytes:
    """An HTTP/2 SETTINGS frame and a GOAWAY with ENHANCE_YOUR_CALM and a reason (RFC 9113, 6.8).

    gRPC clients show the reason with UNAVAILABLE.
    """
    reason = sentence.encode()
    settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    head = (8 + len(reason)).to_bytes(3) + bytes((7, 0, 0, 0, 0, 0))
    return settings + head + (0).to_bytes(4) + (0xB).to_bytes(4) + reason


class Relay:
    """Serves `listening` until closed; `onward` is grpcio's socket, `folder` holds the names."""

    def __init__(
        self,
        listening: Mapping[Door, socket.socket],
        onward: Path,
        folder: Path,
        limits: Limits,
    ) -> None:
        self.peers = PeerTable()
        self._listening = listening
        self._onward = str(onward)
        self._folder = folder
        self._limits = limits
        self._pumps: set[Pump] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._complained: dict[str, float] = {}

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def start(self) -> None:
        self._accepting = True
        for door, listener in self._listening.items():
            self._loop.add_reader(listener, self._accept, door, listener)

    def stop_accepting(self) -> None:
        self._accepting = False
        for listener in self._listening.values():
            self._loop.remove_reader(listener)

    async def close(self) -> None:
        """Ends every connection; what was in flight is lost."""
        if self._accepting:
            self.stop_accepting()
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for pump in tuple(self._pumps):
            pump.close()

    # --- accepting

    def _accept(self, door: Door, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._accept_failed(door, listener, error)
                return
            connection.setblocking(False)
            self._welcome(connection, door)

    def _accept_failed(self, door: Door, listener: socket.socket, error: OSError) -> None:
        self._complain("accept", f"cannot accept a connection: {error.strerror}", door=door.name.lower())
        if error.errno in _SCARCE:
            # the listener stays readable: without a pause this would spin
            self._loop.remove_reader(listener)
            self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._accept_again, door, listener)

    def _accept_again(self, door: Door, listener: socket.socket) -> None:
        if self._accepting:
            self._loop.add_reader(listener, self._accept, door, listener)

    def _welcome(self, connection: socket.socket, door: Door) -> None:
        try:
            caller = identify(connection, door)
        except OSError:
            connection.close()
            return
        why = self._why_refused(caller)
        if why:
            self._refuse(connection, why)
            return
        name = self.peers.add(caller)
        try:
            onward = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self.peers.remove(name)
            self._refuse(connection, f"vgpud has no descriptors left: {error.strerror}")
            return
        onward.setblocking(False)
        if self._try_connect(onward, name, connection):
            return
        task = self._loop.create_task(self._connect_patiently(onward, name, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _why_refused(self, caller: Caller) -> str:
        if caller.door is Door.ADMIN and caller.uid not in (0, os.geteuid()):
            return f"uid {caller.uid} may not use the admin socket"
        limits = self._limits
        allowed = limits.total + (limits.admin if caller.door is Door.ADMIN else 0)
        if len(self.peers) >= allowed:
            return f"vgpud has {len(self.peers)} connections open, at most {allowed} are taken"
        if caller.door is not Door.ADMIN and self.peers.connections_of(caller.uid) >= limits.per_uid:
            return f"uid {caller.uid} has {limits.per_uid} connections open, more are not taken"
        return ""

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self._complain("refuse", f"refused a connection: {why}")
        with contextlib.suppress(OSError):
            connection.send(refusal_frames(why))
        connection.close()

    def _complain(self, kind: str, sentence: str, **words: str) -> None:
        """Once a minute for each kind: callers must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained.get(kind, -_COMPLAIN_SECONDS) >= _COMPLAIN_SECONDS:
            self._complained[kind] = now
            log.warning(sentence, **words)

    # --- onwards

    def _try_connect(self, onward: socket.socket, name: str, connection: socket.socket) -> bool:
        """False if grpcio's backlog is full, which passes; closes both ends on any other trouble."""
        try:
            self._connect(onward, name)
        except BlockingIOError:
            return False
        except OSError as error:
            self._complain("onward", f"cannot reach the server within: {error.strerror}")
            self._abandon(onward, name, connection)
            return True
        self._join(onward, name, connection)
        return True

    def _connect(self, onward: socket.socket, name: str) -> None:
        path = self._folder / name
        if not onward.getsockname():
            onward.bind(str(path))
        onward.connect(self._onward)
        # the kernel keeps the name for as long as the connection lasts
        path.unlink()

    async def _connect_patiently(self, onward: socket.socket, name: str, connection: socket.socket) -> None:
        try:
            for _ in range(_CONNECT_TRIES):
                await asyncio.sleep(_CONNECT_RETRY_SECONDS)
                if self._try_connect(onward, name, connection):
                    return
            self._complain("onward", "cannot reach the server within: it does not accept")
        except asyncio.CancelledError:
            self._abandon(onward, name, connection)
            raise
        self._abandon(onward, name, connection)

    def _abandon(self, onward: socket.socket, name: str, connection: socket.socket) -> None:
        (self._folder / name).unlink(missing_ok=True)
        onward.close()
        connection.close()
        self.peers.remove(name)

    def _join(self, onward: socket.socket, name: str, connection: socket.socket) -> None:
        def ended() -> None:
            self._pumps.discard(pump)
            self.peers.remove(name)

        pump = Pump(self._loop, connection, onward, ended)
        self._pumps.add(pump)
