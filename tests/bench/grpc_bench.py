"""The daemon through its sockets: latency beside the baselines, start, recovery, memory, idle time."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench import ledger
from tests.bench.clients import Tenants, echoes
from tests.bench.common import Report, Row
from tests.bench.node import BenchNode
from tests.bench.sqlite import BareCommits
from tests.demo.node import ROOT

_CLIENTS = (1, 16, 64)
_LIVE = 1000
_RECOVERED = 10_000
_NVML = (
    "import time; b = time.perf_counter(); import pynvml; pynvml.nvmlInit(); print(time.perf_counter() - b)"
)


def run(calls: int, idle_seconds: float) -> Report:
    """Makes `calls` calls for one client, and four times as many for many clients."""
    report = Report("grpc")
    with tempfile.TemporaryDirectory(prefix="vgpud-bench-") as folder:
        yardsticks = _yardsticks(report, Path(folder), calls)
    with _node() as node:
        _start(report, node)
        _idle(report, node, idle_seconds)
        tenants = Tenants(node.tenant_socket)
        asyncio.run(_latencies(report, node, tenants, calls, yardsticks))
        uuids = asyncio.run(tenants.devices())
    with _node() as node:
        _recovery(report, node, uuids)
    return report


@contextmanager
def _node() -> Iterator[BenchNode]:
    node = BenchNode()
    try:
        yield node
    finally:
        node.end()


def _yardsticks(report: Report, folder: Path, calls: int) -> float:
    """Microseconds of one echo plus one durable commit, for one client."""
    with BareCommits(folder) as bare:
        bare.measure(calls)
    commit = report.add(bare.row())
    socket = folder / "echo.sock"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.echo", str(socket)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        rows = [report.add(asyncio.run(echoes(socket, n, _calls(n, calls)))) for n in _CLIENTS]
    finally:
        server.kill()
        server.wait()
    return (rows[0].p50_us or 0.0) + (commit.p50_us or 0.0)


def _calls(clients: int, calls: int) -> int:
    return calls if clients == 1 else 4 * calls


def _start(report: Report, node: BenchNode) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _NVML], env=node.environment, capture_output=True, text=True, check=False
    )
    nvml = float(told.stdout) if told.returncode == 0 else 0.0
    report.value("NVML's own init", nvml * 1e3, "ms", "" if nvml else "it would not start")
    ready = node.until_ready()
    report.value("start to READY, empty", ready * 1e3, "ms", "aim: 500 beyond NVML's init")
    report.value("resident, empty", node.resident_mib(), "MiB", "aim: under 80")


def _idle(report: Report, node: BenchNode, seconds: float) -> None:
    time.sleep(1.0)  # vgpud completes the work that it postpones at its start
    before = node.cpu_seconds()
    time.sleep(seconds)
    percent = (node.cpu_seconds() - before) / seconds * 100
    report.value(f"idle CPU over {seconds:g} s", percent, "% of a core", "aim: under 0.1")


async def _latencies(
    report: Report, node: BenchNode, tenants: Tenants, calls: int, yardsticks_us: float
) -> None:
    rows: list[Row] = []
    for live in (0, _LIVE):
        if live:
            await tenants.take(live)
            report.value(f"resident, {live} live", node.resident_mib(), "MiB")
        for clients in _CLIENTS:
            for row in await tenants.pairs(clients, _calls(clients, calls), f"{live} live"):
                rows.append(report.add(row))
    ratio = (rows[0].p50_us or 0.0) / yardsticks_us
    report.value("Allocate p50 over echo + durable commit", ratio, "times", "aim: 1.5")


def _recovery(report: Report, node: BenchNode, uuids: tuple[str, ...]) -> None:
    """Measures two starts: at the first, leases and specs are missing; at the second, everything is
    in place.
    """
    node.ledger.parent.mkdir(mode=0o700, parents=True)
    asyncio.run(ledger.fill(node.ledger, _RECOVERED, uuids))
    for what in ("leases and specs missing", "all in place"):
        ready = node.until_ready(timeout_seconds=300)
        states = asyncio.run(Tenants(node.tenant_socket).states())
        note = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        report.value(f"start to READY, {_RECOVERED} held, {what}", ready * 1e3, "ms", note)
        report.value(f"resident, {_RECOVERED} held", node.resident_mib(), "MiB")
        node.kill()
