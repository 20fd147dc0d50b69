"""The NVML gateway through the real binding and the C library. Each scene is a process on a simulated
node.
"""

import os
import subprocess
import sys

import pytest

from tests.simnode import BUILD, ROOT

PREFIX = BUILD / "sim"


@pytest.mark.parametrize(
    ("scene", "profile"),
    [
        ("eight_h200", "h200x8"),
        ("mig_comes_and_goes", "h200x8"),
        ("mig_mode_of_ampere_waits_for_a_reset", "a100x8"),
        ("one_gpu_is_lost", "h200x8"),
        ("one_gpu_hangs", "h200x8"),
        ("old_driver", "h200x8"),
        ("xids_are_told", "h200x8"),
    ],
)
def test_vgpud_reads_the_state_of_each_scene_from_a_simulated_node(scene: str, profile: str) -> None:
    path = f"{ROOT / 'native/sim'}:{ROOT}"
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "VGPU_SIM_PREFIX": str(PREFIX),
        "VGPU_SIM_PROFILES": str(ROOT / "configs/sim"),
    }
    inside = [sys.executable, "-m", "tests.hardware.scenes", scene]
    done = subprocess.run(
        [sys.executable, "-m", "vgpu_sim", "run", "--profile", profile, "--", *inside],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
