"""Pausing through the daemon: the tenant's work stops, and its memory stays on the device. A paused tenant
can be changed like a running one.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import simnode
from tests.arbiter.conftest import counters
from tests.conditions import needs
from tests.demo.node import BUILD, DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import client, eventually, helper_pids, release, simulate, states, was_killed
from tests.e2e.test_bypass import events
from tests.e2e.test_engine import ASKED, CUT, SPIN
from tests.e2e.test_move import move
from tests.e2e.test_suspend import beside, refusal, resume
from tests.e2e.test_suspend import goes_on as remembers
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import ArbiterClient
from vgpud.lease.arbiter import Registered
from vgpud.model.errors import ErrorCode
from vgpud.modes.preload import ARBITER_UNIT

EVICTS = f'{CUT}evictable = true\n[pool]\nhost_memory_reserve = "1MiB"\nunevictable = "keep"\n'


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    made = make_shared_node(policy=EVICTS)
    made.start()
    return made


@pytest.fixture
def spinning(node: DemoNode) -> Iterator[tuple[Tenant, str]]:
    tenant, name = spin(node)
    yield tenant, name
    end(node, tenant)


def spin(node: DemoNode, *asked: str) -> tuple[Tenant, str]:
    before = states(node)
    tenant = node.tenant([*ASKED, *asked], [*SPIN, "--seconds", "120"])
    eventually(lambda: states(node).keys() - before.keys(), "it is allocated")
    (name,) = states(node).keys() - before.keys()
    goes_on(node, tenant)
    return tenant, name


def end(node: DemoNode, tenant: Tenant) -> None:
    tenant.process.kill()
    tenant.end()
    eventually(lambda: not states(node), "its allocation goes with it")


def done_ns(node: DemoNode, tenant: Tenant) -> int:
    """Nanoseconds of work that the devices have done for the tenant's program."""
    dump = simnode.SimNode(Path(node.environment["VGPU_SIM_STATE"]), BUILD, "h200x8").dump()
    uses = [use for one in dump["processes"] if one["pid"] == tenant.process.pid for use in one["uses"]]
    return sum(use["done_ns"] for use in uses)


def registered(node: DemoNode, name: str) -> Registered:
    return ArbiterClient(node.run_dir / "arbiter" / "control.sock").registered(name)


def goes_on(node: DemoNode, tenant: Tenant) -> None:
    before = done_ns(node, tenant)
    eventually(lambda: done_ns(node, tenant) > before, "the device works for it")


def stands_still(node: DemoNode, tenant: Tenant) -> None:
    """Asserts that the tenant does no work while another tenant's program runs to its end."""
    before = done_ns(node, tenant)
    assert node.tenant(ASKED, [*SPIN, "--seconds", "0.5"]).end()[0] == 0
    assert done_ns(node, tenant) == before


def pause(node: DemoNode, name: str) -> pb.Allocation:
    with client(node) as calls:
        return calls.pause(name)


def unpause(node: DemoNode, name: str) -> pb.Allocation:
    with client(node) as calls:
        return calls.unpause(name)


def test_a_paused_tenant_keeps_its_memory_and_goes_on_when_it_is_unpaused(
    node: DemoNode, spinning: tuple[Tenant, str]
) -> None:
    tenant, name = spinning
    with client(node) as calls:
        full = calls.get_allocation(name).use[0].memory_used_bytes
    held = pause(node, name)
    assert (held.state, held.paused) == ("paused", True)
    assert registered(node, name).paused
    assert pause(node, name).revision == held.revision
    stands_still(node, tenant)
    with client(node) as calls:
        assert calls.get_allocation(name).use[0].memory_used_bytes == full
    assert f"paused, and kept off its devices: 'vgpuctl unpause {name}'" in node.ctl("why", name).stdout
    assert "paused" in node.ctl("ls").stdout and "paused" in node.ctl("top", "--once").stdout
    shown = node.ctl("show", name).stdout
    assert ["paused:", "yes"] in [line.split() for line in shown.splitlines()]
    held = unpause(node, name)
    assert (held.state, held.paused) == ("active", False)
    assert unpause(node, name).revision == held.revision
    goes_on(node, tenant)
    assert (events(node, "allocation_paused"), events(node, "allocation_unpaused")) == ([name], [name])


def test_a_tenant_is_still_paused_after_restarts_of_vgpud_and_of_the_arbiter(
    node: DemoNode, spinning: tuple[Tenant, str]
) -> None:
    tenant, name = spinning
    pause(node, name)
    node.kill()
    stands = done_ns(node, tenant)
    node.start()
    assert (states(node)[name], done_ns(node, tenant)) == ("paused", stands)
    pid = helper_pids(node)[ARBITER_UNIT]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: helper_pids(node, ARBITER_UNIT).get(ARBITER_UNIT, pid) != pid, "it is restarted")
    eventually(ArbiterClient(node.run_dir / "arbiter" / "control.sock").ready, "it serves")
    eventually(lambda: registered(node, name).pids == (tenant.process.pid,), "it is registered again")
    eventually(lambda: registered(node, name).paused, "it is off again")
    stands_still(node, tenant)
    unpause(node, name)
    goes_on(node, tenant)


