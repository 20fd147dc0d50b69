"""The messages on runtime.sock, as native/runtime/door.h defines them."""

import asyncio
import os
import socket
import struct
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum

from vgpud import clock
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.shares import Shares
from vgpud.pace import Pace
from vgpud.serve.peers import PassedProcess, passed_process
from vgpud.untrusted import has_descriptors, start_helper

MAGIC = 0x54524756
REQUEST = struct.Struct("=5I")
REPLY = struct.Struct("=3I")
FOR_PARENT = 1
MAX_ID_BYTES = 4096
MAX_BODY_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 18
# maximum of receivers that run: in all, of one user, and of root in addition
_receivers = Shares(64, 8, 64)


class Verb(IntEnum):
    PREPARE = 1
    BIND = 2
    END = 3


class Status(IntEnum):
    DONE = 0
    UNCHANGED = 1
    REFUSED = 2


@dataclass(frozen=True)
class Message:
    """A message. `process` is the process of the passed pidfd; None without a pidfd, or if the process has
    ended. `name` is the engine's name of the container; empty if it is not known.
    """

    verb: Verb
    for_parent: bool
    id: str
    body: bytes
    process: PassedProcess | None
    name: str = ""


async def receive(connection: socket.socket, user: int, pace: Pace | None = None) -> Message:
    """Receives a message of `user`. If a descriptor comes with it, the time of the receiver process is
    charged to `pace`. Raises VgpuError(BAD_REQUEST or NO_CAPACITY), or OSError if the peer disconnects.
    """
    head, process = await _head(connection, user, pace)
    magic, verb, flags, id_length, body_length = REQUEST.unpack(head)
    if magic != MAGIC or verb not in set(Verb) or id_length > MAX_ID_BYTES or body_length > MAX_BODY_BYTES:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"a message of verb {verb} with {body_length} bytes is not one that vgpud accepts",
            "use vgpu-runtime and vgpu-hook of vgpud's own version",
        )
    id_and_name = (await _exactly(connection, id_length)).decode(errors="replace")
    body = await _exactly(connection, body_length)
    named, _, name = id_and_name.partition("/")
    return Message(Verb(verb), bool(flags & FOR_PARENT), named, body, process, name)


async def _head(
    connection: socket.socket, user: int, pace: Pace | None
) -> tuple[bytes, PassedProcess | None]:
    await _readable(connection)
    if not has_descriptors(connection, REQUEST.size):
        return await _exactly(connection, REQUEST.size), None
    async with nullcontext() if pace is None else pace.turn(user):
        began = clock.now()
        try:
            receiver, answering = _receiver(connection, user)
        finally:
            if pace is not None:
                pace.took(clock.now() - began)
    # The caller decides how long this receive takes, so it is not part of the turn and not charged to `pace`.
    with answering:
        try:
            await _readable(answering)
            head, pidfds, _, _ = socket.recv_fds(answering, REQUEST.size, 1, socket.MSG_CMSG_CLOEXEC)
        finally:
            receiver.kill()  # the receiver may wait in the close of a socket that lingers
    process = None
    for pidfd in pidfds:
        process = passed_process(pidfd)
        os.close(pidfd)
    if not head:
        raise ConnectionAbortedError("the peer passed more than one descriptor")
    return head + await _exactly(connection, REQUEST.size - len(head)), process


def _receiver(connection: socket.socket, user: int) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Starts a process that receives a message with a descriptor, whose close may wait for the peer
    (native/arbiter/receiver.h). Returns it, and the socket on which it passes on the bytes, and the
    descriptor if that is a pidfd. Raises OSError, or VgpuError(NO_CAPACITY) if too many run.
    """
    if not _receivers.take(user):
        have = f"{_receivers.taken_by(user)} messages with descriptors being received, of {_receivers.taken}"
        raise VgpuError(ErrorCode.NO_CAPACITY, f"uid {user} has {have} in all", "try again in a moment")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    words = ["vgpu-receiver", "--receive", str(REQUEST.size)]
    try:
        with theirs:
            process = start_helper(words, connection.fileno(), theirs.fileno())
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        ours.close()
        _receivers.give_back(user)
        raise
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.wait()
        _receivers.give_back(user)

    loop.add_reader(pidfd, ended)
    return process, ours


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


async def _exactly(connection: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts = []
    while length > 0:
        part = await loop.sock_recv(connection, min(length, _CHUNK_BYTES))
        if not part:
            raise ConnectionResetError("the peer went away within a message")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


async def reply(connection: socket.socket, status: Status, body: bytes = b"") -> None:
    """Sends a reply. Raises OSError if the peer has disconnected."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, packed(status, body))


def packed(status: Status, body: bytes) -> bytes:
    return REPLY.pack(MAGIC, status, len(body)) + body
