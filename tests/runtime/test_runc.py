"""runc with vgpu-runtime, without a container manager that cleans up: what a container holds, and for how
long.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.demo.node import DemoNode
from tests.e2e.support import eventually, is_alive, states
from tests.runtime.bundles import Runc, config
from tests.runtime.conftest import left_nothing
from tests.runtime.rootfs import make_rootfs
from vgpud.proc import ran_exec, start_ticks

pytestmark = needs("runc", "root")
ASKS = {"vgpud.io/memory": "8GiB"}


@pytest.fixture
def runc(shared_node: DemoNode, tmp_path: Path) -> Iterator[Runc]:
    made = Runc(tmp_path, shared_node.run_dir)
    plain = made.call("--version", check=False)
    if plain.returncode != 0:
        unmet("runc", plain.stdout)
    yield made
    made.clear()
    left_nothing(shared_node)


def test_a_runc_container_has_its_slice_from_create_to_delete(
    runc: Runc, shared_node: DemoNode, rootfs: Path
) -> None:
    runc.run("life", config(rootfs, "sleep", "600", asks=ASKS))
    (name,) = states(shared_node)
    assert shared_node.ctl_json("show", name)["label"] == "life"
    spec = (runc.root / "life" / "config.json").read_text()
    assert f'"vgpud.io/prepared": "{name}"' in spec
    runc.delete("life")
    left_nothing(shared_node)
    after = (runc.root / "life" / "config.json").read_text()
    assert "prepared" not in after, "the bundle is as it was"
    runc.run("life", config(rootfs, "sleep", "600", asks=ASKS))
    assert len(states(shared_node)) == 1 and name not in states(shared_node)
    runc.delete("life")


def test_the_init_of_a_created_container_has_not_called_exec_before_its_start(
    runc: Runc, rootfs: Path
) -> None:
    """By this vgpud knows that a runtime has lost the container of a pod."""
    runc.bundle("waits", config(rootfs, "sleep", "600"))
    runc.call("create", "--bundle", str(runc.root / "waits"), "waits")
    try:
        pid = int(json.loads(runc.call("state", "waits").stdout)["pid"])
        ticks = start_ticks(pid)
        assert ticks is not None and not ran_exec(pid, ticks)
        runc.call("start", "waits")
        eventually(lambda: ran_exec(pid, ticks), "the program runs")
    finally:
        runc.delete("waits")


def test_processes_that_outlive_the_init_keep_the_allocation(
    runc: Runc, shared_node: DemoNode, rootfs: Path
) -> None:
    """In the host's pid namespace, processes may outlive the container's init. vgpud finds them in the
    container's cgroup.
    """
    command = "sleep 601 & echo $! >/tmp/child; exec sleep 600"
    spec = config(rootfs, "sh", "-c", command, asks=ASKS, host_pids=True)
    (rootfs / "tmp" / "child").unlink(missing_ok=True)
    init = runc.run("cgroup", spec)
    eventually((rootfs / "tmp" / "child").exists, "the second process runs")
    child = int((rootfs / "tmp" / "child").read_text())
    os.kill(init, signal.SIGKILL)
    eventually(lambda: not is_alive(init), "init ends")
    (name,) = states(shared_node)
    refused = shared_node.ctl("release", name, check=False)
    assert refused.returncode != 0 and f"pid {child}" in refused.stderr
    os.kill(child, signal.SIGKILL)
    left_nothing(shared_node)
    runc.delete("cgroup")


def test_a_runc_container_of_another_user_can_use_its_lease(
    runc: Runc, shared_node: DemoNode, rootfs: Path
) -> None:
    """The owner of the allocation is the host uid of the container's process, so that the process can write
    to its lease.
    """
    spec = config(rootfs, "sleep", "600", asks=ASKS)
    spec["process"]["user"] = {"uid": 12345, "gid": 12346}
    runc.run("user", spec)
    (name,) = states(shared_node)
    usage = (shared_node.run_dir / "leases" / name / "usage").stat()
    assert (usage.st_uid, usage.st_gid) == (12345, 12346)
    runc.delete("user")


def test_a_create_that_fails_after_the_hook_leaves_no_allocation(
    runc: Runc, shared_node: DemoNode, rootfs: Path
) -> None:
    """The creation fails after vgpud has bound the allocation to the container's init. The init ends, and
    vgpud releases the allocation.
    """
    spec = config(rootfs, "no-such-program", asks=ASKS)
    folder = runc.bundle("fails", spec)
    done = runc.call("run", "--bundle", str(folder), "fails", check=False)
    assert done.returncode != 0 and "no-such-program" in done.stdout


def test_an_image_whose_etc_folder_links_out_of_its_root_is_refused(
    runc: Runc, shared_node: DemoNode, tmp_path: Path
) -> None:
    """The image's /etc is a link to the host's /etc. Merged files must not be written there."""
    trap, host = make_rootfs(tmp_path / "trap"), tmp_path / "host-etc"
    host.mkdir()
    (trap / "etc").rmdir()
    (trap / "etc").symlink_to(host)
    folder = runc.bundle("trap", config(trap, "sh", "-c", ":", asks=ASKS))
    done = runc.call("run", "--bundle", str(folder), "trap", check=False)
    assert done.returncode != 0 and "ld.so.preload cannot be merged" in done.stdout
    assert list(host.iterdir()) == []
