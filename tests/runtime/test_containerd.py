"""containerd's shim with vgpu-runtime: `ctr run` with a root file system, without a registry."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.e2e.support import states
from tests.runtime.conftest import FRONT, left_nothing
from tests.runtime.containerd import Containerd, containerd

pytestmark = needs("containerd", "root")
CONFIG = """
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]
"""


@pytest.fixture(scope="module")
def engine(shared_node: DemoNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    # the shim, and the runtime that it calls, inherit containerd's environment
    environment = {**os.environ, "VGPUD_RUN_DIR": str(shared_node.run_dir)}
    with containerd(tmp_path_factory.mktemp("containerd"), CONFIG, environment) as made:
        yield made
        made.ctr("task", "rm", "--force", named("held"))


def named(name: str) -> str:
    """Returns a container's id that contains this process's pid, because runc wants ids that are unique on
    the machine.
    """
    return f"{name}-{os.getpid()}"


def run(
    engine: Containerd, rootfs: Path, name: str, *words: str, command: str
) -> subprocess.CompletedProcess[str]:
    options = ("--rootfs", "--runc-binary", str(FRONT), *words)
    return engine.ctr("run", *options, str(rootfs), named(name), "/usr/bin/sh", "-c", command)


def test_a_containerd_container_has_its_slice(
    engine: Containerd, shared_node: DemoNode, rootfs: Path
) -> None:
    command = "cat /etc/ld.so.preload; env"
    done = run(engine, rootfs, "env", "--rm", "--annotation=vgpud.io/memory=8GiB", command=command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/run/vgpu/libvgpu.so\n") and "VGPU_ALLOCATION=" in done.stdout
    left_nothing(shared_node)


def test_a_refusal_by_vgpud_reaches_the_caller_of_containerd(
    engine: Containerd, shared_node: DemoNode, rootfs: Path
) -> None:
    """containerd's shim reads the refusal from the runtime's log, and passes it on."""
    words = ("--rm", "--annotation=vgpud.io/memory=1000GiB")
    done = run(engine, rootfs, "refused", *words, command=":")
    assert done.returncode != 0 and "E402" in done.stderr, done.stderr
    left_nothing(shared_node)


def test_a_killed_containerd_container_releases_its_slice(
    engine: Containerd, shared_node: DemoNode, rootfs: Path
) -> None:
    words = ("--detach", "--annotation=vgpud.io/memory=8GiB")
    done = run(engine, rootfs, "held", *words, command="exec sleep 600")
    assert done.returncode == 0, done.stderr
    assert len(states(shared_node)) == 1
    (line,) = [
        text for text in engine.ctr("task", "ls").stdout.splitlines() if text.startswith(named("held"))
    ]
    os.kill(int(line.split()[1]), signal.SIGKILL)
    left_nothing(shared_node)
