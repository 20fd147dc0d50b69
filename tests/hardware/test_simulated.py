"""The NVML gateway through the real binding and the C library. Each scene is a process on a simulated
node.
"""

import sys
from collections.abc import Callable

import pytest

from tests.simnode import BUILD, ROOT, SimNode, sim_node  # noqa: F401


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
def test_vgpud_reads_the_state_of_each_scene_from_a_simulated_node(
    sim_node: Callable[..., SimNode],  # noqa: F811
    scene: str,
    profile: str,
) -> None:
    path = {"PYTHONPATH": f"{ROOT / 'native/sim'}:{ROOT}", "VGPU_SIM_PREFIX": str(BUILD / "sim")}
    sim_node(profile).run([sys.executable, "-m", "tests.hardware.scenes", scene], path)
