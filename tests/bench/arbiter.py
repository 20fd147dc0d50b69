"""Latency of one tenant's messages to the arbiter while another tenant attacks it.

The honest tenant asks for a time slice of its own device, and gives it back at once: WANT, GRANT, DONE. The
latency ends when the arbiter sends the GRANT, whose message has that time: the time in which the kernel wakes
the tenant is left out. Each row has the same tenant without an attack, measured in the same run. The goal is
that no attack delays a message by more than 1 ms. The attackers (tests/bench/arbiter_attackers.py) run at the
lowest priority.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.bench.arbiter_attackers import ATTACKS, OTHER_LEASE, granted, say_want
from tests.bench.common import Report, latency_row, percentile
from tests.demo.node import ROOT
from tests.fuzz.test_arbiter import Tenant
from tests.lease.conftest import Node
from tests.native.harness import GIB, GID, UID, UUIDS
from vgpud.lease import DeviceLimits, write_lease

_PAUSE_SECONDS = 0.001
_SECONDS = 4.0
_NICE = -10


class Honest:
    """A tenant alone on a device. The arbiter grants its time slice as soon as it has read the message."""

    def __init__(self, node: Node) -> None:
        limits = [DeviceLimits(UUIDS[1], GIB)]
        lease = write_lease(node.run_dir / "leases", "honest", limits, uid=UID, gid=GID)
        node.client.add(lease.name)
        self._tenant = Tenant(lease, 0)
        self._tenant.line.settimeout(300)

    def ask(self) -> float:
        """Asks for a time slice and gives it back. Returns the seconds until the grant."""
        asked_ns = time.monotonic_ns()
        self.say_want()
        return (self.granted() - asked_ns) / 1e9

    def say_want(self) -> None:
        say_want(self._tenant)

    def granted(self) -> int:
        return granted(self._tenant)

    def close(self) -> None:
        self._tenant.close()


@contextmanager
def attack(name: str, lease: Path) -> Iterator[None]:
    """Runs the attack during the block, and ends its processes afterwards."""
    words = [sys.executable, "-m", "tests.bench.arbiter_attackers", name, str(lease)]
    one = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert one.stdout is not None
    try:
        assert one.stdout.readline() == "stands\n"
        yield
    finally:
        one.communicate("")


@contextmanager
def made_node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="vgpu-arbiter-", dir="/dev/shm") as folder:
        (Path(folder) / "leases").mkdir()
        node = Node(Path(folder))
        node.start_arbiter()
        assert node.arbiter is not None
        with suppress(PermissionError):  # as vgpud-arbiter.service does
            os.setpriority(os.PRIO_PROCESS, node.arbiter.pid, _NICE)
        try:
            yield node
        finally:
            node.end()


def _trips(honest: Honest, seconds: float) -> list[float]:
    trips, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        trips.append(honest.ask())
        time.sleep(_PAUSE_SECONDS)
    return trips


def run(only: str = "") -> Report:
    report = Report("arbiter")
    for name in (name for name in ATTACKS if only in name):
        with made_node() as node:
            honest = Honest(node)
            without = _trips(honest, _SECONDS / 2)
            lease, _ = node.lease("attacker"), node.lease(OTHER_LEASE)
            with attack(name, lease):
                beside = _trips(honest, _SECONDS)
            honest.close()
        note = "longest {:.0f} us; without {:.0f}, {:.0f}, {:.0f}"
        figures = [1e6 * percentile(trips, part) for trips in (beside, without) for part in (50, 99, 100)]
        report.add(latency_row(name, beside, note=note.format(*figures[2:])))
    return report
