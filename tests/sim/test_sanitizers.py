"""Both simulated libraries in one program under AddressSanitizer and UBSan, on a simulated node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simnode import ROOT, SimNode

Make = Callable[..., SimNode]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_sanitizers_report_nothing_while_a_program_calls_the_simulated_driver(
    sim_node: Make, sanitizer: str
) -> None:
    node = sim_node()
    (tour,) = (path for path in (ROOT / "build" / f"native-{sanitizer}").rglob("sim-tour") if path.is_file())
    # leaks are not reported, because memory held until the end of the process is not a leak here
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    # the sanitizer's library must be loaded first; the program preempts no tenant and needs no preloaded
    # library
    env = {**options, "VGPU_SIM_KERNEL_US": "1", "LD_PRELOAD": ""}
    assert node.run([str(tour)], env).stdout == "toured\n"
