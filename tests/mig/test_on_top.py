"""Several tenants in one MIG instance, in modes preload and mps, with a whole vgpud on a simulated node."""

import contextlib
import os
import re
import signal
from typing import Any

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import GIB, client, eventually, helper_pids, release, simulate, states
from tests.mig.world import device, fill, place, standing, target
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

POLICY = """version = 1
[[device]]
match.index = 0
mode = "mig"
mig.layout = ["3g.71gb@4", "2g.35gb@0"]
mig.on_top = ["preload", "mps"]
mps.check_seconds = 0.5
[[device]]
match.index = 1
mode = "mig"
mig.on_top = ["preload", "mps"]
[[device]]
mode = "mig"
"""
LIMIT = 4 * GIB


@pytest.fixture
def node(make_node: NodeMaker) -> DemoNode:
    made = make_node(policy=POLICY)
    made.start()
    return made


def part(node: DemoNode, isolation: str, gib: int = 4, index: int = 0, **asked: Any) -> pb.Allocation:
    with client(node) as calls:
        return calls.allocate(
            pb.AllocateRequest(
                isolation=isolation,
                memory_bytes=gib * GIB,
                selector=pb.Selector(indices=[index]),
                **asked,
            )
        )


@pytest.mark.parametrize("isolation", ["quota", "compute"])
def test_each_tenant_of_a_shared_mig_instance_is_held_to_its_memory_limit(
    node: DemoNode, isolation: str
) -> None:
    share: dict[str, Any] = {"share_percent": 40.0} if isolation == "compute" else {}
    one, two = part(node, isolation, **share), part(node, isolation, 8, **share)
    with client(node) as calls:
        engine = calls.list_devices().devices[0].engine
    assert engine == ("gate" if isolation == "quota" else ""), "instances have the gate"
    assert place(one) == place(two) == "2g.35gb@0", "the smallest that will do, and then the same"
    assert one.slices[0].mig.uuid == two.slices[0].mig.uuid == one.edits.env["CUDA_VISIBLE_DEVICES"]
    for held, gib in ((one, 4), (two, 8)):
        got = fill(node, held)
        assert got["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert (gib - 1) * GIB < got["total_bytes"] <= gib * GIB
    bigger: dict[str, Any] = dict.fromkeys(share, 50.0)
    larger = part(node, isolation, 40, **bigger)
    assert place(larger) == "3g.71gb@4", "what does not fit beside them goes elsewhere"
    whole = pb.AllocateRequest(mig_profile="3g.71gb", selector=pb.Selector(indices=[0]))
    with client(node) as calls, pytest.raises(VgpuError) as refused:
        calls.allocate(whole)
    assert refused.value.code is ErrorCode.NO_CAPACITY
    assert any(larger.id in line for line in refused.value.details)
    with pytest.raises(VgpuError) as full:
        part(node, isolation, 60)
    assert full.value.code is ErrorCode.NO_CAPACITY
    release(node, one.id, two.id, larger.id)
    with client(node) as calls:
        assert calls.allocate(whole).slices[0].mig.profile_name == "3g.71gb", "it is whole again"


def test_a_shared_mig_instance_is_made_for_the_first_slice_and_removed_with_the_last(node: DemoNode) -> None:
    one = part(node, "quota", index=1, mig_profile="1g.18gb")
    two = part(node, "quota", index=1, mig_profile="1g.18gb")
    other = part(node, "compute", index=1, share_percent=50.0)
    assert place(one) == place(two) != place(other), "an instance has one mode"
    assert {place(one), place(other)} == standing(node, 1)
    shown = next(i for i in device(node, 1).instances if i.allocation_id.count(one.id))
    assert set(shown.allocation_id.split(", ")) == {one.id, two.id}
    with client(node) as calls:
        refused = calls.plan_mig(target("off", 1)).refusal
    assert {one.id, two.id} <= set(re.findall("[0-9a-f]{12}", str(refused))), "who holds it is named"
    release(node, one.id)
    assert place(two) in standing(node, 1)
    release(node, two.id)
    assert standing(node, 1) == {place(other)}
    assert helper_pids(node, "vgpud-mps@MIG-")
    release(node, other.id)
    eventually(lambda: not device(node, 1).current, "MIG mode goes off again")
    assert not helper_pids(node, "vgpud-mps@")


def test_a_quota_inside_a_mig_instance_is_resized_up_to_the_size_of_the_instance(node: DemoNode) -> None:
    held, _ = part(node, "quota"), part(node, "quota", 20)
    with client(node) as calls:
        calls.resize(held.id, memory_bytes=6 * GIB)
        with pytest.raises(VgpuError) as full:
            calls.resize(held.id, memory_bytes=30 * GIB)
    assert full.value.code is ErrorCode.NO_CAPACITY
    assert 5 * GIB < fill(node, held)["total_bytes"] <= 6 * GIB


def test_a_restart_of_vgpud_does_not_disturb_tenants_that_share_a_mig_instance(node: DemoNode) -> None:
    quota, share = part(node, "quota"), part(node, "compute", share_percent=40.0)
    daemons = helper_pids(node, "vgpud-mps@MIG-")
    node.kill()
    node.start()
    assert states(node) == {quota.id: "active", share.id: "active"}
    assert helper_pids(node, "vgpud-mps@MIG-") == daemons
    assert fill(node, quota)["total_bytes"] <= LIMIT
    assert fill(node, share)["total_bytes"] <= LIMIT
    beside = part(node, "compute", share_percent=40.0)
    assert place(beside) == place(share)
    with pytest.raises(VgpuError):
        part(node, "compute", share_percent=101.0)


def test_a_dead_mps_control_daemon_fails_only_the_tenants_of_its_own_mig_instance(node: DemoNode) -> None:
    quota = part(node, "quota")
    share = part(node, "compute", share_percent=40.0)
    assert place(quota) != place(share)
    ((_, pid),) = helper_pids(node, "vgpud-mps@MIG-").items()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: states(node)[share.id] == "failed", "its tenant is told")
    assert states(node)[quota.id] == "active"
    eventually(lambda: fill(node, share)["result"] == "CUDA_ERROR_OUT_OF_MEMORY", "it is back")
    assert fill(node, share)["total_bytes"] <= LIMIT


