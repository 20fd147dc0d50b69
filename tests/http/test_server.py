"""HTTP as clients see it: which requests are answered or refused, and how hostile clients are treated."""

import asyncio
import errno
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import clock
from tests.examples import examples
from tests.metrics.samples import observation
from tests.ports import free_port
from vgpud import clock as daemon_clock
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.observation import Observation
from vgpud.model.tenancy import Lifetime
from vgpud.policy.model import HttpSettings, MetricsSettings, Policy
from vgpud.serve.http import server as http
from vgpud.serve.http.doors import Doors
from vgpud.untrusted import Untrusted


class Known:
    """The relay's knowledge of connections: their uids belong to the users `arrived`, and their processes to
    the users `identified`, in this order. Later ones are root's.
    """

    def __init__(self, arrived: Iterable[int] = (), identified: Iterable[int] = ()) -> None:
        self.arrived, self.identified = list(arrived), list(identified)
        self.asked = 0  # how often the kernel was asked about a process

    def user_of(self, connection: socket.socket) -> int:
        return self.arrived.pop(0) if self.arrived else 0

    async def of(self, connection: socket.socket, user: int) -> Caller:
        self.asked += 1
        user = self.identified.pop(0) if self.identified else user
        return Caller(Door.READ, user, user, Lifetime())

    def waited(self, connection: socket.socket, user: int) -> None:
        pass


async def observe() -> Observation:
    return observation()


def policy(page: int | None = None, figures: int | None = None) -> Policy:
    def listen(port: int | None) -> str:
        return "" if port is None else f"127.0.0.1:{port}"

    return Policy(http=HttpSettings(listen=listen(page)), metrics=MetricsSettings(listen=listen(figures)))


def with_doors(
    folder: Path,
    first: Policy,
    work: Callable[[Doors], Awaitable[None]],
    identities: http.Identities | None = None,
) -> None:
    (folder / "private").mkdir()

    async def run() -> None:
        doors = Doors(folder, observe, identities or Known())
        await doors.start(first)
        try:
            await work(doors)
        finally:
            doors.close()

    asyncio.run(run())


async def say(words: bytes, port: int | None = None, path: Path | None = None) -> bytes:
    if path is not None:
        reader, writer = await asyncio.open_unix_connection(str(path))
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    answer = await asyncio.wait_for(reader.read(), 300)
    writer.close()
    return answer


def get(path: str, host: str = "localhost") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_every_user_may_read_metrics_and_nothing_else_on_the_unix_socket(tmp_path: Path) -> None:
    async def work(_: Doors) -> None:
        path = tmp_path / "metrics.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        answer = await say(get("/metrics", "whatever"), path=path)
        assert status(answer) == 200
        assert b"Content-Type: text/plain; version=0.0.4" in answer
        assert b"vgpud_build_info{" in answer
        assert status(await say(get("/"), path=path)) == 404

    with_doors(tmp_path, policy(), work)
    assert not (tmp_path / "metrics.sock").exists()


def test_the_http_server_answers_get_and_head_only(tmp_path: Path) -> None:
    port = free_port()

    async def work(_: Doors) -> None:
        assert b"text/html" in await say(get("/"), port)
        assert b"vgpud_build_info{" in await say(get("/metrics?x=1", f"127.0.0.1:{port}"), port)
        assert status(await say(get("/nowhere"), port)) == 404
        assert status(await say(get("/", "[::1]:80"), port)) == 200
        assert status(await say(get("/").replace(b"GET", b"POST"), port)) == 405
        assert status(await say(b"hello\r\n\r\n", port)) == 400
        assert status(await say(b"GET http://x/ HTTP/1.1\r\nHost: localhost\r\n\r\n", port)) == 400
        head = await say(get("/").replace(b"GET", b"HEAD"), port)
        assert status(head) == 200
        assert head.endswith(b"\r\n\r\n")

    with_doors(tmp_path, policy(page=port), work)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", ""])
