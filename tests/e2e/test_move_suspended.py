"""Moving suspended tenants: no memory is copied, and the new device needs no free memory. The tenants are
resumed on the new device.
"""

import os
import signal
import sys
from functools import partial

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.e2e.support import (
    GIB,
    allocate,
    client,
    eventually,
    is_alive,
    is_killed_at_its_starts,
    quota,
    release,
    simulate,
    states,
)
from tests.e2e.test_move import (
    NO_RESTORE,
    SHARED,
    allocated,
    check_at,
    cut,
    in_use,
    move,
    refusal,
    tenant_of_three,
    tenant_on,
    uuids,
)
from tests.e2e.test_relocate import looks, on, pair, places
from tests.e2e.test_suspend import PROGRAM, beside, end, goes_on, holding, resume, suspend
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_activity, read_limits
from vgpud.model.errors import ErrorCode, VgpuError

SIZE_MIB = 8


def check_waits_at(node: DemoNode, name: str, index: int, cause: str = "hand") -> None:
    """Asserts that API, lease and CDI edits name the new device, and that the tenant has no memory on any
    device.
    """
    uuid = uuids(node)[index]
    with client(node) as calls:
        held = calls.get_allocation(name)
    assert (held.state, held.cause) == ("suspended", cause)
    assert [part.device_uuid for part in held.slices] == [uuid]
    lease = read_limits(node.run_dir / "leases" / name)
    assert ([device.uuid for device in lease.devices], lease.away) == ([uuid], True)
    assert dict(held.edits.env)["CUDA_VISIBLE_DEVICES"] == uuid
    assert allocated(node) == {}
    eventually(lambda: in_use(node) == [], "NVML shows none of it")


@pytest.fixture(scope="module")
def node(shared_node: DemoNode) -> DemoNode:
    return shared_node