@pytest.mark.parametrize("way", ["libvgpu", pytest.param("driver", marks=needs("driver-580"))])
def test_a_paused_tenant_is_still_paused_after_a_suspension_and_its_resume(
    node: DemoNode, spinning: tuple[Tenant, str], way: str
) -> None:
    tenant, name = spinning
    other = beside(node, node.run_dir / "leases" / name)
    other.line()
    pause(node, name)
    for paused in (True, False):
        with client(node) as calls:
            gone = calls.suspend(name, deep=way == "driver")
        assert (gone.state, gone.paused, gone.stays_bytes > 0) == ("suspended", True, way == "libvgpu")
        assert refusal(node, "pause", name).code is ErrorCode.ALLOCATION_BUSY
        if not paused:
            assert not unpause(node, name).paused
        assert resume(node, name).state == ("paused" if paused else "active")
        if paused:
            eventually(lambda: registered(node, name).paused, "it is off again")
            stands_still(node, tenant)
    goes_on(node, tenant)
    assert remembers(other)
    other.end()


@needs("driver-580")
def test_a_paused_tenant_moves_and_is_paused_on_the_other_device(
    node: DemoNode, spinning: tuple[Tenant, str]
) -> None:
    tenant, name = spinning
    pause(node, name)
    for device in (3, 0):
        assert move(node, name, device).state == "paused"
        eventually(lambda: registered(node, name).paused, "it is off again")
        stands_still(node, tenant)
        unpause(node, name)
        goes_on(node, tenant)
        pause(node, name)
        stands_still(node, tenant)


def test_a_paused_tenant_can_be_resized_and_released(node: DemoNode) -> None:
    tenant, name = spin(node)
    pause(node, name)
    with client(node) as calls:
        assert calls.resize(name, memory_bytes=3 << 30).state == "paused"
    assert registered(node, name).paused
    release(node, name, force=True)
    goes_on(node, tenant)
    end(node, tenant)


def test_a_pause_cut_by_a_kill_of_vgpud_is_undone_at_the_next_start(make_node: NodeMaker) -> None:
    node = make_node(policy=CUT)
    node.start(fault_point="pause.order")
    tenant, name = spin(node)
    assert refusal(node, "pause", name).code is ErrorCode.UNREACHABLE
    was_killed(node)
    node.start(fault_point="unpause.order")
    assert states(node) == {name: "active"}
    goes_on(node, tenant)
    pause(node, name)
    assert refusal(node, "unpause", name).code is ErrorCode.UNREACHABLE
    was_killed(node)
    node.start()
    assert states(node) == {name: "paused"}
    eventually(lambda: registered(node, name).paused, "it is off again")
    unpause(node, name)
    goes_on(node, tenant)
    end(node, tenant)
    node.stop()


def test_a_tenant_that_the_driver_does_not_stop_is_not_paused(make_node: NodeMaker) -> None:
    node = make_node(policy=CUT)
    node.start()
    tenant, name = spin(node)
    simulate(node, "fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86", "--count", "12")
    error = refusal(node, "pause", name)
    assert error.code is ErrorCode.UNSUPPORTED and "status 0x56" in error.sentence
    assert states(node) == {name: "active"}
    goes_on(node, tenant)
    end(node, tenant)
    node.stop()


def test_a_paused_tenant_is_active_again_if_the_driver_refuses_to_stop_its_new_process(
    make_node: NodeMaker,
) -> None:
    node = make_node(policy=CUT)
    node.start()
    tenant, name = spin(node)
    pause(node, name)
    simulate(node, "fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86", "--count", "60")
    other = beside(node, node.run_dir / "leases" / name)
    eventually(lambda: registered(node, name).refusal, "the driver refuses to stop the new process")
    error = refusal(node, "pause", name)
    assert error.code is ErrorCode.UNSUPPORTED and "status 0x56" in error.sentence
    eventually(lambda: "held by the gate" in node.ctl("why", name).stdout, "its mark is noticed")
    assert states(node) == {name: "active"}
    assert "asked for, but the driver does not stop it" in node.ctl("show", name).stdout
    other.process.kill()
    other.end()
    end(node, tenant)
    node.stop()


@needs("driver-580")
@pytest.mark.parametrize("deep", [False, True])
def test_a_suspended_tenant_has_no_time_slices(make_node: NodeMaker, deep: bool) -> None:
    """The threads of the suspended tenant wait for the resumption. This wait does not count as work for the
    device.
    """
    node = make_node(policy=CUT + 'share_policy = "work-conserving"\n')
    node.start()
    (tenant, name), (other, _) = spin(node, "--cores", "50"), spin(node, "--cores", "50")
    with client(node) as calls:
        calls.suspend(name, deep)
    lease = node.run_dir / "leases" / name
    turns, worked = counters(lease)["turns"], done_ns(node, other)
    eventually(lambda: done_ns(node, other) > worked + 10**9, "the other tenant has a second of work done")
    assert counters(lease)["turns"] <= turns + 2
    resume(node, name)
    goes_on(node, tenant)
    other.process.kill()
    other.end()
    end(node, tenant)
    node.stop()


def test_a_pause_is_refused_without_the_engine_cut(make_node: NodeMaker) -> None:
    node = make_node(policy=CUT.replace('"cut"', '"gate"'))
    node.start()
    by_gate = node.ctl("alloc", *ASKED).stdout.strip()
    error = refusal(node, "pause", by_gate)
    assert (error.code, "device 0 has the engine gate" in error.sentence) == (ErrorCode.UNSUPPORTED, True)
    for isolation, mode in (("device", "exclusive"), ("compute", "mps")):
        other = node.ctl("alloc", "--isolation", isolation, "--device", "3", *_size(isolation)).stdout.strip()
        error = refusal(node, "pause", other)
        assert error.code is ErrorCode.UNSUPPORTED and f"mode {mode} has no engine cut" in error.sentence
        release(node, other)
    release(node, by_gate)
    node.stop()


def _size(isolation: str) -> list[str]:
    return [] if isolation == "device" else ["--memory", "1GiB", "--cores", "20"]
