"""kill -9 of the real daemon in the middle of a change of MIG layout, and of a request that moves idle
instances.
"""

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import client
from tests.mig.world import allocate, apply, device, place, standing, target
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

AFTER = {"3g.71gb@4", "2g.35gb@2", "1g.18gb@0"}
POINTS = ["record-intent", "destroy-19@1", "create-9@4", "create-14@2"]


def killed(node: DemoNode, error: VgpuError) -> None:
    assert error.code is ErrorCode.UNREACHABLE
    assert node.daemon is not None
    assert node.daemon.wait(300) == -9


def test_a_layout_change_killed_after_a_step_is_finished_by_the_next_start(node: DemoNode) -> None:
    node.start()
    for point in POINTS:
        apply(node, "1g.18gb@0 1g.18gb@1")
        kept = device(node).instances[0].uuids[0]
        node.stop()
        node.start(fault_point=f"mig-apply.{point}")
        with client(node) as calls, pytest.raises(VgpuError) as cut:
            calls.apply_mig(target(" ".join(sorted(AFTER))))
        killed(node, cut.value)
        node.start()
        assert standing(node) == AFTER, point
        assert kept in {uuid for i in device(node).instances for uuid in i.uuids}, "what both have ran on"


def test_a_start_killed_while_it_applies_a_layout_is_repeated(make_node: NodeMaker) -> None:
    node = make_node(
        policy='version = 1\n[[device]]\nmatch.index = 0\nmode = "mig"\nmig.layout = ["all-1g.18gb"]\n'
    )
    for start in range(3):
        with pytest.raises(RuntimeError):
            node.start(fault_point=f"mig-converge.create-19@{start}")
    node.start()
    assert len(standing(node)) == 7


def test_a_request_killed_while_it_moves_idle_instances_is_finished(make_node: NodeMaker) -> None:
    node = make_node(policy='version = 1\n[[device]]\nmode = "mig"\nmig.dynamic = true\n')
    node.start()
    for point in ("clear-instance", "attach-0", "commit"):
        apply(node, "1g.18gb@0")
        node.stop()
        node.start(fault_point=f"allocate.{point}")
        with pytest.raises(VgpuError) as cut:
            allocate(node, "4g.71gb", request_id=point)
        killed(node, cut.value)
        node.start()
        expected = {"4g.71gb@0"} if point == "commit" else {"1g.18gb@0"}
        assert standing(node) == expected, "the idle one is back where it can be"
        held = allocate(node, "4g.71gb", request_id=point)
        assert place(held) == "4g.71gb@0"
        with client(node) as calls:
            calls.release(held.id)
            auto = pb.MigRequest(targets=[pb.MigTarget(layout=["auto"])])
            assert "create" not in [change.kind for change in calls.plan_mig(auto).changes], point
