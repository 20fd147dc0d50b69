"""The client: a tunnel from a loopback port to a slice on another machine, and a program that uses it.

It needs only the standard library. With a token alone, the client accepts only the certificate whose SHA-256
the token contains. With --ca, or without a token, the door's certificate must be signed by the authority of
--ca (else by one of the system's) and contain the host's name.
"""

import asyncio
import os
import signal
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.remote import wire
from vgpud.remote.certificates import fingerprint, pair_problem
from vgpud.remote.engine import ENGINES
from vgpud.remote.relay import PIECE_BYTES, Stream, drop, relay

_CALL_SECONDS = 150.0  # maximum wait for the door's reply: more than the door's own time limit for a slice
_CONNECT_SECONDS = 15.0
_END_SECONDS = 10.0  # maximum wait for the release of the slice
_RESUME_AGAIN_SECONDS = 1.0
# attempts of a call: the door closes new connections at once that are beyond a number or a rate
_TRIES, _AGAIN_SECONDS = 10, 0.3
_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH (x509_vfy.h)
_CONNECTED = ("01", "04", "05")  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2: include/net/tcp_states.h
# /proc/net/tcp is read up to 50 times, because a listing that changes while it is read can lack a socket
_LOOKS, _LOOK_SECONDS = 50, 0.02
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Place:
    """The address of a door, the client's credentials (a token, or a certificate with its key), and the
    authority that signed the door's certificate. Raises VgpuError(BAD_REQUEST) if `address` is not HOST or
    HOST:PORT.
    """

    address: str
    token: str = ""
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def __post_init__(self) -> None:
        host, port = self.host_and_port
        bare = ":" in host and "[" not in self.address
        if not host or bare or not 0 < port < 65536:
            sentence = f"{self.address!r} is not a host with a port"
            hint = f"write [{self.address}]" if bare else "write HOST, HOST:PORT or [IPV6]:PORT"
            raise VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, colon, port = self.address.rpartition(":")
        if not colon or self.address.endswith("]"):
            return self.address.strip("[]"), wire.DEFAULT_PORT
        return host.strip("[]"), int(port) if port.isascii() and port.isdigit() else 0

    @property
    def pin(self) -> str:
        """SHA-256 of the door's certificate, from the token; "" without a token."""
        parts = self.token.split(".")
        return parts[2] if len(parts) == 3 else ""

    def tls(self) -> ssl.SSLContext:
        for file in filter(None, (self.certificate, self.key, self.authority)):
            try:
                file.open("rb").close()
            except OSError as error:
                raise _unusable(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from None
        pinned = self.pin and self.authority is None
        try:
            # a pinned certificate needs none of the system's authorities, and to load them takes some 25 ms
            # of processor time
            context = (
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                if pinned
                else ssl.create_default_context(cafile=self.authority)
            )
        except OSError:
            raise _unusable(f"{self.authority} has no certificate that can be used") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.certificate is not None and self.key is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError:
                raise _unusable(pair_problem(self.certificate, self.key)) from None
        if pinned:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def _unusable(sentence: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, "correct --certificate, --key or --ca")


async def call(place: Place, asked: wire.Call) -> tuple[StreamReader, StreamWriter, dict[str, Any]]:
    """Connects to the door, makes a call, and returns the connection with the reply. Raises VgpuError.

    Tries again if the door closes the connection before the end of the handshake, because it has not received
    the call then. An attach that fails because something cannot be reached is made again in any case: it
    opens nothing on the node that outlives its connection.
    """
    for left in reversed(range(_TRIES)):
        try:
            return await _called(place, asked)
        except ConnectionResetError as error:
            if not left:
                raise _failed(place, error) from None
        except VgpuError as error:
            if not left or error.code is not ErrorCode.UNREACHABLE or not isinstance(asked, wire.Attach):
                raise
        await asyncio.sleep(_AGAIN_SECONDS)
    raise AssertionError


async def _called(place: Place, asked: wire.Call) -> tuple[StreamReader, StreamWriter, dict[str, Any]]:
    """As `call`, but once. Raises ConnectionResetError if the door closes the connection before the end of
    the handshake.
    """
    host, port = place.host_and_port
    writer: StreamWriter | None = None
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=place.tls(), server_hostname=host, limit=PIECE_BYTES
            )
        _check_pin(place, writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(_CALL_SECONDS):
            writer.write(wire.encode(asked))
            reply = wire.result(await reader.readuntil(b"\n"))
        return reader, writer, reply
    except BaseException as error:
        if writer is not None:
            drop(writer)
        elif isinstance(error, ConnectionResetError):
            raise
        if isinstance(error, OSError | UnicodeError | EOFError | TimeoutError | asyncio.LimitOverrunError):
            raise _failed(place, error) from None
        raise


def _failed(place: Place, error: BaseException) -> VgpuError:
    host, port = place.host_and_port
    sentence = f"the call to the door {host} port {port} failed: {_why(error)}"
    return VgpuError(ErrorCode.UNREACHABLE, sentence, _hint(error))


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError | ConnectionResetError | asyncio.LimitOverrunError):
        return "it closed the connection"
    if isinstance(error, ConnectionRefusedError):  # the exception's text repeats the address
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message.lower().rstrip('.')}"
    return (getattr(error, "strerror", "") or str(error)).lower()


