"""The parts of remote slices without a network: messages, limits, grants, and the address of a door."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ports import free_port
from tests.remote.node import CERTIFICATES
from tests.simnode import ROOT
from vgpud import clock
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2
from vgpud.ctl.remote import _checked
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.remote import RemoteSettings
from vgpud.remote import session as session_module
from vgpud.remote import wire
from vgpud.remote.certificates import fingerprint_of
from vgpud.remote.client import Place, Tunnel, call, run, status
from vgpud.remote.door import RemoteDoor, Session, context_of
from vgpud.remote.engine import ENGINES, Lupine
from vgpud.remote.grants import Grant, Grants, Sizes, check_quota
from vgpud.remote.limits import Places, Rate, Rates, network_of
from vgpud.remote.session import _allocate, _looking, _pass_one
from vgpud.settings import Settings

_T = TypeVar("_T")
GIB = 1 << 30
ALICE = Grant(id="", user="alice", uid=1000, gid=1000, created=0)
_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=wire.LABEL_BYTES)


@given(_TEXT, _TEXT, _TEXT)
def test_a_call_of_the_remote_protocol_is_decoded_as_it_was_encoded(
    token: str, memory: str, label: str
) -> None:
    for asked in (wire.Open(token=token, memory=memory, label=label), wire.Attach(token, memory)):
        assert wire.decode(wire.encode(asked)) == asked


@given(
    st.binary(max_size=300)
    | st.dictionaries(st.text(), st.text() | st.integers()).map(
        lambda fields: json.dumps({"version": wire.VERSION, "call": "open", **fields}).encode()
    )
)
def test_any_line_from_a_client_is_a_call_or_a_bad_request(line: bytes) -> None:
    try:
        assert wire.decode(line)
    except VgpuError as error:
        assert error.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    ("read", "line", "sentence"),
    [
        (wire.decode, b'{"version":1}', "the caller does not speak version 2"),
        (wire.decode, b'{"version":2,"call":"walk"}', "the call is not known"),
        (wire.decode, b'{"version":2,"call":"attach","session":"a"}', "the call lacks a field"),
        (wire.decode, b'{"version":2,"call":"status","later":""}', "the call has a field that is not known"),
        (wire.decode, b"[]", "the line is not a JSON object"),
        (wire.result, b"{}", "the reply has neither a result nor an error"),
        (wire.result, b" " * (wire.LINE_BYTES + 1), f"a line has more than {wire.LINE_BYTES} bytes"),
    ],
    ids=["version", "call", "field", "more", "list", "reply", "length"],
)
def test_the_refusal_of_a_line_says_what_is_wrong_with_it(
    read: Callable[[bytes], object], line: bytes, sentence: str
) -> None:
    with pytest.raises(VgpuError, match=sentence) as raised:
        read(line)
    assert raised.value.code is ErrorCode.BAD_REQUEST


def test_an_error_sent_in_a_reply_is_raised_again_by_the_client() -> None:
    with pytest.raises(VgpuError) as raised:
        wire.result(wire.refusal(VgpuError(ErrorCode.OVER_QUOTA, "alice has 2 sessions", "end one")))
    assert raised.value.code is ErrorCode.OVER_QUOTA
    assert (raised.value.sentence, raised.value.hint) == ("alice has 2 sessions", "end one")


def test_a_rate_limiter_allows_a_burst_and_then_its_rate() -> None:
    rate = Rate(per_second=10, burst=3)
    assert [rate.take(1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert [rate.take(1, 0.1), rate.take(1, 0.1)] == [True, False]
    assert rate.owe(20, 10.0) == pytest.approx(1.7)


def test_each_key_of_a_rate_limiter_has_its_own_rate_and_the_number_of_keys_is_bounded() -> None:
    rates = Rates(per_second=1, burst=1, most_keys=2)
    assert [rates.take(key, 0.0) for key in "aabbb"] == [True, False, True, False, False]
    assert rates.take("a", 1.0)
    assert [rates.take("c", 1.0), len(rates._known)] == [True, 2]
    assert not rates.take("a", 1.0)


def test_a_flood_of_one_network_leaves_the_door_open_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 7.0)
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))
    assert [door._may_arrive("192.0.2.9") for _ in range(1000)].count(True) == 25
    assert door._may_arrive("192.0.2.7")


def test_a_flood_of_eight_networks_leaves_the_door_open_to_a_client_without_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter(range(1_000_000))
    monkeypatch.setattr(clock, "now", lambda: next(times) / 1000)  # 1000 connections a second
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))
    accepted = 0
    for _ in range(20):
        accepted += sum(door._may_arrive(f"192.0.2.{number % 8}") for number in range(1987))
        assert door._may_arrive("192.0.2.9")
    assert accepted < 50 * 41  # 50 for each of 40 s, and a burst of 50


def test_handshakes_from_four_networks_leave_connections_for_others() -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))
    for places in (door._handshakes, door._connections):
        with ExitStack() as held:
            for number in range(4 * places.most_each):
                held.enter_context(places.place(f"192.0.2.{number % 4}"))
            assert [held.enter_context(places.place("192.0.2.9")) for _ in range(2)] == [True, True]
            assert not held.enter_context(places.place("192.0.2.0"))


def test_a_flood_of_many_networks_leaves_the_door_open_to_networks_with_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 7.0)
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))
    near, far = socket.socketpair()
    with near, far:
        door._sessions["one"] = _session("one", near)
        assert [door._may_arrive(f"192.0.2.{number}") for number in range(250)].count(True) == 49
        assert door._may_arrive("2001:db8:7::/64")
        assert not door._may_arrive("192.0.2.250")


def test_connections_are_bounded_in_all_and_for_each_address() -> None:
    places = Places(most=2, most_each=1)
    with places.place("a") as first, places.place("a") as again, places.place("b") as other:
        assert (first, again, other) == (True, False, True)
        with places.place("c") as third:
            assert not third
    with places.place("a") as later:
        assert later


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
    ],
)
def test_connections_are_counted_by_ipv4_address_or_64_bit_ipv6_prefix(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_user_has_at_most_a_quarter_of_all_connections_including_control_connections() -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))

    async def check() -> None:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=near)
        idle = [asyncio.ensure_future(asyncio.sleep(1000)) for _ in range(254)]
        with far:
            for number in range(2):  # two sessions of one user
                session = _session(str(number), far)
                session.streams.update(idle[127 * number : 127 * (number + 1)])
                door._sessions[session.id] = session
            with pytest.raises(VgpuError, match="alice has 256 connections, and a user may have 256"):
                await door._attach(session, reader, writer)
            session.streams.pop()
            door._check_connections("alice")
        writer.close()
        for task in idle:
            task.cancel()

    asyncio.run(check())


def test_a_session_has_one_control_connection_and_sends_only_its_end_on_it() -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))

    async def check() -> None:
        backend, process = socket.socketpair()
        session = _session("one", backend)
        door._sessions[session.id] = session
        with ExitStack() as held, backend, process:
            clients, controls = [], []
            for _ in range(4):
                near, far = socket.socketpair()
                clients.append(held.enter_context(far))
                stream = await asyncio.open_connection(sock=near)
                controls.append(asyncio.ensure_future(door._control(session, *stream)))
                await asyncio.sleep(0)
                if len(controls) > 1:  # the new control connection ends the previous one
                    await asyncio.wait_for(controls[-2], 300)
                assert session.control is stream[1]
                assert session.control_ended is None
            # bytes after END would bypass the rate limit, so the door closes the connection
            clients[-1].sendall(wire.END * 1000)
            await asyncio.wait_for(controls[-1], 300)
            assert session.control_ended is not None
            near, far = socket.socketpair()
            held.enter_context(far)
            control = asyncio.ensure_future(door._control(session, *await asyncio.open_connection(sock=near)))
            far.sendall(wire.END)
            process.settimeout(300)
            assert await asyncio.to_thread(process.recv, 1) == b""
            assert session.cause == "its client has ended it"
            assert not control.done()  # the control connection ends when the slice is released
            door._end(session, session.cause)
            await asyncio.wait_for(control, 300)

    asyncio.run(check())


def test_a_connection_that_the_engines_server_refuses_is_refused_to_the_client() -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))

    class NoServer(Lupine):
        port = free_port()

    async def check() -> None:
        backend, process = socket.socketpair()
        backend.setblocking(False)
        near, far = socket.socketpair()
        door._sessions["one"] = session = _session("one", backend)
        hearing = asyncio.ensure_future(door._hear_backend(session))
        with process, far:
            stream = await asyncio.open_connection(sock=near)
            attaching = asyncio.ensure_future(door._attach(session, *stream))
            assert await asyncio.to_thread(_pass_one, process, NoServer())
            with pytest.raises(VgpuError, match="the engine's server accepts no connection") as raised:
                await asyncio.wait_for(attaching, 300)
            assert raised.value.code is ErrorCode.UNREACHABLE  # by which the client knows to try again
            assert door._sessions and not session.streams
        await asyncio.wait_for(hearing, 300)

    asyncio.run(check())


def test_a_network_may_make_ten_calls_at_once_and_then_one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 7.0)
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))
    for _ in range(10):
        door._count_asked("192.0.2.9")
    with pytest.raises(VgpuError, match=r"calls from 192\.0\.2\.9 come faster than 1 a second") as raised:
        door._count_asked("192.0.2.9")
    assert raised.value.code is ErrorCode.OVER_QUOTA
    door._count_asked("192.0.2.7")
    monkeypatch.setattr(clock, "now", lambda: 8.0)
    door._count_asked("192.0.2.9")


def test_a_door_whose_address_is_taken_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        settings = RemoteSettings.model_validate({"listen": listen})
        door = RemoteDoor(settings, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))
        with pytest.raises(VgpuError, match=f"cannot listen on {listen}: address already in use") as raised:
            door.start()
    assert raised.value.code is ErrorCode.BAD_SETTING


_REVOKED = VgpuError(ErrorCode.NOT_ALLOWED, "grant 095a2834 of alice was revoked", "ask for a new one")


@pytest.mark.parametrize(
    ("said", "cause"),
    [(wire.refusal(_REVOKED), _REVOKED), (b"", Session.cause), (b"x", Session.cause)],
    ids=["cause", "end", "part"],
)
def test_the_last_line_of_the_control_connection_is_the_cause_of_the_sessions_end(
    said: bytes, cause: VgpuError
) -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))

    async def check() -> bytes:
        backend, process = socket.socketpair()
        backend.setblocking(False)
        near, far = socket.socketpair()
        door._sessions["one"] = session = _session("one", backend)
        control = asyncio.ensure_future(door._control(session, *await asyncio.open_connection(sock=near)))
        await asyncio.sleep(0)
        with process:
            process.sendall(said)
        await asyncio.wait_for(door._hear_backend(session), 300)
        await asyncio.wait_for(control, 300)
        # a client of an earlier version reads to the end of the connection, too
        with far, far.makefile("rb") as lines:
            return await asyncio.to_thread(lines.read)

    assert asyncio.run(check()) == wire.refusal(cause)
    assert not door._sessions


def test_a_cause_of_end_that_comes_with_the_reply_to_open_is_sent_after_the_reply(tmp_path: Path) -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tmp_path / "remote.sock")

    async def check() -> list[bytes]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "remote.sock"))
            listener.listen()
            near, far = socket.socketpair()
            stream = await asyncio.open_connection(sock=near)
            opening = asyncio.ensure_future(door._open(wire.Open(address="192.0.2.7"), *stream))
            process, _ = await asyncio.to_thread(listener.accept)
            with process:
                process.sendall(wire.answer({"allocation": "a", "user": "alice"}) + wire.refusal(_REVOKED))
            await asyncio.wait_for(opening, 300)
        with far, far.makefile("rb") as lines:
            return await asyncio.to_thread(lines.readlines)

    reply, cause = asyncio.run(check())
    assert wire.result(reply)["allocation"] == "a"
    assert cause == wire.refusal(_REVOKED)
    assert not door._sessions


def test_a_session_that_waits_for_its_byte_rate_does_not_count_as_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 7.0)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    door = RemoteDoor(RemoteSettings.model_validate({"idle": "5s"}), tls, Path("unused"))

    async def check() -> None:
        near, far = socket.socketpair()
        with near, far:
            door._sessions["one"] = session = _session("one", near)
            session.rate = Rate(per_second=1.0, burst=1.0)
            stream = asyncio.ensure_future(door._meter(session)(100))
            await asyncio.sleep(0)
            door._end_late(7.0 + 99.0)
            assert door._sessions
            door._end_late(7.0 + 99.0 + 5.0)
            assert not door._sessions
            stream.cancel()

    asyncio.run(check())


def test_a_session_notices_a_release_soon_after_vgpud_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_LOOK_SECONDS", 0.01)
    answers = [ErrorCode.DEADLINE, ErrorCode.UNREACHABLE, ErrorCode.STOPPING, ErrorCode.NO_SUCH_ALLOCATION]
    goes_on = threading.Event()

    class Vgpud:
        connections = 1

        def get_allocation(self, _: str) -> None:
            goes_on.wait(300)
            raise VgpuError(answers.pop(0), "said", "")

        def close(self) -> None:
            self.connections += 1

    vgpud = Vgpud()
    with _looking(cast("Client", vgpud), "a") as released:
        assert not released.is_set()  # the other thread has not seen the release yet
        goes_on.set()
        assert released.wait(300)
    assert vgpud.connections == 4
    assert not answers


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "this node makes no remote slices"),
        ({"server": "/no/server"}, "the engine's server /no/server is not a program"),
    ],
    ids=["no server", "missing"],
)
def test_a_session_without_a_program_for_its_server_is_refused_and_its_slice_released(
    settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    released = []

    class Vgpud:
        def release(self, name: str, force: bool) -> None:
            released.append((name, force))

    remote = RemoteSettings.model_validate(settings)
    monkeypatch.setattr(session_module, "_configured", lambda: (Settings(run_dir=tmp_path), remote))
    monkeypatch.setattr(session_module, "_with_account", lambda grant, _: grant)
    monkeypatch.setattr(session_module, "_allocate", lambda *_: vgpud_pb2.Allocation(id="made"))
    monkeypatch.setattr(session_module, "_leave_network", lambda: None)
    monkeypatch.setattr(session_module, "Client", lambda *_: nullcontext(Vgpud()))
    near, far = socket.socketpair()
    with near, far, pytest.raises(VgpuError, match=sentence):
        session_module.serve(near, wire.Open(), ALICE, Grants(tmp_path / "grants.json"))
    assert released == ([("made", True)] if settings else [])


def _session(name: str, backend: socket.socket) -> Session:
    return Session(
        id=name,
        key="key",
        user="alice",
        address="2001:db8:7::1",
        network="2001:db8:7::/64",
        allocation="a",
        backend=backend,
        rate=None,
        used=7.0,
        control_ended=None,
    )


def test_the_door_refuses_versions_of_tls_below_1_3() -> None:
    async def check() -> None:
        tls = context_of(CERTIFICATES / "door.pem", CERTIFICATES / "door.key", None)
        client = ssl.create_default_context(cafile=CERTIFICATES / "door.pem")
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client, server_hostname="localhost"
            )
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            writer.transport.abort()
            client.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")

    asyncio.run(check())


def test_the_door_resumes_no_tls_session_whose_certificate_may_have_expired_since() -> None:
    tls = context_of(CERTIFICATES / "door.pem", CERTIFICATES / "door.key", CERTIFICATES / "authority.pem")
    client = ssl.create_default_context(cafile=CERTIFICATES / "door.pem")
    client.load_cert_chain(CERTIFICATES / "client.pem", CERTIFICATES / "client.key")

    def called(port: int, before: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            client.wrap_socket(plain, server_hostname="localhost", session=before) as made,
        ):
            assert made.recv(1) == b"x"  # the server sends session tickets before its first byte
            return made.session, made.session_reused

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            session, _ = await asyncio.to_thread(called, port, None)
            assert session is None or not session.has_ticket
            assert await asyncio.to_thread(called, port, session) == (session, False)

    asyncio.run(check())


def test_attempts_to_open_a_session_are_bounded_by_network_and_by_token() -> None:
    door = RemoteDoor(RemoteSettings(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path("unused"))

    def opening(token: str, address: str) -> AbstractContextManager[None]:
        return door._counted(wire.Open(token=token, address=address))

    with ExitStack() as held:
        for number in range(8):  # eight tokens of one /64
            held.enter_context(opening(f"a{number}", f"2001:db8::{number}"))
        with pytest.raises(VgpuError, match="8 sessions are being opened from 2001:db8::/64"):
            held.enter_context(opening("b", "2001:db8::ffff"))
        for number in range(4):  # four networks with one token
            held.enter_context(opening("c", f"192.0.2.{number}"))
        with pytest.raises(VgpuError, match="4 sessions are being opened by this token"):
            held.enter_context(opening("c", "192.0.2.9"))
        held.enter_context(opening("d", "192.0.2.9"))
    for number in range(8):
        with opening("c", f"2001:db8::{number}"):
            pass


def test_a_label_of_more_than_128_bytes_is_refused() -> None:
    assert wire.decode(wire.encode(wire.Open(label="x" * 128)))
    with pytest.raises(VgpuError, match="label is not a text of at most 128 printable bytes"):
        wire.decode(wire.encode(wire.Open(label="x" * 129)))


@pytest.mark.parametrize(
    ("bounds", "wanted", "sentence"),
    [
        ({"max_memory_bytes": 3 * GIB}, Sizes(2 * GIB, None), "would hold 4GiB, and may hold 3GiB"),
        ({"max_memory_bytes": 3 * GIB}, Sizes(None, 10.0), "asks for no --memory, and may hold 3GiB"),
        ({"max_cores_percent": 50.0}, Sizes(GIB, 31.0), "would hold 51% of a device, and may hold 50%"),
        ({"max_cores_percent": 50.0}, Sizes(GIB, None), "would hold 120% of a device"),
        ({"max_sessions": 1}, Sizes(GIB, 1.0), "has 1 session, and may have 1"),
        ({}, Sizes(None, None), ""),
        ({"max_memory_bytes": 4 * GIB, "max_cores_percent": 50.0}, Sizes(2 * GIB, 30.0), ""),
    ],
)
def test_a_grant_bounds_the_sum_of_the_slices_that_its_sessions_hold(
    bounds: dict[str, Any], wanted: Sizes, sentence: str
) -> None:
    grant = replace(ALICE, **bounds)
    try:
        check_quota(grant, wanted, [Sizes(2 * GIB, 20.0)])
        said = ""
    except VgpuError as error:
        assert error.code is ErrorCode.OVER_QUOTA
        said = error.sentence
    assert (sentence in said) and bool(sentence) == bool(said)


def test_the_file_of_grants_contains_no_token_secret_and_others_cannot_read_it(tmp_path: Path) -> None:
    grants = Grants(tmp_path / "remote" / "grants.json")
    grant, token = grants.add(ALICE, "f" * 64)
    secret = token.split(".")[1]
    assert secret not in (tmp_path / "remote" / "grants.json").read_text()
    assert (tmp_path / "remote" / "grants.json").stat().st_mode & 0o777 == 0o600
    assert grants.find(token, "") == grant
    # only the client checks the certificate's digest in the token
    assert grants.find(token.replace("f" * 64, "e" * 64), "") == grant


def test_an_expired_or_revoked_grant_is_not_found(tmp_path: Path) -> None:
    grants = Grants(tmp_path / "grants.json")
    _, expired = grants.add(replace(ALICE, expires=int(time.time())), "")
    kept, token = grants.add(ALICE, "")
    by_certificate, none = grants.add(replace(ALICE, user="bob", certificate_sha256="a" * 64), "")
    assert none == ""
    assert grants.find("", "a" * 64) == by_certificate
    for wrong, certificate in (
        (expired, ""),
        ("", ""),
        (f"{kept.id}..", ""),
        ("", "b" * 64),
        (token, "a" * 64),
    ):
        if wrong == token:
            assert grants.find(wrong, certificate) == kept  # a token has precedence over a certificate
            continue
        with pytest.raises(VgpuError, match="revoked or has expired"):
            grants.find(wrong, certificate)
    assert [one.id for one in grants.revoke(by_certificate.id)] == [by_certificate.id]
    with pytest.raises(VgpuError, match="revoked or has expired"):
        grants.find("", "a" * 64)
    assert len(grants.revoke(kept.id, expired.partition(".")[0])) == 2
    assert grants.all() == ()


def test_a_session_whose_grant_is_revoked_while_it_allocates_is_refused_and_its_slice_released(
    tmp_path: Path,
) -> None:
    grants = Grants(tmp_path / "grants.json")
    grant, token = grants.add(ALICE, "")
    released = []

    class Vgpud:
        def list_allocations(self) -> vgpud_pb2.ListAllocationsReply:
            return vgpud_pb2.ListAllocationsReply()

        def plan(self, _: vgpud_pb2.AllocateRequest) -> vgpud_pb2.PlanReply:
            return vgpud_pb2.PlanReply()

        def allocate(self, _: vgpud_pb2.AllocateRequest) -> vgpud_pb2.Allocation:
            work = threading.Thread(target=grants.revoke, args=(grant.id,), daemon=True)
            work.start()
            work.join(60)  # the revocation does not wait for the session
            assert grants.all() == ()
            return vgpud_pb2.Allocation(id="made")

        def release(self, name: str, force: bool) -> None:
            released.append((name, force))

    with pytest.raises(VgpuError, match="the grant was revoked or has expired"):
        _allocate(cast("Client", Vgpud()), wire.Open(token=token), grant, grants)
    assert released == [("made", True)]


def test_a_grant_whose_slice_takes_long_to_make_delays_only_its_own_sessions(tmp_path: Path) -> None:
    grants = Grants(tmp_path / "grants.json")
    (slow, _), (other, _) = grants.add(ALICE, ""), grants.add(replace(ALICE, user="bob"), "")
    count = (
        "import sys, pathlib; from vgpud.remote.grants import Grants\n"
        "with Grants(pathlib.Path(sys.argv[1])).counting(sys.argv[2]): print('counts', flush=True)"
    )

    def session_of(grant: Grant) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", count, str(tmp_path / "grants.json"), grant.id]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    with grants.counting(slow.id):
        waits, begins = session_of(slow), session_of(other)
        try:
            assert begins.communicate(timeout=300)[0] == "counts\n"
            assert waits.poll() is None
        except BaseException:
            waits.kill()
            begins.kill()
            raise
    assert waits.communicate(timeout=300)[0] == "counts\n"


@pytest.mark.parametrize(
    "damage",
    [
        '[{"id": 1',
        "{}1",
        "[7]",
        json.dumps([{**asdict(ALICE), "uid": "0"}]),
        json.dumps([{**asdict(ALICE), "expires": "never"}]),
        json.dumps([{**asdict(ALICE), "secret_sha256": "\u00e4" * 64}]),
        json.dumps([{**asdict(ALICE), "certificate_sha256": "ab"}]),
        "{}",
        "[" * 100_000,
    ],
    ids=["cut", "rest", "number", "uid", "expiry", "secret", "certificate", "object", "depth"],
)
def test_a_damaged_file_of_grants_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    (tmp_path / "grants.json").write_text(damage)
    with pytest.raises(VgpuError, match=r"grants\.json cannot be used") as raised:
        Grants(tmp_path / "grants.json").add(ALICE, "")
    assert raised.value.code is ErrorCode.LEDGER_FAILED
    assert (tmp_path / "grants.json").read_text() == damage


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("gpu1", ("gpu1", 14843)),
        ("gpu1:99", ("gpu1", 99)),
        ("[::1]", ("::1", 14843)),
        ("[fe80::1]:7", ("fe80::1", 7)),
    ],
)
def test_an_address_without_a_port_has_port_14843(address: str, wanted: tuple[str, int]) -> None:
    assert Place(address).host_and_port == wanted


@pytest.mark.parametrize("host", ["unknown.host", "gpu..1"])
def test_the_error_for_a_host_without_an_address_differs_from_that_for_a_door_that_is_down(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    known = socket.getaddrinfo

    def local(name: str, *rest: Any) -> Any:
        if name == "unknown.host":  # no name leaves this machine
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", local)
    with pytest.raises(VgpuError, match=f"{host} port 14843 failed") as raised:
        asyncio.run(status(Place(host, token="a.b.c")))
    assert "this machine does not know the name" in raised.value.hint


def test_the_error_for_a_door_of_another_name_differs_from_that_for_an_unknown_authority() -> None:
    async def asked(authority: str) -> VgpuError:
        tls = context_of(CERTIFICATES / "door.pem", CERTIFICATES / "door.key", None)
        async with await asyncio.start_server(lambda *_: None, "127.0.0.9", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(VgpuError) as raised:
                await status(Place(f"127.0.0.9:{port}", authority=CERTIFICATES / authority))
        return raised.value

    named = asyncio.run(asked("door.pem"))
    assert "its certificate is refused: ip address mismatch" in named.sentence
    assert named.hint == "call the door by a name or address that its certificate has (subjectAltName)"
    foreign = asyncio.run(asked("foreign.pem"))
    assert "its certificate is refused: self-signed certificate" in foreign.sentence
    assert "or the authority that has signed it, by --ca" in foreign.hint


def _of_door(
    *lines: bytes, use: Callable[[Place], Coroutine[Any, Any, _T]], heard: list[bytes] | None = None
) -> _T:
    """Returns the result of `use`, for a door that answers each call with these lines. The calls are added to
    `heard`.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        if heard is not None:
            heard.append(asked)
        writer.writelines(lines)
        await reader.read()
        writer.close()

    async def check() -> _T:
        tls = context_of(CERTIFICATES / "door.pem", CERTIFICATES / "door.key", None)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        pin = fingerprint_of(CERTIFICATES / "door.pem")
        try:
            return await asyncio.wait_for(use(Place(f"127.0.0.1:{port}", f"a.b.{pin}")), 300)
        finally:
            server.close()

    return asyncio.run(check())


