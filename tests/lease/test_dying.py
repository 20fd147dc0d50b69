"""Memory of a dying process stays charged until the process is gone, although its lock is released earlier.

The kernel releases a process's locks when it closes the process's files. NVIDIA's files are closed later, so
the memory of the device becomes free last. If the arbiter gave the memory back with the lock, another process
could get it too early. The release of an inotify file takes some milliseconds, so a process with several of
them dies slowly.
"""

import fcntl
import os
import select
import socket
import struct
import subprocess
import time
from pathlib import Path

from tests.lease.conftest import Node, eventually, lease_used
from tests.lease.test_lifecycle import OWN, go_on, python, told
from tests.native.harness import CONTEXT_BYTES, GIB, MIB

SLOW_TO_GO = """
libc = ctypes.CDLL(None)
for _ in range(24):
    file = libc.inotify_init()
    assert file < 0 or libc.inotify_add_watch(file, b"/", 1) >= 0
say("ready")
"""
PROCESSES = 20
FIRST_SLOT = 128 + 16 * 64  # offset of the first process's slot in `usage`, native/common/lease.h


def slow_to_go(node: Node, lease: Path) -> "subprocess.Popen[str]":
    process = python(node, lease, SLOW_TO_GO)
    told(process, "ready")
    assert lease_used(lease) == OWN
    return process


def locked(usage: int) -> bool:
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, FIRST_SLOT, 1, 0)
    return bool(struct.unpack("hhqqi4x", fcntl.fcntl(usage, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)


def gone(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def make_it_look(lease: Path) -> None:
    """Makes the arbiter check which processes have ended, by opening and closing a connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(lease / "arbiter.sock"))


def dies_slowly(node: Node, lease: Path) -> int:
    """Runs one process to its end. Returns how often it was seen alive without its lock."""
    process = slow_to_go(node, lease)
    pidfd, usage = os.pidfd_open(process.pid), os.open(lease / "usage", os.O_RDWR)
    process.kill()
    between = early = 0
    while not gone(pidfd):
        make_it_look(lease)
        open_to_all, left = not locked(usage), lease_used(lease)
        if not gone(pidfd):
            between += open_to_all
            early += left == 0
    eventually(lambda: lease_used(lease) == 0)
    os.close(pidfd)
    os.close(usage)
    assert early == 0
    return between


def test_memory_is_given_back_when_the_process_is_gone_and_not_before(node: Node) -> None:
    """The test observes most processes between the release of their lock and their end. If it misses one
    process, it starts another.
    """
    lease = node.lease()
    assert any(dies_slowly(node, lease) for _ in range(PROCESSES))


WAITS_FOR_ITS_MEMORY = """
import select
say("ready")
pidfd = os.pidfd_open(PID)
pointer = ctypes.c_uint64()
while cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(BYTES)) != 0:
    pass
say("got", bool(select.select([pidfd], [], [], 0)[0]))
"""


def test_without_the_arbiter_memory_is_given_back_no_earlier_than_the_process_is_gone(node: Node) -> None:
    lease = node.lease()
    process = slow_to_go(node, lease)
    code = f"PID, BYTES = {process.pid}, {GIB - OWN - CONTEXT_BYTES - 90 * MIB}" + WAITS_FOR_ITS_MEMORY
    other = python(node, lease, code)
    told(other, "ready")
    node.kill_arbiter()
    process.kill()
    began = time.monotonic()
    go_on(other)
    assert told(other, "got") == ["True"], f"after {time.monotonic() - began} s"
