"""Compares the results of one CUDA program on the simulated node with those on a real device.

    python -m tests.gpu.cuda_conformance PROGRAM --write FILE     record the results of a real device
    python -m tests.gpu.cuda_conformance PROGRAM --against FILE   compare this machine's results with a record

PROGRAM is cuda_conformance*.c, compiled (`build()` does it). The record of one H200, driver 580.159.04, is
data/cuda_conformance_h200.json; tests/sim/test_conformance.py compares the simulator with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
H200 = HERE / "data" / "cuda_conformance_h200.json"
# results of stale_handles.c on the same kind of device
STALE_H200 = HERE / "data" / "stale_handles_h200.json"
SECONDS = 60
CRASHED = -11  # the result of a call that crashes the driver


def build(folder: Path, cuda_include: Path) -> Path:
    """Compiles the program and returns its path. Raises CalledProcessError."""
    program = folder / "cuda_conformance"
    sources = sorted(map(str, HERE.glob("cuda_conformance*.c")))
    subprocess.run(
        ["cc", "-O1", f"-I{cuda_include}", *sources, "-o", str(program), "-ldl"],
        check=True,
        capture_output=True,
    )
    return program


def answers(program: Path, env: Mapping[str, str] | None = None) -> dict[str, int]:
    """Runs the program with the driver that the loader finds. Returns, for the name of each call, its code,
    bytes or count.
    """
    done = subprocess.run(
        [str(program)],
        env=None if env is None else dict(env),
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def differences(
    here: Mapping[str, int], there: Mapping[str, int]
) -> dict[str, tuple[int | None, int | None]]:
    """The calls whose results differ: name, result here, result in the record."""
    names = list(here) + [name for name in there if name not in here]
    return {n: (here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n)}


def main() -> int:
    """Returns 0 if the results are equal or recorded, and 1 if some differ; those are printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path, default=H200)
    args = parser.parse_args()
    found = answers(args.program)
    if args.write is not None:
        args.write.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    different = differences(found, json.loads(args.against.read_text()))
    for name, (here, there) in different.items():
        print(f"{name}: here {here}, recorded {there}")
    print(f"{len(found) - len(different)} of {len(found)} answers alike")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
