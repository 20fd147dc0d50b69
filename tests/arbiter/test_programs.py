"""The measuring programs of tests/gpu run on the simulator, and their output is complete."""

import json
import subprocess
import sys
from pathlib import Path

from tests.arbiter.conftest import KERNEL_US, Card

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_of_ranks_runs_on_the_simulator(card: Card, tmp_path: Path) -> None:
    card.kill_arbiter()  # the program starts an arbiter of its own
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.gpu.compute_ranks", "--build", card.sim.build, "--out", out]
    done = subprocess.run(
        [*map(str, command), "--rate", "400", "--seconds", "0.5", "ranks", "apart"],
        cwd=ROOT,
        env=card.sim.environment({"VGPU_SIM_KERNEL_US": str(KERNEL_US)}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["ranks"]["devices"] == 2
    assert all(min(f["steps"]) > 0 for name, f in figures["ranks"].items() if name != "devices")
    assert min(figures["apart"]["steps"]) > 0
