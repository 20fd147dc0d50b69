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

_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,2000}) HTTP/1\.[01]")
_HOST = re.compile(rb"\r\nhost:[ \t]*([!-~]*)[ \t]*\r\n", re.IGNORECASE)
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
    """Identifies the peers of a Unix socket: at once by uid, and in turns of the users by process. Raises
    OSError for a peer that has ended.
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
        self._open: dict[asyncio.StreamWriter, None] = {}  # open TCP connections, oldest first

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one new connection: the callback for asyncio.start_server."""
        if self._identities is not None:
            await self._serve(reader, writer, self._identities)
            return
        self._make_room()
        self._open[writer] = None
        try:
            await self._converse(reader, writer, _UNKNOWN_USER)
        finally:
            self._open.pop(writer, None)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identities: Identities
    ) -> None:
        """Serves a connection to the Unix socket. The connection counts for its uid until its process is
        known, because the look-up of a process takes time of the event loop and must wait for its turn.
        """
        connection = writer.get_extra_info("socket")
        try:
            user = identities.user_of(connection)
        except OSError:  # the connection is already closed
            writer.close()
            return
        if not self._shares.take(user):
            writer.close()
            return
        try:
            async with asyncio.timeout(PEER_SECONDS):
                known = (await identities.of(connection, user)).user
            if known == user or self._shares.pass_on(user, known):
                user = known
                await self._converse(reader, writer, user)
        except (OSError, TimeoutError):
            pass  # the peer has ended, or the kernel gives no information about its process
        finally:
            writer.close()
            self._shares.give_back(user)

    def _make_room(self) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, user: int) -> None:
        try:
            async with asyncio.timeout(PEER_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            response = await self.answer(head, user)
            async with asyncio.timeout(PEER_SECONDS):
                writer.write(_encoded(response, with_body=not head.startswith(b"HEAD ")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the peer closed the connection, is too slow, or sent too much
        finally:
            writer.close()

    async def answer(self, head: bytes, user: int) -> Response:
        """The response to a request from user `user`. `head` is the request's lines up to the empty one."""
        request = _REQUEST.fullmatch(head.partition(b"\r\n")[0])
        if request is None:
            return _plain(HTTPStatus.BAD_REQUEST)
        host = _HOST.search(head)
        if self._only_loopback and (host is None or not _LOOPBACK.fullmatch(host[1])):
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
