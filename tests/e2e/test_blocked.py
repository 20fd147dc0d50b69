"""vgpud notices a tenant that waits inside the driver, where libvgpu does not see the wait."""

import os
import select
import sys
import time
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.demo.node import DemoNode, Tenant
from tests.e2e.past import PAST, frames_are_told
from tests.e2e.support import eventually, states
from tests.e2e.test_idle import IDLE, ask, eventually_stands, goes_idle, shown
from tests.e2e.test_suspend import end, resume, suspend
from tests.native.harness import TEST_BUILD
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_activity
from vgpud.node.tenants.blocked import Looks
from vgpud.proc import start_ticks
from vgpud.stacks.blocked import MACHINES

QUOTA = ("--isolation", "quota", "--memory", "1GiB", "--device", "0")
CARD = ("--isolation", "device", "--device", "2")
WAITS = str(TEST_BUILD / "waits")
SAID = "suspended_thread_blocked_in_driver"
pytestmark = needs("ptrace")


@pytest.fixture(scope="module")
def shared_policy() -> str:
    return IDLE


@pytest.fixture(scope="module")
def node(shared_node: DemoNode) -> DemoNode:
    if os.uname().machine not in MACHINES or not Path("/proc/self/syscall").exists():
        unmet("frames", "this machine does not say what a thread waits for")
    return shared_node


def started(node: DemoNode, *program: str, asked: tuple[str, ...] = QUOTA) -> tuple[Tenant, str]:
    before = states(node)
    tenant = node.tenant(list(asked), list(program or (sys.executable, "-c", PAST)))
    tenant.line()
    (name,) = states(node).keys() - before.keys()
    return tenant, name


def answer(tenant: Tenant, seconds: float = 300) -> dict[str, object]:
    assert tenant.process.stdout is not None
    readable, _, _ = select.select([tenant.process.stdout], [], [], seconds)
    assert readable, "it is still away"
    return tenant.line()


def wants(node: DemoNode, name: str) -> int:
    """Number of the tenant's threads that libvgpu keeps waiting."""
    return read_activity(node.run_dir / "leases" / name).wants


def test_a_call_unknown_to_libvgpu_resumes_an_idle_suspended_tenant(node: DemoNode) -> None:
    tenant, name = started(node)
    for _ in range(2):
        goes_idle(node, name)
        ask(tenant, "past")
        assert answer(tenant) == {"done": "past"}
    lines = [line for line in node.log.read_text().splitlines() if name in line]
    told = [line for line in lines if SAID in line]
    assert 2 <= len(told) <= sum("suspended as idle" in line for line in lines), "once for each suspension"
    assert all(str(tenant.process.pid) in line for line in told)
    end(node, tenant, name)


@needs("driver-580")
def test_a_tenant_suspended_by_hand_shows_that_it_is_blocked_and_stays_suspended(node: DemoNode) -> None:
    tenant, name = started(node)
    suspend(node, name)
    assert shown(node, name).standing == "by hand"
    ask(tenant, "past")
    eventually_stands(node, name, "by hand, wants to work")
    assert wants(node, name) == 0, "libvgpu does not know"
    resume(node, name)
    assert answer(tenant) == {"done": "past"}
    suspend(node, name)
    assert shown(node, name).standing == "by hand", "that was before"
    resume(node, name)
    end(node, tenant, name)


@needs("driver-580")
def test_a_blocked_tenant_of_a_whole_card_shows_that_it_wants_to_work(node: DemoNode) -> None:
    tenant, name = started(node, asked=CARD)
    suspend(node, name)
    ask(tenant, "past")
    eventually_stands(node, name, "by hand, wants to work")
    assert states(node)[name] == "suspended", "but comes back by hand only"
    resume(node, name)
    assert answer(tenant) == {"done": "past"}
    end(node, tenant, name)


def seen(looks: Looks, one: tuple[int, int]) -> object:
    looks.look([one])
    return looks.blocked([one])


@needs("driver-580")
def test_waits_outside_the_driver_are_not_taken_for_blocked(node: DemoNode) -> None:
    tenant, name = started(node, WAITS, asked=CARD)
    one = process(suspend(node, name))
    looks = Looks()
    for _ in range(4):
        looks.look([one])
        time.sleep(0.05)
    if not frames_are_told(one[0]):
        unmet("frames", "not by the stack pointer alone")
    assert looks.blocked([one]) == ()
    assert shown(node, name).standing == "by hand"
    ask(tenant)  # starts another thread, which allocates memory
    eventually(lambda: seen(looks, one), "it alone is seen")
    assert len(looks.blocked([one])) == 1
    looks.look([(one[0], one[1] + 1)])
    assert looks.blocked([one]) == (), "another process of the same pid"
    resume(node, name)
    assert answer(tenant) == {"code": 0}
    end(node, tenant, name)


@needs("driver-580")
def test_a_blocked_thread_is_found_among_many(node: DemoNode) -> None:
    tenant, name = started(node, WAITS, asked=CARD)
    one = process(suspend(node, name))
    ask(tenant)
    looks = Looks(most_threads=16)
    eventually(lambda: seen(looks, one), "it is seen")
    resume(node, name)
    assert answer(tenant) == {"code": 0}
    end(node, tenant, name)


def process(suspended: pb.Allocation) -> tuple[int, int]:
    (pid,) = suspended.suspended_pids
    ticks = start_ticks(pid)
    assert ticks is not None
    return pid, ticks
