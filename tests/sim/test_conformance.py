"""The simulated driver returns what an H200 returned, call by call. docs/simulator.md lists the
differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.gpu.cuda_conformance import CRASHED, H200, STALE_H200, answers, differences
from tests.native.harness import TEST_BUILD
from tests.simnode import SimNode

Make = Callable[..., SimNode]

#: known differences: call -> (simulator, real H200)
KNOWN = {
    # in every recorded run the H200's driver freed 2 MiB of its own at this moment
    "graph launched: bytes": (67108864, 65011712),
    "graph trimmed: bytes": (0, -2097152),
    # the simulator lacks the 32-bit functions from before CUDA 3.2
    "procaddr cuMemAlloc 2000 0": (20, 1),
    # the H200's driver crashes for an empty description
    "green: describe none": (1, CRASHED),
}


def test_the_simulator_answers_a_program_as_an_h200_did_in_a_recording(sim_node: Make) -> None:
    node = sim_node("h200x1")
    here, card = answers(TEST_BUILD / "cuda_conformance", node.environment()), json.loads(H200.read_text())
    assert len(card) > 280
    assert differences(here, card) == KNOWN


def test_a_handle_of_an_ended_context_is_refused_as_on_a_real_card(sim_node: Make) -> None:
    """The simulated driver returns an error where the H200's driver crashed."""
    node = sim_node("h200x1")
    here = answers(TEST_BUILD / "stale_handles", node.environment())
    card = json.loads(STALE_H200.read_text())
    differ = differences(here, card)
    assert {name for name, (_, there) in differ.items() if there != CRASHED} == set()
    accepted = {name for name, answer in card.items() if answer == CRASHED and here[name] <= 0}
    assert accepted == set()