def _hint(error: BaseException) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):  # UnicodeError: the name is not valid in DNS
        return "correct the host's name, or give its address: this machine does not know the name"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OTHER_NAME:
        return "call the door by a name or address that its certificate has (subjectAltName)"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "name the door's certificate, or the authority that has signed it, by --ca"
    return "check that vgpud-remote.service runs there, and that the port is open"


def _check_pin(place: Place, writer: StreamWriter) -> None:
    """Without --ca: raises VgpuError(NOT_ALLOWED) if the door's certificate is not the one that the token
    names. The client has sent no call to the door yet.
    """
    if not place.pin or place.authority is not None:
        return
    shown = writer.get_extra_info("ssl_object").getpeercert(True)
    if shown is None or fingerprint(shown) != place.pin:
        raise VgpuError(
            ErrorCode.NOT_ALLOWED,
            f"the certificate of {place.address} is not the one that the token names",
            "ask the node's administrator for a new token; the address may be of another machine",
        )


async def status(place: Place) -> dict[str, Any]:
    """Returns the sessions of the client's user."""
    _, writer, reply = await call(place, wire.Status(place.token))
    drop(writer)
    wire.check_sessions(reply)
    return reply


class Tunnel:
    """A slice on another machine, and a port of the loopback address that leads to it. Other users of this
    machine cannot use the port.
    """

    def __init__(self, place: Place, wanted: wire.Open) -> None:
        self._place = place
        self._wanted = wanted
        self._streams: set[asyncio.Task[None]] = set()
        self._closing = False

    async def open(self) -> dict[str, Any]:
        """Opens the session and the port. Returns the door's reply. Raises VgpuError."""
        reader, writer, self._made = await call(self._place, self._wanted)
        try:
            wire.check_opened(self._made)
        except VgpuError:
            drop(writer)
            raise
        self._control_writer = writer
        self._control = asyncio.ensure_future(self._keep(reader, writer))
        self._server = await asyncio.start_server(self._arrived, "127.0.0.1", 0, limit=PIECE_BYTES)
        return self._made

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def ended(self) -> "asyncio.Task[VgpuError | None]":
        """A task that ends when the session has ended and cannot be resumed. Its result is the cause, or None
        after `close`.
        """
        return self._control

    async def close(self) -> None:
        """Ends the session, and waits until the slice is released, for 10 s at most. A session whose control
        connection is lost ends after the door's grace period.
        """
        self._closing = True
        self._server.close()
        if not self._control.done() and not self._control_writer.is_closing():
            self._control_writer.write(wire.END)
            await asyncio.wait([self._control], timeout=_END_SECONDS)
        for task in (*self._streams, self._control):
            task.cancel()
        await asyncio.gather(*self._streams, self._control, return_exceptions=True)

    async def _keep(self, reader: StreamReader, writer: StreamWriter) -> VgpuError | None:
        """Keeps the control connection, and makes it again if it is lost, until the session has ended.
        Returns the cause of the end; None after `close`.
        """
        while True:
            try:
                with suppress(OSError, EOFError, asyncio.LimitOverrunError):
                    while True:
                        cause = wire.cause(await reader.readuntil(b"\n"))
                        if cause is not None:
                            return cause
            finally:
                drop(writer)
            if self._closing:
                return None
            try:
                reader, writer = await self._resume()
            except VgpuError as error:
                return error
            self._control_writer = writer

    async def _resume(self) -> tuple[StreamReader, StreamWriter]:
        until = asyncio.get_running_loop().time() + float(self._made["grace"])
        while True:
            try:
                asked = wire.Resume(self._made["session"], self._made["key"])
                reader, writer, _ = await call(self._place, asked)
                return reader, writer
            except VgpuError as error:
                if error.code is not ErrorCode.UNREACHABLE or asyncio.get_running_loop().time() >= until:
                    raise
            await asyncio.sleep(_RESUME_AGAIN_SECONDS)

    async def _attach(self) -> Stream:
        """Connects to the engine's server through the door. Raises VgpuError."""
        reader, writer, _ = await call(self._place, wire.Attach(self._made["session"], self._made["key"]))
        return reader, writer

    async def _arrived(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            if not await _is_own(writer):
                return
            far_reader, far_writer = await self._attach()
            try:
                await relay((reader, writer), (far_reader, far_writer))
            finally:
                drop(far_writer)
        except (VgpuError, OSError):
            pass  # the program's connection is closed
        finally:
            self._streams.discard(task)
            drop(writer)


async def _is_own(writer: StreamWriter) -> bool:
    """Does the program at the other end run as this user?"""
    address, port = writer.get_extra_info("peername")
    own = writer.get_extra_info("sockname")[1]
    if (
        address != "127.0.0.1"
    ):  # a socket of another user at 127.0.0.2 could have the same port as one of ours
        return False
    for _ in range(_LOOKS):
        uid = _uid_of(port, own)
        if uid is not None:
            return uid == os.getuid()
        await asyncio.sleep(_LOOK_SECONDS)
    return False


def _uid_of(port: int, own: int) -> int | None:
    """Returns the uid of the socket that is connected from `port` to `own` on 127.0.0.1, from /proc/net/tcp
    (proc(5)). Returns None if it is not listed: a listing that changes while it is read can lack a socket,
    and a socket that its program has closed is listed as root's, without an inode.
    """
    wanted = [f"0100007F:{port:04X}", f"0100007F:{own:04X}"]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1:3] == wanted and words[3] in _CONNECTED and words[9] != "0":
            return int(words[7])
    return None


