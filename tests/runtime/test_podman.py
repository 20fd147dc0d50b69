"""Podman and runc, with vgpu-runtime, with CDI and with a hook: what a container sees, and what it leaves
behind.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.e2e.support import quota, release, states
from tests.runtime.conftest import HOOK, LIMITS, Podman, left_nothing, podman_with

pytestmark = needs("podman", "root")
ASKS = "--annotation=vgpud.io/memory=8GiB"
SMI = "nvidia-smi --query-gpu=memory.total --format=csv,noheader"


def test_nvidia_smi_in_a_podman_container_shows_the_slice(podman: Podman) -> None:
    assert podman.run(ASKS, command=SMI).stdout.strip() == "8192 MiB"
    said = podman.run(ASKS, "--env=VGPU_MEMORY=2GiB", "--env=VGPU_ALLOCATION=x", command=SMI).stdout
    assert said.strip() == "8192 MiB", "variables may be the image's"


def test_the_limit_of_a_podman_container_holds_against_its_environment(podman: Podman) -> None:
    """Even with an empty environment, as after ssh or su, /etc/ld.so.preload loads libvgpu."""
    state = podman.node.environment["VGPU_SIM_STATE"]
    done = podman.run(ASKS, command=f"env -i VGPU_SIM_STATE={state} /usr/bin/{SMI}")
    assert done.stdout.strip() == "8192 MiB"


def test_the_environment_of_a_podman_container_names_its_allocation(podman: Podman) -> None:
    shown = podman.run(ASKS, command="env").stdout
    assert re.search(r"^VGPU_ALLOCATION=[0-9a-f]{12}$", shown, re.MULTILINE)
    assert "LD_PRELOAD" not in shown


def test_a_podman_container_keeps_the_preloads_of_its_image(podman: Podman, rootfs: Path) -> None:
    own = rootfs / "etc" / "ld.so.preload"
    own.unlink(missing_ok=True)
    own.write_text("/usr/lib/x86_64-linux-gnu/libc.so.6\n")
    try:
        shown = podman.run(ASKS, command="cat /etc/ld.so.preload").stdout
        assert own.read_text() == "/usr/lib/x86_64-linux-gnu/libc.so.6\n", "the image itself was changed"
    finally:
        own.unlink()
    assert shown.splitlines() == ["/run/vgpu/libvgpu.so", "/usr/lib/x86_64-linux-gnu/libc.so.6"]


def test_a_refusal_by_vgpud_reaches_the_caller_of_podman(podman: Podman) -> None:
    done = podman.run("--annotation=vgpud.io/memory=1000GiB", check=False)
    assert done.returncode != 0
    assert "no device can hold 1000GiB" in done.stderr and "E402" in done.stderr
    assert "hint: ask for at most" in done.stderr


def test_a_podman_container_without_a_request_is_unchanged(podman: Podman) -> None:
    shown = podman.run(command="env; cat /proc/self/mounts").stdout
    assert "VGPU_ALLOCATION" not in shown and "/run/vgpu" not in shown


def test_the_allocation_lasts_as_long_as_the_init_process_of_the_podman_container(podman: Podman) -> None:
    pid = podman.start("vgpud-test-life", ASKS)
    (name,) = states(podman.node)
    with_pid = podman.node.ctl_json("show", name)
    assert str(pid) in json.dumps(with_pid), "bound to the container's init"
    os.kill(pid, signal.SIGKILL)
    left_nothing(podman.node)


def test_a_podman_container_is_listed_by_its_name(podman: Podman) -> None:
    podman.start("vgpud-test-name", ASKS)
    (name,) = states(podman.node)
    assert podman.node.ctl_json("show", name)["label"] == "vgpud-test-name"
    left = podman.start("vgpud-test-label", ASKS, "--annotation=vgpud.io/label=mine")
    labels = {item["label"] for item in podman.node.ctl_json("ls")["items"]}
    assert labels == {"vgpud-test-name", "mine"}, left


def test_a_restarted_podman_container_gets_a_slice_again(podman: Podman) -> None:
    podman.start("vgpud-test-again", ASKS)
    before = set(states(podman.node))
    podman.call("restart", "--time=0", "vgpud-test-again")
    after = set(states(podman.node)) - before
    assert len(after) == 1, "its second life holds an allocation of its own"
    podman.call("rm", "--force", "--time=0", "vgpud-test-again")
    left_nothing(podman.node)


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_a_container_that_the_runtime_fails_to_start_leaves_no_allocation(
    podman: Podman, shared_node: DemoNode, tmp_path: Path, end: str
) -> None:
    """The runtime fails when vgpud has made the allocation and the container does not exist yet."""
    runtime = tmp_path / "runc"
    runtime.write_text("#!/bin/sh\n" + {"ended": "echo broken >&2; exit 9\n", "killed": "kill -9 $$\n"}[end])
    runtime.chmod(0o755)
    podman.runtime = (*podman.runtime, f"--runtime-flag=vgpu-runtime={runtime}")
    assert podman.run(ASKS, check=False).returncode != 0
    left_nothing(shared_node)


def test_a_podman_container_waits_for_vgpud_and_vgpud_notices_an_end_that_it_missed(
    podman: Podman, shared_node: DemoNode
) -> None:
    """vgpud is down. A starting container waits for vgpud. At its next start vgpud notices the end of another
    container.
    """
    pid = podman.start("vgpud-test-away", ASKS)
    shared_node.kill()
    os.kill(pid, signal.SIGKILL)
    command = podman.command("run", "--rm", *LIMITS, ASKS, "--rootfs", str(podman.rootfs), "sh", "-c", ":")
    with subprocess.Popen(command) as waiting:
        shared_node.start()
        assert waiting.wait(300) == 0
    podman.call("rm", "--force", "--time=0", "vgpud-test-away")
    left_nothing(shared_node)


@pytest.mark.parametrize("isolation", ["quota", "compute"])
def test_root_in_a_container_can_create_no_file_in_folders_of_the_host(
    podman: Podman, isolation: str
) -> None:
    """If root in a container could create such files, it could fill the file system of the run folder."""
    podman.start(f"vgpud-test-{isolation}", ASKS, f"--annotation=vgpud.io/isolation={isolation}")
    tries = "for folder in /run/vgpu/*/ /run/vgpu/*/*/; do (echo > $folder/new); done; ls /dev/shm"
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="vgpud-test-"):
        shown = podman.call("exec", f"vgpud-test-{isolation}", "sh", "-c", tries).stdout
    assert list(podman.node.run_dir.rglob("new")) == [] and "vgpud-test-" not in shown


# --- CDI


@pytest.fixture
def by_cdi(shared_node: DemoNode, rootfs: Path) -> Iterator[Podman]:
    """Podman with runc. `link` puts links to the node's CDI specs into the system's CDI folder, which Podman
    reads. After the test the links are removed.
    """
    made = podman_with(shared_node, rootfs, "--runtime=runc")
    system = Path("/var/run/cdi")
    links = []

    def link() -> None:
        system.mkdir(parents=True, exist_ok=True)
        for spec in (shared_node.folder / "cdi").glob("*.json"):
            place = system / spec.name
            if not place.is_symlink():
                place.symlink_to(spec)
                links.append(place)

    made.link = link  # type: ignore[attr-defined]
    yield made
    for place in links:
        place.unlink(missing_ok=True)
    made.clear()


def test_podman_gives_a_container_the_slice_that_its_cdi_device_names(
    by_cdi: Podman, shared_node: DemoNode
) -> None:
    held = quota(shared_node, 3)
    by_cdi.link()  # type: ignore[attr-defined]
    done = by_cdi.run(f"--device={held.cdi_name}", command=f"{SMI}; cat /etc/ld.so.preload")
    assert done.stdout.splitlines()[:2] == ["3072 MiB", "/run/vgpu/libvgpu.so"]
    release(shared_node, held.id)
    left_nothing(shared_node)


# --- hooks.d


def test_a_hook_of_podman_prepares_a_container(shared_node: DemoNode, rootfs: Path, tmp_path: Path) -> None:
    """A hook in hooks.d with stage precreate prepares the container, so no other runtime is needed."""
    example = json.loads((HOOK.parents[3] / "configs/oci/vgpud-hook.json").read_text())
    example["hook"]["path"] = str(HOOK)
    example["hook"]["args"] = ["vgpu-hook", f"--run-dir={shared_node.run_dir}", "precreate"]
    (tmp_path / "vgpud-hook.json").write_text(json.dumps(example))
    podman = podman_with(shared_node, rootfs, "--runtime=runc", f"--hooks-dir={tmp_path}")
    assert podman.run(ASKS, command=SMI).stdout.strip() == "8192 MiB"
    refused = podman.run("--annotation=vgpud.io/memory=1000GiB", check=False)
    assert refused.returncode != 0 and "E402" in refused.stderr
    pid = podman.start("vgpud-test-hook", ASKS)
    assert len(states(shared_node)) == 1, "it outlives podman run --detach"
    os.kill(pid, signal.SIGKILL)
    left_nothing(shared_node)
    podman.clear()
