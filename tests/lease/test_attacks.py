"""Attacks of a tenant on the arbiter, and through it on other tenants. Each test is one attack."""

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests import oldkernel
from tests.bench.arbiter import Honest
from tests.bench.arbiter_attackers import TURN
from tests.conditions import needs, unmet
from tests.fusefile import fuse_file, locked_in_the_kernel, never_written_back
from tests.fuzz.test_arbiter import Tenant, message
from tests.lease.conftest import Node, eventually
from tests.lingering import kernel_refuses_descriptors, lingering, passes
from tests.native.harness import GIB, MIB, PROBE, TEST_BUILD, UUIDS, connect_to_arbiter
from vgpud import lease_layout as layout
from vgpud.lease import DeviceLimits, write_lease

WELCOME, REFUSED, WANT = 2, 3, 4
FALLOC_FL_KEEP_SIZE = 1
CANNOT_CHOOSE_PIDS = 3
ABANDONED_THREADS = 4  # ASIDE_ALONE_MAX of native/arbiter/aside.h
HOLD = (PROBE, "hold", "100MiB", "--then-wait-on-stdin")


@pytest.fixture
def shm() -> Iterator[Node]:
    """A node whose leases are on a file system in memory, as in /run."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "leases").mkdir()
        node = Node(Path(folder))
        node.start_arbiter()
        yield node
        node.end()


def test_blocks_allocated_beyond_the_end_of_a_usage_file_are_freed(shm: Node) -> None:
    usage = shm.lease() / layout.USAGE_FILE
    libc = ctypes.CDLL(None, use_errno=True)
    with usage.open("r+b") as file:
        size, beyond = ctypes.c_long(64 * MIB), ctypes.c_long(layout.USAGE_FILE_SIZE)
        assert libc.fallocate(file.fileno(), FALLOC_FL_KEEP_SIZE, beyond, size) == 0
    assert usage.stat().st_size == layout.USAGE_FILE_SIZE
    eventually(lambda: usage.stat().st_blocks * 512 <= 8 * MIB)
    assert shm.client.registered("a1").cuts > 0


@contextmanager
def node_of(folder: Path, before: Sequence[str]) -> Iterator[Node]:
    (folder / "leases").mkdir()
    node = Node(folder, before=before)
    node.start_arbiter()
    yield node
    node.end()


class Counted:
    """A node whose arbiter's calls are counted (tests/native/fake/counted.c)."""

    def __init__(self, node: Node, calls: Path) -> None:
        self.node, self._calls = node, calls

    def so_far(self) -> int:
        return self._calls.stat().st_size

    def since(self, place: int) -> bytes:
        """Returns the calls since `place`, an earlier result of so_far(): one letter for each call."""
        return self._calls.read_bytes()[place:]

    def rested(self) -> int:
        """Waits until the arbiter has slept for two of its ticks without a call. Returns the number of calls
        so far.
        """
        last, since = self.so_far(), time.monotonic()
        while time.monotonic() < since + 0.25:
            time.sleep(0.02)
            now = self.so_far()
            if now != last or not sleeps(self.node):
                last, since = now, time.monotonic()
        return last


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    calls = tmp_path / "calls"
    preload = ("env", f"LD_PRELOAD={TEST_BUILD / 'libcounted.so'}", f"VGPU_TEST_CALLS={calls}")
    with node_of(tmp_path, preload) as node:
        yield Counted(node, calls)


