"""The simulated driver answers as an H200 did, question by question; the manual lists what differs."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.gpu.cuda_conformance import CRASHED, H200, answers, differences
from tests.native.harness import TEST_BUILD
from tests.simnode import SimNode

Make = Callable[..., SimNode]

#: Question -> (simulator, card).
KNOWN = {
    # the card gave 2 MiB of its own back meanwhile, in every run
    "graph launched: bytes": (67108864, 65011712),
    "graph trimmed: bytes": (0, -2097152),
    # the 32-bit forms from before CUDA 3.2 are not there
    "procaddr cuMemAlloc 2000 0": (20, 1),
    # the card's driver crashes on a description of nothing
    "green: describe none": (1, CRASHED),
}


def test_the_simulator_answers_a_program_as_the_recorded_h200(sim_node: Make) -> None:
    node = sim_node("h200x1")
    here, card = answers(TEST_BUILD / "cuda_conformance", node.environment()), json.loads(H200.read_text())
    assert len(card) > 280
    assert differences(here, card) == KNOWN
