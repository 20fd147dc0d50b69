"""A whole vgpud on a simulated node of its own, for each test."""

import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import prepared
from tests.demo.node import POLICY, Command, Daemon, DemoNode
from tests.simnode import create

NodeMaker = Callable[..., DemoNode]
# A policy for tests that suspend tenants. It reserves little host memory, so that a test machine with little
# memory can hold the tenants' memory.
ROOMY = f'{POLICY}\n[pool]\nhost_memory_reserve = "1MiB"\n'


def simulated(state: Path, profile: str, driver: str = "") -> dict[str, str]:
    """The environment variables of a new simulated node. Fails the test if the simulator is not built."""
    inside: dict[str, str] = create(state, profile, driver=driver).environment(os.environ)
    return inside


class PreparedNode(DemoNode):
    """A node whose daemon and vgpuctl are forked from prepared processes that have already imported vgpud. A
    node whose command is not `python -m MODULE` starts that command.
    """

    def launch(self, environment: Mapping[str, str], log: int) -> Daemon:
        if tuple(self.command[:2]) != DemoNode.command[:2]:
            return super().launch(environment, log)
        module, *arguments = self.command[2:]
        with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is wanted
            return prepared.program(module, arguments, environment, nothing.fileno(), log)

    def launch_ctl(self, arguments: Sequence[str]) -> Command:
        command = prepared.ctl(arguments, self.environment)
        _launched.append(command)
        return command


# vgpuctl and tenants that the running test has started
_launched: list[Command] = []


def pytest_runtest_setup() -> None:
    _launched.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Kills the tenants that a failed test leaves. On a shared node, later tests would otherwise fail or
    wait.
    """
    report = yield
    for command in _launched:
        if report.failed and command.poll() is None:
            command.kill()
    return report


@contextmanager
def node_maker(folder: Path) -> Iterator[NodeMaker]:
    """Yields a function that makes nodes. After the test, every process that they started is ended."""
    made: list[DemoNode] = []

    def make(profile: str = "h200x8", policy: str = POLICY, driver: str = "") -> DemoNode:
        node = PreparedNode(policy, simulated(folder / f"sim{len(made)}", profile, driver))
        made.append(node)
        return node

    try:
        yield make
    finally:
        for node in made:
            end_daemon(node)
            end_helpers(node)
            node.remove()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeMaker]:
    """Makes nodes that all tests of a module share."""
    with node_maker(tmp_path_factory.mktemp("shared")) as make:
        yield make


@pytest.fixture(scope="module")
def shared_policy() -> str:
    """The policy of `shared_node` and `cut_node`. A module overrides this fixture to use another policy."""
    return ROOMY


@pytest.fixture(scope="module")
def shared_node(make_shared_node: NodeMaker, shared_policy: str) -> DemoNode:
    """A started node that all tests of a module share."""
    node = make_shared_node(policy=shared_policy)
    node.start()
    return node


@pytest.fixture
def cut_node(make_node: NodeMaker, shared_policy: str) -> Iterator[DemoNode]:
    """A node that the test itself starts, usually with a fault point at which vgpud is killed."""
    node = make_node(policy=shared_policy)
    yield node
    node.stop()


def end_daemon(node: DemoNode) -> None:
    """Stops the daemon, because a killed process writes no coverage."""
    if node.daemon is not None:
        end_process(node.daemon)


def end_process(process: Daemon) -> None:
    """Ends a process by SIGTERM, or by SIGKILL if it does not end."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_helpers(node: DemoNode) -> None:
    """Ends every process whose command line or environment names this node's folder. Arbiters get SIGTERM, at
    which they write their coverage.
    """
    marker = f"{node.folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if marker in words and int(process.name) != os.getpid():
            arbiter = words.split(b"\0", 1)[0].endswith(b"vgpu-arbiter")
            for number in (signal.SIGTERM, signal.SIGCONT) if arbiter else (signal.SIGKILL,):
                with suppress(ProcessLookupError):
                    os.kill(int(process.name), number)


@pytest.fixture
def node(make_node: NodeMaker) -> DemoNode:
    """8 simulated H200, policy auto, not started."""
    return make_node()
