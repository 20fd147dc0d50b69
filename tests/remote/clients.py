"""Clients of remote slices, their connections, and the processes of the engine's server."""

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

from tests.demo.node import Command
from tests.remote.node import Client, RemoteNode


def say(client: Command, words: str) -> str:
    """Sends a line to the client's program, and returns the line that the program prints."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(words + "\n")
    client.stdin.flush()
    return client.stdout.readline().strip()


def opened(remote: RemoteNode, token: str, *options: str) -> Client:
    """Starts a client, and waits until its program has a connection to the engine."""
    client = remote.client(token, *options)
    answer = say(client, "echo hello")
    assert answer == "hello", (answer, "" if answer else ended(client), remote.log.read_text())
    return client


def ended(client: Client) -> str:
    _, errors = client.communicate(timeout=300)
    return errors


def engine_of(remote: RemoteNode) -> list[int]:
    """The processes of the engine's server on this node."""
    program = str(remote.node.folder / "engine.py").encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if program in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def connections_of(pid: int, port: int) -> list[socket.socket]:
    """Copies of the sockets by which a process is connected to this port."""
    pidfd = os.pidfd_open(pid)
    found = []
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if not str(name.readlink()).startswith("socket:"):
                continue
            made = socket.socket(fileno=_taken(pidfd, int(name.name)))
            if made.family == socket.AF_INET and made.getpeername()[1] == port:
                found.append(made)
            else:
                made.close()
    os.close(pidfd)
    return found


def _taken(pidfd: int, number: int) -> int:
    """pidfd_getfd(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = int(libc.syscall(438, pidfd, number, 0))
    if made < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return made
