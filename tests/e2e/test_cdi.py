"""CDI specs stay correct while the daemon runs: vgpud notices changes that make a spec stale."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import allocate, client, eventually, quota, release


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node("h100x8")
    node.start()
    return node


def spec_file(node: DemoNode, name: str) -> Path:
    return node.folder / "cdi" / f"vgpud.io-vgpu_{name}.json"


def edits(node: DemoNode, name: str) -> dict[str, Any]:
    """The container edits of the spec; empty if there is no spec."""
    try:
        (device,) = json.loads(spec_file(node, name).read_text())["devices"]
    except FileNotFoundError:
        return {}
    found: dict[str, Any] = device["containerEdits"]
    return found


def mounted(node: DemoNode, name: str) -> set[str]:
    return {Path(mount["containerPath"]).name for mount in edits(node, name).get("mounts", ())}


def test_no_mount_of_a_slice_is_below_another(node: DemoNode) -> None:
    """A container runtime in a user namespace opens the parent of each mount, and may not list the lease's
    folder.
    """
    held = quota(node)
    places = {Path(mount["containerPath"]) for mount in edits(node, held.id)["mounts"]}
    assert Path("/run/vgpu/lease") in places
    assert not [place for place in places if places & {*place.parents}]
    release(node, held.id)


def test_a_removed_cdi_spec_is_written_again_and_one_without_an_allocation_is_removed(node: DemoNode) -> None:
    held = quota(node)
    for file in (node.folder / "cdi").iterdir():
        file.unlink()
    eventually(lambda: edits(node, held.id), "the spec is written again")
    shutil.rmtree(node.folder / "cdi")
    eventually(lambda: edits(node, held.id), "with its folder")
    shutil.copy(spec_file(node, held.id), spec_file(node, "deadbeef0000"))
    eventually(lambda: not spec_file(node, "deadbeef0000").exists(), "an orphan is removed")
    assert edits(node, held.id)
    release(node, held.id)
    assert not spec_file(node, held.id).exists()


def test_a_driver_upgrade_updates_the_cdi_specs_at_once_or_at_the_next_start(make_node: NodeMaker) -> None:
    """After a driver upgrade the specs of existing allocations name the new driver's files."""
    node = make_node("h100x8")
    copy_driver(node)
    node.start()
    held = quota(node)
    assert "libcuda.so.1" in mounted(node, held.id) and "libcuda.so.590.10" not in mounted(node, held.id)
    upgrade(node, "1", "590.10")
    eventually(lambda: "libcuda.so.590.10" in mounted(node, held.id), "the new files are in the spec")
    node.kill()
    upgrade(node, "590.10", "595.10")
    node.start()
    eventually(lambda: "libcuda.so.595.10" in mounted(node, held.id), "the spec was written anew")


def copy_driver(node: DemoNode) -> None:
    """Gives the node a separate copy of the simulated driver, which the test may replace."""
    folder = node.folder / "driver"
    folder.mkdir()
    for library in Path(node.environment["LD_LIBRARY_PATH"].split(":")[0]).iterdir():
        shutil.copy(library, folder / library.name, follow_symlinks=False)
    node.environment["LD_LIBRARY_PATH"] = str(folder)


def upgrade(node: DemoNode, old: str, new: str) -> None:
    """Renames the libraries of the driver. Their name that ends with .so.1 becomes a link to the new one."""
    for name in ("libcuda.so", "libnvidia-ml.so"):
        folder = node.folder / "driver"
        (folder / f"{name}.{old}").rename(folder / f"{name}.{new}")
        (folder / f"{name}.1").unlink(missing_ok=True)
        (folder / f"{name}.1").symlink_to(f"{name}.{new}")


def test_a_driver_load_with_other_device_numbers_updates_the_cdi_specs(node: DemoNode) -> None:
    """The kernel may give the driver other major numbers at each load of its module."""
    root = Path(node.environment["VGPUD_HOST_ROOT"])
    held = allocate(node, isolation="hardware", mig_profile="1g.10gb")
    caps = {n["path"]: n["major"] for n in edits(node, held.id)["deviceNodes"] if "nvidia-cap" in n["path"]}
    assert len(caps) == 2
    devices = root / "proc" / "devices"
    old = next(iter(caps.values()))
    devices.write_text(devices.read_text().replace(f"{old} nvidia-caps", f"{old - 1} nvidia-caps"))

    def renewed() -> bool:
        nodes = edits(node, held.id).get("deviceNodes", ())
        return {n["major"] for n in nodes if "nvidia-cap" in n["path"]} == {old - 1}

    eventually(renewed, "the spec has the new numbers")
    release(node, held.id)


DESTROY = """
import pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByUUID({uuid!r})
instance = n.nvmlDeviceGetGpuInstanceById(card, {gi})
n.nvmlComputeInstanceDestroy(n.nvmlGpuInstanceGetComputeInstanceById(instance, {ci}))
n.nvmlGpuInstanceDestroy(instance)
"""


def test_a_mig_instance_destroyed_outside_vgpud_is_made_again_with_its_cdi_spec(node: DemoNode) -> None:
    """vgpud makes the instance again, because a CDI spec must not name an instance that does not exist."""
    held = allocate(node, isolation="hardware", mig_profile="1g.10gb")
    mig = held.slices[0].mig
    code = DESTROY.format(uuid=held.slices[0].device_uuid, gi=mig.gpu_instance_id, ci=mig.compute_instance_id)
    subprocess.run([sys.executable, "-c", code], env=node.environment, check=True, timeout=300)

    def stands() -> bool:
        with client(node) as calls:
            (device,) = [d for d in calls.list_mig().devices if d.device_uuid == held.slices[0].device_uuid]
            uuids = [uuid for instance in device.instances for uuid in instance.uuids]
        return bool(uuids) and any(uuids[0] in entry for entry in edits(node, held.id)["env"])

    eventually(stands, "the spec names an instance that is there")
    release(node, held.id)
