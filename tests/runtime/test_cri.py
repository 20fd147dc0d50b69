"""Pods by the CRI of real releases of containerd, configured as the pages of docs/ say."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.e2e.support import eventually, quota, release, states
from tests.runtime.conftest import left_nothing
from tests.runtime.containerd import IMAGE, SUITES, Containerd, containerd, documented_config
from tests.runtime.cri import Cri
from tests.runtime.image import make_image

pytestmark = needs("containerd", "debian-archive", "root")
ASKS = {"vgpud.io/memory": "8GiB"}
SMI = ("/usr/bin/nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader")
# Only these two releases have CDI. The installed one may be containerd 1.6, which has none.
with_cdi = pytest.mark.parametrize("shared_engine", ["1.7", "2"], indirect=True, scope="module")


@dataclass
class Engine:
    release: str
    containerd: Containerd
    cri: Cri
    node: DemoNode

    @property
    def state(self) -> str:
        return self.node.environment["VGPU_SIM_STATE"]

    def start(self, name: str, cdi: str = "", **pod: object) -> str:
        return self.cri.start(self.cri.pod(name, **pod), self.state, cdi)  # type: ignore[arg-type]

    def smi(self, container: str) -> str:
        """Returns the output of nvidia-smi without the container's environment variables."""
        return self.cri.run(container, "/usr/bin/env", "-i", f"VGPU_SIM_STATE={self.state}", *SMI)

    def ended(self) -> None:
        self.cri.clear()
        left_nothing(self.node)


@pytest.fixture(scope="module", params=SUITES)
def shared_engine(
    request: pytest.FixtureRequest,
    shared_node: DemoNode,
    rootfs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("cri")
    config = documented_config(request.param, shared_node.folder / "cdi")
    # the shim, and the runtime that it calls, inherit containerd's environment
    environment = {**os.environ, "VGPUD_RUN_DIR": str(shared_node.run_dir)}
    with containerd(folder, config, environment, request.param) as made:
        image = make_image(rootfs, IMAGE, folder / "image.tar")
        done = made.ctr("-n", "k8s.io", "images", "import", "--no-unpack", str(image))
        assert done.returncode == 0, f"{done.stderr}{made.log()[-2000:]}"
        with Cri(made.socket) as cri:
            yield Engine(request.param, made, cri, shared_node)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """containerd for one test. After the test its pods are removed and the node is empty."""
    yield shared_engine
    shared_engine.ended()


def test_the_annotation_of_a_pod_gives_its_container_a_slice(engine: Engine) -> None:
    container = engine.start("annotated", handler="vgpu", annotations=ASKS)
    assert engine.smi(container) == "8192 MiB"
    assert engine.cri.run(container, "/usr/bin/cat", "/etc/ld.so.preload") == "/run/vgpu/libvgpu.so"


@pytest.mark.parametrize(
    ("asks", "error"),
    [({"vgpud.io/memory": "1000GiB"}, "E402"), ({}, "E103"), ({"vgpud.io/memori": "8GiB"}, "E103")],
)
def test_a_pod_that_gets_no_slice_has_no_container(engine: Engine, asks: dict[str, str], error: str) -> None:
    """The runtime class of the pod asks for a slice, so a pod without a request is refused, too."""
    with pytest.raises(grpc.RpcError) as raised:
        engine.start("refused", handler="vgpu", annotations=asks)
    assert f"({error})" in str(raised.value.details()), raised.value.details()


def test_a_pod_of_the_default_runtime_gets_no_slice_and_no_libvgpu(engine: Engine) -> None:
    container = engine.start("plain", annotations=ASKS)
    assert not states(engine.node)
    assert "/run/vgpu" not in engine.cri.run(container, "/usr/bin/cat", "/proc/self/mounts")


def test_the_slice_of_a_container_outlives_a_restart_of_containerd_and_of_vgpud(engine: Engine) -> None:
    container = engine.start("lasting", handler="vgpu", annotations=ASKS)
    (before,) = states(engine.node)
    engine.containerd.kill()
    engine.node.kill()
    engine.node.start()
    engine.containerd.start()
    engine.cri.ready()
    assert engine.cri.running(container)
    assert list(states(engine.node)) == [before]
    assert engine.smi(container) == "8192 MiB"
    engine.cri.call("StopContainer", container_id=container)
    left_nothing(engine.node)


def test_a_killed_container_releases_its_slice(engine: Engine) -> None:
    container = engine.start("killed", handler="vgpu", annotations=ASKS)
    shown = engine.cri.call("ContainerStatus", container_id=container, verbose=True)
    os.kill(json.loads(shown.info["info"])["pid"], signal.SIGKILL)
    left_nothing(engine.node)
    eventually(lambda: not engine.cri.running(container), "containerd sees the end")


@with_cdi
def test_a_container_gets_a_slice_by_the_cdi_device_of_the_slice(engine: Engine) -> None:
    """Like the kubelet, this test names CDI devices in the CRI's field for them."""
    held = quota(engine.node, 3)
    container = engine.start("cdi", cdi=held.cdi_name)
    assert engine.smi(container) == "3072 MiB"
    release(engine.node, held.id, force=True)


@with_cdi
def test_a_container_with_the_cdi_device_of_a_released_slice_does_not_start(engine: Engine) -> None:
    held = quota(engine.node, 3)
    release(engine.node, held.id)
    with pytest.raises(grpc.RpcError, match="unresolvable CDI devices"):
        engine.start("gone", cdi=held.cdi_name)
