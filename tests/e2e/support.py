"""Helpers of the fault tests: API calls from the test's process, commands of the simulator, waiting for a
condition.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import simnode
from tests.demo.node import BUILD, DemoNode
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb

GIB = 1 << 30
MIB = 1 << 20
PROBE = str(BUILD / "bin" / "vgpu-probe")
ADMIN = "admin.sock"
TENANT = "vgpud.sock"
READ = "ro.sock"


def client(node: DemoNode, door: str = ADMIN, timeout_seconds: float = 300) -> Client:
    return Client(node.run_dir / door, timeout_seconds)


def allocate(node: DemoNode, **asked: Any) -> pb.Allocation:
    with client(node) as calls:
        return calls.allocate(pb.AllocateRequest(**asked))


def quota(node: DemoNode, gib: int = 1, **asked: Any) -> pb.Allocation:
    """Makes a preload allocation, on device 0 unless the caller names another device."""
    asked.setdefault("selector", pb.Selector(indices=[0]))
    return allocate(node, isolation="quota", memory_bytes=gib * GIB, **asked)


def release(node: DemoNode, *allocations: str, force: bool = False) -> None:
    with client(node) as calls:
        for allocation in allocations:
            calls.release(allocation, force)


def states(node: DemoNode) -> dict[str, str]:
    """The state of every allocation, by id."""
    with client(node) as calls:
        return {a.id: a.state for a in calls.list_allocations().allocations}


def simulate(node: DemoNode, *words: str) -> None:
    """Runs `vgpu-sim WORDS` on the node."""
    simnode.simulate(node.environment["VGPU_SIM_STATE"], *words)


def eventually(holds: Callable[[], object], what: str = "it", seconds: float = 300) -> None:
    """Waits until `holds()` is true. The limit of `seconds` only ends a test that would never finish."""
    end, pause = time.monotonic() + seconds, 0.01
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)


def was_killed(node: DemoNode) -> None:
    """Asserts that the fault point at which vgpud was started killed it."""
    assert node.daemon is not None
    assert node.daemon.wait(300) == -signal.SIGKILL


def is_killed_at_its_starts(node: DemoNode, *points: str) -> None:
    """Starts vgpud once for each of these fault points. Each start continues an interrupted change, and is
    killed before it serves.
    """
    for point in points:
        with pytest.raises(RuntimeError, match="did not start"):
            node.start(fault_point=point)
        was_killed(node)


def helper_pids(node: DemoNode, prefix: str = "") -> dict[str, int]:
    """The pids of the node's running helper processes, by unit name."""
    found = {}
    for path in (node.run_dir / "units").glob(f"{prefix}*.pid"):
        try:
            pid = int(path.read_text().split()[0])
        except FileNotFoundError:  # the helper has ended since the folder was listed
            continue
        if is_alive(pid):
            found[path.name.removesuffix(".pid")] = pid
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
