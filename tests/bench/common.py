"""Timing, percentiles, tables, and the JSON files with the same rows."""

import asyncio
import json
import os
import platform
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "bench"


@dataclass(frozen=True)
class Row:
    """One line of a table. Latencies are in microseconds. Other figures are in `value`, with their `unit`."""

    what: str
    p50_us: float | None = None
    p99_us: float | None = None
    per_second: float | None = None
    value: float | None = None
    unit: str = ""
    note: str = ""


@dataclass
class Report:
    """The rows of one bench."""

    name: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        print(line(row), flush=True)
        return row

    def value(self, what: str, value: float, unit: str, note: str = "") -> Row:
        return self.add(Row(what, value=value, unit=unit, note=note))

    def write(self) -> Path:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        path = OUTPUT / f"{self.name}.json"
        text = json.dumps({"machine": machine(), "rows": [asdict(row) for row in self.rows]}, indent=2)
        path.write_text(text + "\n")
        return path


def machine() -> dict[str, object]:
    """The machine's properties on which figures depend. Names are left out."""
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "grpcio": grpc.__version__,
    }


HEAD = f"{'':52} {'p50 us':>9} {'p99 us':>9} {'per s':>8}"


def line(row: Row) -> str:
    if row.value is not None:
        return f"{row.what:52} {row.value:>9.4g} {row.unit:18} {row.note}".rstrip()
    numbers = [f"{n:>{w}.0f}" if n is not None else " " * w for n, w in
               ((row.p50_us, 9), (row.p99_us, 9), (row.per_second, 8))]  # fmt: skip
    return f"{row.what:52} {' '.join(numbers)}  {row.note}".rstrip()


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that at least `percent` percent of all values do not exceed. `values` need not be sorted."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def latency_row(what: str, seconds: Sequence[float], elapsed: float | None = None, note: str = "") -> Row:
    """A row for these latencies. `elapsed` is the wall time of all calls together, in seconds."""
    return Row(
        what,
        p50_us=percentile(seconds, 50) * 1e6,
        p99_us=percentile(seconds, 99) * 1e6,
        per_second=len(seconds) / elapsed if elapsed else None,
        note=note,
    )


async def at_once(
    clients: int, calls: int, call: Callable[[int, int], Awaitable[None]]
) -> tuple[list[float], float]:
    """Runs `call(client, number)` `calls` times in all, shared by `clients` clients that each wait for their
    own call.

    Returns the latencies and the wall time, in seconds.
    """
    seconds: list[float] = []
    numbers = iter(range(calls))

    async def client(index: int) -> None:
        for number in numbers:
            began = time.perf_counter()
            await call(index, number)
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*[client(index) for index in range(clients)])
    return seconds, time.perf_counter() - began
