"""A process that ends before it is registered gives back its memory and its slot.

The arbiter has no pidfd of a process that died before it sent REGISTER or before its connection was accepted,
or that could not connect.
"""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.lease.conftest import Node, eventually, lease_used
from tests.lease.test_lifecycle import HELD, HOLD
from tests.native.harness import LIBVGPU, PROBE, TEST_BUILD, Tenant
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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["socket", "connect", "send", "recv"])
def test_a_kill_before_the_registration_gives_the_slot_back(node: Node, call: str, when: str) -> None:
    """The process is killed after it has locked its slot and before the arbiter has answered it."""
    lease = node.lease()
    tenant = Tenant(lease, (TEST_BUILD / "libdies-at.so", LIBVGPU))
    died = tenant.run(PROBE, "info", DIES_AT=call, DIES_WHEN=when)
    assert died.returncode == -signal.SIGKILL
    eventually(lambda: is_empty(lease))
