"""Frameworks under a limit of 6 GiB: they compute the same numbers as without it, and end with their own
out-of-memory error.

python -m tests.gpu.memory_frameworks --build FOLDER --out FILE [programs] [hami] [nccl]

Each program runs twice without libvgpu: differences between these two runs are not caused by libvgpu. A
program that is not installed, or needs more GPUs, is skipped, and the reason is in its place.
"""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pynvml

from tests.demo.scenes import python_with
from tests.gpu.memory_node import GIB, MIB, Bench, ledger_bytes, lines, main
from tests.ports import free_port
from vgpud.lease import ArbiterClient, DeviceLimits, read_usage, write_lease

LIMIT_BYTES = 6 * GIB
PROGRAMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("driver_copies", {}),
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
WITHOUT_LEASE = ("driver_copies", "torch_eager", "torch_graphs", "jax_train", "cupy_arrays")
NEEDS = {"torch": "torch", "jax": "jax", "cupy": "cupy", "triton": "triton", "nccl": "torch"}


def _module(name: str) -> str | None:
    return NEEDS.get(name.split("_", maxsplit=1)[0])


def missing(name: str) -> str | None:
    """Returns why the program cannot run here, or None."""
    module = _module(name)
    if module is not None and python_with(module) is None:
        return f"{module} is not installed"
    return None


def _command(name: str, exhaust: bool) -> list[str]:
    flags = ["--until-out-of-memory"] if exhaust else []
    module = _module(name)
    python = sys.executable if module is None else python_with(module)
    return [str(python), "-m", "tests.gpu.memory_programs", name, *flags]


def _said(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    said = lines(done.stdout)
    return said[-1] if said else {"failed": done.returncode, "stderr": done.stderr[-1500:]}


def _native(bench: Bench, name: str, env: dict[str, str]) -> dict[str, Any]:
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"} if name.startswith("jax") else {}
    return _said(bench.run(None, *_command(name, exhaust=False), **env, **share))


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference between two runs' numbers; infinite if a run has no numbers."""
    if not one or len(one) != len(other):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in zip(one, other, strict=True))


def verdict(limited: dict[str, Any], native: Sequence[dict[str, Any]]) -> str:
    """Compares the limited run with two native runs. The native runs show how much the program's own results
    differ.
    """
    first, second = (run.get("numbers", []) for run in native)
    mine = limited.get("numbers", [])
    if not mine or not first:
        return "no numbers"
    if mine in (first, second):
        return "the same"
    if first != second and apart(mine, first) <= 4 * apart(first, second):
        return "differs no more than two native runs"
    return "differs"


def _compared(limited: dict[str, Any], native: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = [run.get("numbers", []) for run in native]
    return {
        "verdict": verdict(limited, native),
        "native_apart": apart(*numbers),
        "limited_apart": apart(limited.get("numbers", []), numbers[0]),
        "limited": limited,
        "native": list(native),
    }


def _pair(bench: Bench, index: int) -> dict[str, Any]:
    name, env = PROGRAMS[index]
    why = missing(name)
    if why is not None:
        return {"program": name, "env": env, "skipped": why}
    lease = bench.lease(f"program-{index}", LIMIT_BYTES)
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            most[0] = max(most[0], ledger_bytes(read_usage(lease)))

    thread = threading.Thread(target=watch)
    thread.start()
    limited = _said(bench.run(lease, *_command(name, exhaust=True), **env))
    done.set()
    thread.join()
    native = [_native(bench, name, env) for _ in range(2)]
    return {
        "program": name,
        "env": env,
        "ledger_most_mib": most[0] / MIB,
        **_compared(limited, native),
    }


def programs(bench: Bench) -> Any:
    """Runs each program under a limit of 6 GiB, and twice without one."""
    for name, _ in PROGRAMS:
        missing(name)  # keeps the answer; each thread would start the Pythons of PATH by itself
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda index: _pair(bench, index), range(len(PROGRAMS))))


def _without_lease(bench: Bench, name: str) -> dict[str, Any]:
    why = missing(name)
    if why is not None:
        return {"program": name, "skipped": why}
    shared = bench.run_dir / f"hami-{name}"
    limits = {"CUDA_DEVICE_MEMORY_LIMIT": "6g", "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(shared)}
    env = limits | {"LD_PRELOAD": str(bench.libvgpu)}
    limited = _said(bench.run(None, *_command(name, exhaust=True), **env))
    native = [_native(bench, name, {}) for _ in range(2)]
    return {"program": name, **_compared(limited, native)}


def hami(bench: Bench) -> Any:
    """Programs without a daemon and a lease, limited by HAMi's variables."""
    return [_without_lease(bench, name) for name in WITHOUT_LEASE]


def _two_ranks(bench: Bench, lease: Path | None, exhaust: bool) -> list[dict[str, Any]]:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            _command("nccl_train", exhaust),
            env=bench.env(lease, **meet, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = []
    for process in ranks:
        try:
            out, error = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
        said = lines(out)
        outcomes.append(said[-1] if said else {"failed": process.returncode, "stderr": error[-1500:]})
    return outcomes


def nccl(bench: Bench) -> Any:
    """Two processes of one lease on two GPUs, which reduce their gradients over NCCL."""
    count = pynvml.nvmlDeviceGetCount()
    why = missing("nccl_train") or (None if count >= 2 else f"{count} GPU here, two are needed")
    if why is not None:
        return {"skipped": why}
    uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]
    limits = [DeviceLimits(uuid, LIMIT_BYTES) for uuid in uuids]
    lease = write_lease(bench.run_dir / "leases", "nccl", limits, os.getuid(), os.getgid())
    ArbiterClient(bench.run_dir / "arbiter" / "control.sock").add("nccl")
    limited = _two_ranks(bench, lease, exhaust=True)
    native = [_two_ranks(bench, None, exhaust=False) for _ in range(2)]
    return [{"rank": rank, **_compared(limited[rank], [run[rank] for run in native])} for rank in range(2)]


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", {"programs": programs, "hami": hami, "nccl": nccl}))
