"""Frameworks under a limit of 6 GiB: the same numbers as without, and their own out-of-memory error.

python -m tests.gpu.memory_frameworks --build FOLDER --out FILE
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.memory_node import GIB, MIB, Bench, ledger_bytes, lines, main
from vgpud.lease import read_usage

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


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", {"programs": programs}))
