"""Exactness of libvgpu's memory accounting on a real GPU, with NVML as the judge.

python -m tests.gpu.memory_exact --build FOLDER --out FILE [PART ...]
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pynvml

from tests.gpu.memory_node import (
    FAMILIES,
    GIB,
    MIB,
    Bench,
    go_on,
    ledger_bytes,
    lines,
    main,
    nvml_bytes,
    step,
)
from tests.gpu.memory_race import deaths, each, race
from tests.gpu.memory_relay import relay
from vgpud.lease import read_usage


def _checkpoint(bench: Bench, lease: Path, process: "subprocess.Popen[str]", said: dict[str, Any]) -> Any:
    ledger = ledger_bytes(read_usage(lease)) - said["managed_bytes"]
    nvml = nvml_bytes(bench.uuid).get(process.pid, -1)
    return {
        "at": said["at"],
        "ledger_mib": ledger / MIB,
        "nvml_mib": nvml / MIB,
        "off_mib": (ledger - nvml) / MIB,
    }


def families(bench: Bench) -> Any:
    """Allocates in each family in pieces of 32 MiB up to a limit of 1 GiB, and compares the memory ledger
    with NVML's figure then.
    """
    results = []
    for family in FAMILIES:
        lease = bench.lease(f"fill-{family}", GIB)
        process = bench.start(lease, bench.program("memory_families"), "fill", family)
        said = step(process)
        row: dict[str, Any] = {"said": said[0] if said else None}
        if said:
            row |= {"full": _checkpoint(bench, lease, process, said[-1])}
            row["refusals_limit"] = read_usage(lease).device(0).refusals_limit
            go_on(process)
            after = step(process)
            row |= {"freed": _checkpoint(bench, lease, process, after[-1])} if after else {}
        _, error = process.communicate("\n")
        row["stderr"] = error[-300:]
        results.append(row)
    return results


def graphs(bench: Bench) -> Any:
    """Returns what the driver holds for graphs that share memory, after each step."""
    done = bench.run(None, bench.program("graph_memory"))
    return {"steps": lines(done.stdout), "rc": done.returncode, "stderr": done.stderr[-300:]}


def ledger(bench: Bench) -> Any:
    """Compares the memory ledger with NVML after every step of three random walks through all kinds of
    allocations.
    """
    walks = {}
    for seed in (1, 2, 3):
        lease = bench.lease(f"walk-{seed}", 12 * GIB)
        process = bench.start(lease, bench.program("memory_families"), "walk", str(seed))
        points = []
        while said := step(process):
            points.append(_checkpoint(bench, lease, process, said[-1]))
            go_on(process)
        _, error = process.communicate()
        off = [abs(point["off_mib"]) for point in points]
        walks[str(seed)] = {
            "checkpoints": len(points),
            "worst_off_mib": max(off),
            "beyond_2_mib": [point for point in points if abs(point["off_mib"]) > 2],
            "named": [point for point in points if not point["at"].startswith("random")],
            "rc": process.returncode,
            "stderr": error[-300:],
        }
    return walks


def killed(bench: Bench) -> Any:
    """Kills processes in the middle of random operations. Returns how long after the process's end the lease
    has its memory back; the driver's own work at the death is included, and shown separately.
    """
    dice = random.Random(2)
    lease = bench.lease("killed", 8 * GIB)
    rows = []
    for seed in range(int(os.environ.get("VGPU_KILLS", "15"))):
        process = bench.start(lease, bench.program("memory_families"), "race", str(seed), "100000000")
        step(process)
        go_on(process)
        time.sleep(0.05 + dice.random() * 0.3)
        held = ledger_bytes(read_usage(lease))
        began = time.monotonic_ns()
        process.kill()
        process.wait()
        ended = time.monotonic_ns()
        while ledger_bytes(read_usage(lease)) != 0 and time.monotonic_ns() - ended < 2_000_000_000:
            time.sleep(0.0002)
        rows.append((held / MIB, (ended - began) / 1e6, (time.monotonic_ns() - ended) / 1e6))
        process.communicate()
    back = sorted(row[2] for row in rows)
    return {
        "kills": len(rows),
        "held_mib": [min(row[0] for row in rows), max(row[0] for row in rows)],
        "death_ms": max(row[1] for row in rows),
        "given_back_after_death_ms": {"median": back[len(back) // 2], "most": back[-1]},
    }


def card_full(bench: Bench) -> Any:
    """Two leases whose limits together exceed the device. The program gets an ordinary out-of-memory error,
    and the counters show that the device was full.
    """
    total = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(bench.uuid)).total)
    first, second = (bench.lease(f"full-{i}", total * 3 // 4) for i in range(2))
    rows = []
    processes = []
    for lease in (first, second):
        process = bench.start(lease, bench.program("memory_families"), "fill", "alloc", "1024")
        said = step(process)
        meter = read_usage(lease).device(0)
        rows.append(
            {
                "said": said[0] if said else None,
                "limit_mib": total * 3 // 4 / MIB,
                "ledger_mib": ledger_bytes(read_usage(lease)) / MIB,
                "refusals_limit": meter.refusals_limit,
                "refusals_card": meter.refusals_card,
            }
        )
        processes.append(process)
    for process in processes:
        process.kill()
        process.communicate()
    return rows


MPS = "nvidia-cuda-mps-control"


def mps(bench: Bench) -> Any:
    """Checks an MPS tenant of two processes, whose memory libvgpu limits together."""
    if shutil.which(MPS) is None:
        return f"there is no {MPS}"
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/p", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/l"}
        Path(folder, "l").mkdir()
        subprocess.run([MPS, "-d"], env=bench.env(None, **env), check=True, timeout=20)
        try:
            return _mps_tenant(bench, env)
        finally:
            subprocess.run(
                [MPS], input="quit\n", text=True, env=bench.env(None, **env), check=False, timeout=30
            )


def _mps_bytes(uuid: str) -> dict[int, int]:
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return {p.pid: p.usedGpuMemory or 0 for p in pynvml.nvmlDeviceGetMPSComputeRunningProcesses(device)}


def _mps_tenant(bench: Bench, env: dict[str, str]) -> Any:
    lease = bench.lease("mps", 4 * GIB)
    program = bench.program("memory_families")
    first = bench.start(lease, program, "fill", "alloc", "32", "50", **env)
    said = [step(first)]
    second = bench.start(lease, program, "fill", "alloc", **env)
    said.append(step(second))
    listed = _mps_bytes(bench.uuid)
    result = {
        "said": [line[0] if line else None for line in said],
        "limit_mib": 4096,
        "nvml_mib": {pid: nbytes / MIB for pid, nbytes in listed.items()},
        "nvml_sum_mib": sum(listed.get(p.pid, 0) for p in (first, second)) / MIB,
        "ledger_mib": ledger_bytes(read_usage(lease)) / MIB,
        "each_context_mib": [p.devices[0].context_bytes / MIB for p in read_usage(lease).processes],
    }
    for process in (first, second):
        go_on(process)
        step(process)
        process.communicate("\n")
    return result


def views(bench: Bench) -> Any:
    """What nvidia-smi and NVML's Python bindings show inside the slice while a process holds memory."""
    lease = bench.lease("views", 4 * GIB)
    process = bench.start(lease, bench.program("memory_families"), "fill", "alloc")
    said = step(process)
    query = (
        "import pynvml as n; n.nvmlInit(); d = n.nvmlDeviceGetHandleByIndex(0);"
        " m = n.nvmlDeviceGetMemoryInfo(d); p = n.nvmlDeviceGetComputeRunningProcesses(d);"
        " print(m.total, m.used, m.free, [(q.pid, q.usedGpuMemory) for q in p])"
    )
    table = bench.run(lease, "nvidia-smi")
    rows = bench.run(lease, "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    python = bench.run(lease, sys.executable, "-c", query)
    with tempfile.TemporaryDirectory() as empty:
        other = bench.run(bench.lease("views-other", GIB), "nvidia-smi", HOME=empty)
    result = {
        "pid": process.pid,
        "said": said,
        "ledger": ledger_bytes(read_usage(lease)),
        "nvidia_smi": table.stdout,
        "compute_apps": rows.stdout,
        "pynvml": python.stdout + python.stderr,
        "another_tenant": other.stdout,
    }
    process.kill()
    began = time.monotonic_ns()
    process.wait()
    while ledger_bytes(read_usage(lease)) != 0 and time.monotonic_ns() - began < 2_000_000_000:
        time.sleep(0.0005)
    result["given_back_after_kill_ms"] = (time.monotonic_ns() - began) / 1e6
    process.communicate()
    return result


if __name__ == "__main__":
    PARTS = {
        "families": families,
        "graphs": graphs,
        "ledger": ledger,
        "views": views,
        "race": race,
        "each": each,
        "deaths": deaths,
        "relay": relay,
        "killed": killed,
        "card_full": card_full,
        "mps": mps,
    }
    sys.exit(main(__doc__ or "", PARTS))
