"""Closes a silent connection that keeps a control daemon from answering.

NVIDIA's daemon reads from one connection at a time and waits for it: a process that connects and sends
nothing blocks the daemon for all users (measured on 535 and 550). Ending the daemon would end all its
clients. The processes that hold the connection may be innocent, because a descriptor can be passed to other
processes, so vgpud signals none of them. Instead it shuts the daemon's end of the connection down through a
copy of the daemon's descriptor (pidfd_getfd(2)). The daemon then reads an end of file and continues.
"""

import os
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vgpud.proc import PidFd, Running, open_pidfd, session_of

# Numbers of the system calls read, recvfrom and recvmsg, in asm/unistd.h of x86-64 and in
# asm-generic/unistd.h (aarch64).
_READING = frozenset({0, 45, 47, 63, 207, 212})
_UCRED = struct.Struct("=iII")  # struct ucred of unix(7): pid, uid, gid
_NEXT_SECONDS = 0.01  # time that the daemon needs to turn to its next connection


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, as the kernel recorded it at connect(2). Pid 0 means that it is in another
    pid namespace.

    The pid is for the log only, because it may have been reused.
    """

    pid: int
    uid: int


def cut_silent(daemon: Running, seconds: float) -> Counter[Peer]:
    """Closes the connections for which the daemon waits, one after the other, for at most `seconds`.

    Returns the number of closed connections by peer. The result is empty if the daemon does not wait for a
    client, or if the kernel forbids the inspection (Yama's ptrace_scope 3).
    """
    found: Counter[Peer] = Counter()
    pidfd = open_pidfd(daemon)
    if pidfd is None:
        return found
    until = time.monotonic() + seconds
    with pidfd:
        while (peer := _cut(daemon.pid, pidfd)) is not None:
            found[peer] += 1
            if time.monotonic() >= until:
                break
            time.sleep(_NEXT_SECONDS)
    return found


def _cut(pid: int, pidfd: PidFd) -> Peer | None:
    waits = _waits_on(pid)
    if waits is None:
        return None
    try:
        with socket.socket(fileno=pidfd.copy_of(waits)) as connection:
            peer = _peer(connection)
            # The daemon was blocked in a read of this descriptor before the copy was made, and still is. So
            # the copy is of the silent connection, and not of a later one with the same number.
            if _is_own(peer.pid, pid) or _waits_on(pid) != waits or not _is_copy(connection, pid, waits):
                return None
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the descriptor is no socket, or is closed
        return None
    return peer


def _waits_on(pid: int) -> int | None:
    """The descriptor from which the process is reading now (proc(5), /proc/PID/syscall)."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
        return int(words[1], 16) if len(words) > 1 and int(words[0]) in _READING else None
    except (OSError, ValueError):
        return None


def _is_copy(connection: socket.socket, pid: int, descriptor: int) -> bool:
    theirs = os.stat(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH116 - follows the link to the socket itself
    ours = os.fstat(connection.fileno())
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def _peer(connection: socket.socket) -> Peer:
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(said)
    return Peer(pid, uid)


def _is_own(pid: int, daemon_pid: int) -> bool:
    """Is this process the daemon itself or one of its servers? Those are in the daemon's session (measured on
    580).
    """
    session = session_of(daemon_pid)
    return session is not None and session_of(pid) == session
