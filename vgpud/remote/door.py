"""The network server for remote clients ("the door"): TLS, limits for each client, and the relay of bytes. It
runs as an unprivileged user.

For each slice it has a connection to a session process (entry.py), which verifies the token and passes it
connections to the engine's server. The door has no access to vgpud or to the grants.
"""

import argparse
import asyncio
import hmac
import secrets
import signal
import socket
import ssl
import sys
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import uvloop

from vgpud import clock, logs, sd
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted
from vgpud.policy.remote import RemoteSettings
from vgpud.remote import wire
from vgpud.remote.certificates import fingerprint, pair_problem
from vgpud.remote.limits import Places, Rate, Rates, network_of
from vgpud.remote.relay import PIECE_BYTES, Stream, drop, finish, relay
from vgpud.settings import load_settings

log = structlog.get_logger(__name__)

_CALL_SECONDS = 10.0  # time limit for the handshake and the line of the call together
_BACKLOG, _ACCEPT_AGAIN_SECONDS = 1024, 0.1
# time limit for the opening of a session, whose allocation may wait for devices that change their mode
_OPEN_SECONDS = 120.0
_CONNECT_SECONDS = 10.0
_SWEEP_SECONDS = 0.5
_FAREWELL_SECONDS = 2.0  # maximum time for telling the clients that the door stops
_HANDSHAKES_AT_ONCE, _HANDSHAKES_EACH = 128, 32
# maximum of sessions that are being opened: each needs a process for up to _OPEN_SECONDS
_OPENINGS_OF_A_NETWORK, _OPENINGS_OF_A_TOKEN = 8, 4
_PART_OF_CONNECTIONS = 4  # a network or a user gets at most a quarter of all connections
_ASKED_PER_SECOND, _ASKED_AT_ONCE = 1.0, 10.0
# a network gets at most a quarter of the rate of handshakes; its burst is half of that rate, because a
# program makes many connections at its start
_PART_OF_RATE, _PART_OF_BURST = 4, 2
_PART_OF_KEPT = 16  # a network gets at most a sixteenth of the arrivals that are reserved (see _may_arrive)
_NETWORKS = 4096  # number of networks whose rates are remembered
# the connection of a peer that does not answer is closed after about 45 s (tcp(7))
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 45_000


_NO_CAUSE = VgpuError(ErrorCode.HELPER_FAILED, "its process on the node has ended", wire.JOURNAL)


@dataclass
class Session:
    """A slice, from the reply to `open` until its end. `used` is the time at which its last bytes passed, or
    are allowed to pass by its rate. `control_ended` is None while the session has a control connection;
    otherwise it is the time at which that connection ended, or at which the session began. `cause` is the
    reason that is logged if the session process ends.
    """

    id: str
    key: str
    user: str
    address: str
    network: str
    allocation: str
    backend: socket.socket
    rate: Rate | None
    used: float
    control_ended: float | None
    bytes_relayed: int = 0
    cause: VgpuError | str = _NO_CAUSE
    streams: set["asyncio.Task[None]"] = field(default_factory=set)
    control: StreamWriter | None = None
    wanted: deque["asyncio.Future[socket.socket | None]"] = field(default_factory=deque)

    def row(self) -> dict[str, object]:
        return {
            "allocation": self.allocation,
            "address": self.address,
            "connections": len(self.streams),
            "bytes": self.bytes_relayed,
            "connected": self.control_ended is None,
        }


