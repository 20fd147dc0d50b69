"""A whole vgpud on a simulated node of its own, for each test."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import prepared
from tests.demo.node import POLICY, Command, Daemon, DemoNode
from tests.simnode import create

NodeMaker = Callable[..., DemoNode]
#: For tenants that are suspended: the machine of the tests may be short of memory, and they hold little.
ROOMY = f'{POLICY}\n[pool]\nhost_memory_reserve = "1MiB"\n'


def simulated(state: Path, profile: str) -> dict[str, str]:
    """The environment inside a new simulated node; a missing build is a failure, not a skip."""
    inside: dict[str, str] = create(state, profile).environment(os.environ)
    return inside


class PreparedNode(DemoNode):
    """Its programs have nothing to import any more, unless a test has another program for its daemon."""

    def launch(self, environment: Mapping[str, str], log: int) -> Daemon:
        if self.command is not DemoNode.command:
            return super().launch(environment, log)
        return prepared.daemon(environment, log)

    def launch_ctl(self, arguments: Sequence[str]) -> Command:
        return prepared.ctl(arguments, self.environment)


@contextmanager
def node_maker(folder: Path) -> Iterator[NodeMaker]:
    """Makes nodes, and clears away all that they started."""
    made: list[DemoNode] = []

    def make(profile: str = "h200x8", policy: str = POLICY) -> DemoNode:
        node = PreparedNode(policy, simulated(folder / f"sim{len(made)}", profile))
        made.append(node)
        return node

    try:
        yield make
    finally:
        for node in made:
            if node.daemon is not None and node.daemon.poll() is None:
                node.kill()
            end_helpers(node)
            node.remove()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeMaker]:
    """For a daemon that all tests of a module share."""
    with node_maker(tmp_path_factory.mktemp("shared")) as make:
        yield make


@pytest.fixture(scope="module")
def shared_policy() -> str:
    """Of the two below; a module that wants another has a fixture of this name."""
    return ROOMY


@pytest.fixture(scope="module")
def shared_node(make_shared_node: NodeMaker, shared_policy: str) -> DemoNode:
    """One started for all tests of a module."""
    node = make_shared_node(policy=shared_policy)
    node.start()
    return node


@pytest.fixture
def cut_node(make_node: NodeMaker, shared_policy: str) -> Iterator[DemoNode]:
    """One that a test starts, and cuts, itself."""
    node = make_node(policy=shared_policy)
    yield node
    node.stop()


def end_helpers(node: DemoNode) -> None:
    """Every process whose environment names this node's folders."""
    marker = f"{node.folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if marker in words and int(process.name) != os.getpid():
            try:
                os.kill(int(process.name), 9)
            except ProcessLookupError:
                continue


@pytest.fixture
def node(make_node: NodeMaker) -> DemoNode:
    """8 simulated H200, policy auto, not started."""
    return make_node()
