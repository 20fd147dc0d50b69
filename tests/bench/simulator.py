"""Cost of the simulated driver, alone and beside many processes, and with processes that are killed at
random.
"""

import tempfile
import time
from pathlib import Path

from tests.bench.common import Report
from tests.sim.test_crowd import FIGURES, HOLDERS, crowd, measure, start
from tests.simnode import SimNode, build_dir

_CALLS = {
    "attach_ns": "a first context",
    "memory_ns": "a query of memory",
    "rates_ns": "a query of utilization",
    "clock_ns": "a query of a clock",
    "launch_ns": "a launch (CPU)",
}


def run(crowd_seconds: float) -> Report:
    report = Report("simulator")
    with tempfile.TemporaryDirectory() as scratch:
        node = SimNode(Path(scratch) / "node", build_dir(), "h200x8")
        node.sim("create", "--profile", node.profile)
        _costs(report, node, "alone")
        for _ in range(HOLDERS):
            start(node, FIGURES, "hold")
        _costs(report, node, f"beside {HOLDERS} processes")
        node.stop()
        end = time.monotonic() + crowd_seconds
        killed = crowd(node, lambda _: time.monotonic() < end)
        report.value("processes killed at random", killed, "", f"in {crowd_seconds:g} s; all sums held")
        node.stop()
    return report


def _costs(report: Report, node: SimNode, where: str) -> None:
    for word, nanoseconds in measure(node).items():
        if word in _CALLS:
            report.value(f"{_CALLS[word]}, {where}", nanoseconds / 1000, "us")