async def run(
    place: Place,
    wanted: wire.Open,
    library: str,
    command: list[str],
    environment: Mapping[str, str],
    tell: Callable[[VgpuError], None],
) -> int:
    """Runs a command with a slice of another machine. Returns its exit code, or 128 plus the number of the
    signal that ended it. If the session ends before the command, `tell` is called with the cause, and if the
    command then fails, the exit code is that of the cause. Raises VgpuError if no slice is opened or the
    client does not know the node's engine, OSError if the command cannot be started.
    """
    tunnel = Tunnel(place, wanted)
    made = await tunnel.open()
    cause: VgpuError | None = None

    def end(ended: "asyncio.Task[VgpuError | None]") -> None:
        nonlocal cause
        cause = None if ended.cancelled() else ended.result()
        if cause is not None:
            tell(VgpuError(cause.code, f"the remote session has ended: {cause.sentence}", cause.hint))

    try:
        engine = ENGINES.get(str(made["engine"]))
        if engine is None:
            sentence = f"the node has the engine {made['engine']!r}, which this client does not know"
            raise VgpuError(
                ErrorCode.UNSUPPORTED, sentence, "install the client in the same version as vgpud on the node"
            )
        variables = {**environment, **engine.client_environment(tunnel.port, library, environment)}
        program = await asyncio.create_subprocess_exec(*command, env=variables)
        tunnel.ended.add_done_callback(end)
        code = await _wait(program)
        if code == 0:
            return 0
    finally:
        await tunnel.close()  # may still read why the session ended
    if cause is not None:
        return cause.code.exit_code.value
    return code if code >= 0 else 128 - code


async def _wait(program: asyncio.subprocess.Process) -> int:
    """Waits for the program, and forwards signals to it. SIGINT and SIGQUIT are ignored, because the terminal
    sends them to the program too.
    """
    loop = asyncio.get_running_loop()

    def pass_on(number: int) -> None:
        with suppress(ProcessLookupError):
            program.send_signal(number)

    for number in _FORWARDED:
        loop.add_signal_handler(number, pass_on, number)
    for number in (signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, lambda: None)
    return await program.wait()
