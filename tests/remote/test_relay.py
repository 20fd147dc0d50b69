"""The relay between two connections, and the ends of each."""

import asyncio
import socket
import subprocess
from asyncio import StreamReader, StreamWriter

import pytest

from vgpud.model.errors import VgpuError
from vgpud.remote import relay as relays
from vgpud.remote.engine import ENGINES
from vgpud.remote.relay import relay
from vgpud.remote.session import _wait_ready


async def _pair() -> tuple[tuple[StreamReader, StreamWriter], socket.socket]:
    """A connection of the relay, and its peer."""
    near, peer = socket.socketpair()
    peer.setblocking(False)
    return await asyncio.open_connection(sock=near), peer


def test_the_end_of_one_side_reaches_the_other_and_its_last_pieces_come_back() -> None:
    async def check() -> None:
        (near, program), (far, engine) = await _pair(), await _pair()
        work = asyncio.ensure_future(relay(near, far))
        loop = asyncio.get_running_loop()
        with program, engine:
            program.sendall(b"ask")
            program.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(engine, 100) == b"ask"
            assert await loop.sock_recv(engine, 100) == b""
            engine.sendall(b"answer")
            engine.close()
            assert await loop.sock_recv(program, 100) == b"answer"
            assert await loop.sock_recv(program, 100) == b""
            await work

    asyncio.run(check())


def test_a_side_that_does_not_end_after_the_other_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        (near, program), (far, engine) = await _pair(), await _pair()
        with engine:
            program.close()
            await relay(near, far)
            assert await asyncio.get_running_loop().sock_recv(engine, 100) == b""

    monkeypatch.setattr(relays, "_REST_SECONDS", 0.0)
    asyncio.run(check())


def test_a_session_does_not_wait_for_its_server_when_the_door_has_left() -> None:
    door, session = socket.socketpair()
    door.close()
    with session, subprocess.Popen(["sleep", "1000"]) as server:
        try:
            with pytest.raises(ConnectionResetError, match="the door has left"):
                _wait_ready(server, ENGINES["lupine"], session)
        finally:
            server.kill()


def test_a_session_says_that_its_server_has_ended() -> None:
    door, session = socket.socketpair()
    with door, session, subprocess.Popen(["false"]) as server:
        server.wait()
        with pytest.raises(VgpuError, match="the engine's server ended with 1 before it listened"):
            _wait_ready(server, ENGINES["lupine"], session)
