"""`python -m tests.bench.arbiter_attackers ATTACK LEASE`: runs one attack on the arbiter until standard
input ends. It prints a line when the attack has begun."""

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.fuzz.test_arbiter import DONE, WANT, Tenant, message
from vgpud import lease_layout as layout

Done = Callable[[], None]
# with this many locks on a file, an F_GETLK of the arbiter takes less than ASIDE_MAX_NS
# (native/arbiter/aside.h)
SHORT_LOOK_LOCKS = 1500
OTHER_LEASE = "attackers-other"
GRANT = 6
TURN = struct.Struct("<QQQIIQ")  # struct vgpu_turn in native/common/lease.h
_HEAD_BYTES = 24
_FAR = 1 << 30
_HOLE_BYTES = 2 << 30
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)


def say_want(tenant: Tenant) -> None:
    tenant.line.send(message(WANT, 0, TURN.pack(0, 0, 0, 0, 1, 0)))


def granted(tenant: Tenant) -> int:
    """Waits for the time slice and gives it back. Returns the CLOCK_MONOTONIC time at which the arbiter
    granted it.
    """
    while True:
        answer = tenant.line.recv(layout.MESSAGE_SIZE)
        assert answer, "the arbiter closed the connection"
        if int.from_bytes(answer[:4], "little") == GRANT:
            break
    number, *_, sent_ns = TURN.unpack_from(answer, _HEAD_BYTES)
    tenant.line.send(message(DONE, 0, TURN.pack(number, 0, 0, 0, 1, 0)))
    return int(sent_ns)


def nothing(lease: Path, stands: Done) -> None:
    stands()
    time.sleep(3600)


def locks_and_bad_packets(lease: Path, stands: Done, locks: int) -> None:
    """Every slot is marked as used, so the arbiter checks each, and each check goes through all locks."""
    usage = _locked(lease, locks)
    for slot in range(layout.MAX_SLOTS):
        os.pwrite(usage, b"\1\0\0\0", layout.USAGE_SLOTS + slot * layout.SLOT_SIZE)
    stands()
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, suppress(OSError):
            line.setblocking(False)
            line.connect(str(lease / layout.ARBITER_SOCKET))
            line.send(b"no message")


def messages(lease: Path, stands: Done) -> None:
    """A registered process sends as many messages as the socket takes. It connects again when the arbiter
    closes the connection.
    """
    stands()
    while True:
        with suppress(OSError, AssertionError):
            tenant = Tenant(lease, 3)
            tenant.line.setblocking(True)
            while True:
                tenant.line.send(message(WANT, tenant.slot))
        time.sleep(0.001)


def messages_of_all_slots(lease: Path, stands: Done) -> None:
    """256 registered connections send a message each, one after the other, repeatedly."""
    tenants = [Tenant(lease, slot) for slot in range(layout.MAX_SLOTS)]
    stands()
    while True:
        for tenant in tenants:
            tenant.say(message(WANT, tenant.slot))
            tenant.listen()


def writes(lease: Path, stands: Done) -> None:
    """Writes to `usage` of two leases alternately. inotify reports each write, and the arbiter checks the
    file's size.
    """
    files = [_locked(one, SHORT_LOOK_LOCKS) for one in (lease, lease.with_name(OTHER_LEASE))]
    stands()
    while True:
        for file in files:
            os.pwrite(file, b"x", layout.USAGE_SLOTS)


def connections(lease: Path, stands: Done) -> None:
    """Opens 100 connections at once, repeatedly."""
    stands()
    while True:
        lines = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(100)]
        for line in lines:
            line.setblocking(False)
            with suppress(OSError):
                line.connect(str(lease / layout.ARBITER_SOCKET))
        for line in lines:
            line.close()


