"""As many allocations as in a day, without pauses: memory, descriptors and disk use must not grow."""

import os
import time
from pathlib import Path

from tests.bench.common import Report, latency_row
from tests.bench.node import BenchNode
from tests.bench.operate import scrape
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb

SAMPLES = 20
MODES: tuple[dict[str, object], ...] = (
    {"memory_bytes": 2**30, "isolation": "quota"},
    {"memory_bytes": 2**30, "isolation": "quota", "count": 2},
    {"memory_bytes": 2**30, "share_percent": 25.0, "isolation": "compute"},
    {"mig_profile": "1g.18gb", "isolation": "hardware"},
    {"isolation": "device"},
)


def run(cycles: int) -> Report:
    """Makes mostly quota allocations. Every tenth allocation is of one of MODES, in turn. Some are resized,
    and the metrics are scraped.
    """
    report = Report("soak")
    node = BenchNode()
    try:
        node.until_ready()
        with Client(node.run_dir / "admin.sock") as client:
            _turn(report, node, client, cycles)
    finally:
        node.end()
    return report


def _turn(report: Report, node: BenchNode, client: Client, cycles: int) -> None:
    seconds = []
    every = max(1, cycles // SAMPLES)
    began = time.perf_counter()
    for cycle in range(cycles):
        if cycle % every == 0:
            _sample(report, node, cycle)
        asked = MODES[(cycle // 10) % len(MODES)] if cycle % 10 == 0 else MODES[0]
        before = time.perf_counter()
        held = client.allocate(pb.AllocateRequest(label=f"soak {cycle}", **asked))  # type: ignore[arg-type]
        if cycle % 100 == 50:
            client.resize(held.id, memory_bytes=2**31)
        client.release(held.id)
        seconds.append(time.perf_counter() - before)
        if cycle % 500 == 0:
            scrape(node.run_dir / "metrics.sock")
            client.list_allocations()
    _sample(report, node, cycles)
    report.add(latency_row("an allocation and its release", seconds, time.perf_counter() - began))
    _growth(report)


def _sample(report: Report, node: BenchNode, cycle: int) -> None:
    descriptors = len(list(Path(f"/proc/{node.pid}/fd").iterdir()))
    report.value(f"after {cycle}: memory", node.resident_mib(), "MiB")
    report.value(f"after {cycle}: descriptors", descriptors, "")
    report.value(f"after {cycle}: threads", len(list(Path(f"/proc/{node.pid}/task").iterdir())), "")
    report.value(f"after {cycle}: disk", _size(node.folder / "state") / 1024, "KiB")
    report.value(f"after {cycle}: files", _files(node), "")


def _size(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _files(node: BenchNode) -> int:
    """Number of files in the run folder and of CDI specs. No file of a released allocation may be left."""
    folders = (node.run_dir, node.folder / "cdi")
    return sum(len(names) + len(dirs) for folder in folders for _, dirs, names in os.walk(folder))


def _growth(report: Report) -> None:
    """Growth in the second half of the run, when caches and the event history are full."""
    for what in ("memory", "descriptors", "threads", "disk", "files"):
        values = [row.value for row in report.rows if row.what.endswith(f": {what}")]
        known = [value for value in values if value is not None]
        report.value(f"second half, growth of {what}", known[-1] - known[len(known) // 2], "")
