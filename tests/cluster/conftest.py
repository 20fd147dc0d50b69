"""Fixtures: a real cluster of one node for all tests of this folder. Each test has an empty node and a policy
of its own.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.control import Cluster, cluster_config, losing_runc, write_base_spec
from tests.cluster.pods import IMAGES, Pods
from tests.conditions import unmet
from tests.demo.node import DemoNode
from tests.e2e.conftest import node_maker
from tests.kubelet import official
from tests.kubelet.double import fixed_plugins
from tests.runtime import conftest as runtime
from tests.runtime.containerd import IMAGE, SUITES, Containerd, containerd, package
from tests.runtime.cri import Cri
from tests.runtime.image import make_image
from tests.sim import outside
from tests.simnode import ROOT

rootfs = runtime.rootfs
OnPolicy = Callable[[str], Pods]


def etcd() -> Path:
    folder = outside.unpacked("etcd-server", "trixie")
    return folder / "usr/bin/etcd" if folder else unmet("debian-archive", outside.why["etcd-server-trixie"])


def cluster_node(node: DemoNode, kubeconfig: Path) -> None:
    """Prepares a node that is not started for the kubelet of the cluster."""
    client = official.client() or unmet("python-index", official.why)
    root = node.folder / "k"
    root.mkdir()
    node.environment |= {
        "PYTHONPATH": f"{client}:{ROOT}",
        "VGPUD_KUBELET_DIR": str(root),
        "VGPUD_DEVICE_PLUGINS_DIR": str(fixed_plugins(root)),
        "VGPUD_KUBECONFIG": str(kubeconfig),
        "VGPUD_NODE_NAME": "node-1",
        # the client writes the certificates of the kubeconfig there, and a killed vgpud leaves them
        "TMPDIR": str(node.folder),
    }


def add_images(made: Containerd, rootfs: Path, folder: Path) -> None:
    archive = make_image(rootfs, IMAGE, folder / "image.tar")
    done = made.ctr("-n", "k8s.io", "images", "import", "--no-unpack", str(archive))
    assert done.returncode == 0, done.stderr
    for name in IMAGES:
        assert made.ctr("-n", "k8s.io", "images", "tag", IMAGE, name).returncode == 0


@contextmanager
def running(release: str, programs: Path, rootfs: Path, folder: Path) -> Iterator[Pods]:
    """A cluster of one node behind a release of containerd. vgpud does not run."""
    with node_maker(folder) as make:
        node = make("h200x8")
        cluster_node(node, folder / "vgpud.conf")
        state, spec = node.environment["VGPU_SIM_STATE"], folder / "base.json"
        write_base_spec(package(release) / "usr/bin/ctr", state, spec)
        config = cluster_config(release, node, folder, spec)
        path = {"PATH": f"{losing_runc(folder)}:{os.environ['PATH']}"}
        with containerd(folder, config, os.environ | path, release) as made:
            add_images(made, rootfs, folder)
            cluster = Cluster(folder, programs, etcd(), made, node)
            try:
                cluster.start()
                with Cri(made.socket) as cri:
                    yield Pods(cluster, cri)
            finally:
                cluster.stop()
                made.kill()
                made.end_containers()  # the containers of pods that were just deleted may still run


@pytest.fixture(scope="session", params=[release for release in SUITES if release != "installed"])
def shared_pods(
    request: pytest.FixtureRequest, rootfs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pods]:
    programs = Path(os.environ["VGPU_KUBERNETES"]).resolve()
    with running(request.param, programs, rootfs, tmp_path_factory.mktemp("cluster")) as pods:
        yield pods


@pytest.fixture
def on_policy(shared_pods: Pods) -> Iterator[OnPolicy]:
    """A function that starts vgpud with a policy. After the test the node is emptied."""
    node = shared_pods.cluster.node

    def start(policy: str) -> Pods:
        (node.folder / "etc" / "vgpud.toml").write_text(policy)
        node.start()
        return shared_pods

    yield start
    if node.daemon is not None and node.daemon.poll() is not None:
        node.start()  # a failed test may leave vgpud killed
    shared_pods.clear()
    runtime.left_nothing(node)
    node.stop()
