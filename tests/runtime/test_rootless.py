"""Rootless Podman with vgpu-runtime: the allocation of an ordinary user's container belongs to that user."""

import grp
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.demo.node import BUILD, POLICY, DemoNode
from tests.e2e.conftest import node_maker
from tests.e2e.support import client, eventually, states
from tests.otheruser import open_folder
from tests.runtime.conftest import FRONT, LIMITS, left_nothing

pytestmark = needs("podman", "root", "user-namespaces", "debian-archive")
USER = 4321
GROUP = grp.getgrnam("games")
ASKS = "--annotation=vgpud.io/memory=5GiB"
SMI = "nvidia-smi --query-gpu=memory.total --format=csv,noheader"


@dataclass
class Rootless:
    folder: Path
    node: DemoNode

    def podman(self, *words: str, runtime: str = str(FRONT)) -> subprocess.CompletedProcess[str]:
        own = ["setpriv", f"--reuid={USER}", f"--regid={GROUP.gr_gid}", "--clear-groups"]
        flag = [f"--runtime-flag=vgpu-run-dir={self.node.run_dir}"] if runtime != "runc" else []
        return subprocess.run(
            [*own, "podman", f"--runtime={runtime}", *flag, *words],
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def run(self, *words: str, command: str, **by: str) -> subprocess.CompletedProcess[str]:
        state = self.node.environment["VGPU_SIM_STATE"]
        inside = (f"--volume={state}:{state}", f"--env=VGPU_SIM_STATE={state}")
        image = ("--rootfs", str(self.folder / "fs"))
        return self.podman("run", *LIMITS, *inside, *words, *image, "sh", "-c", command, **by)


@pytest.fixture(scope="module")
def rootless(rootfs: Path) -> Iterator[Rootless]:
    with open_folder() as folder, node_maker(folder) as make:
        shutil.copytree(rootfs, folder / "fs", symlinks=True)
        for path in (folder, *(folder / "fs").rglob("*")):
            os.lchown(path, USER, USER)
        os.lchown(folder / "fs", USER, USER)
        node = make("h200x1", f"{POLICY}\n[runtime]\nusers = true\n")
        node.environment["VGPUD_GROUP"] = GROUP.gr_name
        # every user may open the simulator's state, as every user may open the device nodes of a driver
        Path(node.environment["VGPU_SIM_STATE"]).chmod(0o666)
        node.start()
        made = Rootless(folder, node)
        # the user's runtime must be able to mount the libraries of the build
        try:
            plain = made.run("--rm", f"--volume={BUILD}:/build", command="true", runtime="runc")
            if plain.returncode != 0:
                unmet("podman", f"it runs no rootless container here: {plain.stderr.strip()}")
            yield made
        finally:
            made.podman("rm", "--force", "--time=0", "held")
            pause = folder / "libpod/tmp/pause.pid"  # the process that keeps the user's namespaces
            if pause.exists():
                os.kill(int(pause.read_text()), signal.SIGKILL)


def test_a_rootless_container_has_its_slice(rootless: Rootless) -> None:
    done = rootless.run("--rm", ASKS, command=SMI)
    assert done.stdout.strip() == "5120 MiB", done.stderr
    left_nothing(rootless.node)


def test_a_refusal_by_vgpud_reaches_the_caller_of_rootless_podman(rootless: Rootless) -> None:
    refused = rootless.run("--rm", "--annotation=vgpud.io/memory=1000GiB", command="true")
    assert refused.returncode != 0 and "E402" in refused.stderr, refused.stderr


def test_a_rootless_containers_allocation_belongs_to_its_user_and_ends_with_the_container(
    rootless: Rootless,
) -> None:
    done = rootless.run("--detach", "--name=held", ASKS, command="sleep 600")
    assert done.returncode == 0, done.stderr
    with client(rootless.node) as calls:
        (held,) = calls.list_allocations().allocations
    assert held.owner_uid == USER
    pid = int(rootless.podman("inspect", "--format={{.State.Pid}}", "held").stdout)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not states(rootless.node), "the allocation is released")
    left_nothing(rootless.node)