class RemoteDoor:
    """`backend` is the socket on which each connection starts a session process. Times are by vgpud.clock."""

    def __init__(self, settings: RemoteSettings, tls: ssl.SSLContext, backend: Path) -> None:
        self._settings = settings
        self._tls = tls
        self._backend = backend
        self._sessions: dict[str, Session] = {}
        most = settings.max_connections
        self._connections_each = max(1, most // _PART_OF_CONNECTIONS)
        self._connections = Places(most, self._connections_each, kept=self._connections_each)
        self._handshakes = Places(_HANDSHAKES_AT_ONCE, _HANDSHAKES_EACH, kept=_HANDSHAKES_EACH)
        self._openings = Places(settings.max_sessions, _OPENINGS_OF_A_NETWORK)
        self._openings_by_token = Places(settings.max_sessions, _OPENINGS_OF_A_TOKEN)
        rate = settings.handshakes_per_second
        each, burst = rate / _PART_OF_RATE, max(1.0, rate / _PART_OF_BURST)
        self._arrivals_of_network = Rates(each, burst, _NETWORKS)
        self._arrivals = Rate(rate - each, max(1.0, rate - each))
        self._kept_arrivals = Rate(each, max(1.0, each))
        self._kept_of_network = Rates(each / _PART_OF_KEPT, 1.0, _NETWORKS)
        self._asked = Rates(_ASKED_PER_SECOND, _ASKED_AT_ONCE, _NETWORKS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._farewells: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to listen. Raises VgpuError(BAD_SETTING)."""
        host, _, port = self._settings.listen.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=_BACKLOG)
        except OSError as error:
            sentence = f"cannot listen on {self._settings.listen}: {(error.strerror or str(error)).lower()}"
            raise VgpuError(ErrorCode.BAD_SETTING, sentence, "correct listen in [remote]") from None
        listener.setblocking(False)
        self._spawn(self._accept(listener))
        self._spawn(self._sweep())

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            hint = "try again when vgpud-remote.service runs"
            self._end(session, VgpuError(ErrorCode.STOPPING, "the door stops", hint))
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=_FAREWELL_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- arrival

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                await _readable(listener)
                try:
                    self._accept_some(listener)
                except OSError:  # no descriptor is free, or the client has already closed the connection
                    await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)

    def _accept_some(self, listener: socket.socket) -> None:
        """Accepts the waiting connections. Those beyond the rate are closed at once, without a task. Raises
        OSError.
        """
        for _ in range(_BACKLOG):
            try:
                arrived, peer = listener.accept()
            except BlockingIOError:
                return
            if self._may_arrive(network_of(str(peer[0]))):
                arrived.setblocking(False)
                self._spawn(self._arrived(arrived, str(peer[0])))
            else:
                arrived.close()

    def _may_arrive(self, network: str) -> bool:
        """Counts a new connection. Returns False if it is beyond a rate.

        Each network has a rate, so that a single network cannot use up the whole rate. Many networks together
        can use up the common rate. A network that has a session is then still accepted, and a quarter of the
        whole rate is reserved for networks that make few connections.
        """
        now = clock.now()
        if not self._arrivals_of_network.take(network, now):
            return False
        if self._arrivals.take(1, now) or any(one.network == network for one in self._sessions.values()):
            return True
        return self._kept_of_network.take(network, now) and self._kept_arrivals.take(1, now)

    async def _arrived(self, arrived: socket.socket, address: str) -> None:
        with arrived, self._connections.place(network_of(address)) as is_in:
            if is_in:
                with suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
                    await self._serve(arrived, address)

    async def _serve(self, arrived: socket.socket, address: str) -> None:
        """Answers one call. Raises OSError, EOFError or TimeoutError if the client leaves or is too slow, and
        LimitOverrunError if its line is too long.
        """
        writer: StreamWriter | None = None
        try:
            with self._handshakes.place(network_of(address)) as is_in:
                if not is_in:
                    return
                async with asyncio.timeout(_CALL_SECONDS):
                    reader, writer = await self._encrypted(arrived)
                    call = wire.decode(await reader.readuntil(b"\n"))
            await self._answer(call, reader, writer, address)
        except VgpuError as error:
            log.info(LogEvent.REMOTE_CALL_REFUSED, address=address, why=str(error))
            if writer is not None:
                await _send(writer, wire.refusal(error))
                await finish(writer)
        finally:
            if writer is not None:
                drop(writer)

    async def _encrypted(self, arrived: socket.socket) -> Stream:
        """Makes the TLS handshake on an accepted connection."""
        loop = asyncio.get_running_loop()
        _keep_alive(arrived)
        reader = StreamReader(limit=PIECE_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, arrived, ssl=self._tls, ssl_handshake_timeout=_CALL_SECONDS
        )
        return reader, StreamWriter(transport, protocol, reader, loop)

    async def _answer(
        self, call: wire.Call, reader: StreamReader, writer: StreamWriter, address: str
    ) -> None:
        certificate = writer.get_extra_info("ssl_object").getpeercert(True)
        known_by = fingerprint(certificate) if certificate else ""
        if isinstance(call, wire.Open | wire.Status):
            self._count_asked(address)
        if isinstance(call, wire.Open):
            asked = replace(call, certificate=known_by, address=address)
            await self._open(asked, reader, writer)
        elif isinstance(call, wire.Attach):
            await self._attach(self._session(call.session, call.key), reader, writer)
        elif isinstance(call, wire.Resume):
            session = self._session(call.session, call.key)
            await _send(writer, wire.answer({}))
            await self._control(session, reader, writer)
        elif isinstance(call, wire.Status):
            backend, found = await self.ask(replace(call, certificate=known_by))
            backend.close()
            rows = [one.row() for one in self._sessions.values() if one.user == found["user"]]
            await _send(writer, wire.answer({"user": found["user"], "sessions": rows}))
            await finish(writer)
        else:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                "a client may not ask for the policy's table [remote], only the door may",
                "open a session",
            )

    def _count_asked(self, address: str) -> None:
        """Limits the rate at which a network can start session processes. Raises VgpuError(OVER_QUOTA)."""
        network = network_of(address)
        if not self._asked.take(network, clock.now()):
            sentence = f"calls from {network} come faster than {_ASKED_PER_SECOND:g} a second"
            raise VgpuError(ErrorCode.OVER_QUOTA, sentence, "try again in a few seconds")

    def _session(self, name: str, key: str) -> Session:
        session = self._sessions.get(name)
        if session is None or not hmac.compare_digest(session.key.encode(), key.encode()):
            sentence = "the door has no such session, or it belongs to another client"
            raise VgpuError(ErrorCode.NO_SUCH_CLIENT, sentence, "open another session")
        return session

    # --- sessions

    async def _open(self, call: wire.Open, reader: StreamReader, writer: StreamWriter) -> None:
        with self._counted(call):
            backend, made = await self.ask(call)
            user = str(made["user"])
            try:
                self._check_sessions(user)
                self._check_connections(user)
            except VgpuError:
                backend.close()
                raise
            settings = self._settings
            rate = settings.bytes_per_second
            session = Session(
                id=secrets.token_hex(8),
                key=secrets.token_urlsafe(32),
                user=user,
                address=call.address,
                network=network_of(call.address),
                allocation=str(made["allocation"]),
                backend=backend,
                rate=None if rate is None else Rate(rate, max(rate / 4, PIECE_BYTES)),
                used=clock.now(),
                control_ended=clock.now(),
            )
            self._sessions[session.id] = session
            self._spawn(self._hear_backend(session))
        told = {"session": session.id, "key": session.key, "engine": settings.engine, "grace": settings.grace}
        await _send(writer, wire.answer({**made, **told}))
        await self._control(session, reader, writer)

    def _check_sessions(self, user: str) -> None:
        """Raises VgpuError(OVER_QUOTA) if the user may not have another session."""
        most = self._settings.max_sessions_per_user
        if sum(one.user == user for one in self._sessions.values()) >= most:
            sentence = f"{user} has {counted(most, 'session')}, and may have {most}"
            raise VgpuError(ErrorCode.OVER_QUOTA, sentence, "end a session ('vgpuctl remote status')")

    @contextmanager
    def _counted(self, call: wire.Open) -> Iterator[None]:
        """Counts a session that is being opened. Raises VgpuError(OVER_QUOTA) if there are too many: in all,
        from the client's network, or with its token. The door cannot verify a token, so it counts by the
        whole token: a forged token that contains the id of a grant does not count against that grant.
        """
        if len(self._sessions) + self._openings.taken >= self._settings.max_sessions:
            held = counted(self._settings.max_sessions, "remote session")
            sentence = f"the node has {held}, which is its limit"
            raise VgpuError(ErrorCode.OVER_QUOTA, sentence, "try again when one has ended")
        with (
            self._openings.place(network_of(call.address)) as by_network,
            self._openings_by_token.place(call.token or call.certificate) as by_token,
        ):
            if not by_network or not by_token:
                whose = (_OPENINGS_OF_A_TOKEN, "by this token")
                if not by_network:
                    whose = (_OPENINGS_OF_A_NETWORK, f"from {network_of(call.address)}")
                sentence = f"{whose[0]} sessions are being opened {whose[1]}, which is the limit"
                raise VgpuError(
                    ErrorCode.OVER_QUOTA, sentence, "try again when one of these sessions has been opened"
                )
            yield

    async def ask(self, call: wire.Call) -> tuple[socket.socket, dict[str, Any]]:
        """Sends a call to a new session process. Returns its connection and its reply. Raises VgpuError."""
        loop = asyncio.get_running_loop()
        backend = socket.socket(socket.AF_UNIX)
        backend.setblocking(False)
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await loop.sock_connect(backend, str(self._backend))
                await loop.sock_sendall(backend, wire.encode(call))
                line = await _line(backend)
            return backend, wire.result(line)
        except (OSError, TimeoutError):
            backend.close()
            sentence = "the node cannot open remote sessions now"
            raise VgpuError(
                ErrorCode.UNREACHABLE, sentence, "see the journal of vgpud-remote-session"
            ) from None
        except BaseException:
            backend.close()
            raise

    async def _control(self, session: Session, reader: StreamReader, writer: StreamWriter) -> None:
        """Handles a control connection until it ends. A session has one: a new one ends the previous one,
        because a control connection may stay open without a time limit. Its end starts the grace period. If
        the client sends END, the door closes the connection when the slice is released. Any other bytes end
        the connection, because they are not counted against the session's rate.
        """
        if session.control is not None:
            drop(session.control)
        session.control, session.control_ended = writer, None
        try:
            if await reader.read(len(wire.END) + 1) == wire.END:
                session.cause = "its client has ended it"
                # the session process releases the slice and ends
                session.backend.shutdown(socket.SHUT_WR)
                await reader.read(1)
        finally:
            if session.control is writer:
                session.control, session.control_ended = None, clock.now()

    async def _hear_backend(self, session: Session) -> None:
        """Gives each connection that the session process passes to the stream that asked for it. Ends the
        session when the session process ends.
        """
        try:
            while True:
                await _readable(session.backend)
                try:
                    data, descriptors, _, _ = socket.recv_fds(session.backend, 1, 1)
                except BlockingIOError:
                    continue
                made = socket.socket(fileno=descriptors[0]) if descriptors else None
                if data and data != wire.CONNECT:
                    wire.result(data + await _line(session.backend))
                if not data or not session.wanted:
                    break
                waiting = session.wanted.popleft()
                if waiting.cancelled():
                    if made is not None:
                        made.close()
                else:
                    waiting.set_result(made)
        except VgpuError as cause:
            session.cause = cause
        except OSError:
            pass
        finally:
            self._end(session, session.cause)
            session.backend.close()

    def _end(self, session: Session, cause: VgpuError | str) -> None:
        """Ends a session. If the cause is an error, it is sent to the client. If the cause is a text, it is
        only logged: the client has ended the session or has left, so it knows the cause.
        """
        if self._sessions.pop(session.id, None) is None:
            return
        why = cause.sentence if isinstance(cause, VgpuError) else cause
        log.info(LogEvent.REMOTE_SESSION_ENDED, allocation=session.allocation, user=session.user, why=why)
        for waiting in session.wanted:
            waiting.cancel()
        for task in session.streams:
            task.cancel()
        if session.control is not None and isinstance(cause, VgpuError):
            session.control.write(wire.refusal(cause))
            self._spawn(finish(session.control), self._farewells)
        elif session.control is not None:
            drop(session.control)
        with suppress(OSError):
            session.backend.shutdown(socket.SHUT_RDWR)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._end_late(clock.now())

    def _end_late(self, now: float) -> None:
        """Ends sessions whose grace period is over, and sessions that were idle for too long."""
        for session in list(self._sessions.values()):
            ended = session.control_ended
            if ended is not None and now - ended >= self._settings.grace:
                self._end(session, "its client has left")
            elif self._settings.idle is not None and now - session.used >= self._settings.idle:
                sentence = f"it was idle for {self._settings.idle:g} s, and idle of [remote] allows no more"
                hint = "open another session, or ask the node's administrator for a longer idle"
                self._end(session, VgpuError(ErrorCode.DENIED_BY_POLICY, sentence, hint))

    # --- streams

    async def _attach(self, session: Session, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._check_connections(session.user)
        session.streams.add(task)
        try:
            server = await self._connection(session)
            if server is None:
                hint = "end a program of the session, or try again"
                raise VgpuError(ErrorCode.UNREACHABLE, "the engine's server accepts no connection", hint)
            await _send(writer, wire.answer({}))
            engine = await asyncio.open_connection(sock=server, limit=PIECE_BYTES)
            try:
                await relay(engine, (reader, writer), self._meter(session))
            finally:
                drop(engine[1])
        finally:
            session.streams.discard(task)

    def _check_connections(self, user: str) -> None:
        """Raises VgpuError(OVER_QUOTA) if the user may not have another connection. Each session counts one
        for its control connection, even while the client is not connected.
        """
        held = sum(1 + len(one.streams) for one in self._sessions.values() if one.user == user)
        if held >= self._connections_each:
            sentence = f"{user} has {held} connections, and a user may have {self._connections_each}"
            raise VgpuError(ErrorCode.OVER_QUOTA, sentence, "end a program of the session")

    async def _connection(self, session: Session) -> socket.socket | None:
        """Asks the session process for a connection to the engine's server. Returns None if the server
        refuses it.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[socket.socket | None] = loop.create_future()
        session.wanted.append(waiting)
        await loop.sock_sendall(session.backend, wire.CONNECT)
        async with asyncio.timeout(_CONNECT_SECONDS):
            return await waiting

    def _meter(self, session: Session) -> Callable[[int], Awaitable[None]]:
        async def seen(size: int) -> None:
            now = clock.now()
            wait = 0.0 if session.rate is None else session.rate.owe(size, now)
            session.used = now + wait
            session.bytes_relayed += size
            if wait:
                await asyncio.sleep(wait)

        return seen

    def _spawn(self, work: Coroutine[Any, Any, None], *sets: set[asyncio.Task[None]]) -> None:
        task = asyncio.ensure_future(work)
        for tasks in (self._tasks, *sets):
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _send(writer: StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(_CALL_SECONDS):
        await writer.drain()


async def _line(backend: socket.socket) -> bytes:
    """Reads one line of a session process, and leaves what follows it in the socket: the cause of an early
    end can follow the reply to `open` at once. Raises ConnectionResetError if the session process ends
    without a line.
    """
    line = b""
    while not line.endswith(b"\n"):
        await _readable(backend)
        with suppress(BlockingIOError):
            seen = backend.recv(4096, socket.MSG_PEEK)
            if not seen:
                raise ConnectionResetError
            line += backend.recv(seen.find(b"\n") + 1 or len(seen))
    return line


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def context_of(certificate: Path, key: Path, authority: Path | None) -> ssl.SSLContext:
    """TLS 1.3 with the door's certificate. With `authority`, clients may show certificates that it has
    signed.

    Raises VgpuError(BAD_SETTING).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # a session that is resumed by a ticket is not checked for an expired certificate, so no tickets are sent
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    sentence = ""
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError:
        sentence = pair_problem(certificate, key)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        sentence = f"the door's certificate {certificate} or its key {key} cannot be read: {said}"
    try:
        if authority is not None:
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_OPTIONAL
    except ssl.SSLError:
        sentence = sentence or f"{authority} has no certificate that can be used"
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        sentence = sentence or f"the clients' authority {authority} cannot be read: {said}"
    if sentence:
        hint = "docs/remote.md has the command that makes a certificate"
        raise VgpuError(ErrorCode.BAD_SETTING, sentence, hint)
    return context


async def _serve(backend: Path, tls: ssl.SSLContext) -> None:
    """Serves until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    asking = RemoteDoor(RemoteSettings(), tls, backend)
    connection, table = await asking.ask(wire.Settings())
    connection.close()
    door = RemoteDoor(RemoteSettings.model_construct(None, **table), tls, backend)
    door.start()
    sd.notify("READY=1")
    await stopping.wait()
    sd.notify("STOPPING=1")
    await door.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vgpud-remote", description="give slices to other machines, by TLS")
    parser.add_argument("--certificate", type=Path, required=True, help="the door's certificate, in PEM")
    parser.add_argument("--key", type=Path, required=True, help="its key")
    parser.add_argument("--clients", type=Path, help="the authority that signs clients' certificates")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings()
        logs.configure(settings.level)
        clients = arguments.clients if arguments.clients and arguments.clients.exists() else None
        tls = context_of(arguments.certificate, arguments.key, clients)
        uvloop.run(_serve(settings.run_dir / wire.DOOR_SOCKET, tls))
    except VgpuError as error:
        sys.stderr.write(f"vgpud-remote: {error}\nhint: {error.hint}\n")
        return int(error.code.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
