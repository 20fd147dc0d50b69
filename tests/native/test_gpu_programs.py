"""The GPU programs of tests/gpu on the simulated node: their correctness, not their figures."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native.harness import BUILD, GIB, MIB, ROOT
from tests.simnode import SimNode

Make = Callable[..., SimNode]
CONTEXT_MIB = 526  # of the simulated H200


@pytest.fixture
def run(sim_node: Make, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs parts of a program on a simulated H200; what it writes."""
    node = sim_node("h200x1")
    cache = (BUILD / "CMakeCache.txt").read_text()
    includes = re.findall(r"^VGPU_(?:CUDA|NVML)_INCLUDE:\w+=(.*)$", cache, re.MULTILINE)
    env = {
        "CPATH": ":".join(includes),
        "LIBRARY_PATH": str(BUILD / "sim" / "lib"),
        "PYTHONPATH": str(ROOT),
    }

    def program(name: str, *parts: str, **more: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        words = [sys.executable, "-m", f"tests.gpu.{name}", "--build", str(BUILD), "--out", str(out), *parts]
        subprocess.run(words, env=node.environment(env | more), capture_output=True, check=False, timeout=240)
        figures: dict[str, Any] = json.loads(out.read_text())
        assert [part for part in parts if "broke" in figures[part]] == [], figures
        return figures

    return program


def test_every_family_stops_at_the_limit_and_comes_back(run: Callable[..., dict[str, Any]]) -> None:
    rows = run("memory_exact", "families")["families"]
    assert len(rows) == 10
    for row in rows:
        assert row["said"]["result"] == 2, row
        assert row["refusals_limit"] >= 1
        assert 0 < row["said"]["total_mib"] <= 1024 - CONTEXT_MIB
        assert abs(row["full"]["off_mib"]) <= 2 and abs(row["freed"]["off_mib"]) <= 2, row
        assert row["stderr"] == ""


def test_the_ledger_is_nvmls(run: Callable[..., dict[str, Any]]) -> None:
    for walk in run("memory_exact", "ledger")["ledger"].values():
        assert walk["rc"] == 0 and walk["checkpoints"] > 60, walk
        assert walk["beyond_2_mib"] == []


def test_races_kills_and_a_full_card(run: Callable[..., dict[str, Any]]) -> None:
    figures = run("memory_exact", "race", "killed", "card_full", VGPU_RACE_OPERATIONS="1000", VGPU_KILLS="5")
    race = figures["race"]
    assert race["returncodes"] == [0] * 8 and race["operations"] == 8_000
    assert race["stopped"]["over_limit"] == 0 and race["stopped_ledger"]["over_limit"] == 0
    assert race["ledger_after"] == 0
    assert figures["killed"]["kills"] == 5
    first, second = figures["card_full"]
    assert (first["refusals_card"], first["refusals_limit"] > 0) == (0, True)
    assert (second["refusals_card"] > 0, second["refusals_limit"]) == (True, 0)
    assert second["said"]["result"] == 2
    assert second["ledger_mib"] * MIB < 141 * GIB


def test_an_mps_tenant_of_two_processes(run: Callable[..., dict[str, Any]]) -> None:
    """MPS limits each process by itself; libvgpu on top holds both to one limit."""
    mps = run("memory_exact", "mps")["mps"]
    assert mps["said"][0]["total_mib"] == 1600
    assert mps["said"][1]["result"] == 2
    assert mps["limit_mib"] - 32 < mps["nvml_sum_mib"] <= mps["limit_mib"]
    assert mps["ledger_mib"] == mps["nvml_sum_mib"]
    assert mps["each_context_mib"] == [348, 348]
