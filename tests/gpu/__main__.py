"""Runs every program of this folder that has a main on this machine's GPU: `python -m tests.gpu test |
bench`.

    ./dev gpu-test [NAME ...]     those that check
    ./dev gpu-bench [NAME ...]    those that measure; their figures go to build/gpu/NAME.json

Exit status: the number of programs that failed. Without a GPU it runs nothing and prints that.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.gpu.cuda_conformance import build

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu"
TESTS = (
    "mig_readonly",
    "memory_exact",
    "memory_frameworks",
    "mps_h200",
    "suspend_h200",
    "suspended_calls",
    "idle_h200",
    "turns_h200",
    "pool_h200",
    "move_h200",
    "confined_h200",
    "edges_h200",
    "cuda_conformance",
)
BENCHES = ("compute_h200", "compute_h200_cut", "compute_programs", "compute_ranks", "memory_figures")
WITH_FIGURES = ("memory_exact", "memory_frameworks", *BENCHES)  # programs that take --build and --out
ENGINE_CUT = "compute_h200_cut"  # runs compute_h200 with engine `cut`


def arguments(name: str) -> list[str]:
    if name in WITH_FIGURES:
        engine = ["--engine", "cut"] if name == ENGINE_CUT else []
        return [*engine, "--build", str(ROOT / "build" / "native"), "--out", str(OUT / f"{name}.json")]
    if name == "cuda_conformance":
        headers = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
        return [str(build(OUT, headers))]
    return []


def main() -> int:
    kinds = {"test": TESTS, "bench": BENCHES}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        print(__doc__, file=sys.stderr)
        return 2
    known = kinds[sys.argv[1]]
    names = sys.argv[2:] or known
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no such program: {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if shutil.which("nvidia-smi") is None:
        print("no NVIDIA GPU here (nvidia-smi is not there): nothing was run", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        module = "compute_h200" if name == ENGINE_CUT else name
        command = [sys.executable, "-m", f"tests.gpu.{module}", *arguments(name)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
