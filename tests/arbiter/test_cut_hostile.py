"""Tenants under engine `cut` that give the arbiter hostile files and lists of channels."""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.arbiter.conftest import LONG, Card, counters
from tests.arbiter.test_cut import GROUP, launches
from tests.conditions import needs
from tests.e2e.support import eventually
from tests.fusefile import fuse_file
from tests.fuzz.test_arbiter import DONE, WANT, Tenant, message
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy

CONSERVING, HARD = SharePolicy.WORK_CONSERVING, SharePolicy.HARD
PIDFD_GETFD = 438  # the same number on every architecture
UUID_BYTES = 16


def uuid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))


def list_groups(tenant: Tenant, uuid: str, rows: list[tuple[int, ...]]) -> None:
    """Writes channel groups into the tenant's table. Each row is file, client, subdevice, count, channels."""
    at = layout.CHANNELS_AT + tenant.slot * layout.CHANNELS_SIZE
    body = b"".join(GROUP.pack(uuid_bytes(uuid), *row) for row in rows)
    os.pwrite(tenant.usage, body, at + layout.CHANNELS_GROUPS)
    os.pwrite(tenant.usage, struct.pack("<I", len(rows)), at + layout.CHANNELS_COUNT)


def want(tenant: Tenant) -> None:
    tenant.say(message(WANT, tenant.slot, struct.pack("<QQQIIQ", 0, 0, 0, 0, 1, 0)))


def goes_on(lease: Path) -> None:
    """Waits until the other tenant has launched so many kernels of 1 ms that the arbiter must have
    served it.
    """
    least = launches(lease) + 2000
    eventually(lambda: launches(lease) > least, "kernels run")


@needs("root", "fuse")
@pytest.mark.parametrize("silent", ["flush", "getattr"])
def test_a_blocking_file_in_place_of_the_control_device_stops_no_time_slices_of_other_tenants(
    cut_card: Card, tmp_path: Path, silent: str
) -> None:
    """For a file of a tenant's own file system, close(2) or fstat(2) blocks until the file system's server
    answers.
    """
    good, bad = (cut_card.lease(name, CONSERVING, 50) for name in ("good", "bad"))
    cut_card.spin(good, LONG)
    with fuse_file(tmp_path / "mount", silent) as made:
        file = os.open(made.path, os.O_RDWR)
        with closing(Tenant(bad, 0)) as tenant:
            list_groups(tenant, cut_card.uuids[0], [(file, 7, 8, 1, 9, *(0,) * 7)])
            want(tenant)
            goes_on(good)
    with suppress(OSError):
        os.close(file)


@needs("root", "fuse")
def test_an_exec_that_does_not_end_stops_no_time_slices_of_other_tenants(
    cut_card: Card, tmp_path: Path
) -> None:
    """pidfd_getfd(2) waits until the exec of the target process ends."""
    good, bad = (cut_card.lease(name, CONSERVING, 50) for name in ("good", "bad"))
    cut_card.spin(good, LONG)
    with fuse_file(tmp_path / "mount", "flush") as made:
        program = subprocess.Popen([sys.executable, "-c", EXECS, str(bad), cut_card.uuids[0], str(made.path)])
        assert made.asked()
        goes_on(good)
    program.kill()
    program.wait()


EXECS = """
import os, sys
from pathlib import Path
from tests.arbiter.test_cut_hostile import list_groups, want
from tests.fuzz.test_arbiter import Tenant
tenant = Tenant(Path(sys.argv[1]), 0)
list_groups(tenant, sys.argv[2], [(99, 7, 8, 1, 9, *(0,) * 7)])
want(tenant)
os.set_inheritable(tenant.line.fileno(), True)
os.open(sys.argv[3], os.O_RDWR | os.O_CLOEXEC)
os.execvp("sleep", ["sleep", "1000"])
"""


def own_line(pid: int) -> socket.socket:
    """A duplicate of the process's connection to the arbiter, taken by pidfd_getfd(2)."""
    libc, pidfd = ctypes.CDLL(None), os.pidfd_open(pid)
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if not str(file.readlink()).startswith("socket:"):
                continue
            made = socket.socket(fileno=libc.syscall(PIDFD_GETFD, pidfd, int(file.name), 0))
            if made.family == socket.AF_UNIX and made.type == socket.SOCK_SEQPACKET:
                return made
            made.close()
    finally:
        os.close(pidfd)
    raise AssertionError("it has no connection to an arbiter")


@needs("ptrace")
@pytest.mark.parametrize("priority", [0, 1])
def test_false_reports_of_idle_time_cost_another_tenant_no_share(cut_card: Card, priority: int) -> None:
    """A tenant with priority and a share of 5 percent reports again and again that it is idle. If the arbiter
    believed all reports, the tenant could use 88 percent of the device.
    """
    good, bad = cut_card.lease("good", HARD, 50), cut_card.lease("bad", HARD, 5, priority=priority)
    cut_card.spin(good, LONG)
    hostile = cut_card.spin(bad, LONG)
    eventually(lambda: counters(bad)["used_ns"] > 0, "both run")
    stop = threading.Event()
    idle = struct.pack("<QQQIIQ", 0, 2_000_000, 0, 0, 1, 0)
    works = struct.pack("<QQQIIQ", 0, 0, 0, 0, 1, 0)

    def lie(line: socket.socket) -> None:
        with line, suppress(OSError):
            while not stop.wait(0.002):
                line.send(message(DONE, 0, idle), socket.MSG_DONTWAIT)
                line.send(message(WANT, 0, works), socket.MSG_DONTWAIT)

    liar = threading.Thread(target=lie, args=(own_line(hostile.pid),))
    liar.start()
    try:
        before = launches(good), launches(bad)
        eventually(lambda: launches(good) > before[0] + 1000, "kernels of the good one run")
        assert launches(bad) - before[1] < 0.6 * (launches(good) - before[0])
    finally:
        stop.set()
        liar.join()
