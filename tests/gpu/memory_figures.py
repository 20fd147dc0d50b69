"""Cost of libvgpu's memory limits on a real GPU: its wrappers beside the driver's own functions, starts
beside native starts.

python -m tests.gpu.memory_figures --build FOLDER --out FILE [calls] [start] [first] [many] [shell]
"""

import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.memory_node import GIB, Bench, lines, main


def calls(bench: Bench) -> Any:
    """The driver's functions against libvgpu's wrappers, in one process."""
    done = bench.run(bench.lease("calls", 8 * GIB), bench.program("memory_bench"), "calls")
    return {"figures": lines(done.stdout), "stderr": done.stderr[-500:], "rc": done.returncode}


def _one_start(bench: Bench, lease: Path | None) -> float:
    done = bench.run(lease, bench.program("memory_bench"), "start")
    assert done.returncode == 0, done.stderr
    figure = lines(done.stdout)[0]
    return float(figure["init_ns"] + figure["context_ns"]) / 1e6


def _many_at_once(bench: Bench, lease: Path | None, count: int) -> list[float]:
    with ThreadPoolExecutor(count) as pool:
        return sorted(pool.map(lambda _: _one_start(bench, lease), range(count)))


def _bash(bench: Bench, lease: Path | None) -> float:
    env = bench.env(lease)
    start = time.monotonic_ns()
    for _ in range(20):
        subprocess.run(["bash", "-c", "true"], env=env, check=True)
    return (time.monotonic_ns() - start) / 20e6


def start(bench: Bench) -> Any:
    """Milliseconds for cuInit and the first context, native and limited alternately."""
    lease = bench.lease("start", 64 * GIB)
    took: dict[str, list[float]] = {"native": [], "limited": []}
    for _ in range(10):
        took["native"].append(_one_start(bench, None))
        took["limited"].append(_one_start(bench, lease))
    return {k: {"median_ms": statistics.median(v), "min_ms": min(v)} for k, v in took.items()}


def first(bench: Bench) -> Any:
    """Milliseconds for the first process of a lease that does not know the size of a context yet."""
    took: dict[str, list[float]] = {"native": [], "first": []}
    for i in range(10):
        took["native"].append(_one_start(bench, None))
        took["first"].append(_one_start(bench, bench.lease(f"first-{i}", 64 * GIB)))
    more = [a - b for a, b in zip(took["first"], took["native"], strict=True)]
    return {k: {"median_ms": statistics.median(v), "min_ms": min(v)} for k, v in took.items()} | {
        "more_median_ms": statistics.median(more)
    }


def many(bench: Bench) -> Any:
    """Milliseconds for 64 processes that start at the same time."""
    lease = bench.lease("many", 64 * GIB)
    figures = {}
    for which, where in (("native", None), ("limited", lease)):
        each = _many_at_once(bench, where, 64)
        figures[which] = {"p50_ms": each[32], "p99_ms": each[-1], "min_ms": each[0]}
    return figures


def shell(bench: Bench) -> Any:
    """Milliseconds for a program that does not use CUDA."""
    lease = bench.lease("shell", 64 * GIB)
    took: dict[str, list[float]] = {"native": [], "limited": []}
    for _ in range(8):
        took["native"].append(_bash(bench, None))
        took["limited"].append(_bash(bench, lease))
    return {k: {"median_ms": statistics.median(v), "min_ms": min(v)} for k, v in took.items()}


if __name__ == "__main__":
    PARTS = {"calls": calls, "start": start, "first": first, "many": many, "shell": shell}
    sys.exit(main(__doc__ or "", PARTS))
