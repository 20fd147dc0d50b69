"""`python -m tests.coverage [ARGUMENTS OF pytest]`: lines and branches of each room that the tests run,
Python and C.

Branches are counted as well as lines, in the programs that tests start too. The C of native/ and the tests'
own programs are built again, with counters (gcov), in build/coverage. A process that SIGKILL ends writes no
counts, so the figures are lower bounds. Exits 1 when a test fails, and, where no arguments choose tests, when
a pure room is below its floor. `--pure` runs the tests that see these rooms without a daemon, and shows only
them.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simnode import ROOT

OUT = ROOT / "build" / "coverage"
NATIVE, NATIVE_TESTS = OUT / "native", OUT / "native-tests"  # tests/native/harness.py expects these names
#: Minimum percent of lines and branches in rooms without I/O, where tests can reach each error path.
FLOORS = {"vgpud/model": 95.0, "vgpud/policy": 95.0, "vgpud/planner": 95.0}
PURE_TESTS = (
    "tests/model",
    "tests/policy",
    "tests/planner",
    "tests/node",
    "tests/mig/test_cut.py",
    "tests/mig/test_parts_cut.py",
    "tests/api",
    "tests/metrics",
)
#: Tests that counters break, each with the reason; they are left out
UNFIT = {
    "tests/native/test_symbols.py": "gcov adds to libvgpu's exported symbols",
    "tests/arbiter/test_strangers.py::test_each_ordinary_program_is_limited_and_runs_to_its_end[sealed]": (
        "gcov reports on standard error that it cannot open its file"
    ),
    "tests/arbiter/test_strangers.py::test_a_process_with_few_descriptors_is_limited_or_refused[7]": (
        "gcov reports on standard error that it has no descriptor for its file"
    ),
    "tests/mps/test_guard.py::test_the_guard_needs_no_symbol_newer_than_glibc_2_17": (
        "gcov needs a newer symbol to write counts at SIGTERM"
    ),
}
BUILDS_ONLY = "native/common/layout.c"  # not in the table: the build runs this program, no test does
CONFIG = f"""
[run]
branch = true
parallel = true
patch = subprocess, execv, fork, _exit
sigterm = true
source = vgpud
omit = */gen/*
data_file = {OUT}/python
[report]
exclude_also =
    if TYPE_CHECKING:
    \\.\\.\\.$
"""


@dataclass
class Room:
    """Numbers of lines and branches in all, and of those that were run."""

    lines: int = 0
    run_lines: int = 0
    branches: int = 0
    run_branches: int = 0
    missing: dict[str, list[int]] = field(default_factory=dict)  # file -> lines that were not run

    @property
    def percent(self) -> float:
        there = self.lines + self.branches
        return 100.0 if there == 0 else 100 * (self.run_lines + self.run_branches) / there


def room_of(path: str) -> str:
    """The room of a file: vgpud/planner/choose.py -> vgpud/planner; vgpud/clock.py -> vgpud."""
    return "/".join(Path(path).parts[: min(2, len(Path(path).parts) - 1)])


def run(*words: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, text=True, check=check)


def build() -> None:
    """Builds native/ and the tests' programs with counters, which programs of native/ write at SIGTERM, with
    those of their libraries.
    """
    cache = (ROOT / "build" / "native" / "CMakeCache.txt").read_text().splitlines()
    given = [f"-D{line}" for line in cache if line.startswith(("VGPU_CUDA_INCLUDE:", "VGPU_NVML_INCLUDE:"))]
    program, library = OUT / "count_at_sigterm.o", OUT / "count_library.o"
    for made, more in ((program, "-UCOUNT_LIBRARY"), (library, "-DCOUNT_LIBRARY")):
        source = ROOT / "tests" / "native" / "count_at_sigterm.c"
        run("cc", "-c", "-fPIC", "-D_GNU_SOURCE", more, source, "-o", made)
    given.append("-DCMAKE_C_FLAGS=--coverage -fprofile-update=atomic -O1")
    ends = f"-DCMAKE_EXE_LINKER_FLAGS={program}", f"-DCMAKE_SHARED_LINKER_FLAGS={library}"
    for source, folder, options in (
        (ROOT / "native", NATIVE, ends),
        (ROOT / "tests" / "native", NATIVE_TESTS, (f"-DVGPU_BUILD={NATIVE}",)),
    ):
        run("cmake", "-S", source, "-B", folder, "-G", "Ninja", *given, *options)
        run("cmake", "--build", folder)
    for old in OUT.rglob("*.gcda"):
        old.unlink()


def of_python(rooms: dict[str, Room]) -> None:
    config = f"--rcfile={OUT / 'config'}"
    run(sys.executable, "-m", "coverage", "combine", "-q", config)
    run(sys.executable, "-m", "coverage", "json", "-q", config, "-o", OUT / "python.json")
    for path, told in json.loads((OUT / "python.json").read_text())["files"].items():
        room, summary = rooms[room_of(path)], told["summary"]
        room.lines += summary["num_statements"]
        room.run_lines += summary["covered_lines"]
        room.branches += summary["num_branches"]
        room.run_branches += summary["covered_branches"]
        if told["missing_lines"]:
            room.missing[path] = told["missing_lines"]


def gcov() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file of native/, gcov's record of a line) for every object that contains the line."""
    for notes in OUT.rglob("*.gcno"):
        words = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(notes)]
        said = subprocess.run(words, cwd=OUT, capture_output=True, text=True, check=True).stdout
        for text in said.splitlines():
            for file in json.loads(text)["files"]:
                path = Path(OUT, file["file"]).resolve()
                if path.is_relative_to(ROOT / "native") and path != ROOT / BUILDS_ONLY:
                    yield from ((str(path.relative_to(ROOT)), line) for line in file["lines"])


def of_c(rooms: dict[str, Room]) -> None:
    counts: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for path, line in gcov():
        branches = [one["count"] for one in line["branches"]]
        key = path, line["line_number"]
        count, before = counts.get(key, (0, [0] * len(branches)))
        both = [a + b for a, b in zip(before, branches, strict=False)]
        counts[key] = (count + line["count"], both)
    for (path, number), (count, branches) in sorted(counts.items()):
        room = rooms[room_of(path)]
        room.lines += 1
        room.run_lines += count > 0
        room.branches += len(branches)
        room.run_branches += sum(taken > 0 for taken in branches)
        if count == 0:
            room.missing.setdefault(path, []).append(number)


def show(rooms: dict[str, Room]) -> list[str]:
    """Prints the table; returns the rooms below their floor."""
    print(f"{'room':24}{'lines':>8}{'run':>8}{'branches':>10}{'run':>8}{'percent':>9}{'floor':>7}")
    for name, room in sorted(rooms.items()):
        figures = f"{room.lines:8}{room.run_lines:8}{room.branches:10}{room.run_branches:8}"
        print(f"{name:24}{figures}{room.percent:9.1f}{FLOORS.get(name, ''):>7}")
    told = {name: {**vars(room), "percent": round(room.percent, 2)} for name, room in rooms.items()}
    (OUT / "coverage.json").write_text(json.dumps(told, indent=1, sort_keys=True))
    print(f"lines that no test runs, by file: {OUT / 'coverage.json'}")
    return [name for name, floor in FLOORS.items() if rooms[name].percent < floor]


def main(words: list[str]) -> int:
    pure = words == ["--pure"]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "config").write_text(CONFIG)
    for old in OUT.glob("python.*"):
        old.unlink()
    if not pure:
        build()
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={OUT / 'config'}", "-m", "pytest", "-q"]
    chosen = PURE_TESTS if pure else words or ("-m", "not real", *(f"--deselect={test}" for test in UNFIT))
    native = ROOT / "build" / "native" if pure else NATIVE
    # as in `./dev test`: three workers for each core, and all tests of a file run on the same worker
    workers = 2 if pure else min(12, 3 * (os.cpu_count() or 1))
    command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    # a process of another user cannot write its counts, and would say so on standard error
    given = {"VGPU_BUILD_DIR": str(native), "GCOV_ERROR_FILE": os.devnull}
    tests = run(*command, *chosen, check=False, **given)
    rooms: dict[str, Room] = defaultdict(Room)
    of_python(rooms)
    if pure:
        rooms = {name: room for name, room in rooms.items() if name in FLOORS}
    else:
        of_c(rooms)
    low = show(rooms)
    if words and not pure:
        low = []
    for name in low:
        print(f"{name} is below its floor of {FLOORS[name]} percent", file=sys.stderr)
    return int(tests.returncode != 0 or bool(low))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
