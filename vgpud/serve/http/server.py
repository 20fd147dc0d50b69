"""A small HTTP server, with the part of HTTP/1.1 (RFC 9112) that a scrape and a page need: one GET or HEAD
without a body per connection.

A library would be a hundred times larger. The bytes of a request, the time to send it and the number of
connections are bounded.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import structlog

from vgpud import clock
from vgpud.model.caller import Caller
from vgpud.model.log_event import LogEvent
from vgpud.model.shares import Shares
from vgpud.pace import Pace

log = structlog.get_logger(__name__)

MAX_HEAD_BYTES = 8192
PEER_SECONDS = 5.0
MAX_CONNECTIONS = 64
CONNECTIONS_PER_USER = 8
CONNECTIONS_OF_ROOT = 16  # connections reserved for root, in addition to those of other users
# a pause of nine times the time that a page took, so that pages for users other than root take a tenth of the
# event loop's time
_REST_FACTOR = 9.0
_UNKNOWN_USER = -1
_ACCEPT_PAUSE_SECONDS = 0.1
_HEAD_END = b"\r\n\r\n"

_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,2000}) HTTP/1\.[01]")
_HOST = re.compile(rb"\r\nhost:([^\r\n]*)\r\n", re.IGNORECASE)
# Accepted names in the Host header. Any other name is refused: an attacker's web page could resolve its own
# name to this address (DNS rebinding).
_LOOPBACK = re.compile(rb"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Page = Callable[[], Awaitable[Response]]


def _plain(status: HTTPStatus) -> Response:
    return Response(f"{status.value} {status.phrase}\n".encode(), status=status)


class Identities(Protocol):
    """Identifies the peers of a Unix socket: the uid of a peer at once (`user_of`), the process of a peer in
    turns of the users (`of`). Raises OSError for a peer that has ended.
    """

    def user_of(self, connection: socket.socket) -> int: ...

    async def of(self, connection: socket.socket, user: int) -> Caller: ...


class Server:
    """Serves `pages` by path. With `only_loopback` (TCP), the Host header must be a loopback name.

    With `identities` (a Unix socket), each user has a share of the connections. Without it (TCP), a new
    connection replaces the oldest one if all are in use.
    """

    def __init__(
        self,
        pages: Mapping[str, Page],
        only_loopback: bool,
        identities: Identities | None = None,
    ) -> None:
        self._pages = pages
        self._only_loopback = only_loopback
        self._identities = identities
        self._shares = Shares(MAX_CONNECTIONS, CONNECTIONS_PER_USER, CONNECTIONS_OF_ROOT)
        self._pace = Pace(_REST_FACTOR)
        self._listener: socket.socket | None = None
        self._open: dict[asyncio.Task[None], None] = {}  # open connections, oldest first

    def start(self, listener: socket.socket) -> None:
        """Serves the connections of `listener`, which `close` closes."""
        listener.setblocking(False)
        self._listener = listener
        self._accept_later(0)

    def close(self) -> None:
        """Accepts no more. Open connections are served to their end."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept_later(self, seconds: float) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener
        if listener is not None and seconds > 0:
            loop.remove_reader(listener)
            loop.call_later(seconds, self._accept_later, 0)
        elif listener is not None:
            loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # no descriptor is free; the listener stays readable, so without a pause the event loop would spin
            self._accept_later(_ACCEPT_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        user = self._admitted(connection, self._identities)
        if user is None:
            connection.close()
            return
        task = asyncio.ensure_future(self._serve(connection, user))
        self._open[task] = None
        task.add_done_callback(lambda ended: self._open.pop(ended, None))

    def _admitted(self, connection: socket.socket, identities: Identities | None) -> int | None:
        """The user for whom a new connection is counted, or None if there is no room for it."""
        if identities is None:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            return _UNKNOWN_USER
        try:
            user = identities.user_of(connection)
        except OSError:  # the connection is already closed
            return None
        return user if self._shares.take(user) else None

    async def _serve(self, connection: socket.socket, user: int) -> None:
        """Serves a connection. A connection to the Unix socket counts for the uid of its peer until the
        peer's process is known, because the look-up of a process takes time of the event loop and must wait
        for its turn.
        """
        try:
            if self._identities is not None:
                async with asyncio.timeout(PEER_SECONDS):
                    known = (await self._identities.of(connection, user)).user
                if known != user:
                    if not self._shares.pass_on(user, known):
                        return
                    user = known
            await self._converse(connection, user)
        except (TimeoutError, OSError):
            pass  # the peer has ended or closed the connection, is too slow, or sent too much
        finally:
            connection.close()
            if self._identities is not None:
                self._shares.give_back(user)

    async def _converse(self, connection: socket.socket, user: int) -> None:
        async with asyncio.timeout(PEER_SECONDS):
            head = await _head(connection)
        response = await self.answer(head, user)
        async with asyncio.timeout(PEER_SECONDS):
            answer = _encoded(response, with_body=not head.startswith(b"HEAD "))
            await asyncio.get_running_loop().sock_sendall(connection, answer)

    async def answer(self, head: bytes, user: int) -> Response:
        """The response to a request from user `user`. `head` is the request's lines up to the empty one."""
        request = _REQUEST.fullmatch(head.partition(b"\r\n")[0])
        if request is None:
            return _plain(HTTPStatus.BAD_REQUEST)
        if self._only_loopback:
            host = _HOST.search(head)
            if host is None or not _LOOPBACK.fullmatch(host[1].strip(b" \t")):
                return _plain(HTTPStatus.MISDIRECTED_REQUEST)
        if request[1] not in (b"GET", b"HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        page = self._pages.get(request[2].partition(b"?")[0].decode("ascii"))
        if page is None:
            return _plain(HTTPStatus.NOT_FOUND)
        try:
            return await (page() if user == 0 else self._paced(page, user))
        except Exception:
            log.exception(LogEvent.BUG_IN_HTTP_PAGE, path=request[2].decode("ascii"))
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _paced(self, page: Page, user: int) -> Response:
        async with self._pace.turn(user):
            began = clock.now()
            try:
                return await page()
            finally:
                self._pace.took(clock.now() - began)


async def _head(connection: socket.socket) -> bytes:
    """Receives a request up to its empty line. Raises OSError if the peer closes the connection, or sends too
    much.
    """
    loop, head = asyncio.get_running_loop(), b""
    while (end := head.find(_HEAD_END)) < 0:
        if len(head) >= MAX_HEAD_BYTES:
            raise ConnectionAbortedError("the head is too long")
        piece = await loop.sock_recv(connection, MAX_HEAD_BYTES - len(head))
        if not piece:
            raise ConnectionResetError("the peer went away within its request")
        head += piece
    return head[: end + len(_HEAD_END)]


def _encoded(response: Response, with_body: bool) -> bytes:
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **response.headers,
    }
    lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (response.body if with_body else b"")
