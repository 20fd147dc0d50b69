"""Runs the scenes on real GPUs if a driver answers, and otherwise on the simulated node."""

import logging
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.demo import scenes
from tests.demo.checks import Checks
from tests.demo.node import BUILD, DemoNode
from vgpud import logs
from vgpud.hardware.gateway import Gateway
from vgpud.model.errors import VgpuError


def real_gpus() -> int:
    try:
        return len(Gateway().snapshot().devices)
    except VgpuError as error:
        print(f"no NVIDIA driver answers here ({error.sentence})")
        return 0


def on_simulated_node() -> int:
    """Runs the demo again, on a simulated node of eight H200."""
    with tempfile.TemporaryDirectory(prefix="vgpu-sim-") as folder:
        state = Path(folder) / "node"
        command = [str(BUILD / "bin" / "vgpu-sim"), "run", "--profile", "h200x8", "--state", str(state)]
        return subprocess.call([*command, "--", sys.executable, "-m", "tests.demo"])


def main() -> int:
    logs.configure(logging.WARNING)
    simulated = "VGPU_SIM_STATE" in os.environ
    if not simulated and real_gpus() == 0:
        print("using the simulated node: 8 x NVIDIA H200")
        return on_simulated_node()
    checks = Checks()
    node = DemoNode()
    try:
        scenes.play(node, checks)
    except (RuntimeError, VgpuError, subprocess.TimeoutExpired, OSError) as error:
        traceback.print_exc()
        checks.check("the demo ran to its end", False, error)
        print(node.log.read_text()[-3000:] if node.log.exists() else "", file=sys.stderr)
    finally:
        scenes.clear_away(node)
    print()
    print(checks.table())
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
