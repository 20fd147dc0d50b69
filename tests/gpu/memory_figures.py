"""What libvgpu's memory half costs on a real GPU: calls beside the driver's own, starts beside native ones.

python -m tests.gpu.memory_figures --build FOLDER --out FILE [calls] [start] [first]
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
    """Driver against hooked, in one process."""
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
    """cuInit and context, alternating; 64 at once; bash. Milliseconds."""
    lease = bench.lease("start", 64 * GIB)
    took: dict[str, list[float]] = {"native": [], "limited": []}
    for _ in range(10):
        took["native"].append(_one_start(bench, None))
        took["limited"].append(_one_start(bench, lease))
    bash: dict[str, list[float]] = {"native": [], "limited": []}
    for _ in range(8):
        bash["native"].append(_bash(bench, None))
        bash["limited"].append(_bash(bench, lease))
    first = []
    for i in range(5):
        first.append(_one_start(bench, bench.lease(f"start-{i}", 64 * GIB)))
    many = {}
    for which, where in (("native", None), ("limited", lease)):
        each = _many_at_once(bench, where, 64)
        many[which] = {"p50": each[32], "p99": each[-1], "min": each[0]}
    return {
        "init_and_context_ms": {k: {"median": statistics.median(v), "min": min(v)} for k, v in took.items()},
        "first_in_its_lease_ms": statistics.median(first),
        "bash_true_ms": {k: {"median": statistics.median(v), "min": min(v)} for k, v in bash.items()},
        "64_at_once_ms": many,
    }


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", {"calls": calls, "start": start}))
