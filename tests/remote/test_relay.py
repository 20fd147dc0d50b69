"""The relay between two connections, and the end of each direction."""

import asyncio
import os
import socket
import subprocess
from asyncio import StreamReader, StreamWriter

import pytest

from tests import clock
from tests.lease.conftest import eventually as until
from tests.ports import free_port
from vgpud.model.errors import VgpuError
from vgpud.remote.client import _uid_of
from vgpud.remote.engine import ENGINES, Lupine
from vgpud.remote.relay import finish, relay
from vgpud.remote.session import _wait_ready


async def _pair() -> tuple[tuple[StreamReader, StreamWriter], socket.socket]:
    """A connection of the relay, and the socket at its other end."""
    near, peer = socket.socketpair()
    peer.setblocking(False)
    return await asyncio.open_connection(sock=near), peer


async def _received(peer: socket.socket, size: int) -> bytes:
    with clock.outside():
        return await asyncio.get_running_loop().sock_recv(peer, size)


def test_the_end_of_one_direction_is_relayed_and_the_answer_still_comes_back() -> None:
    async def check() -> None:
        (near, program), (far, engine) = await _pair(), await _pair()
        client, door = socket.socketpair()  # a stand-in for TLS, where one direction alone cannot be closed
        ends = [asyncio.open_connection(sock=one) for one in (client, door)]
        work = [
            asyncio.ensure_future(relay(one, await end)) for one, end in zip((near, far), ends, strict=True)
        ]
        loop = asyncio.get_running_loop()
        with program, engine:
            program.sendall(b"ask")
            program.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(engine, 100) == b"ask"
            assert await loop.sock_recv(engine, 100) == b""
            engine.sendall(b"answer")
            engine.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(program, 100) == b"answer"
            assert await loop.sock_recv(program, 100) == b""
            await asyncio.gather(*work)

    asyncio.run(check())


def test_a_program_that_has_ended_its_side_may_wait_a_day_for_the_answer() -> None:
    async def check() -> None:
        (near, program), (far, door) = await _pair(), await _pair()
        work = asyncio.ensure_future(relay(near, far))
        with program, door:
            program.shutdown(socket.SHUT_WR)
            assert await _received(door, 4) == bytes(4)
            await clock.passed(86400.0)
            door.sendall(b"\0\0\0\6answer\0\0\0\0")
            assert await _received(program, 6) == b"answer"
            await work

    clock.run(check())


def test_a_relay_with_one_ended_direction_ends_when_a_connection_is_lost() -> None:
    async def check() -> None:
        (near, program), (far, door) = await _pair(), await _pair()
        with program:
            door.sendall(bytes(4))
            work = asyncio.ensure_future(relay(near, far))
            assert await _received(program, 1) == b""
            door.close()
            await work  # the relay ends although the program keeps its connection

    clock.run(check())


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\5abc"], ids=["none", "length", "piece"])
def test_a_lost_connection_between_client_and_door_closes_the_programs_connection(sent: bytes) -> None:
    async def check() -> None:
        (near, program), (far, door) = await _pair(), await _pair()
        with program:
            door.sendall(sent)
            door.close()
            await relay(near, far)
            assert (await asyncio.get_running_loop().sock_recv(program, 100)) in (b"", b"abc")

    asyncio.run(check())


def test_the_owner_of_a_local_connection_is_known_until_the_program_closes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as made:
        made.connect(listener.getsockname())
        ports = made.getsockname()[1], listener.getsockname()[1]
        accepted, _ = listener.accept()
        with accepted:
            until(lambda: _uid_of(*ports) == os.getuid())
            made.shutdown(socket.SHUT_WR)
            until(lambda: _uid_of(*ports) == os.getuid())
            made.close()
            assert _uid_of(*ports) is None


def test_a_session_stops_waiting_for_its_server_when_the_door_has_gone() -> None:
    door, session = socket.socketpair()
    door.close()
    with session, subprocess.Popen(["sleep", "1000"]) as server:
        try:
            with pytest.raises(ConnectionResetError, match="the door has left"):
                _wait_ready(server, ENGINES["lupine"], session)
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("program", "sentence"),
    [("false", "the engine's server ended with 1 before it listened"), ("cat", "does not listen within 0 s")],
)
def test_a_session_says_that_its_server_does_not_listen(
    program: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgpud.remote.session._READY_SECONDS", 0)

    class NoServer(Lupine):
        port = free_port()

    door, session = socket.socketpair()
    with door, session, subprocess.Popen([program], stdin=subprocess.PIPE) as server:
        if program == "false":
            server.wait()
        with pytest.raises(VgpuError, match=sentence):
            _wait_ready(server, NoServer(), session)


def test_a_peer_that_reads_nothing_does_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpud.remote.relay._FLUSH_SECONDS", 0.05)

    async def check() -> None:
        (_, writer), peer = await _pair()
        with peer:
            writer.write(bytes(16 << 20))
            await finish(writer)
            peer.settimeout(300)
            with peer.makefile("rb") as lines:
                read = await asyncio.to_thread(lines.read)
            assert len(read) < 16 << 20  # the rest was dropped

    asyncio.run(check())
