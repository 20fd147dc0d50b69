"""The HTTP listeners: metrics.sock always, and the loopback addresses that the policy names."""

import asyncio
import errno
import os
import pwd
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from vgpud import clock
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.observation import Observation
from vgpud.policy.model import Policy
from vgpud.serve.http.history import SAMPLE_SECONDS, History
from vgpud.serve.http.page import CONTENT_SECURITY_POLICY, page
from vgpud.serve.http.server import Identities, Page, Response, Server
from vgpud.serve.metrics.exposition import CONTENT_TYPE
from vgpud.serve.metrics.render import Renderer
from vgpud.untrusted import Untrusted, refuse_descriptors

_NAMES_KEPT_SECONDS = 300.0
_NAMES_WAIT_SECONDS = 0.5


class UserNames:
    """Names of users for the status page, looked up on a thread: a directory service can be slow."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._since = float("-inf")
        self._running: asyncio.Task[dict[int, str]] | None = None

    async def of(self, uids: Iterable[int]) -> Mapping[int, str]:
        """The names of the users that are known by now. A user without an account has an empty name. A user
        that was not looked up in time is missing.
        """
        wanted = set(uids)
        is_old = clock.now() - self._since > _NAMES_KEPT_SECONDS
        if self._running is None and (is_old or wanted - self._names.keys()):
            self._running = asyncio.ensure_future(asyncio.to_thread(_look_up, wanted))
        task = self._running
        if task is not None:
            await asyncio.wait((task,), timeout=_NAMES_WAIT_SECONDS)
            if task.done() and self._running is task:
                self._running = None
                self._names, self._since = task.result(), clock.now()
        return self._names


def _look_up(uids: set[int]) -> dict[int, str]:
    found = {}
    for uid in uids:
        try:
            # a directory may have names that are not UTF-8, which no page can contain
            found[uid] = pwd.getpwuid(uid).pw_name.encode(errors="replace").decode()
        except (KeyError, OverflowError):
            found[uid] = ""
    return found


log = structlog.get_logger(__name__)

SOCKET_NAME = "metrics.sock"
_BACKLOG = 64
_HIDDEN = "metrics.new"


@dataclass(frozen=True, slots=True)
class _Door:
    server: Server
    pages: dict[str, Page]


class Doors:
    """Opens and closes the listeners. `observe` collects the data of the pages; `identities`
    identifies the callers of metrics.sock.

    The addresses of a new policy are bound before the policy comes into force.
    """

    def __init__(
        self,
        run_dir: Path,
        observe: Callable[[], Awaitable[Observation]],
        identities: Identities,
    ) -> None:
        self._identities = identities
        self._run_dir = run_dir
        self._observe = observe
        self._renderer = Renderer()
        self._history = History()
        self._names = UserNames()
        self._unix: Server | None = None
        self._tcp: dict[str, _Door] = {}  # the TCP listeners by address

    async def start(self, policy: Policy) -> None:
        """Starts the listeners. Raises VgpuError(BAD_SETTING) if metrics.sock cannot be made."""
        pages = {"/metrics": self._metrics}
        # The socket is created in a private folder, so that no user can connect before its mode is set.
        hidden = self._run_dir / "private" / _HIDDEN
        hidden.unlink(missing_ok=True)
        one = Untrusted(socket.AF_UNIX)
        try:
            refuse_descriptors(one)
            one.bind(str(hidden))
            hidden.chmod(0o666)
            one.listen(_BACKLOG)
            one.keep()
            hidden.rename(self._run_dir / SOCKET_NAME)
        except OSError as error:
            one.close()
            hint = "check the rights and free space of the run folder (VGPUD_RUN_DIR)"
            raise replace(_cannot(str(self._run_dir / SOCKET_NAME), error), hint=hint) from None
        self._unix = Server(pages, False, self._identities)
        self._unix.start(one)
        try:
            (await self.prepare(policy))(True)
        except VgpuError as error:  # an address that cannot be bound must not prevent vgpud from starting
            log.error(LogEvent.HTTP_NOT_LISTENING, why=str(error), hint=error.hint)

    async def record(self) -> None:
        """Samples the history of the status page until the daemon stops. It pauses while the policy turns the
        page off.
        """
        while True:
            if any("/" in door.pages for door in self._tcp.values()):
                self._history.add(await self._observe(), clock.now())
            else:
                self._history.clear()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def prepare(self, policy: Policy) -> Callable[[bool], None]:
        """Binds the addresses that `policy` adds. The returned function takes True to commit (addresses that
        are no longer wanted are closed) or False to roll back.

        Raises VgpuError(BAD_SETTING) for an address that cannot be bound; nothing has changed then.
        """
        wanted = wanted_addresses(policy)
        made: dict[str, _Door] = {}
        for address in wanted.keys() - self._tcp.keys():
            try:
                made[address] = self._listen(address)
            except VgpuError:
                for door in made.values():
                    door.server.close()
                raise

        def decide(keep: bool) -> None:
            if keep:
                self._tcp |= made
            gone = self._tcp.keys() - wanted.keys() if keep else made.keys()
            for address in tuple(gone):
                (self._tcp.pop(address) if keep else made[address]).server.close()
            if keep:
                for address, with_page in wanted.items():
                    self._furnish(self._tcp[address], with_page)

        return decide

    def _furnish(self, door: "_Door", with_page: bool) -> None:
        door.pages["/metrics"] = self._metrics
        if with_page:
            door.pages["/"] = self._page
        else:
            door.pages.pop("/", None)

    def _listen(self, address: str) -> "_Door":
        host, _, port = address.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        try:
            one = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _cannot(address, error) from None
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((bare, int(port)))
            one.listen(_BACKLOG)
        except OSError as error:
            one.close()
            raise _cannot(address, error) from None
        pages: dict[str, Page] = {}
        server = Server(pages, only_loopback=True)
        server.start(one)
        log.info(LogEvent.HTTP_LISTENING, address=address)
        return _Door(server, pages)

    def close(self) -> None:
        for door in self._tcp.values():
            door.server.close()
        if self._unix is not None:
            self._unix.close()
            (self._run_dir / SOCKET_NAME).unlink(missing_ok=True)

    async def _metrics(self) -> Response:
        return Response(self._renderer.render(await self._observe()).encode(), CONTENT_TYPE)

    async def _page(self) -> Response:
        seen = await self._observe()
        names = await self._names.of({allocation.request.owner.uid for allocation in seen.allocations})
        html = page(seen, os.uname().nodename, self._history, names)
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Referrer-Policy": "no-referrer"}
        return Response(html.encode(), "text/html; charset=utf-8", headers=headers)


def wanted_addresses(policy: Policy) -> dict[str, bool]:
    """The addresses that the policy names, each with True if the status page is served at it, or False if
    only the metrics are.
    """
    wanted = {policy.metrics.listen: False, policy.http.listen: True}
    return {address: with_page for address, with_page in wanted.items() if address}


def _cannot(address: str, error: OSError) -> VgpuError:
    hint = "name another address in [http] or [metrics] of the policy"
    if error.errno == errno.EACCES:
        hint = "name a port of 1024 or more: vgpud has no right to lower ones"
    elif error.errno in (errno.EAFNOSUPPORT, errno.EPERM):  # the unit's RestrictAddressFamilies=
        hint = "let the unit use TCP: systemctl edit vgpud, as docs/metrics.md says"
    why = (error.strerror or str(error)).lower()
    return VgpuError(ErrorCode.BAD_SETTING, f"cannot listen on {address}: {why}", hint)
