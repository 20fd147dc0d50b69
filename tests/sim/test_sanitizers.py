"""Both libraries in one program under AddressSanitizer and UBSan, on a simulated node."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simnode import ROOT, SimNode

Make = Callable[..., SimNode]


def cached(build: Path, name: str) -> str:
    """A variable of the CMake cache of the tree under test."""
    for line in (build / "CMakeCache.txt").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split("=", 1)[1]
    pytest.fail(f"{build}/CMakeCache.txt has no {name}")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_a_tour_of_the_simulator_is_clean_under_sanitizers(
    sim_node: Make, tmp_path: Path, sanitizer: str
) -> None:
    node = sim_node()
    headers = [f"-D{n}={cached(node.build, n)}" for n in ("VGPU_CUDA_INCLUDE", "VGPU_NVML_INCLUDE")]
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(tmp_path / "b"), "-G", "Ninja", *headers]
    for command in (
        [*configure, f"-DVGPU_SANITIZE={sanitizer}", "-DCMAKE_BUILD_TYPE=Debug"],
        ["ninja", "-C", str(tmp_path / "b"), "-j2", "sim-tour"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (tour,) = [p for p in (tmp_path / "b").rglob("sim-tour") if p.is_file()]
    # what a process holds at its end is for the process's end: leaks are not asked for
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    # the sanitizer's own library has to be the first; the tour takes nothing off the card
    env = {**options, "VGPU_SIM_KERNEL_US": "1", "LD_PRELOAD": ""}
    assert node.run([str(tour)], env).stdout == "toured\n"
