"""NVML is missing, appears late, is slow or hangs, or a device is lost while it has tenants."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conditions import unmet
from tests.demo.node import BUILD, DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import (
    GIB,
    PROBE,
    allocate,
    client,
    eventually,
    quota,
    release,
    simulate,
    states,
)
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind

LIBRARY = BUILD / "sim" / "lib" / "libnvidia-ml.so.1"


def without_nvml(node: DemoNode, folder: Path) -> None:
    """Points the library path to an empty folder, into which the test may install a driver later."""
    folder.mkdir()
    node.environment["LD_LIBRARY_PATH"] = str(folder)
    found = subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"],
        env=node.environment,
        capture_output=True,
        check=False,
    )
    if found.returncode == 0:
        unmet("no-driver", "this machine has a libnvidia-ml.so.1 of its own")


def test_vgpud_runs_without_nvml_and_uses_it_once_it_is_installed(
    make_node: NodeMaker, tmp_path: Path
) -> None:
    node = make_node()
    without_nvml(node, tmp_path / "lib")
    node.start()
    status = node.ctl("status", check=False)
    assert status.returncode == 37
    assert "E501" in status.stdout
    for words in (("devices",), ("alloc", "--memory", "1GiB")):
        refused = node.ctl(*words, check=False)
        assert refused.returncode == 12, refused.stderr
        assert "E501" in refused.stderr
    assert states(node) == {}
    for library in LIBRARY.parent.iterdir():
        (tmp_path / "lib" / library.name).symlink_to(library)
    release(node, quota(node).id)
    assert node.ctl("status", check=False).returncode == 0


def test_vgpud_runs_without_a_driver_and_uses_it_once_it_is_loaded(
    make_node: NodeMaker, tmp_path: Path
) -> None:
    node = make_node()
    state = Path(node.environment["VGPU_SIM_STATE"])
    hidden = state.with_name("unloaded")
    state.rename(hidden)
    node.start()
    status = node.ctl("status", check=False)
    assert status.returncode == 37
    assert "E502" in status.stdout
    refused = node.ctl("alloc", "--memory", "1GiB", check=False)
    assert refused.returncode == 9, refused.stderr
    assert "E502" in refused.stderr
    hidden.rename(state)
    eventually(lambda: node.ctl("status", check=False).returncode == 0, "status says that it is back")
    release(node, quota(node).id)


def test_vgpud_keeps_all_allocations_if_it_starts_without_nvml(make_node: NodeMaker, tmp_path: Path) -> None:
    node = make_node()
    node.start()
    held = {
        quota(node).id: "active",
        allocate(node, isolation="hardware", memory_bytes=16 * GIB).id: "active",
        allocate(node, isolation="compute", memory_bytes=GIB).id: "active",
    }
    node.stop()
    state = Path(node.environment["VGPU_SIM_STATE"])
    state.rename(state.with_name("unloaded"))
    node.start()
    assert states(node) == held
    state.with_name("unloaded").rename(state)
    with client(node) as calls:
        assert len(calls.list_devices().devices) == 8
    eventually(lambda: states(node) == held, "all is as it was")
    release(node, *held)
    assert node.stop() == 0


@pytest.fixture
def impatient(make_node: NodeMaker) -> DemoNode:
    """A node that waits at most two seconds for a call of NVML."""
    node = make_node()
    node.environment["VGPUD_NVML_DEADLINE_SECONDS"] = "2"
    node.start()
    return node


def healths(node: DemoNode) -> list[str]:
    """The health of each device in vgpud's last snapshot, which may be one second old."""
    with client(node) as calls:
        return [device.health for device in calls.list_devices().devices]


def test_a_hanging_device_leaves_the_others_in_service(impatient: DemoNode) -> None:
    node = impatient
    held = quota(node)
    simulate(node, "fault", "hang", "--function", "nvmlDevice*", "--device", "0")
    eventually(lambda: healths(node)[0] == "silent", "a snapshot that is new")
    with client(node) as calls:
        sick, *others = calls.list_devices().devices
        assert sick.health == "silent"
        assert "within 2 s" in sick.health_reason
        assert {device.health for device in others} == {"ok"}
    with pytest.raises(VgpuError) as refused:
        quota(node)
    assert refused.value.code is ErrorCode.NVML_TIMEOUT, refused.value
    other = quota(node, selector=pb.Selector(indices=[1]))
    release(node, other.id)
    assert states(node)[held.id] in ("active", "failed")
    simulate(node, "fault", "clear")
    eventually(lambda: set(healths(node)) == {"ok"}, "all devices answer")
    release(node, held.id)
    release(node, quota(node).id)


