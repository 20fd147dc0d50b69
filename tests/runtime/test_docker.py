"""Docker of a later Debian release, with vgpu-runtime and with CDI, configured as docs/containers.md says."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.demo.node import BUILD, DemoNode
from tests.e2e.support import eventually, quota, release, states
from tests.runtime.conftest import left_nothing
from tests.runtime.containerd import IMAGE, package
from tests.runtime.image import make_image
from tests.sim import outside
from tests.simnode import ROOT

pytestmark = needs("containerd", "debian-archive", "root")
SUITE = "forky"
ASKS = "--annotation=vgpud.io/memory=8GiB"
SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader")
#: options for a machine without firewall rules and without overlay file systems
HERE = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs")


@dataclass
class Docker:
    client: Path
    socket: Path
    node: DemoNode
    names: list[str]

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.client), "--host", f"unix://{self.socket}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    def run(self, *words: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        """Runs a container. `words` are options of docker run."""
        state = self.node.environment["VGPU_SIM_STATE"]
        inside = ("--network=none", f"--volume={state}:{state}", f"--env=VGPU_SIM_STATE={state}")
        return self.call("run", *inside, *words, IMAGE, *command)

    def start(self, name: str, *words: str) -> None:
        self.names.append(name)
        done = self.run(
            "--detach", f"--name={name}", "--runtime=vgpu", ASKS, *words, command=("sleep", "600")
        )
        assert done.returncode == 0, done.stderr

    def pid(self, name: str) -> int:
        return int(self.call("inspect", "--format={{.State.Pid}}", name).stdout)


def documented_config(folder: Path, node: DemoNode) -> Path:
    """The daemon.json of docs/containers.md, with the test's paths."""
    page = (ROOT / "docs" / "containers.md").read_text()
    (shown,) = re.findall(r"`/etc/docker/daemon.json`\): `(.*)`\.", page)
    config = json.loads(shown.replace("/usr/bin/vgpu-runtime", str(BUILD / "bin" / "vgpu-runtime")))
    (folder / "daemon.json").write_text(json.dumps(config | {"cdi-spec-dirs": [str(node.folder / "cdi")]}))
    return folder / "daemon.json"


def unpacked(name: str) -> Path:
    folder = outside.unpacked(name, SUITE)
    return folder or unmet("debian-archive", outside.why[f"{name}-{SUITE}"])


@pytest.fixture(scope="module")
def shared_docker(
    shared_node: DemoNode, rootfs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Docker]:
    folder = tmp_path_factory.mktemp("docker")
    server = unpacked("docker.io") / "usr/sbin"
    docker = Docker(unpacked("docker-cli") / "usr/bin/docker", folder / "docker.sock", shared_node, [])
    config = documented_config(folder, shared_node)
    path = f"{server}:{package('2') / 'usr/bin'}:{os.environ['PATH']}"
    places = (f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
    with (folder / "log").open("wb") as log:
        # the shim, and the runtime that it calls, inherit the daemon's environment
        daemon = subprocess.Popen(
            [server / "dockerd", f"--config-file={config}", f"--host=unix://{docker.socket}", *places, *HERE],
            env={**os.environ, "PATH": path, "VGPUD_RUN_DIR": str(shared_node.run_dir)},
            stdout=log,
            stderr=log,
        )
    try:
        eventually(
            lambda: daemon.poll() is not None or docker.call("version").returncode == 0, "dockerd serves"
        )
        if daemon.poll() is not None:
            unmet("containerd", f"dockerd does not start here: {(folder / 'log').read_text()[-500:]}")
        loaded = docker.call("load", f"--input={make_image(rootfs, IMAGE, folder / 'image.tar')}")
        assert loaded.returncode == 0, loaded.stderr
        yield docker
    finally:
        daemon.terminate()
        daemon.wait(300)


@pytest.fixture
def docker(shared_docker: Docker) -> Iterator[Docker]:
    """Docker for one test. After the test its containers are removed and the node is empty."""
    yield shared_docker
    for name in shared_docker.names:
        shared_docker.call("rm", "--force", name)
    shared_docker.names.clear()
    left_nothing(shared_docker.node)


def test_a_docker_container_has_its_slice_whatever_its_environment(docker: Docker) -> None:
    state = docker.node.environment["VGPU_SIM_STATE"]
    # by the exit code: dockerd drops output that it has not copied 2 s after the end of a container
    looks = f'test "$(/usr/bin/nvidia-smi {" ".join(SMI[1:])})" = "8192 MiB"'
    bare = ("env", "-i", f"VGPU_SIM_STATE={state}", "/bin/sh", "-c", looks)
    done = docker.run("--rm", "--runtime=vgpu", ASKS, command=bare)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


def test_a_refusal_by_vgpud_reaches_the_caller_of_docker(docker: Docker) -> None:
    asks = "--annotation=vgpud.io/memory=1000GiB"
    done = docker.run("--rm", "--runtime=vgpu", asks, command=("true",))
    assert done.returncode != 0
    assert "no device can hold 1000GiB" in done.stderr and "E402" in done.stderr


def test_docker_exec_runs_under_the_containers_limit_and_docker_restart_makes_a_new_slice(
    docker: Docker,
) -> None:
    docker.start("again")
    (before,) = states(docker.node)
    assert docker.node.ctl_json("show", before)["label"] == "again", "the container's name"
    assert docker.call("exec", "again", *SMI).stdout.strip() == "8192 MiB"
    assert docker.call("restart", "--timeout=0", "again").returncode == 0
    eventually(lambda: len(states(docker.node)) == 1, "the first life's slice is released")
    assert list(states(docker.node)) != [before]


def test_a_killed_docker_container_releases_its_slice(docker: Docker) -> None:
    docker.start("killed")
    os.kill(docker.pid("killed"), signal.SIGKILL)
    left_nothing(docker.node)


def test_docker_gives_a_container_the_slice_that_its_cdi_device_names(docker: Docker) -> None:
    held = quota(docker.node, 3)
    done = docker.run("--rm", f"--device={held.cdi_name}", command=SMI)
    assert done.stdout.strip() == "3072 MiB", done.stderr
    release(docker.node, held.id)
