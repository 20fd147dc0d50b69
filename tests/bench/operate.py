"""The cost of monitoring: a scrape, the status page, and vgpuctl's listings."""

import http.client
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.common import Report, latency_row
from tests.bench.node import BenchNode
from tests.demo.node import BUILD, ROOT
from vgpud import lease_layout as layout
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb

FEW, MANY = 200, 1000
SCRAPES = 60


def run() -> Report:
    report = Report("operate")
    with _node() as node, Client(node.run_dir / "admin.sock") as client:
        _allocate(client, FEW)
        report.value("devices", len(client.list_devices().devices), "")
        _scrapes(report, node, FEW)
        _allocate(client, MANY - FEW)
        _scrapes(report, node, MANY)
        with _tenants(node, 8):
            _verb(report, node, "ps", " and 8 processes")
        for verb in ("ls", "top -1"):
            _verb(report, node, verb)
    return report


@contextmanager
def _node() -> Iterator[BenchNode]:
    node = BenchNode()
    try:
        node.until_ready()
        yield node
    finally:
        node.end()


def _allocate(client: Client, count: int) -> None:
    for _ in range(count):
        client.allocate(pb.AllocateRequest(memory_bytes=512 * 2**20, isolation="quota", label="bench"))


def scrape(path: Path) -> bytes:
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/metrics")
    body = connection.getresponse().read()
    connection.close()
    return body


def _scrapes(report: Report, node: BenchNode, allocations: int) -> None:
    """Scrapes after pauses in which every cached value becomes stale. Reports the processor time as for one
    scrape a second.
    """
    path = node.run_dir / "metrics.sock"
    size = len(scrape(path))
    usages = list((node.run_dir / "leases").glob("*/usage"))
    for kind in ("idle", "counting"):
        seconds = []
        cpu = 0.0
        for turn in range(SCRAPES):
            time.sleep(0.55)
            for usage in usages if kind == "counting" else ():
                _count(usage, turn)
            before = node.run_seconds()
            began = time.perf_counter()
            scrape(path)
            seconds.append(time.perf_counter() - began)
            cpu += node.run_seconds() - before
        name = f"{allocations} allocations, all {kind}"
        report.add(latency_row(f"scrape, {name}", seconds, note=f"{size / 1024:.0f} KiB"))
        report.value(f"one a second, {name}", cpu / SCRAPES * 100, "% of a core")


def _count(usage: Path, turn: int) -> None:
    """Changes a lease's usage page, as the arbiter does when it grants a time slice, so cached figures are
    stale.
    """
    with usage.open("r+b") as file:
        file.seek(layout.USAGE_COMPUTE)
        file.write(struct.pack("<Q", turn * 1000 + 7))


@contextmanager
def _tenants(node: BenchNode, count: int) -> Iterator[None]:
    command = [str(BUILD / "bin" / "vgpu-probe"), "hold", str(2**20), "--then-wait-on-stdin"]
    started = [node.tenant(["--memory", "512MiB", "--isolation", "quota"], command) for _ in range(count)]
    try:
        for tenant in started:
            tenant.line()
        yield
    finally:
        for tenant in started:
            tenant.end()


def _verb(report: Report, node: BenchNode, verb: str, more: str = "") -> None:
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "vgpud.ctl", *verb.split()],
            env=node.environment,
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        seconds.append(time.perf_counter() - began)
    report.add(latency_row(f"vgpuctl {verb}, {MANY} allocations{more}", seconds))