def test_a_request_with_an_unknown_host_header_is_refused(tmp_path: Path, host: str) -> None:
    port = free_port()

    async def work(_: Doors) -> None:
        answer = await say(get("/", host), port)
        assert status(answer) == 421
        assert b"NVIDIA" not in answer
        assert status(await say(b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n", port)) == 421

    with_doors(tmp_path, policy(page=port), work)


def test_slow_peers_and_peers_with_long_requests_are_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PEER_SECONDS", 0.2)
    port = free_port()

    async def work(_: Doors) -> None:
        # the server closes a connection without a complete request
        assert await say(b"GET / HT", port) == b""
        try:
            answer = await say(b"GET / HTTP/1.1\r\nX: " + b"y" * 4 * http.MAX_HEAD_BYTES, port)
        except ConnectionError:
            answer = b""
        assert answer == b""

    with_doors(tmp_path, policy(page=port), work)


def test_silent_connections_beyond_the_maximum_do_not_prevent_a_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client opens twice as many connections as the server holds at most. The server closes the oldest
    ones, and still serves the page.
    """
    port = free_port()
    monkeypatch.setattr(http, "PEER_SECONDS", 1e6)

    async def work(_: Doors) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * http.MAX_CONNECTIONS)]
        assert status(await say(get("/"), port)) == 200
        for reader, _writer in held[: http.MAX_CONNECTIONS]:
            assert await asyncio.wait_for(reader.read(), 300) == b"", "the oldest connections are closed"
        for _reader, writer in held:
            writer.close()

    with_doors(tmp_path, policy(page=port), work)


@pytest.mark.parametrize(
    ("arrived", "identified"),
    [
        ([7] * http.CONNECTIONS_PER_USER + [7] * 30, []),
        # the uids of the user's own namespace
        (range(100, 100 + http.CONNECTIONS_PER_USER + 30), [7] * (http.CONNECTIONS_PER_USER + 30)),
    ],
)
def test_one_user_holds_a_bounded_number_of_connections_of_metrics_sock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: Iterable[int], identified: list[int]
) -> None:
    monkeypatch.setattr(http, "PEER_SECONDS", 1e6)
    path, known = tmp_path / "metrics.sock", Known([*arrived, 8, 0], identified)

    async def work(_: Doors) -> None:
        held = []
        for _each in range(http.CONNECTIONS_PER_USER):
            held.append(await asyncio.open_unix_connection(str(path)))
        for _each in range(30):
            try:
                refused = await say(get("/metrics"), path=path)
            except ConnectionError:
                refused = b""
            assert refused == b""
        # the event loop does not ask the kernel about connections beyond the share of their uid
        assert known.asked == http.CONNECTIONS_PER_USER + (30 if identified else 0)
        for _who in ("user 8", "root"):
            assert status(await say(get("/metrics"), path=path)) == 200
        for _reader, writer in held:
            writer.close()

    with_doors(tmp_path, policy(), work, known)


@pytest.mark.parametrize(("user", "seconds"), [(7, 1 + 10 + 10), (0, 3)])
def test_building_pages_for_a_user_takes_at_most_a_tenth_of_the_time_and_root_is_not_limited(
    user: int, seconds: float
) -> None:
    """A user that scrapes again and again."""

    async def slow() -> http.Response:
        await clock.passed(1)
        return http.Response(b"")

    async def scrapes() -> None:
        server, began = http.Server({"/metrics": slow}, only_loopback=False), daemon_clock.now()
        for _ in range(3):
            assert (await server.answer(get("/metrics"), user)).status == 200
        assert daemon_clock.now() - began == seconds

    clock.run(scrapes())


def test_a_failing_page_reveals_no_details(tmp_path: Path) -> None:
    async def work() -> None:
        async def broken() -> http.Response:
            raise RuntimeError("secret")

        one = socket.socket(socket.AF_UNIX)
        one.bind(str(tmp_path / "s"))
        server = http.Server({"/": broken}, only_loopback=False)
        one.listen()
        server.start(one)
        answer = await say(get("/"), path=tmp_path / "s")
        server.close()
        assert status(answer) == 500
        assert b"secret" not in answer

    asyncio.run(work())


def test_a_reload_moves_the_page_to_the_new_address(tmp_path: Path) -> None:
    first, second = free_port(), free_port()

    async def work(doors: Doors) -> None:
        # a new policy may give the page the address that the metrics had before
        (await doors.prepare(policy(page=first, figures=second)))(True)
        assert b"text/html" in await say(get("/"), first)
        assert status(await say(get("/"), second)) == 404
        assert status(await say(get("/metrics"), second)) == 200
        (await doors.prepare(policy(page=second)))(True)
        assert b"text/html" in await say(get("/"), second)
        with pytest.raises(ConnectionRefusedError):
            await say(get("/"), first)
        undo = await doors.prepare(policy(page=first))
        undo(False)
        assert b"text/html" in await say(get("/"), second)
        with pytest.raises(ConnectionRefusedError):
            await say(get("/"), first)

    with_doors(tmp_path, policy(figures=first), work)


def test_a_reload_to_an_address_in_use_changes_nothing(tmp_path: Path) -> None:
    mine, other = free_port(), free_port()

    async def work(doors: Doors) -> None:
        with socket.create_server(("127.0.0.1", other)) as _:
            with pytest.raises(VgpuError) as refused:
                await doors.prepare(policy(page=other))
            assert refused.value.code is ErrorCode.BAD_SETTING
            assert str(other) in refused.value.sentence
        assert status(await say(get("/"), mine)) == 200

    with_doors(tmp_path, policy(page=mine), work)


def test_vgpud_starts_without_an_http_address_that_is_in_use(tmp_path: Path) -> None:
    port = free_port()

    async def work(_: Doors) -> None:
        assert status(await say(get("/metrics"), path=tmp_path / "metrics.sock")) == 200

    with socket.create_server(("127.0.0.1", port)):
        with_doors(tmp_path, policy(page=port), work)


def test_a_path_of_metrics_sock_that_is_taken_is_named_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "metrics.sock").mkdir()
    with pytest.raises(VgpuError) as raised:
        with_doors(tmp_path, policy(), no_work)
    assert raised.value.sentence == f"cannot listen on {tmp_path}/metrics.sock: is a directory"
    assert "VGPUD_RUN_DIR" in raised.value.hint


async def no_work(_: Doors) -> None:
    pass


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_connection_that_cannot_be_accepted_does_not_end_the_http_server(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [number]
    accept = Untrusted.accept

    def fails_once(listener: Untrusted) -> Any:
        if failures:
            raise OSError(failures.pop(), "")
        return accept(listener)

    async def work(_: Doors) -> None:
        assert status(await say(get("/metrics"), path=tmp_path / "metrics.sock")) == 200
        assert not failures

    monkeypatch.setattr(Untrusted, "accept", fails_once)
    with_doors(tmp_path, policy(), work)


HEADS = (
    rb"(GET|HEAD|POST|get) (/|/x|[ -~]{0,40}) HTTP/1\.[0-2]\r\n(Host: (localhost|127\.0\.0\.1|[ -~]{0,20}))?"
)


@settings(max_examples=examples(150))
@given(
    st.one_of(
        st.binary(max_size=200),
        st.from_regex(HEADS, fullmatch=True),
    )
)
def test_any_request_of_a_peer_is_answered_or_refused(head: bytes) -> None:
    """For any request the server raises no exception, and it does not serve the page under the name of
    another host.
    """

    async def page() -> http.Response:
        return http.Response(b"secret")

    server = http.Server({"/": page}, only_loopback=True)
    answer = asyncio.run(server.answer(head + b"\r\n\r\n", 0))
    assert answer.status.value in (200, 400, 404, 405, 421)
    if answer.status.value == 200:
        assert re.search(rb"(?i)\r\nhost:\s*(localhost|127\.|\[::1\])", head)


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "name a port of 1024 or more"),
        (errno.EAFNOSUPPORT, "systemctl edit vgpud"),
        (errno.EADDRINUSE, "name another address"),
    ],
)
def test_each_kind_of_unusable_address_has_its_own_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    async def listen() -> None:
        with pytest.raises(VgpuError) as refused:
            await Doors(tmp_path, observe, Known()).prepare(policy(page=80))
        assert hint in refused.value.hint

    monkeypatch.setattr(socket.socket, "bind", refuse)
    asyncio.run(listen())


@pytest.mark.parametrize(
    ("value", "status"), [("\t" * 1_000_000 + "x y", 421), ("\t localhost \t", 404), ("local host", 421)]
)
def test_a_host_header_of_any_form_is_parsed_in_linear_time(value: str, status: int) -> None:
    """An attack: a search with backtracking over a million tabs in the header takes hours."""
    server = http.Server({}, only_loopback=True)
    head = f"GET / HTTP/1.1\r\nHost:{value}\r\n\r\n".encode()
    assert asyncio.run(server.answer(head, 0)).status == status
