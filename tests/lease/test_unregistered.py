"""A process that ends before it is registered gives back its memory and its slot.

The arbiter has no pidfd of a process that died before it sent REGISTER or before its connection was accepted,
or that could not connect.
"""

import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lease.conftest import Node, eventually, lease_used
from tests.lease.test_lifecycle import HELD, HOLD
from tests.native.harness import LIBVGPU, PROBE, TEST_BUILD, Tenant
from vgpud import lease_layout as layout
from vgpud.lease import read_usage


def hold(node: Node, lease: Path) -> "subprocess.Popen[str]":
    process = node.tenant(lease, *HOLD)
    assert process.stdout is not None
    process.stdout.readline()
    assert lease_used(lease) == HELD
    return process


def is_empty(lease: Path) -> bool:
    return lease_used(lease) == 0 and read_usage(lease).processes == ()


def test_the_memory_of_a_process_that_died_before_its_connection_was_accepted_is_given_back(
    node: Node,
) -> None:
    lease = node.lease()
    assert node.arbiter is not None
    node.arbiter.send_signal(signal.SIGSTOP)
    process = hold(node, lease)
    process.kill()
    process.wait()
    node.arbiter.send_signal(signal.SIGCONT)
    eventually(lambda: is_empty(lease))


def test_the_memory_of_a_process_that_never_connected_is_given_back(node: Node) -> None:
    lease = node.lease()
    (lease / "arbiter.sock").rename(lease / "elsewhere")
    process = hold(node, lease)
    process.kill()
    eventually(lambda: is_empty(lease))


def test_a_living_process_that_cannot_register_keeps_its_memory(node: Node) -> None:
    """Meanwhile other processes of the lease start and end, and the arbiter checks the slots each time."""
    lease = node.lease()
    (lease / "arbiter.sock").rename(lease / "elsewhere")
    process = hold(node, lease)
    for _ in range(5):
        other = node.tenant(lease, *HOLD)
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
        eventually(lambda: len(read_usage(lease).processes) == 1)
    assert lease_used(lease) == HELD
    assert process.poll() is None


ENDS_ITS_FIRST_THREAD = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


def test_the_memory_of_a_process_that_dies_slowly_is_given_back(node: Node) -> None:
    """The process has released its lock and is still dying at the arbiter's first looks. A process whose
    first thread has ended stands in for it, because /proc shows it as one that is dying.
    """
    lease = node.lease()
    (lease / "arbiter.sock").rename(lease / "elsewhere")
    process = hold(node, lease)
    command = [sys.executable, "-c", ENDS_ITS_FIRST_THREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None
        dying.stdout.readline()
        eventually(lambda: Path(f"/proc/{dying.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        with (lease / "usage").open("r+b") as usage:
            usage.seek(layout.USAGE_SLOTS + layout.SLOT_PID)
            usage.write(struct.pack("<i", dying.pid))
        other = node.tenant(lease, *HOLD)
        assert other.stdout is not None
        other.stdout.readline()
        for ended in (process, other):
            ended.kill()
            ended.wait()
        eventually(lambda: [held.pid for held in read_usage(lease).processes] == [dying.pid])
        assert lease_used(lease) == HELD
        time.sleep(0.5)  # the arbiter's looks for `other` have ended; a longer time changes nothing
        dying.communicate(b"")
    eventually(lambda: is_empty(lease))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["socket", "connect", "send", "recv"])
def test_a_kill_before_the_registration_gives_the_slot_back(node: Node, call: str, when: str) -> None:
    """The process is killed after it has locked its slot and before the arbiter has answered it."""
    lease = node.lease()
    tenant = Tenant(lease, (TEST_BUILD / "libdies-at.so", LIBVGPU))
    died = tenant.run(PROBE, "info", DIES_AT=call, DIES_WHEN=when)
    assert died.returncode == -signal.SIGKILL
    eventually(lambda: is_empty(lease))