@needs("driver-580")
def test_a_suspended_tenant_is_resumed_on_the_device_that_it_was_moved_to(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    suspend(node, name)
    eventually(lambda: in_use(node) == [], "nothing of it is on a device")
    for to in (3, 5, 0, 0, 4):
        gone = move(node, name, to)
        assert len(gone.suspended_pids) == 1
        check_waits_at(node, name, to)
    resume(node, name)
    check_at(node, name, 4)
    assert goes_on(tenant)
    suspend(node, name)  # suspends the tenant on its new device
    move(node, name, 0)
    resume(node, name)
    check_at(node, name, 0)
    assert move(node, name, 2).state == "active"
    check_at(node, name, 2)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_resume_on_a_full_device_is_refused(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    full = on(node, 138, 1)
    suspend(node, name)
    move(node, name, 1)
    with pytest.raises(VgpuError) as refused:
        resume(node, name)
    assert refused.value.code is ErrorCode.NO_CAPACITY
    assert states(node)[name] == "suspended"
    release(node, full)
    resume(node, name)
    check_at(node, name, 1)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_move_of_a_suspended_tenant_follows_processes_that_end_or_start_meanwhile(node: DemoNode) -> None:
    """A process that starts meanwhile has the old device in its environment, and uses the new one."""
    tenant, name = tenant_on(node, 0)
    lease = node.run_dir / "leases" / name
    node.environment["CUDA_VISIBLE_DEVICES"] = uuids(node)[0]
    try:
        second = beside(node, lease)
        second.line()
        assert len(suspend(node, name).suspended_pids) == 2
        new = [beside(node, lease)]
        eventually(lambda: read_activity(lease).wants == 1, "it waits")
        os.kill(second.process.pid, signal.SIGKILL)
        eventually(lambda: not is_alive(second.process.pid), "it is gone")
        assert len(move(node, name, 3).suspended_pids) == 1
        new.append(beside(node, lease))
        eventually(lambda: read_activity(lease).wants == 2, "both wait")
        assert len(move(node, name, 2).suspended_pids) == 1
    finally:
        del node.environment["CUDA_VISIBLE_DEVICES"]
    resume(node, name)
    for one in new:
        one.line()
        assert goes_on(one)
    assert goes_on(tenant)
    eventually(lambda: in_use(node) == [2], "all of them are there")
    assert {second.end()[0], *(one.end()[0] for one in new)} == {-signal.SIGKILL, 0}
    end(node, tenant, name)


@needs("driver-580")
def test_two_suspended_slices_exchange_devices(node: DemoNode) -> None:
    tenant, name = pair(node, 2, 5)
    suspend(node, name)
    move(node, name, 4, source=uuids(node)[5])
    assert places(node)[name] == [2, 4]
    move(node, name, 6, 7)
    move(node, name, 5, 2)
    resume(node, name)
    assert places(node)[name] == [5, 2]
    assert looks(tenant) == [7, 8]
    eventually(lambda: in_use(node) == [2, 5], "NVML shows it on both")
    end(node, tenant, name)


@needs("driver-580")
def test_a_suspended_tenant_of_a_whole_card_moves_beside_other_tenants(node: DemoNode) -> None:
    """Other tenants may use the device that the suspended tenant leaves, and the device that it moves to."""
    tenant, name = holding(node, 0, "--isolation", "device", "--device", "2", size_mib=SIZE_MIB)
    suspend(node, name)
    others = [on(node, 1, 2), on(node, 1, 3)]
    move(node, name, 3)
    with pytest.raises(VgpuError) as refused:
        resume(node, name)
    assert refused.value.code is ErrorCode.DEVICE_IN_USE
    node.ctl("drain", "3", "--move", check=False)
    # the tenant stays suspended, although its device is free and a resume would succeed
    assert places(node)[name] == [0]
    resume(node, name)
    assert goes_on(tenant)
    eventually(lambda: in_use(node) == [0], "NVML shows it there")
    node.ctl("undrain", "3")
    release(node, *others)
    end(node, tenant, name)


@needs("driver-580")
def test_a_moved_suspended_tenant_is_released_on_its_new_device(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    suspend(node, name)
    move(node, name, 3)
    with client(node) as calls, pytest.raises(VgpuError) as alive:
        calls.release(name, force=True)
    assert alive.value.code is ErrorCode.TENANT_ALIVE
    tenant.process.kill()
    eventually(lambda: name not in states(node), "it goes with its process")
    tenant.end()
    release(node, allocate(node, isolation="device", selector=pb.Selector(indices=[3])).id)


@needs("driver-580")
def test_moves_of_a_suspended_tenant_to_unfit_devices_are_refused(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    suspend(node, name)
    with client(node) as calls:
        calls.drain_device(uuids(node)[2])
        assert "it is drained" in refusal(node, name, 2).sentence
        calls.drain_device(uuids(node)[2], undrain=True)
    shared = allocate(node, isolation="compute", memory_bytes=GIB, selector=pb.Selector(indices=[4]))
    assert refusal(node, name, 4).code is ErrorCode.DEVICE_IN_USE
    release(node, shared.id)
    check_waits_at(node, name, 0)
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_failed_resume_returns_all_processes_to_the_device_where_they_were_saved(
    cut_node: DemoNode,
) -> None:
    """The restore of one of three processes fails on the new device. All three are restored on the device
    where they were saved.
    """
    node = cut_node
    node.start(fault_point="resume.restore-0")
    tenant, name = tenant_of_three(node)
    suspend(node, name)
    move(node, name, 3)
    with pytest.raises(VgpuError):
        resume(node, name)  # vgpud is killed after the restore of the first process
    simulate(node, *NO_RESTORE)
    node.start()
    assert states(node) == {name: "suspended"}
    eventually(lambda: in_use(node) == [3], "two of them are there")
    move(node, name, 5)
    eventually(lambda: in_use(node) == [], "they have gone again")
    simulate(node, *NO_RESTORE)
    with pytest.raises(VgpuError):
        resume(node, name)
    resume(node, name)
    eventually(lambda: in_use(node) == [5], "all have come")
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_suspended_move_cut_after_every_step_converges(cut_node: DemoNode) -> None:
    """vgpud is killed after each step of a suspended tenant's moves, and the tenant stays suspended, on the
    old or the new device. Once a move is recorded, the starts that complete it are killed as well.
    """
    node = cut_node
    node.start(fault_point="move.record-intent")
    tenant, name = tenant_on(node, 0)
    suspend(node, name)
    for to, following in enumerate(("apply-mode", "save-0", "record-move"), start=1):
        cut(node, name, to)
        node.start(fault_point=f"move.{following}")
        check_waits_at(node, name, 0)
    cut(node, name, 4)
    is_killed_at_its_starts(node, "move.attach-0", "move.write-spec", "move.commit")
    node.start(fault_point="move.unapply-mode")
    check_waits_at(node, name, 4)
    cut(node, name, 5)
    node.start()
    check_waits_at(node, name, 5)
    resume(node, name)
    check_at(node, name, 5)
    assert goes_on(tenant)
    end(node, tenant, name)


def is_all_on(node: DemoNode, device: int) -> bool:
    return in_use(node) == [device]


@needs("driver-580")
def test_a_rollback_of_a_resume_that_is_cut_in_the_middle_converges(cut_node: DemoNode) -> None:
    """The resume restores one process on the new device, fails for the next one and rolls back. The rollback
    saves the restored process from the new device.
    """
    node = cut_node
    node.start(fault_point="resume.record-stay")
    tenant, name = tenant_of_three(node)
    for to, following in ((3, "resume.save-0"), (5, "")):
        suspend(node, name)
        move(node, name, to)
        # fault for the first restore: slow, but it succeeds
        simulate(node, "fault", "slow", *NO_RESTORE[2:4], "--microseconds", "1", "--count", "1")
        simulate(node, *NO_RESTORE)  # fault for the second restore: it fails
        with pytest.raises(VgpuError) as lost:
            resume(node, name)
        assert lost.value.code is ErrorCode.UNREACHABLE
        node.start(fault_point=following)
        assert states(node) == {name: "active"}
        eventually(partial(is_all_on, node, to), "all are there")
        assert goes_on(tenant)
    end(node, tenant, name)


@needs("namespaces", "driver-580")
def test_a_suspended_tenant_that_cannot_open_the_new_device_is_not_moved(node: DemoNode) -> None:
    """As in a container, the tenant cannot open the node of the new device. The refused move changes
    nothing.
    """
    before = states(node)
    tenant = node.tenant([*SHARED, "0"], ["unshare", "-m", sys.executable, "-c", PROGRAM, str(SIZE_MIB)])
    tenant.line()
    (name,) = states(node).keys() - before.keys()
    suspend(node, name)
    assert "has no node of device" in refusal(node, name, 1).sentence
    check_waits_at(node, name, 0)
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_defrag_for_a_whole_device_moves_a_suspended_tenant(node: DemoNode) -> None:
    held = [quota(node, 10, selector=pb.Selector(indices=[device])).id for device in range(8)]
    suspend(node, held[5])
    with client(node) as calls:
        (only,) = calls.defrag(pb.DefragRequest(selector=pb.Selector(indices=[5]))).moves
    assert only.allocation_id == held[5]
    assert [5] not in places(node).values()
    release(node, *held)
