"""Many processes use one simulated node at the same time and are killed at random."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable

from tests.native.harness import TEST_BUILD
from tests.simnode import SimNode

Make = Callable[..., SimNode]
MIB = 1 << 20
PAGE = 2 * MIB
CONTEXT = 526 * MIB
CROWD, HOLDERS = 64, 200
FIGURES = str(TEST_BUILD / "figures")


def measure(node: SimNode) -> dict[str, float]:
    """Nanoseconds that calls of the simulated driver take, measured in a separate process."""
    measured: dict[str, float] = json.loads(node.run([FIGURES], {"VGPU_SIM_KERNEL_US": "0.001"}).stdout)
    return measured


def start(node: SimNode, *words: str) -> subprocess.Popen[str]:
    process = node.start(words)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_devices_used_memory_is_the_sum_over_two_hundred_processes(sim_node: Make) -> None:
    node = sim_node()
    holders = [start(node, FIGURES, "hold") for _ in range(HOLDERS)]
    assert node.dump()["devices"][0]["memory_used"] == HOLDERS * CONTEXT
    assert measure(node)["launch_ns"] > 0
    for process in holders:
        process.kill()
    for process in holders:
        process.wait()
    state = node.dump()
    assert (state["processes"], state["devices"][0]["memory_used"]) == ([], 0)


def check_sums(node: SimNode, alive: set[int]) -> None:
    """Asserts that every entry belongs to a living process, that every sum of memory is right, and that no
    device exceeds its memory.
    """
    state = node.dump()
    assert {p["pid"] for p in state["processes"]} <= alive
    for device in state["devices"]:
        held = [u for p in state["processes"] for u in p["uses"] if u["device"] == device["index"]]
        assert device["memory_used"] == sum(u["bytes"] for u in held)
        assert all(
            (u["bytes"] - u["context_bytes"]) % PAGE == 0 and u["done_ns"] <= u["submitted_ns"] for u in held
        )
        assert device["memory_used"] <= device["memory_total"] - device["memory_reserved"]


def crowd(node: SimNode, lasts: Callable[[int], bool], seed: int = 5) -> int:
    """Runs CROWD processes on one node, kills them at random and replaces them, while `lasts(deaths)` is
    true. Returns the number of deaths.
    """
    choose, deaths = random.Random(seed), 0
    running = [start(node, FIGURES, "churn", str(i)) for i in range(CROWD)]
    while lasts(deaths):
        for i in choose.sample(range(CROWD), 8):
            running[i].kill()
        for i, process in enumerate(running):
            if process.returncode is None and process.poll() is None:
                continue
            assert process.wait() == -9, process.stderr and process.stderr.read()
            deaths += 1
            node.running.remove(process)
            process.communicate()
            running[i] = start(node, FIGURES, "churn", str(deaths * CROWD + i))
        check_sums(node, {p.pid for p in running})
    for process in running:
        process.kill()
        process.wait()
    state = node.dump()
    assert state["processes"] == []
    assert [d["memory_used"] for d in state["devices"]] == [0] * len(state["devices"])
    return deaths + CROWD


def test_memory_sums_agree_after_random_kills_among_many_processes(sim_node: Make) -> None:
    node = sim_node("h200x1")
    crowd(node, lambda deaths: deaths < CROWD)
    assert measure(node)["launch_ns"] > 0  # no dead process left a lock behind
