"""containerd's shim with vgpu-runtime: `ctr run` on a root file system, without a registry."""

import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.demo.node import DemoNode
from tests.e2e.support import eventually, states
from tests.runtime.conftest import FRONT, left_nothing
from tests.simnode import ROOT

pytestmark = needs("containerd", "root")
CONFIG = """
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]
"""
# as Debian installs it for containerd 1.6, 1.7 and 2.1
DEBIAN = """
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "{folder}/opt"
"""
Ctr = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def containerd(folder: Path, config: str, environment: Mapping[str, str]) -> Iterator[Ctr]:
    """Runs a containerd of the test's own during the block."""
    (folder / "config.toml").write_text(config)
    socket = folder / "containerd.sock"

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ctr", "--address", str(socket), *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    places = ("--root", folder / "root", "--state", folder / "state", "--address", socket)
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["containerd", "-c", folder / "config.toml", *places], env=environment, stdout=log, stderr=log
        )
    try:
        eventually(lambda: daemon.poll() is not None or call("version").returncode == 0, "containerd serves")
        if daemon.poll() is not None:
            unmet("containerd", f"it does not start here: {(folder / 'log').read_text()[-500:]}")
        yield call
    finally:
        call("task", "rm", "--force", "held")
        daemon.terminate()
        daemon.wait(300)


@pytest.fixture(scope="module")
def ctr(shared_node: DemoNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ctr]:
    # the shim and its runtime inherit containerd's environment
    environment = {**os.environ, "VGPUD_RUN_DIR": str(shared_node.run_dir)}
    with containerd(tmp_path_factory.mktemp("containerd"), CONFIG, environment) as call:
        yield call


def test_the_pages_tables_leave_cri_working_and_pass_annotations_on(tmp_path: Path) -> None:
    """The tables are appended to the file that Debian installs. If its runtimes lacked runc, the CRI plugin
    would stop.
    """
    page = (ROOT / "docs" / "containers.md").read_text()
    (tables,) = (
        block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "runtimes.vgpu" in block
    )
    config = DEBIAN.format(folder=tmp_path) + tables
    with containerd(tmp_path, config, os.environ) as call:
        plugins = [line.split() for line in call("plugins", "ls").stdout.splitlines()]
        states = {words[1]: words[3] for words in plugins if words[:1] == ["io.containerd.grpc.v1"]}
        assert states["cri"] == "ok", (tmp_path / "log").read_text()[-2000:]
    runtimes = tomllib.loads(config)["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert runtimes["vgpu"]["pod_annotations"] == ["vgpud.io/*"]


def run(ctr: Ctr, rootfs: Path, name: str, *words: str, command: str) -> subprocess.CompletedProcess[str]:
    options = ("--rootfs", "--runc-binary", str(FRONT), *words)
    return ctr("run", *options, str(rootfs), name, "/usr/bin/sh", "-c", command)


def test_a_containerd_container_has_its_slice(ctr: Ctr, shared_node: DemoNode, rootfs: Path) -> None:
    command = "cat /etc/ld.so.preload; env"
    done = run(ctr, rootfs, "env", "--rm", "--annotation=vgpud.io/memory=8GiB", command=command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/run/vgpu/libvgpu.so\n") and "VGPU_ALLOCATION=" in done.stdout
    left_nothing(shared_node)


def test_a_refusal_reaches_the_caller_of_containerd(ctr: Ctr, shared_node: DemoNode, rootfs: Path) -> None:
    """The shim reads the refusal from the runtime's log."""
    words = ("--rm", "--annotation=vgpud.io/memory=1000GiB")
    done = run(ctr, rootfs, "refused", *words, command=":")
    assert done.returncode != 0 and "E402" in done.stderr, done.stderr
    left_nothing(shared_node)


def test_a_killed_containerd_container_releases_its_slice(
    ctr: Ctr, shared_node: DemoNode, rootfs: Path
) -> None:
    words = ("--detach", "--annotation=vgpud.io/memory=8GiB")
    done = run(ctr, rootfs, "held", *words, command="exec sleep 600")
    assert done.returncode == 0, done.stderr
    assert len(states(shared_node)) == 1
    (line,) = [text for text in ctr("task", "ls").stdout.splitlines() if text.startswith("held")]
    os.kill(int(line.split()[1]), signal.SIGKILL)
    left_nothing(shared_node)