@pytest.fixture(params=[(), tuple(oldkernel.words())], ids=["kernel", "kernel before 6.5"])
def any_kernel(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    with node_of(tmp_path, request.param) as node:
        yield node


@pytest.fixture
def old_kernel(tmp_path: Path) -> Iterator[Node]:
    with node_of(tmp_path, oldkernel.words()) as node:
        yield node


def test_a_tenant_process_registers_and_its_end_is_noticed(any_kernel: Node) -> None:
    lease = any_kernel.lease()
    process = any_kernel.tenant(lease, *HOLD)
    eventually(lambda: any_kernel.client.list("a1") == (process.pid,))
    process.kill()
    process.wait()
    eventually(lambda: any_kernel.client.list("a1") == ())


@pytest.mark.parametrize("word", [b"no message", message(1, 0)], ids=["bad packet", "registration"])
def test_passed_sockets_with_a_long_linger_time_do_not_stop_the_arbiter(
    any_kernel: Node, word: bytes
) -> None:
    """Each connection passes several sockets. The arbiter drops some of them when it receives the message,
    and others when it closes the connection. Further
    connections wait in the listener's queue when the lease ends.
    """
    node, lease = any_kernel, any_kernel.lease()
    assert node.arbiter is not None
    refuses = kernel_refuses_descriptors() and not node.before
    took, lines = set(), []
    with ExitStack() as stack:
        node.arbiter.send_signal(signal.SIGSTOP)
        for _ in range(6):
            line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connect_to_arbiter(line, lease)
            line.settimeout(300)
            took |= {passes(line, word, stack.enter_context(lingering())) for _ in range(4)}
            lines.append(line)
        node.arbiter.send_signal(signal.SIGCONT)
        for line in lines[:3]:
            with suppress(ConnectionResetError):
                assert line.recv(4096) == b"" or refuses
        assert node.client.list("a1") == ()
        node.client.remove("a1")
        assert registers(node.lease("a2"))
    assert took == {not refuses}


@needs("root", "fuse")
def test_a_passed_file_whose_close_hangs_delays_neither_the_arbiter_nor_its_end(
    any_kernel: Node, tmp_path: Path
) -> None:
    node, lease = any_kernel, any_kernel.lease()
    assert node.arbiter is not None
    refuses = kernel_refuses_descriptors() and not node.before
    with ExitStack() as stack:
        sockets, file = stack.enter_context(never_written_back(tmp_path / "mount", 4))

        def attack(lease: Path) -> None:
            line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connect_to_arbiter(line, lease)
            assert passes(line, b"no message", next(sockets)) is not refuses

        node.arbiter.send_signal(signal.SIGSTOP)
        attack(lease)
        node.arbiter.send_signal(signal.SIGCONT)
        assert refuses or file.asked()  # a close waits
        node.arbiter.send_signal(signal.SIGSTOP)
        attack(lease)
        node.arbiter.send_signal(signal.SIGCONT)
        node.client.remove("a1")
        other = node.lease("a2")
        assert registers(other)
        for attacked in (other, node.lease("a3")):  # "a3" has accepted no connection
            node.arbiter.send_signal(signal.SIGSTOP)
            attack(attacked)
            node.kill_arbiter()
            node.start_arbiter()
            assert registers(attacked)


def keepers_of(arbiter: int) -> list[int]:
    children = Path(f"/proc/{arbiter}/task/{arbiter}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "vgpu-keeper\n"]


@needs("root", "fuse")
@pytest.mark.parametrize("waits", [False, True], ids=["ended", "waits in a close"])
def test_a_killed_keeper_leaves_no_file_to_the_arbiter(old_kernel: Node, tmp_path: Path, waits: bool) -> None:
    """A killed keeper does not end while a close waits in it, and reads no more messages."""
    node, lease = old_kernel, old_kernel.lease()
    assert node.arbiter is not None
    with ExitStack() as stack:
        sockets, file = stack.enter_context(never_written_back(tmp_path / "mount", 2))
        lines = []
        for _ in range(2):
            line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            assert is_refused(line, lease)  # the arbiter has accepted the connection
            lines.append(line)

        def attack() -> None:
            assert node.arbiter is not None
            node.arbiter.send_signal(signal.SIGSTOP)
            assert passes(lines.pop(), b"no message", next(sockets))
            node.arbiter.send_signal(signal.SIGCONT)

        arbiter = node.arbiter.pid
        eventually(lambda: len(keepers_of(arbiter)) == 1)
        [keeper] = keepers_of(arbiter)
        if waits:
            attack()
            assert file.asked()
        pidfd = os.pidfd_open(keeper)
        os.kill(keeper, signal.SIGKILL)
        if not waits:
            select.select([pidfd], [], [])
        os.close(pidfd)
        others = [node.lease(f"b{number}") for number in range(8)]
        for _ in range(40 if waits else 1):  # more messages than the queue to the keeper process holds
            assert all(map(registers, others))
        attack()
        assert registers(node.lease("a2"))
        node.kill_arbiter()


def impostor(node: Node, what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(TEST_BUILD / "impostor"), str(node.run_dir / "leases" / "a1"), "7", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("late", [False, True], ids=["accepted at once", "accepted after the pid's reuse"])
def test_a_reused_pid_does_not_register_another_users_process(any_kernel: Node, late: bool) -> None:
    any_kernel.lease()
    assert any_kernel.arbiter is not None
    if late:
        any_kernel.arbiter.send_signal(signal.SIGSTOP)
    program = impostor(any_kernel, "register")
    assert program.stdout is not None
    stranger = program.stdout.readline()
    any_kernel.arbiter.send_signal(signal.SIGCONT)
    answer = program.stdout.readline()
    program.communicate(timeout=300)
    if program.returncode == CANNOT_CHOOSE_PIDS:
        unmet("namespaces", "process numbers cannot be chosen here")
    assert (program.returncode, answer) == (0, f"{REFUSED}\n"), stranger
    assert any_kernel.client.list("a1") == ()


def test_a_restarted_arbiter_does_not_adopt_another_users_process_by_a_reused_pid(any_kernel: Node) -> None:
    any_kernel.lease()
    program = impostor(any_kernel, "stay")
    assert program.stdout is not None
    stranger = program.stdout.readline()
    if stranger == "":
        unmet("namespaces", "process numbers cannot be chosen here")
    any_kernel.kill_arbiter()
    any_kernel.start_arbiter()
    assert any_kernel.client.list("a1") == ()
    program.communicate("")


# Locks a slot, connects to the arbiter, becomes the user sys.argv[2], makes a user namespace, and registers
# from within the namespace.
IN_A_NAMESPACE = """
import ctypes, fcntl, os, socket, sys
from pathlib import Path
from tests.fuzz.test_arbiter import REGISTER, message
from tests.native.harness import connect_to_arbiter
from vgpud import lease_layout as layout
lease, user = Path(sys.argv[1]), int(sys.argv[2])
usage = os.open(lease / layout.USAGE_FILE, os.O_RDWR)
fcntl.lockf(usage, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, layout.USAGE_SLOTS)
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connect_to_arbiter(line, lease)
os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("made", flush=True); input()
os.setresuid(0, 0, 0)
print("inside", flush=True); input()
try:
    line.send(message(REGISTER, 0))
    print(int.from_bytes(line.recv(4096)[:4], "little"), flush=True)
except ConnectionError:  # closed by the arbiter
    print(0, flush=True)
"""


@needs("root", "user-namespaces")
@pytest.mark.parametrize(("user", "answers"), [(4242, {WELCOME}), (4343, {REFUSED, 0})])
def test_only_a_user_namespace_of_the_leases_owner_belongs_to_the_lease(
    old_kernel: Node, user: int, answers: set[int]
) -> None:
    """Before Linux 6.5 the arbiter takes the process that has the peer's pid when it accepts. Here that
    process has a subordinate uid in a user namespace of the lease's owner, or of another user.
    """
    node = old_kernel
    assert node.arbiter is not None
    lease = write_lease(node.run_dir / "leases", "a1", [DeviceLimits(UUIDS[0], GIB)], uid=4242, gid=4242)
    node.client.add("a1")
    node.arbiter.send_signal(signal.SIGSTOP)
    words = [sys.executable, "-c", IN_A_NAMESPACE, str(lease), str(user)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "made\n"
        Path(f"/proc/{child.pid}/uid_map").write_text("0 1000000 65536\n")
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "inside\n"
        node.arbiter.send_signal(signal.SIGCONT)
        print(file=child.stdin, flush=True)
        assert int(child.stdout.readline()) in answers
        assert node.client.list("a1") == ((child.pid,) if user == 4242 else ())
        child.kill()


def test_a_malformed_packet_starts_no_query_of_the_locks(counted: Counted) -> None:
    """Every slot has an owner, so a check of all slots makes 256 queries, for which other tenants wait."""
    node, lease = counted.node, counted.node.lease()
    honest = Honest(node)
    with (lease / layout.USAGE_FILE).open("r+b") as usage:
        for slot in range(layout.MAX_SLOTS):
            os.pwrite(usage.fileno(), b"\1\0\0\0", layout.USAGE_SLOTS + slot * layout.SLOT_SIZE)
        before = counted.rested()
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, suppress(OSError):
                line.settimeout(300)
                connect_to_arbiter(line, lease)
                line.send(b"no message")
                honest.ask()
                line.recv(1)  # the arbiter closes the connection
        counted.rested()
        calls = counted.since(before)
    honest.close()
    assert (calls.count(b"a"), calls.count(b"g"), calls.count(b"q")) == (20, 20, 0)


def test_a_lease_whose_usage_file_has_too_many_locks_is_shut(node: Node) -> None:
    """Each query of the locks takes longer than the arbiter waits for one."""
    lease = node.lease()

    def is_shut() -> bool:
        registers(lease)
        return node.client.registered("a1").shut

    with (lease / layout.USAGE_FILE).open("r+b") as usage:
        lock_besides(usage.fileno(), 15_000)
        eventually(is_shut)


class Burst:
    """COUNT simultaneous operations of a tenant. For each of them the arbiter makes the call CALL at least
    once.
    """

    COUNT, CALL = 60, b"q"

    def __init__(self, node: Node, number: int, stack: ExitStack) -> None:
        """Makes two leases. `stack` closes their files at the end of the round."""
        self.leases = [node.lease(f"attacker-{number}-{one}") for one in range(2)]
        self.stack = stack
        self.usages = [os.open(lease / layout.USAGE_FILE, os.O_RDWR) for lease in self.leases]
        for usage in self.usages:
            stack.callback(os.close, usage)

    def tenant(self, slot: int) -> Tenant:
        tenant = Tenant(self.leases[0], slot)
        self.stack.callback(tenant.close)
        return tenant

    def prepare(self) -> None:
        """Prepares the burst while the arbiter runs."""

    def act(self) -> None:
        """Makes all operations of the burst while the arbiter is stopped."""


class HangUps(Burst):
    def prepare(self) -> None:
        self.tenants = [self.tenant(slot) for slot in range(self.COUNT)]

    def act(self) -> None:
        for tenant in self.tenants:
            tenant.line.close()  # `usage` stays open and keeps its locks


class Registrations(Burst):
    """One process registers for one slot after another. For each registration the arbiter checks the former
    slot.
    """

    def prepare(self) -> None:
        self.lines = []
        for slot in range(self.COUNT):
            at = layout.USAGE_SLOTS + slot * layout.SLOT_SIZE
            fcntl.lockf(self.usages[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
            line = self.stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connect_to_arbiter(line, self.leases[0])
            self.lines.append(line)

    def act(self) -> None:
        for slot, line in enumerate(self.lines):
            line.send(message(1, slot))


class Deaths(Burst):
    def prepare(self) -> None:
        words = [sys.executable, "-c", DIES, str(self.leases[0]), str(self.COUNT)]
        self.parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stack.callback(self.parent.communicate)
        assert self.parent.stdout is not None
        assert self.parent.stdout.readline() == "stands\n"

    def act(self) -> None:
        self.parent.communicate("")


DIES = """
import os, sys
from pathlib import Path
from tests.fuzz.test_arbiter import Tenant
waits, held = os.pipe()  # the children end with this process, however it ends
for slot in range(int(sys.argv[2])):
    ready, told = os.pipe()
    if os.fork() == 0:
        os.close(held)
        tenant = Tenant(Path(sys.argv[1]), slot)
        os.write(told, b"1")
        os.read(waits, 1)
        os._exit(0)
    os.close(told)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
print("stands", flush=True)
sys.stdin.read()
os.close(held)
for _ in range(int(sys.argv[2])):
    os.wait()
"""


class Writes(Burst):
    """For each write the arbiter gets an event of inotify. It then opens the file, checks its size and closes
    it, for which it gets a second event. The arbiter queries no locks for these events.
    """

    COUNT, CALL = 6000, b"e"

    def act(self) -> None:
        for number in range(self.COUNT):
            os.pwrite(self.usages[number % 2], b"x", layout.USAGE_SLOTS)


@pytest.mark.parametrize("kind", [HangUps, Registrations, Deaths, Writes])
def test_another_tenants_message_waits_for_at_most_one_look_at_the_locks(
    counted: Counted, kind: type[Burst]
) -> None:
    """The arbiter is stopped while the attacker acts and the other tenant sends WANT, so all events are
    ready at once. One look tests a lock and queries it.
    """
    node, honest = counted.node, Honest(counted.node)
    assert node.arbiter is not None
    with ExitStack() as stack:
        burst = kind(node, 0, stack)
        burst.prepare()
        node.arbiter.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.arbiter.pid, os.WSTOPPED)
        before = counted.so_far()
        burst.act()
        honest.say_want()
        node.arbiter.send_signal(signal.SIGCONT)
        honest.granted()
        eventually(lambda: counted.since(before).count(kind.CALL) >= kind.COUNT)
        calls = counted.since(before)
    honest.close()
    # A look is two or three calls. The arbiter may have been stopped during one. In the turn of its loop that
    # receives WANT it sends the GRANT before it begins another look.
    waited = calls[: calls.index(b"g")]
    assert waited.count(kind.CALL) <= 3
    assert kind.CALL not in waited.rpartition(b"t")[2]


def test_a_usage_file_that_grows_while_the_arbiter_has_no_free_descriptor_is_truncated_later(
    counted: Counted,
) -> None:
    """A tenant can use up the arbiter's descriptors by its connections."""
    node, usage = counted.node, counted.node.lease() / layout.USAGE_FILE
    assert node.arbiter is not None
    before = counted.rested()
    pid = node.arbiter.pid
    used = {int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(used) + 1) if number not in used)
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, most))
    os.truncate(usage, layout.USAGE_FILE_SIZE + 64 * MIB)
    # the arbiter has read the event, and has begun another turn of its loop
    eventually(lambda: b"t" in counted.since(before).partition(b"e")[2])
    assert usage.stat().st_size > layout.USAGE_FILE_SIZE
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    eventually(lambda: usage.stat().st_size == layout.USAGE_FILE_SIZE)


def lock_besides(usage: int, locks: int) -> None:
    """Takes this many locks on bytes that belong to no slot, the last byte first: for each lock the kernel
    walks over those before it.
    """
    for lock in reversed(range(locks)):
        fcntl.lockf(usage, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, (1 << 30) + 2 * lock)


def sleeps(node: Node) -> bool:
    return set(states(node)) == {"S"}


def test_a_tenant_that_floods_the_arbiter_is_disconnected_and_later_served_again(node: Node) -> None:
    """Between its messages it connects, which costs 20 times as much: a program on a busy machine may send
    fewer messages alone than the rate allows.
    """
    lease = node.lease()
    node.lease("other")
    flood = Tenant(lease, 3)
    flood.line.settimeout(10)
    with pytest.raises(OSError):
        for _ in range(1_000_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, suppress(OSError):
                line.setblocking(False)
                connect_to_arbiter(line, lease)
            flood.line.send(message(WANT, flood.slot))
    Tenant(node.run_dir / "leases" / "other", 0).close()  # the arbiter still serves other tenants
    flood.close()
    eventually(lambda: registers(lease))


def test_connections_are_accepted_at_a_bounded_rate(counted: Counted) -> None:
    """Connections beyond the listener's queue wait or are refused by the kernel. A connection costs 20 units
    of the 10 000 that a tenant has in a second, after a burst of 20 000 (native/arbiter/rate.h).
    """
    lease = counted.node.lease()
    before, began = counted.so_far(), time.monotonic()
    for _ in range(25):
        with ExitStack() as held:
            for _ in range(100):
                line = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                line.setblocking(False)
                with suppress(BlockingIOError):
                    connect_to_arbiter(line, lease)
    assert counted.node.client.ready()
    eventually(lambda: registers(lease))  # its connection waits behind all others
    accepted = counted.since(before).count(b"a")
    assert accepted <= 1000 + 500 * (time.monotonic() - began) + 2  # 2: the last of a burst, and `ready`


EXECS = """
import os, socket, sys
from pathlib import Path
from tests.fuzz.test_arbiter import Tenant
tenant = Tenant(Path(sys.argv[1]), 0)
if os.fork() == 0:
    sys.stdin.read()
    tenant.line.shutdown(socket.SHUT_RDWR)
    os._exit(0)
os.open(sys.argv[2], os.O_RDWR | os.O_CLOEXEC)
os.execvp("sleep", ["sleep", "1000"])
"""


@needs("root", "fuse")
def test_a_tenant_whose_exec_does_not_end_delays_no_other_tenant(node: Node, tmp_path: Path) -> None:
    """The attacker's exec closes a file of the attacker's own file system and waits. Until the exec ends,
    reads of the process's /proc files wait, too. The arbiter reads them when the connection is shut down,
    which a child of the attacker does while the exec waits.
    """
    lease, other = node.lease(), node.lease("other")
    with fuse_file(tmp_path / "mount", "flush") as file:
        program = subprocess.Popen(
            [sys.executable, "-c", EXECS, str(lease), str(file.path)], stdin=subprocess.PIPE
        )
        assert file.asked() and program.stdin is not None
        program.stdin.close()
        eventually(lambda: "D" in states(node))
        Tenant(other, 0).close()
        assert node.client.ready()
    program.kill()
    program.wait()


@needs("root", "fuse")
def test_a_tenant_that_locks_its_usage_file_in_the_kernel_delays_no_other_tenant(
    shm: Node, tmp_path: Path
) -> None:
    """The attacker locks its usage file in the kernel. The arbiter publishes the counters of the attacker's
    time slices in that file.
    """
    lease, honest = shm.lease(), Honest(shm)
    attacker = Tenant(lease, 0)
    with locked_in_the_kernel(lease / layout.USAGE_FILE, tmp_path / "mount"):
        attacker.line.send(message(WANT, 0, TURN.pack(0, 0, 0, 0, 1, 0)))
        honest.ask()
        assert shm.client.list("a1") == (os.getpid(),)
    attacker.close()
    honest.close()


@needs("root", "fuse")
def test_a_slot_that_a_kernel_lock_kept_from_being_cleared_is_cleared_after_the_unlock(
    shm: Node, tmp_path: Path
) -> None:
    """The usage files of two leases of the user are locked in the kernel, and as many threads of the arbiter
    wait for them as one user may have. Then a process of a third lease ends.
    """
    locked, other = [shm.lease(f"locked{one}") for one in range(2)], shm.lease("other")
    processes = [registered_child(lease, slot) for lease in locked for slot in range(3)]
    last = registered_child(other, 5)
    with ExitStack() as held:
        for number, lease in enumerate(locked):
            held.enter_context(locked_in_the_kernel(lease / layout.USAGE_FILE, tmp_path / f"mount{number}"))
        for process in processes:
            end(process)
        eventually(lambda: states(shm).count("D") == ABANDONED_THREADS)
        end(last)
        eventually(lambda: shm.client.list("other") == ())
        for _ in range(50):  # each request makes the arbiter start the queries that are due
            assert shm.client.ready()
        assert owner_of(other, 5) != 0
    eventually(lambda: owner_of(other, 5) == 0)


REGISTERS = """
import os, sys
from pathlib import Path
from tests.fuzz.test_arbiter import Tenant
from vgpud import lease_layout as layout
slot = int(sys.argv[2])
tenant = Tenant(Path(sys.argv[1]), slot)
os.pwrite(tenant.usage, b"\\1\\0\\0\\0", layout.USAGE_SLOTS + slot * layout.SLOT_SIZE)
print("stands", flush=True)
sys.stdin.read()
"""


def registered_child(lease: Path, slot: int) -> "subprocess.Popen[str]":
    """Starts a process that registers for the slot and keeps it until `end`."""
    words = [sys.executable, "-c", REGISTERS, str(lease), str(slot)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "stands\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def owner_of(lease: Path, slot: int) -> int:
    """The registration number in the slot; 0 if the slot is free."""
    with (lease / layout.USAGE_FILE).open("rb") as usage:
        usage.seek(layout.USAGE_SLOTS + slot * layout.SLOT_SIZE)
        return int.from_bytes(usage.read(4), "little")


@needs("root", "fuse")
def test_a_tenant_that_locks_its_lease_folder_in_the_kernel_delays_no_restart_of_the_arbiter(
    shm: Node, tmp_path: Path
) -> None:
    """Root in a container may lock the folder of its lease by listing it. A restarted arbiter binds a socket
    in that folder.
    """
    lease, other = shm.lease(), shm.lease("other")
    shm.kill_arbiter()
    with locked_in_the_kernel(lease, tmp_path / "mount"):
        shm.start_arbiter()
        Tenant(other, 0).close()
    eventually(lambda: registers(lease))


def states(node: Node) -> list[str]:
    """States of the arbiter's threads. D means that a thread waits inside the kernel."""
    assert node.arbiter is not None
    found = []
    for thread in Path(f"/proc/{node.arbiter.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found.append((thread / "stat").read_text().rsplit(")", 1)[1].split()[0])
    return found


def is_refused(line: socket.socket, lease: Path) -> bool:
    """Registers without a lock of slot 0. Returns True when the arbiter has refused it."""
    line.settimeout(300)
    try:
        connect_to_arbiter(line, lease)
        line.send(message(1, 0))
        return bool(struct.unpack_from("<I", line.recv(4096))[0] == REFUSED)
    except OSError:
        return False


def registers(lease: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        return is_refused(line, lease)
