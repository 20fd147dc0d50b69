"""kill -9 of vgpud after every step of Allocate, Release and Resize: the next start converges."""

from pathlib import Path
from typing import Any

import pytest

from tests.demo.node import DemoNode
from tests.e2e.support import is_killed_at_its_starts, was_killed
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_limits
from vgpud.model.errors import ErrorCode, VgpuError

GIB = 1 << 30
ASK: dict[str, dict[str, Any]] = {
    "preload": {"isolation": "quota", "memory_bytes": 4 * GIB},
    "mps": {"isolation": "compute", "memory_bytes": 2 * GIB, "share_percent": 50},
    "mig": {"isolation": "hardware", "memory_bytes": 16 * GIB},
    "exclusive": {"isolation": "device"},
}
ALLOCATE_POINTS = ["record-intent", "apply-mode", "attach-0", "write-spec", "commit"]
RELEASE_POINTS = ["record-intent", "remove-spec", "detach-0", "unapply-mode", "forget"]


def client(node: DemoNode) -> Client:
    return Client(node.run_dir / "admin.sock", timeout_seconds=300)


def world(node: DemoNode) -> dict[str, int]:
    """The number of objects of each kind that allocations consist of, for example leases, CDI specs and MIG
    instances. A crash must leave none of them behind.
    """
    with client(node) as calls:
        devices = calls.list_devices().devices
        allocations = calls.list_allocations().allocations
    return {
        "allocations": len(allocations),
        "leases": len(list((node.run_dir / "leases").glob("*"))),
        "specs": len(list((node.folder / "cdi").glob("*.json"))),
        "instances": sum(len(d.mig.instances) for d in devices),
        "mig devices": sum(d.mig.current for d in devices),
        "mps daemons": len(list((node.run_dir / "units").glob("vgpud-mps@*.pid"))),
    }


NOTHING = dict.fromkeys(["allocations", "leases", "specs", "instances", "mig devices", "mps daemons"], 0)


def held_world(mode: str) -> dict[str, int]:
    return {
        "allocations": 1,
        "leases": int(mode == "preload"),
        "specs": 1,
        "instances": int(mode == "mig"),
        "mig devices": int(mode == "mig"),
        "mps daemons": int(mode == "mps"),
    }


def allocate(node: DemoNode, mode: str, request_id: str = "r") -> pb.Allocation:
    with client(node) as calls:
        return calls.allocate(pb.AllocateRequest(request_id=request_id, **ASK[mode]))


def release(node: DemoNode, allocation: str) -> None:
    with client(node) as calls:
        calls.release(allocation)


def was_cut(node: DemoNode, error: VgpuError) -> None:
    """Asserts that vgpud was killed at its fault point, and that the caller got the error UNREACHABLE."""
    assert error.code is ErrorCode.UNREACHABLE
    was_killed(node)


@pytest.mark.parametrize("mode", ASK)
def test_an_allocation_cut_after_any_step_converges_at_the_next_start(node: DemoNode, mode: str) -> None:
    """vgpud is killed after a step, its next start leaves nothing behind, and the next attempt is cut one
    step later. An allocation that was cut after its last step exists, and the repeated request gets it.
    """
    for point in ALLOCATE_POINTS:
        node.start(fault_point=f"allocate.{point}")
        assert world(node) == NOTHING, f"before {point}"
        with pytest.raises(VgpuError) as cut:
            allocate(node, mode)
        was_cut(node, cut.value)
    node.start()
    assert world(node) == held_world(mode)
    again = allocate(node, mode)
    assert world(node) == held_world(mode)
    release(node, again.id)
    assert world(node) == NOTHING


@pytest.mark.parametrize("mode", ASK)
def test_a_release_cut_after_any_step_converges_at_the_next_start(node: DemoNode, mode: str) -> None:
    """Each start of vgpud continues the release, and is killed after the next step."""
    first, *rest = RELEASE_POINTS
    node.start(fault_point=f"release.{first}")
    held = allocate(node, mode)
    assert world(node) == held_world(mode)
    with pytest.raises(VgpuError) as cut:
        release(node, held.id)
    was_cut(node, cut.value)
    is_killed_at_its_starts(node, *(f"release.{point}" for point in rest))
    node.start()
    assert world(node) == NOTHING
    with client(node) as calls:  # a caller without an answer releases again
        assert calls.release(held.id).already_released


def test_a_resize_cut_after_any_step_converges_at_the_next_start(node: DemoNode) -> None:
    node.start(fault_point="resize.record-intent")
    held = allocate(node, "preload")
    with client(node) as calls, pytest.raises(VgpuError) as cut:
        calls.resize(held.id, memory_bytes=8 * GIB)
    was_cut(node, cut.value)
    is_killed_at_its_starts(node, "resize.apply")
    node.start()
    with client(node) as calls:
        shown = calls.get_allocation(held.id)
    assert shown.state == "active"
    assert shown.slices[0].memory_bytes == 8 * GIB
    assert read_limits(node.run_dir / "leases" / held.id).devices[0].memory_bytes == 8 * GIB
    release(node, held.id)


def test_a_start_cut_after_any_step_of_an_undo_converges_at_the_next_start(node: DemoNode) -> None:
    """vgpud is killed during a MIG allocation. The next start undoes it and is killed after each step of the
    release.
    """
    node.start(fault_point="allocate.attach-0")
    with pytest.raises(VgpuError) as cut:
        allocate(node, "mig")
    was_cut(node, cut.value)
    is_killed_at_its_starts(node, *(f"release.{point}" for point in RELEASE_POINTS))
    node.start()
    assert world(node) == NOTHING


def test_allocations_of_every_mode_survive_kills_of_vgpud(node: DemoNode) -> None:
    """Each mode has one allocation on its own device. vgpud is killed twice."""
    node.start()
    held = [allocate(node, mode, mode).id for mode in ASK]
    before = snapshot(node)
    for _ in range(2):
        node.kill()
        node.start()
        assert snapshot(node) == before
    for allocation in held:
        release(node, allocation)
    assert world(node) == NOTHING
    assert node.stop() == 0


def snapshot(node: DemoNode) -> dict[str, str | bytes]:
    with client(node) as calls:
        kept: dict[str, str | bytes] = {
            a.id: a.SerializeToString(deterministic=True) for a in calls.list_allocations().allocations
        }
    for path in sorted(Path(node.folder / "cdi").glob("*.json")):
        kept[path.name] = path.read_text()
    return kept