_OPENED = {"session": "one", "key": "key", "engine": "lupine", "grace": 30.0}


@pytest.mark.parametrize(
    "changed",
    [
        *({"grace": value} for value in (None, "thirty", [30], -1, float("nan"), 10**400)),
        *({name: value} for name in ("session", "key", "engine") for value in (None, 7)),
    ],
    ids=lambda changed: " ".join(f"{name}={str(value)[:9]}" for name, value in changed.items()),
)
def test_a_reply_to_open_that_lacks_fields_of_the_client_is_refused(changed: dict[str, Any]) -> None:
    made = {name: value for name, value in {**_OPENED, **changed}.items() if value is not None}
    with pytest.raises(VgpuError, match="the reply to open") as raised:
        _of_door(wire.answer(made), use=lambda place: Tunnel(place, wire.Open()).open())
    assert raised.value.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize("listens", [False, True])
def test_a_door_that_does_not_answer_is_reported(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
        if listens:
            monkeypatch.setattr("vgpud.remote.client._CONNECT_SECONDS", 0.1)
            door.listen()
        with pytest.raises(VgpuError) as raised:
            asyncio.run(status(Place(f"127.0.0.1:{port}", "a.b.c")))
    why = "no answer in time" if listens else "connection refused"
    assert raised.value.sentence == f"the call to the door 127.0.0.1 port {port} failed: {why}"
    assert raised.value.hint == "check that vgpud-remote.service runs there, and that the port is open"


def test_a_client_starts_no_program_for_an_engine_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vgpud.remote.client._END_SECONDS", 0)
    program = ["touch", str(tmp_path / "started")]
    with pytest.raises(VgpuError, match="the node has the engine 'later', which this client does not know"):
        _of_door(
            wire.answer({**_OPENED, "engine": "later"}),
            use=lambda place: run(place, wire.Open(), "", program, {}, lambda _: None),
        )
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("asked", "code", "calls"),
    [
        (wire.Attach("one", "key"), ErrorCode.UNREACHABLE, 10),
        (wire.Attach("one", "key"), ErrorCode.NO_SUCH_CLIENT, 1),
        (wire.Resume("one", "key"), ErrorCode.UNREACHABLE, 1),
        (wire.Open(), ErrorCode.UNREACHABLE, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_only_an_attach_that_the_door_refuses_as_unreachable_is_made_again_up_to_ten_times(
    asked: wire.Call, code: ErrorCode, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgpud.remote.client._AGAIN_SECONDS", 0)
    refused, heard = VgpuError(code, "the engine's server accepts no connection", "try again"), list[bytes]()
    with pytest.raises(VgpuError) as raised:
        _of_door(wire.refusal(refused), use=lambda place: call(place, asked), heard=heard)
    assert str(raised.value) == str(refused)
    assert [wire.decode(line) for line in heard] == [asked] * calls


def test_only_an_error_on_the_control_connection_is_the_cause_of_an_end() -> None:
    async def ended(place: Place) -> VgpuError | None:
        tunnel = Tunnel(place, wire.Open())
        await tunnel.open()
        cause = await tunnel.ended
        await tunnel.close()
        return cause

    lines = wire.answer(_OPENED), b'{"later":1}\n', b"later\n", wire.answer({}), wire.refusal(_REVOKED)
    cause = _of_door(*lines, use=ended)
    assert cause is not None
    assert cause.sentence == _REVOKED.sentence


_ROW = {"allocation": "9983c04ad08f", "address": "::1", "connections": 1, "bytes": 7, "connected": True}


def test_the_client_accepts_the_list_of_sessions_that_a_door_sends() -> None:
    reply = {"user": "alice", "sessions": [_ROW]}
    assert _of_door(wire.answer(reply), use=status) == reply


@pytest.mark.parametrize(
    "sessions",
    [
        *([{**_ROW, "allocation": value}] for value in ("a\x1b[2J", "a\n", "", None, ["a"])),
        [{**_ROW, "bytes": "many"}],
        [{"allocation": "a"}],
        ["a"],
        {"a": 1},
        None,
    ],
    ids=repr,
)
def test_a_list_of_sessions_whose_ids_are_not_hexadecimal_is_refused(sessions: Any) -> None:
    with pytest.raises(VgpuError, match="the reply to status is not a list of sessions") as raised:
        _of_door(wire.answer({"user": "alice", "sessions": sessions}), use=status)
    assert raised.value.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            ("client.pem", "door.key", "door.pem"),
            "the key in {door.key} is not that of the certificate in {client.pem}",
        ),
        (("client.pem", "none.key", "door.pem"), "cannot read {none.key}: no such file or directory"),
        (("client.pem", "client.pem", "door.pem"), "{client.pem} has no private key that can be used"),
        (("client.key", "client.key", "door.pem"), "{client.key} is a private key"),
        (("client.pem", "client.key", "door.key"), "{door.key} has no certificate that can be used"),
        (("client.pem", "client.key", "none.pem"), "cannot read {none.pem}: no such file or directory"),
    ],
)
def test_the_error_names_a_certificate_file_that_tls_cannot_use(
    names: tuple[str, str, str], sentence: str
) -> None:
    certificate, key, authority = (CERTIFICATES / name for name in names)
    for name in names:
        sentence = sentence.replace(f"{{{name}}}", str(CERTIFICATES / name))
    with pytest.raises(VgpuError) as raised:
        Place("gpu1", certificate=certificate, key=key, authority=authority).tls()
    assert raised.value.sentence == sentence
    with pytest.raises(VgpuError) as raised:
        context_of(certificate, key, authority)
    # of a missing file the door says which of its files it is
    missing = next((name for name in names if name.startswith("none")), None)
    if missing is None:
        assert raised.value.sentence == sentence
    else:
        assert missing in raised.value.sentence
        assert raised.value.sentence.endswith(" cannot be read: no such file or directory")


@pytest.mark.parametrize("lost", [0, 9, 60], ids=["grant", "secret", "digest"])
def test_a_token_that_lacks_a_character_is_refused(tmp_path: Path, lost: int) -> None:
    _, token = Grants(tmp_path / "grants.json").add(ALICE, "f" * 64)
    assert _checked(f"{token}\n", "FILE") == token
    with pytest.raises(VgpuError, match="the token of FILE is not whole: its parts have") as raised:
        _checked(token[:lost] + token[lost + 1 :], "FILE")
    assert raised.value.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize("address", ["", ":1", "gpu1:x", "gpu1:0", "gpu1:65536"])
def test_an_invalid_host_is_refused(address: str) -> None:
    with pytest.raises(VgpuError, match="is not a host with a port"):
        Place(address)


@pytest.mark.parametrize("address", ["::1", "2001:db8::7"])
def test_an_ipv6_address_without_brackets_is_refused_with_a_hint(address: str) -> None:
    with pytest.raises(VgpuError, match="is not a host with a port") as raised:
        Place(address)
    assert raised.value.hint == f"write [{address}]"


def test_an_empty_token_is_reported_as_empty() -> None:
    with pytest.raises(VgpuError, match="FILE is empty"):
        _checked("\n", "FILE")


def test_the_environment_of_the_remote_engine_keeps_the_programs_library_path() -> None:
    before = {"LD_LIBRARY_PATH": "/opt/other"}
    made = ENGINES["lupine"].client_environment(5, "/opt/lupine/lib", before)
    assert made == {"LUPINE_SERVER": "127.0.0.1:5", "LD_LIBRARY_PATH": "/opt/lupine/lib:/opt/other"}