def test_a_second_user_of_shared_slices_gets_a_mig_instance_of_its_own(node: DemoNode) -> None:
    mine = part(node, "compute", share_percent=40.0, owner_uid=1, owner_gid=1)
    other = part(node, "compute", share_percent=40.0, owner_uid=2, owner_gid=2)
    assert place(mine) != place(other)
    with pytest.raises(VgpuError) as refused:
        part(node, "compute", share_percent=40.0, owner_uid=3, owner_gid=3)
    assert refused.value.code is ErrorCode.NO_CAPACITY


def test_after_a_reboot_a_slice_inside_a_mig_instance_is_made_again_or_released(node: DemoNode) -> None:
    held = part(node, "quota")
    node.kill()
    simulate(node, "reboot")
    node.start()
    assert states(node) in ({held.id: "active"}, {})
    assert standing(node) == {"3g.71gb@4", "2g.35gb@0"}


def test_mig_instances_are_not_shared_unless_the_policy_permits_it(node: DemoNode) -> None:
    whole: dict[str, Any] = {"mig_profile": "1g.18gb"}
    for asked in ({}, whole):
        with pytest.raises(VgpuError) as refused:
            part(node, "quota", index=2, **asked)
        assert refused.value.code is ErrorCode.DENIED_BY_POLICY


def test_vgpuctl_mps_ls_shows_the_mps_daemon_of_a_mig_instance(node: DemoNode) -> None:
    share = part(node, "compute", share_percent=40.0)
    with client(node) as calls:
        (daemon,) = calls.list_mps().daemons
    assert daemon.device_uuid == share.slices[0].mig.uuid
    assert daemon.client_limit == 48 * 2 // 7


def test_an_interrupted_allocation_inside_a_mig_instance_leaves_nothing_behind(make_node: NodeMaker) -> None:
    node = make_node(policy=POLICY)
    node.start(fault_point="allocate.attach-0")
    for isolation, share, following in (("quota", None, "allocate.attach-0"), ("compute", 40.0, "")):
        with contextlib.suppress(VgpuError):
            part(node, isolation, index=1, share_percent=share)
        assert node.daemon is not None
        node.daemon.wait(300)
        node.start(fault_point=following)
        assert states(node) == {}, isolation
        eventually(lambda: not device(node, 1).current, "the instance and MIG mode are gone")
        assert not helper_pids(node, "vgpud-mps@"), isolation
        assert not list((node.run_dir / "leases").iterdir()), isolation


@pytest.mark.parametrize("isolation", ["quota", "compute"])
def test_an_interrupted_release_inside_a_mig_instance_is_finished(
    make_node: NodeMaker, isolation: str
) -> None:
    node = make_node(policy=POLICY)
    node.start(fault_point="release.detach-0")
    share = None if isolation == "quota" else 40.0
    stays, goes = (
        part(node, isolation, share_percent=share),
        part(node, isolation, index=1, share_percent=share),
    )
    with contextlib.suppress(VgpuError):
        release(node, goes.id)
    assert node.daemon is not None
    node.daemon.wait(300)
    node.start()
    eventually(lambda: states(node) == {stays.id: "active"}, "one is gone and the other untouched")
    eventually(lambda: not device(node, 1).current, "the instance and MIG mode are gone")
    assert fill(node, stays)["total_bytes"] <= LIMIT
