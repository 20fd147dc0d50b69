"""Fixtures: real container engines, which need root, with a vgpud on a simulated node."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import unmet
from tests.demo.node import BUILD, DemoNode
from tests.e2e.conftest import node_maker
from tests.e2e.support import eventually, states
from tests.runtime.rootfs import add, libraries, make_rootfs
from tests.sim import outside

FRONT = BUILD / "bin" / "vgpu-runtime"
HOOK = BUILD / "bin" / "vgpu-hook"
# No network, and limits that every session may set, because Podman's default limits may be higher.
LIMITS = ("--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_rootfs(tmp_path_factory.mktemp("root") / "fs")


def made_rootfs(place: Path) -> Path:
    """A root file system for containers. It contains nvidia-smi if that can be fetched."""
    smi = outside.nvidia_smi("550")
    folder = make_rootfs(place, *([smi] if smi else []))
    for library in libraries(BUILD / "lib" / "libvgpu.so"):
        add(folder, library)
    return folder


@dataclass
class Podman:
    node: DemoNode
    rootfs: Path
    runtime: tuple[str, ...]
    names: list[str] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        return ["podman", *self.runtime, *words]

    def call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=300, check=False)
        if check:
            assert done.returncode == 0, f"podman {' '.join(words)}: {done.stdout}{done.stderr}"
        return done

    def run(self, *words: str, command: str = "true", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a container to its end. `words` are options of podman run."""
        state = self.node.environment["VGPU_SIM_STATE"]
        inside = (f"--volume={state}:{state}", f"--env=VGPU_SIM_STATE={state}")
        options = (*LIMITS, *inside, *words)
        if "--detach" not in words:
            options = ("--rm", *options)
        return self.call("run", *options, "--rootfs", str(self.rootfs), "sh", "-c", command, check=check)

    def start(self, name: str, *words: str, command: str = "sleep 600") -> int:
        """Starts a container that keeps running. Returns the pid of its init."""
        self.names.append(name)
        self.run("--detach", f"--name={name}", *words, command=command)
        return self.pid(name)

    def pid(self, name: str) -> int:
        return int(self.call("inspect", "--format={{.State.Pid}}", name).stdout)

    def clear(self) -> None:
        for name in self.names:
            self.call("rm", "--force", "--time=0", name, check=False)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoNode]:
    with node_maker(tmp_path_factory.mktemp("node")) as make:
        node = make("h200x1")
        node.start()
        yield node


def podman_with(node: DemoNode, rootfs: Path, *runtime: str) -> Podman:
    """Skips the test if Podman cannot run any container."""
    plain = Podman(node, rootfs, ("--runtime=runc",)).run(check=False)
    if plain.returncode != 0:
        unmet("podman", f"it runs no container here: {plain.stderr.strip()}")
    return Podman(node, rootfs, runtime)


@pytest.fixture
def podman(shared_node: DemoNode, rootfs: Path) -> Iterator[Podman]:
    """Podman with vgpu-runtime. Every test leaves the node empty."""
    made = podman_with(
        shared_node, rootfs, f"--runtime={FRONT}", f"--runtime-flag=vgpu-run-dir={shared_node.run_dir}"
    )
    yield made
    made.clear()
    left_nothing(shared_node)


def left_nothing(node: DemoNode) -> None:
    """Waits until all allocations are released, and asserts that no lease, spec or mount is left."""
    eventually(lambda: not states(node), "all allocations are released")
    assert leftovers(node) == {}


def leftovers(node: DemoNode) -> dict[str, Any]:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found = {
        "leases": [path.name for path in (node.run_dir / "leases").iterdir()],
        "specs": [path.name for path in (node.folder / "cdi").glob("*")],
        "mounts": [line for line in mounts if "/run/vgpu" in line],
    }
    return {kind: what for kind, what in found.items() if what}
