"""What a tenant tries against the arbiter, and through it against others: each test is the attack."""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests import oldkernel
from tests.conditions import needs, unmet
from tests.fusefile import fuse_file
from tests.fuzz.test_arbiter import Tenant, message
from tests.lease.conftest import Node, eventually
from tests.native.harness import MIB, PROBE, TEST_BUILD
from vgpud import lease_layout as layout

WANT = 4
REFUSED = 3
FALLOC_FL_KEEP_SIZE = 1
CANNOT_CHOOSE_PIDS = 3
HOLD = (PROBE, "hold", "100MiB", "--then-wait-on-stdin")


@pytest.fixture
def shm() -> Iterator[Node]:
    """A node whose leases are on a file system in memory, as /run is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "leases").mkdir()
        node = Node(Path(folder))
        node.start_arbiter()
        yield node
        node.end()


def cpu_seconds(node: Node) -> float:
    """Of the arbiter, so far."""
    assert node.arbiter is not None
    fields = Path(f"/proc/{node.arbiter.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_room_beyond_the_end_of_a_usage_file_is_given_back(shm: Node) -> None:
    usage = shm.lease() / layout.USAGE_FILE
    libc = ctypes.CDLL(None, use_errno=True)
    with usage.open("r+b") as file:
        size, beyond = ctypes.c_long(64 * MIB), ctypes.c_long(layout.USAGE_FILE_SIZE)
        assert libc.fallocate(file.fileno(), FALLOC_FL_KEEP_SIZE, beyond, size) == 0
    assert usage.stat().st_size == layout.USAGE_FILE_SIZE
    eventually(lambda: usage.stat().st_blocks * 512 <= 8 * MIB)
    assert shm.client.registered("a1").cuts > 0


@pytest.fixture(params=[(), tuple(oldkernel.words())], ids=["kernel", "kernel before 6.5"])
def any_kernel(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    (tmp_path / "leases").mkdir()
    node = Node(tmp_path, before=request.param)
    node.start_arbiter()
    yield node
    node.end()


def test_a_tenant_process_registers_and_its_end_is_noticed(any_kernel: Node) -> None:
    lease = any_kernel.lease()
    process = any_kernel.tenant(lease, *HOLD)
    eventually(lambda: any_kernel.client.list("a1") == (process.pid,))
    process.kill()
    process.wait()
    eventually(lambda: any_kernel.client.list("a1") == ())


def impostor(node: Node, what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(TEST_BUILD / "impostor"), str(node.run_dir / "leases" / "a1"), "7", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_number_that_a_stranger_has_by_now_does_not_register_it(any_kernel: Node) -> None:
    any_kernel.lease()
    program = impostor(any_kernel, "register")
    out, _ = program.communicate(timeout=300)
    if program.returncode == CANNOT_CHOOSE_PIDS:
        unmet("namespaces", "process numbers cannot be chosen here")
    assert (program.returncode, int(out)) == (0, REFUSED)
    assert any_kernel.client.list("a1") == ()


def test_an_arbiter_that_starts_anew_adopts_no_stranger_by_its_number(any_kernel: Node) -> None:
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


def test_bad_packets_cost_nothing_that_grows_with_the_locks_of_the_tenant(node: Node) -> None:
    """Every slot has an owner word, and the file 20 000 locks: a sweep looks at all of them 256 times."""
    lease = node.lease()
    before = cpu_seconds(node)
    with (lease / layout.USAGE_FILE).open("r+b") as usage:
        for slot in range(layout.MAX_SLOTS):
            os.pwrite(usage.fileno(), b"\1\0\0\0", layout.USAGE_SLOTS + slot * layout.SLOT_SIZE)
        for lock in range(20_000):
            fcntl.lockf(usage, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, (1 << 30) + 2 * lock)
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, suppress(OSError):
                line.connect(str(lease / layout.ARBITER_SOCKET))
                line.send(b"no message")
        assert node.client.ready()
    assert cpu_seconds(node) - before < 1  # 26 s where each packet brings a sweep


def test_a_tenant_that_floods_is_hung_up_on_and_served_again(node: Node) -> None:
    lease = node.lease()
    node.lease("other")
    flood = Tenant(lease, 3)
    flood.line.settimeout(10)
    with pytest.raises(OSError):
        for _ in range(1_000_000):
            flood.line.send(message(WANT, flood.slot))
    Tenant(node.run_dir / "leases" / "other", 0).close()  # is served meanwhile
    flood.close()
    eventually(lambda: registers(lease))


def test_connections_are_taken_at_a_rate(node: Node) -> None:
    """Those that find no room now are refused by the kernel, or wait; the arbiter's time is bounded."""
    lease = node.lease()
    before = cpu_seconds(node)
    for _ in range(400):
        with ExitStack() as held:
            for _ in range(100):
                line = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                line.setblocking(False)
                with suppress(BlockingIOError):
                    line.connect(str(lease / layout.ARBITER_SOCKET))
    assert node.client.ready()
    assert cpu_seconds(node) - before < 0.2  # 0.7 s without a rate, 0.02 s with one
    eventually(lambda: registers(lease))


EXECS = """
import os, socket, sys
from pathlib import Path
from tests.fuzz.test_arbiter import Tenant
tenant = Tenant(Path(sys.argv[1]), 0)
os.open(sys.argv[2], os.O_RDWR | os.O_CLOEXEC)
tenant.line.shutdown(socket.SHUT_RDWR)
os.execvp("sleep", ["sleep", "1000"])
"""


@needs("root", "fuse")
def test_a_tenant_that_stays_in_the_midst_of_an_exec_stops_nothing(node: Node, tmp_path: Path) -> None:
    """The exec closes the file of the tenant's own file system, and waits; until it ends, so does /proc."""
    lease, other = node.lease(), node.lease("other")
    with fuse_file(tmp_path / "mount", "flush") as file:
        program = subprocess.Popen([sys.executable, "-c", EXECS, str(lease), str(file.path)])
        assert file.asked()
        eventually(lambda: "D" in states(node))
        Tenant(other, 0).close()
        assert node.client.ready()
    program.kill()
    program.wait()


def states(node: Node) -> list[str]:
    """Of the arbiter's threads: D, it waits inside the kernel."""
    assert node.arbiter is not None
    threads = Path(f"/proc/{node.arbiter.pid}/task").iterdir()
    return [(thread / "stat").read_text().rsplit(")", 1)[1].split()[0] for thread in threads]


def registers(lease: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(1)
        try:
            line.connect(str(lease / layout.ARBITER_SOCKET))
            line.send(message(1, 0))
            return bool(
                struct.unpack_from("<I", line.recv(4096))[0] == REFUSED
            )  # slot 0 is not held: it answers
        except OSError:
            return False