def test_vgpud_keeps_the_allocations_of_devices_that_hang_during_its_start(impatient: DemoNode) -> None:
    """A hanging device does not prove that its tenants failed, so their allocations keep their state."""
    node = impatient
    held = {
        quota(node).id: "active",
        allocate(
            node, isolation="hardware", memory_bytes=16 * GIB, selector=pb.Selector(indices=[1])
        ).id: "active",
    }
    node.kill()
    simulate(node, "fault", "hang", "--function", "nvmlDevice*", "--device", "0")
    simulate(node, "fault", "hang", "--function", "nvmlDevice*", "--device", "1")
    node.start()
    assert states(node) == held
    assert node.ctl("status", check=False).returncode == 37
    simulate(node, "fault", "clear")
    eventually(lambda: node.ctl("status", check=False).returncode == 0, "all is well again")
    assert states(node) == held
    release(node, *held)
    assert node.stop() == 0


def test_a_hanging_nvml_library_is_reported_and_recovers(impatient: DemoNode) -> None:
    node = impatient
    held = quota(node)
    simulate(node, "fault", "hang", "--function", "nvml*")
    answers: list[object] = []

    def list_devices() -> None:
        try:
            with client(node) as calls:
                answers.append(calls.list_devices())
        except VgpuError as error:
            answers.append(error.code)

    waiting = threading.Thread(target=list_devices)
    waiting.start()
    with client(node) as calls:
        assert calls.get_node().allocation_count == 1
        assert len(calls.list_allocations().allocations) == 1
        calls.get_policy()
    waiting.join(300)
    assert answers
    eventually(lambda: node.ctl("status", check=False).returncode == 37, "it is known to hang")
    assert "E504" in node.ctl("status", check=False).stdout
    simulate(node, "fault", "clear")
    eventually(lambda: node.ctl("status", check=False).returncode == 0, "it is well again")
    release(node, held.id)


def test_a_hanging_change_of_one_device_does_not_hold_up_other_devices(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    simulate(node, "fault", "hang", "--function", "nvmlDeviceCreateGpuInstance*", "--device", "0")
    late = node.ctl(
        *("alloc", "--isolation", "hardware", "--memory", "16GiB", "--device", "0"),
        *("--timeout", "1.5", "--request-id", "late"),
        check=False,
    )
    assert late.returncode == 36, late.stderr
    assert "E802" in late.stderr
    assert "--request-id late" in late.stderr
    other = quota(node, selector=pb.Selector(indices=[1]))
    release(node, other.id)
    simulate(node, "fault", "clear")
    found = node.ctl_json(
        *("alloc", "--isolation", "hardware", "--memory", "16GiB", "--device", "0", "--request-id", "late")
    )
    assert states(node) == {found["id"]: "active"}
    release(node, found["id"])


def test_a_lost_device_fails_only_its_own_allocations(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    with client(node) as calls:
        before = calls.get_node().revision
    ask = ["--isolation", "quota", "--memory", "1GiB", "--device"]
    tenants = [
        node.tenant([*ask, number], [PROBE, "hold", "64MiB", "--then-wait-on-stdin"]) for number in "01"
    ]
    for tenant in tenants:
        tenant.line()
    bound = {a["slices"][0]["deviceUuid"]: a["id"] for a in node.ctl_json("ls")["items"]}
    with client(node) as calls:
        uuids = [device.uuid for device in calls.list_devices().devices]
    mps = allocate(node, isolation="compute", memory_bytes=GIB, selector=pb.Selector(indices=[2]))
    mig = allocate(node, isolation="hardware", memory_bytes=16 * GIB, selector=pb.Selector(indices=[3]))
    whole = allocate(node, isolation="device", selector=pb.Selector(indices=[4]))
    for number in "0234":
        simulate(node, "fault", "gpu-lost", "--device", number)
        simulate(node, "fault", "xid", "--device", number, "--code", "79")
    on_lost = {bound[uuids[0]], mps.id, mig.id, whole.id}
    expected = {bound[uuids[1]]: "active", **dict.fromkeys(on_lost, "failed")}
    eventually(lambda: states(node) == expected, "what is on the lost devices has failed, nothing else")
    assert tenants[1].alive
    status = node.ctl("status", check=False)
    assert status.returncode == 37
    assert all(allocation in status.stdout for allocation in on_lost)
    told = []
    with client(node) as calls:
        for event in calls.watch(before):
            if event.kind in (EventKind.DEVICE_LOST, EventKind.ALLOCATION_FAILED):
                told.append(event.subject)
            if on_lost <= set(told):
                break
    assert uuids[0] in told, "watchers hear of the device itself"
    tenants[0].end()
    release(node, mps.id, mig.id, whole.id)
    gone = {bound[uuids[1]]: "active"}
    eventually(lambda: states(node) == gone, "the tenant of a lost device ends, and its allocation with it")
    with pytest.raises(VgpuError) as refused:
        quota(node)
    assert refused.value.code is ErrorCode.GPU_LOST
    release(node, quota(node, selector=pb.Selector(indices=[1])).id)
    tenants[1].end()
    eventually(lambda: states(node) == {}, "the other tenant ends as ever")
