"""kill -9 of vgpud after every step of Allocate, Release and Resize: the next start converges."""

import json
from pathlib import Path

import pytest

from tests.demo.node import DemoNode

ASK = {
    "preload": ["--isolation", "quota", "--memory", "4GiB"],
    "mps": ["--isolation", "compute", "--memory", "2GiB", "--cores", "50"],
    "mig": ["--isolation", "hardware", "--memory", "16GiB"],
    "exclusive": ["--isolation", "device"],
}
ALLOCATE_POINTS = ["record-intent", "apply-mode", "attach-0", "write-spec", "commit"]
RELEASE_POINTS = ["record-intent", "remove-spec", "detach-0", "unapply-mode", "forget"]


def world(node: DemoNode) -> dict[str, int]:
    """What is there of any allocation, in every place where something could be left."""
    device = node.ctl_json("devices")["items"]
    return {
        "allocations": len(node.ctl_json("ls")["items"]),
        "leases": len(list((node.run_dir / "leases").glob("*"))),
        "specs": len(list((node.folder / "cdi").glob("*.json"))),
        "instances": sum(len(d.get("mig", {}).get("instances", [])) for d in device),
        "mig devices": sum(bool(d.get("mig", {}).get("current")) for d in device),
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


@pytest.mark.parametrize("mode", ASK)
def test_allocate_cut_after_every_step(node: DemoNode, mode: str) -> None:
    for point in ALLOCATE_POINTS:
        node.start(fault_point=f"allocate.{point}")
        request = ["alloc", *ASK[mode], "--request-id", f"r-{point}"]
        cut = node.ctl(*request, check=False)
        assert cut.returncode == 32, f"{point}: {cut.stdout}{cut.stderr}"
        assert node.daemon is not None
        assert node.daemon.wait(10) == -9
        node.start()
        committed = point == "commit"
        assert world(node) == (held_world(mode) if committed else NOTHING), point
        again = node.ctl_json(*request)
        assert world(node) == held_world(mode), point
        node.ctl("release", again["id"])
        assert world(node) == NOTHING, point
        node.stop()


@pytest.mark.parametrize("mode", ASK)
def test_release_cut_after_every_step(node: DemoNode, mode: str) -> None:
    for point in RELEASE_POINTS:
        node.start(fault_point=f"release.{point}")
        held = node.ctl_json("alloc", *ASK[mode])
        assert world(node) == held_world(mode)
        cut = node.ctl("release", held["id"], check=False)
        assert cut.returncode == 32, f"{point}: {cut.stdout}{cut.stderr}"
        assert node.daemon is not None
        assert node.daemon.wait(10) == -9
        node.start()
        assert world(node) == NOTHING, point
        node.stop()


@pytest.mark.parametrize("point", ["record-intent", "apply"])
def test_resize_cut_after_every_step(node: DemoNode, point: str) -> None:
    node.start(fault_point=f"resize.{point}")
    held = node.ctl_json("alloc", *ASK["preload"])
    cut = node.ctl("resize", held["id"], "--memory", "8GiB", check=False)
    assert cut.returncode == 32
    node.start()
    shown = node.ctl_json("show", held["id"])
    assert shown["state"] == "active"
    assert int(shown["slices"][0]["memoryBytes"]) == 8 << 30
    limits = limits_of(node, held["id"])
    assert limits == 8 << 30
    node.ctl("release", held["id"])


def limits_of(node: DemoNode, allocation: str) -> int:
    """What the tenant is held to: the lease's own word."""
    from vgpud.lease import read_limits

    return read_limits(node.run_dir / "leases" / allocation).devices[0].memory_bytes


def test_what_a_kill_leaves_is_what_was_there(node: DemoNode) -> None:
    """One allocation in every mode at once, each on its device; twenty kills at random moments."""
    node.start()
    held = {mode: node.ctl_json("alloc", *ask)["id"] for mode, ask in ASK.items()}
    before = snapshot(node)
    for _ in range(5):
        node.kill()
        node.start()
        assert snapshot(node) == before
    for allocation in held.values():
        node.ctl("release", allocation)
    assert world(node) == NOTHING
    assert node.stop() == 0


def snapshot(node: DemoNode) -> dict[str, str]:
    kept = {}
    for allocation in node.ctl_json("ls")["items"]:
        allocation.pop("ageSeconds", None)
        kept[allocation["id"]] = json.dumps(allocation, sort_keys=True)
    for path in sorted(Path(node.folder / "cdi").glob("*.json")):
        kept[path.name] = path.read_text()
    return kept
