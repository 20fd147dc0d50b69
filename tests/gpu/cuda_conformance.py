"""The same CUDA program on the simulated node and on a card: do they answer alike?

    python -m tests.gpu.cuda_conformance PROGRAM --write FILE     on a machine with a card: record it
    python -m tests.gpu.cuda_conformance PROGRAM --against FILE   compare what runs here with a record

PROGRAM is cuda_conformance*.c, compiled (`build()` does it). The record of one H200, driver 580.159.04, is
data/cuda_conformance_h200.json; tests/sim/test_conformance.py holds the simulator against it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
H200 = HERE / "data" / "cuda_conformance_h200.json"
STALE_H200 = HERE / "data" / "stale_handles_h200.json"  # of stale_handles.c, on the same kind of card
SECONDS = 60
CRASHED = -11  # the answer to a question that the driver does not survive


def build(folder: Path, cuda_include: Path) -> Path:
    """Compile the tour; the program. Raises CalledProcessError."""
    program = folder / "cuda_conformance"
    sources = sorted(map(str, HERE.glob("cuda_conformance*.c")))
    subprocess.run(
        ["cc", "-O1", f"-I{cuda_include}", *sources, "-o", str(program), "-ldl"],
        check=True,
        capture_output=True,
    )
    return program


def answers(program: Path, env: Mapping[str, str] | None = None) -> dict[str, int]:
    """What the driver that the program finds says: name of the question -> code, bytes or count."""
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
    """Questions that are answered differently: (here, there)."""
    names = list(here) + [name for name in there if name not in here]
    return {n: (here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n)}


def main() -> int:
    """0: alike (or recorded); 1: something differs, which is printed."""
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
