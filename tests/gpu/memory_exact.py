"""Exactness of libvgpu's memory accounting on a real GPU, with NVML as the judge.

python -m tests.gpu.memory_exact --build FOLDER --out FILE [PART ...]
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pynvml

from tests.gpu.memory_node import GIB, MIB, Bench, ledger_bytes, lines, main, nvml_bytes
from vgpud.lease import read_usage

FAMILIES = ("alloc", "pitch", "managed", "vmm", "async", "pool", "array", "array3d", "mipmap", "graph")


def _step(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What the program prints until it waits for a line."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(json.loads(line))
        if "at" in said[-1]:
            break
    return said


def _go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


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
    """Every family in 32 MiB pieces up to a limit of 1 GiB, and the ledger beside NVML there."""
    results = []
    for family in FAMILIES:
        lease = bench.lease(f"fill-{family}", GIB)
        process = bench.start(lease, bench.program("memory_families"), "fill", family)
        said = _step(process)
        row: dict[str, Any] = {"said": said[0] if said else None}
        if said:
            row |= {"full": _checkpoint(bench, lease, process, said[-1])}
            row["refusals_limit"] = read_usage(lease).device(0).refusals_limit
            _go_on(process)
            after = _step(process)
            row |= {"freed": _checkpoint(bench, lease, process, after[-1])} if after else {}
        _, error = process.communicate("\n")
        row["stderr"] = error[-300:]
        results.append(row)
    return results


def ledger(bench: Bench) -> Any:
    """The ledger against NVML after every step of three random walks through everything."""
    walks = {}
    for seed in (1, 2, 3):
        lease = bench.lease(f"walk-{seed}", 12 * GIB)
        process = bench.start(lease, bench.program("memory_families"), "walk", str(seed))
        points = []
        while said := _step(process):
            points.append(_checkpoint(bench, lease, process, said[-1]))
            _go_on(process)
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


def _card_used(uuid: str) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)


class _Most:
    """The highest of a figure, and how often it was above the limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.most, self.samples, self.over = limit, 0, 0, 0

    def add(self, nbytes: int) -> None:
        self.most = max(self.most, nbytes)
        self.samples += 1
        self.over += nbytes > self.limit

    def said(self) -> dict[str, float]:
        return {"most_mib": self.most / MIB, "samples": self.samples, "over_limit": self.over}


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "Z")
    except OSError:
        return True


def _signal_all(processes: "list[subprocess.Popen[str]]", number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


RACE_SECONDS_MAX = 100


def race(bench: Bench) -> Any:
    """A million operations by eight processes under one limit. NVML's figures of several processes are not of
    one instant, so three figures are taken: their sum on the fly; the card's own figure, less what it is
    above that sum while nothing happens; and the sum while all eight are stopped, which is of one instant."""
    count, operations = 8, int(os.environ.get("VGPU_RACE_OPERATIONS", "125000"))
    limit = count * 620 * MIB + GIB
    lease = bench.lease("race", limit)
    processes = [
        bench.start(lease, bench.program("memory_families"), "race", str(seed), str(operations))
        for seed in range(count)
    ]
    for process in processes:
        _step(process)
    pids = {process.pid for process in processes}

    def held() -> int:
        return sum(nbytes for pid, nbytes in nvml_bytes(bench.uuid).items() if pid in pids)

    offset = _card_used(bench.uuid) - held()
    moving, card, still, still_card, ledger = (_Most(limit) for _ in range(5))
    for process in processes:
        _go_on(process)
    ends = time.monotonic() + RACE_SECONDS_MAX
    stops_at = 0.0
    while any(process.poll() is None for process in processes) and time.monotonic() < ends:
        moving.add(held())
        card.add(_card_used(bench.uuid) - offset)
        if time.monotonic() >= stops_at:
            stops_at = time.monotonic() + 0.04
            _signal_all(processes, signal.SIGSTOP)
            while not all(_stopped(pid) for pid in pids):
                pass
            still.add(held())
            still_card.add(_card_used(bench.uuid) - offset)
            ledger.add(ledger_bytes(read_usage(lease)))
            _signal_all(processes, signal.SIGCONT)
    _signal_all(processes, signal.SIGKILL if time.monotonic() >= ends else signal.SIGCONT)
    outs = [process.communicate() for process in processes]
    said = [line for out, _ in outs for line in lines(out)]
    time.sleep(0.2)
    return {
        "limit_mib": limit / MIB,
        "card_above_processes_mib": offset / MIB,
        "on_the_fly": moving.said(),
        "card": card.said(),
        "stopped": still.said(),
        "stopped_card": still_card.said(),
        "stopped_ledger": ledger.said(),
        "operations": sum(line.get("operations", 0) for line in said),
        "refused": sum(line.get("refused", 0) for line in said),
        "returncodes": [process.returncode for process in processes],
        "stderr": [error[-200:] for _, error in outs if error],
        "ledger_after": ledger_bytes(read_usage(lease)),
    }


def killed(bench: Bench) -> Any:
    """Processes in the middle of random operations are killed; how long until the lease has it all back,
    counted from the end of the process (the driver's own work at a death included, and told apart)."""
    dice = random.Random(2)
    lease = bench.lease("killed", 8 * GIB)
    rows = []
    for seed in range(int(os.environ.get("VGPU_KILLS", "15"))):
        process = bench.start(lease, bench.program("memory_families"), "race", str(seed), "100000000")
        _step(process)
        _go_on(process)
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
    """Two leases whose limits come to more than the card: an ordinary out-of-memory error, and the counters
    say that it was the card."""
    total = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(bench.uuid)).total)
    first, second = (bench.lease(f"full-{i}", total * 3 // 4) for i in range(2))
    rows = []
    processes = []
    for lease in (first, second):
        process = bench.start(lease, bench.program("memory_families"), "fill", "alloc", "1024")
        said = _step(process)
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
    """libvgpu as the memory limiter of an MPS tenant of two processes, which share one limit."""
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
    said = [_step(first)]
    second = bench.start(lease, program, "fill", "alloc", **env)
    said.append(_step(second))
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
        _go_on(process)
        _step(process)
        process.communicate("\n")
    return result


def views(bench: Bench) -> Any:
    """What nvidia-smi and NVML's Python bindings say inside the slice while a process holds memory."""
    lease = bench.lease("views", 4 * GIB)
    process = bench.start(lease, bench.program("memory_families"), "fill", "alloc")
    said = _step(process)
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
        "ledger": ledger,
        "views": views,
        "race": race,
        "killed": killed,
        "card_full": card_full,
        "mps": mps,
    }
    sys.exit(main(__doc__ or "", PARTS))