def deaths(lease: Path, stands: Done) -> None:
    """200 registered processes end at once, repeatedly. For each death the arbiter queries the locks."""
    _locked(lease, SHORT_LOOK_LOCKS)
    told = False
    while True:
        children = [child for slot in range(200) if (child := _registered_child(lease, slot))]
        if not told:
            stands()
        told = True
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def slots_of_one(lease: Path, stands: Done) -> None:
    """One process registers repeatedly, each time in another slot. At each registration the arbiter checks
    all slots that the process had before.
    """
    _locked(lease, SHORT_LOOK_LOCKS)
    stands()
    while True:
        held = []
        with suppress(OSError, AssertionError):
            for slot in range(layout.MAX_SLOTS):
                tenant = Tenant(lease, slot)
                held.append(tenant)
        for tenant in held:
            tenant.line.close()  # `usage` stays open and keeps its locks
        time.sleep(0.05)


def hang_ups(lease: Path, stands: Done) -> None:
    """200 registered processes close their connections at once and keep their locks. For each closed
    connection the arbiter queries the locks, and does so again at its next tick.
    """
    _locked(lease, SHORT_LOOK_LOCKS)
    held: list[Tenant] = []
    told = False
    while True:
        with suppress(OSError, AssertionError):
            for slot in range(200):
                held.append(Tenant(lease, slot))
        if not told:
            stands()
        told = True
        for tenant in held:
            tenant.line.close()
        held.clear()
        time.sleep(0.01)


def holes(lease: Path, stands: Done) -> None:
    """Allocates 2 GiB of blocks in `usage`, again and again, and punches a hole into them. A page fault in
    the hole waits until it is made. Meanwhile the tenant uses its device, so that the arbiter writes its
    counters there.
    """
    usage = os.open(lease / layout.USAGE_FILE, os.O_RDWR)
    fallocate = ctypes.CDLL(None).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    page = layout.USAGE_COMPUTE // mmap.PAGESIZE * mmap.PAGESIZE
    for mode in (_KEEP_SIZE, _KEEP_SIZE | _PUNCH_HOLE):
        if os.fork() == 0:
            while True:
                fallocate(usage, mode, page, _HOLE_BYTES)
    stands()
    while True:
        with suppress(OSError, AssertionError):
            tenant = Tenant(lease, 0)
            tenant.line.settimeout(60)
            while True:
                say_want(tenant)
                granted(tenant)
                time.sleep(0.002)
        time.sleep(0.001)


ATTACKS: dict[str, Callable[[Path, Done], None]] = {
    "nothing": nothing,
    "holes in `usage`, 2 GiB": holes,
    "bad packets, 20 000 locks": lambda lease, stands: locks_and_bad_packets(lease, stands, 20_000),
    "bad packets, 30 000 locks": lambda lease, stands: locks_and_bad_packets(lease, stands, 30_000),
    "messages": messages,
    "messages of 256 connections": messages_of_all_slots,
    "writes to usage": writes,
    "connections": connections,
    "200 processes end at once": deaths,
    "one process in all slots": slots_of_one,
    "200 connections end at once": hang_ups,
}


def _locked(lease: Path, locks: int) -> int:
    """Returns a descriptor of `usage`, on which this process has this many locks besides those of slots."""
    usage = os.open(lease / layout.USAGE_FILE, os.O_RDWR)
    for lock in range(locks):
        fcntl.lockf(usage, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _FAR + 2 * lock)
    return usage


def _registered_child(lease: Path, slot: int) -> int:
    """Returns the child's pid, or 0 if the arbiter refused it."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(OSError, AssertionError):
            tenant = Tenant(lease, slot)
            os.write(told, b"1")
            os.close(told)
            signal.pause()
            tenant.close()
        os._exit(1)
    os.close(told)
    registered = os.read(ready, 1) == b"1"
    os.close(ready)
    if not registered:
        os.waitpid(child, 0)
    return child if registered else 0


def main() -> None:
    name, lease = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        # lowest priority, because the bench measures the arbiter's work and not the competition for
        # processors
        os.nice(19)
        try:
            ATTACKS[name](lease, lambda: print("stands", flush=True))
        finally:
            os._exit(1)
    with suppress(OSError):
        os.setpgid(child, child)
    sys.stdin.read()
    # killpg also kills the child's children; the child is not reaped yet, so its pid is still valid
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
