"""libvgpu's memory half on a real GPU: figures beside native, exactness, real programs.

    python -m tests.gpu.memory_figures --libvgpu SO --arbiter PROGRAM --out FOLDER [PART ...]

Parts: calls start families ledger race views programs. Each writes FOLDER/PART.json. Needs a free GPU, cc
and cuda.h, and no root. The C programs beside this file are built in FOLDER. No setting is changed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from vgpud.lease import ArbiterClient, DeviceLimits, Usage, read_usage, write_lease

HERE = Path(__file__).parent
MIB = 1 << 20
GIB = 1 << 30
FAMILIES = ("alloc", "pitch", "managed", "vmm", "async", "pool", "array", "array3d", "mipmap", "graph")


@dataclass(frozen=True)
class Bench:
    """Where things are, and one running arbiter."""

    libvgpu: Path
    out: Path
    run_dir: Path
    uuid: str

    def lease(self, name: str, memory_bytes: int) -> Path:
        folder = write_lease(self.run_dir / "leases", name, [DeviceLimits(self.uuid, memory_bytes)], 0, 0)
        ArbiterClient(self.run_dir / "arbiter" / "control.sock").add(name)
        return folder

    def env(self, lease: Path | None, **more: str) -> dict[str, str]:
        env = dict(os.environ) | more
        if lease is not None:
            env |= {"LD_PRELOAD": str(self.libvgpu), "VGPU_LEASE": str(lease)}
        return env

    def program(self, name: str) -> Path:
        return self.out / name

    def run(
        self, lease: Path | None, *command: str | Path, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(part) for part in command],
            env=self.env(lease, **more),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def start(self, lease: Path | None, *command: str | Path) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(part) for part in command],
            env=self.env(lease),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def nvml_bytes(uuid: str) -> dict[int, int]:
    """Memory of each compute process as NVML says it."""
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return {p.pid: p.usedGpuMemory or 0 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}


def ledger_bytes(usage: Usage) -> int:
    meter = usage.device(0)
    return meter.used_bytes + meter.context_bytes


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# --- figures


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
    for which, where in (
        ("native", None),
        ("limited", lease),
        ("native_again", None),
        ("limited_again", lease),
    ):
        each = _many_at_once(bench, where, 64)
        many[which] = {"p50": each[32], "p99": each[-1], "min": each[0]}
    return {
        "init_and_context_ms": {k: {"median": statistics.median(v), "min": min(v)} for k, v in took.items()},
        "first_in_its_lease_ms": statistics.median(first),
        "bash_true_ms": {k: {"median": statistics.median(v), "min": min(v)} for k, v in bash.items()},
        "64_at_once_ms": many,
    }


# --- exactness


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


def race(bench: Bench) -> Any:
    """Eight processes under one limit; NVML's sum over them is sampled all the while."""
    count, seconds = 8, 20
    limit = count * 620 * MIB + GIB
    lease = bench.lease("race", limit)
    processes = [
        bench.start(lease, bench.program("memory_families"), "race", str(seed), str(seconds))
        for seed in range(count)
    ]
    for process in processes:
        _step(process)
    most, samples, over = 0, 0, 0
    pids = {process.pid for process in processes}
    for process in processes:
        _go_on(process)
    while any(process.poll() is None for process in processes) and samples < 100_000:
        held = sum(nbytes for pid, nbytes in nvml_bytes(bench.uuid).items() if pid in pids)
        most, samples, over = max(most, held), samples + 1, over + (held > limit)
    outs = [process.communicate() for process in processes]
    said = [line for out, _ in outs for line in lines(out)]
    return {
        "limit_mib": limit / MIB,
        "most_mib": most / MIB,
        "samples": samples,
        "samples_over_limit": over,
        "operations": sum(line["operations"] for line in said),
        "refused": sum(line["refused"] for line in said),
        "returncodes": [process.returncode for process in processes],
        "stderr": [error[-200:] for _, error in outs if error],
        "ledger_after": ledger_bytes(read_usage(lease)),
    }


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


# --- real programs

PROGRAMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("torch_eager", {}),
    ("torch_eager", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("torch_eager", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    ("torch_compile", {}),
    ("torch_graphs", {}),
    ("jax_train", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    ("jax_train", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    ("jax_train", {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}),
    ("cupy_arrays", {}),
    ("cupy_async", {}),
    ("triton_kernel", {}),
)


def _program(bench: Bench, lease: Path | None, name: str, env: dict[str, str]) -> dict[str, Any]:
    command: list[str | Path] = [sys.executable, "-m", "tests.gpu.memory_programs", name]
    done = bench.run(lease, *command, *(["--until-out-of-memory"] if lease else []), **env)
    said = lines(done.stdout)
    return said[-1] if said else {"failed": done.returncode, "stderr": done.stderr[-1500:]}


def _pair(bench: Bench, index: int) -> dict[str, Any]:
    name, env = PROGRAMS[index]
    lease = bench.lease(f"program-{index}", 6 * GIB)
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            most[0] = max(most[0], ledger_bytes(read_usage(lease)))

    thread = threading.Thread(target=watch)
    thread.start()
    limited = _program(bench, lease, name, env)
    done.set()
    thread.join()
    native_env = env | ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"} if name.startswith("jax") else {})
    native = _program(bench, None, name, native_env)
    same = limited.get("numbers") == native.get("numbers") and "numbers" in native
    return {
        "program": name,
        "env": env,
        "same_numbers": same,
        "limited": limited,
        "native": native,
        "ledger_most_mib": most[0] / MIB,
    }


def programs(bench: Bench) -> Any:
    """Each program under a limit of 6 GiB and without one."""
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda index: _pair(bench, index), range(len(PROGRAMS))))


PARTS: dict[str, Callable[[Bench], Any]] = {
    "calls": calls,
    "families": families,
    "ledger": ledger,
    "views": views,
    "race": race,
    "start": start,
    "programs": programs,
}


def build(out: Path) -> None:
    for name in ("memory_bench", "memory_families"):
        command = ["cc", "-O2", "-I/usr/local/cuda/include", str(HERE / f"{name}.c"), "-o", str(out / name)]
        libraries = ["-L/usr/local/cuda/lib64/stubs", "-L/usr/local/nvidia/lib64", "-l:libcuda.so.1", "-ldl"]
        done = subprocess.run(command + libraries, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            libraries[2] = "-lcuda"
            subprocess.run(command + libraries, check=True)


@contextmanager
def arbiter(program: Path, run_dir: Path) -> Iterator[None]:
    (run_dir / "leases").mkdir(parents=True)
    process = subprocess.Popen([program, "--run-dir", run_dir, "--foreground"], stderr=subprocess.DEVNULL)
    client = ArbiterClient(run_dir / "arbiter" / "control.sock")
    while not client.ready():
        time.sleep(0.01)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--libvgpu", type=Path, required=True)
    parser.add_argument("--arbiter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    options = parser.parse_args()
    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    build(options.out)
    with tempfile.TemporaryDirectory() as folder, arbiter(options.arbiter.resolve(), Path(folder) / "run"):
        bench = Bench(options.libvgpu.resolve(), options.out.resolve(), Path(folder) / "run", uuid)
        for part in options.parts:
            began = time.monotonic()
            try:
                result = PARTS[part](bench)
            except Exception as error:
                result = {"broke": repr(error)}
            (options.out / f"{part}.json").write_text(json.dumps(result, indent=1))
            print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
