"""The GPU programs of tests/gpu on the simulated node. The tests check that they work, not their figures."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import eventually
from tests.gpu import memory_node, suspended_calls
from tests.gpu.memory_frameworks import verdict
from tests.native.harness import BUILD, GIB, MIB, ROOT
from tests.simnode import SimNode
from vgpud.proc import read_stat

Make = Callable[..., SimNode]
CONTEXT_MIB = 526  # MiB of a context on the simulated H200


FREES = ("cuMemFree_v2", "cuMemFreeAsync", "cuMemRelease", "cuArrayDestroy", "cuMipmappedArrayDestroy")


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x1")


@pytest.fixture
def slow_frees(node: SimNode) -> None:
    """Delays each call that frees memory by 300 us."""
    for function in FREES:
        node.sim("fault", "slow", "--function", function, "--microseconds", "300")


@pytest.fixture(scope="module")
def compiler() -> dict[str, str]:
    """The environment in which the programs are compiled."""
    cache = (BUILD / "CMakeCache.txt").read_text()
    includes = re.findall(r"^VGPU_(?:CUDA|NVML)_INCLUDE:\w+=(.*)$", cache, re.MULTILINE)
    return {"CPATH": ":".join(includes), "LIBRARY_PATH": str(BUILD / "sim" / "lib")}


@pytest.fixture(scope="module")
def programs(compiler: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of tests/gpu/memory_node.py, compiled once."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in compiler.items():
            patched.setenv(name, value)
        memory_node.programs(folder)
    return folder


@pytest.fixture
def run(
    node: SimNode, compiler: dict[str, str], programs: Path, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Runs parts of a program on a simulated H200, and returns its output."""
    env = {**compiler, "PYTHONPATH": str(ROOT)}

    def program(name: str, *parts: str, **more: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        words = [sys.executable, "-m", f"tests.gpu.{name}", "--build", str(BUILD), "--out", str(out), *parts]
        if name.startswith("memory_"):
            words += ["--programs", str(programs)]
        subprocess.run(words, env=node.environment(env | more), capture_output=True, check=False, timeout=300)
        figures: dict[str, Any] = json.loads(out.read_text())
        assert [part for part in parts if "broke" in figures.get(part, ())] == [], figures
        return figures

    return program


def test_every_family_of_allocation_functions_stops_at_the_limit_and_frees(
    run: Callable[..., dict[str, Any]],
) -> None:
    rows = run("memory_exact", "families")["families"]
    assert len(rows) == 10
    for row in rows:
        assert row["said"]["result"] == 2, row
        assert row["refusals_limit"] >= 1
        assert 0 < row["said"]["total_mib"] <= 1024 - CONTEXT_MIB
        assert abs(row["full"]["off_mib"]) <= 2 and abs(row["freed"]["off_mib"]) <= 2, row
        assert row["stderr"] == ""


def test_the_memory_ledger_agrees_with_nvml(run: Callable[..., dict[str, Any]]) -> None:
    for walk in run("memory_exact", "ledger")["ledger"].values():
        assert walk["rc"] == 0 and walk["checkpoints"] > 60, walk
        assert walk["beyond_2_mib"] == []


def test_nvml_never_shows_two_pieces_of_memory_if_programs_hold_one_at_a_time(
    run: Callable[..., dict[str, Any]],
) -> None:
    """The simulator frees memory before the call returns, so NVML never shows two pieces. A real driver may
    free it later.
    """
    figures = run("memory_exact", "relay", VGPU_RELAY="alloc vmm")["relay"]
    assert figures["samples"] > 100 and figures["over"] == 0, figures


def test_device_memory_in_use_stays_below_the_limit_during_calls(
    run: Callable[..., dict[str, Any]], slow_frees: None
) -> None:
    """The program samples the use of the device during the calls. On the simulator no call uses more than it
    requested.
    """
    few = {"VGPU_RACE_OPERATIONS": "10000", "VGPU_DEATHS": "4"}
    figures = run("memory_exact", "each", "deaths", **few)
    for family, row in (*figures["each"].items(), ("deaths", figures["deaths"])):
        assert row["card"]["over_limit"] == 0, (family, row)
    assert all(row["returncodes"] == [0] * 8 for row in figures["each"].values())
    # this many families of allocations reached the limit
    assert sum(row["refused"] > 0 for row in figures["each"].values()) >= 8, figures


def test_limits_hold_under_races_kills_and_a_full_device(
    run: Callable[..., dict[str, Any]], slow_frees: None
) -> None:
    few = {"VGPU_RACE_OPERATIONS": "1000", "VGPU_KILLS": "5"}
    figures = run("memory_exact", "race", "killed", "card_full", **few)
    race = figures["race"]
    assert race["returncodes"] == [0] * 8 and race["operations"] == 8_000
    assert race["stopped"]["over_limit"] == 0 and race["stopped_ledger"]["over_limit"] == 0
    # the device's use stays below the limit even during calls in flight
    assert race["card"]["over_limit"] == 0, race
    assert race["ledger_after"] == 0
    assert figures["killed"]["kills"] == 5
    first, second = figures["card_full"]
    assert (first["refusals_card"], first["refusals_limit"] > 0) == (0, True)
    assert (second["refusals_card"] > 0, second["refusals_limit"]) == (True, 0)
    assert second["said"]["result"] == 2
    assert second["ledger_mib"] * MIB < 141 * GIB


def test_programs_compute_the_same_results_with_and_without_a_limit(
    run: Callable[..., dict[str, Any]],
) -> None:
    """Each program runs without a limit, under a lease and under HAMi's variables. A program that the machine
    lacks is reported as skipped.
    """
    figures = run("memory_frameworks", "programs", "hami", "nccl")
    for rows, most in ((figures["programs"], 6144 - CONTEXT_MIB), (figures["hami"], 6144 - CONTEXT_MIB)):
        row, *others = rows
        assert row["verdict"] == "the same" and row["native_apart"] == 0, row
        assert row["limited"]["error"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert row["limited"]["total"] == 6 * GIB < row["native"][0]["total"]
        assert row["limited"]["pieces"] == most // 256
        assert [other for other in others if "skipped" not in other and "verdict" not in other] == []
    assert "skipped" in figures["nccl"]  # the test's node has one device, and the program for NCCL needs two


def test_tenants_go_on_after_each_kill_of_the_arbiter(
    node: SimNode, run: Callable[..., dict[str, Any]]
) -> None:
    """The measured section fails if a tenant stays off the device."""
    few = {"VGPU_KILLED_SECONDS": "3", "VGPU_BENCH_RATE": "400", "VGPU_SIM_KERNEL_US": "1000"}
    uuid = node.dump()["devices"][0]["uuid"]
    figures = run("compute_h200", "--engine", "cut", "killed", VGPU_BENCH_UUID=uuid, **few)
    killed = figures["killed"]
    assert killed["kills"] > 0 and min(killed["longest_ms"]) > 0, figures


KNOWN = {
    "cuFuncGetAttribute": "answers",
    "cuLaunchKernel": "blocks",
    "cuDriverGetVersion": "answers",
    "cuGraphAddKernelNode_v2": "blocks",
    "cuFuncGetAttribute of a kernel's function": "blocks",
}


def test_the_program_that_searches_for_blocking_calls_finds_the_known_ones(
    node: SimNode, tmp_path: Path
) -> None:
    cache = (BUILD / "CMakeCache.txt").read_text()
    (include,) = re.findall(r"^VGPU_CUDA_INCLUDE:\w+=(.*)$", cache, re.MULTILINE)
    words = [str(suspended_calls.build(tmp_path, Path(include))), *KNOWN]
    done = suspended_calls.run_group(words, node.environment(), 60)
    said = {row["call"]: row["it"] for row in map(json.loads, done.splitlines())}
    assert said == KNOWN


def test_a_failed_program_of_a_measurement_leaves_no_child_process() -> None:
    script = "sleep 600 >/dev/null 2>&1 & echo $!; exit 1"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        suspended_calls.run_group(["sh", "-c", script])
    child = int(failed.value.stdout)
    eventually(lambda: (stat := read_stat(child)) is None or not stat.is_alive, "the child has ended")


def test_the_search_for_blocking_calls_names_calls_without_a_wrapper_that_block_or_fail() -> None:
    tried = [
        {"call": "cuLaunchKernel", "it": "blocks", "result": 0},
        {"call": "cuFuncGetAttribute of a kernel", "it": "blocks", "result": 0},
        {"call": "cuDeviceGet of a moon", "it": "blocks", "result": 0},
        {"call": "cuCtxGetCurrent", "it": "answers", "result": 0},
        {"call": "cuNobodyKnows", "it": "blocks", "result": 0},
        {"call": "cuFails", "it": "answers", "result": 304},
    ]
    assert suspended_calls.open_ways(tried, suspended_calls.wrapped()) == [
        "cuDeviceGet of a moon",
        "cuNobodyKnows",
        "cuFails",
    ]


def test_noise_between_two_native_runs_is_not_reported_as_a_difference() -> None:
    """Two runs without libvgpu show how much the program's own results differ."""

    def run(*numbers: float) -> dict[str, Any]:
        return {"numbers": list(numbers)}

    assert verdict(run(1, 2), [run(1, 2), run(1, 3)]) == "the same"
    assert verdict(run(1, 2.000001), [run(1, 2), run(1, 2)]) == "differs"
    assert verdict(run(1, 2.000001), [run(1, 2), run(1, 1.999999)]) == "differs no more than two native runs"
    assert verdict(run(1, 3), [run(1, 2), run(1, 1.999999)]) == "differs"
    assert verdict({"failed": 1}, [run(1), run(1)]) == verdict(run(1), [{}, {}]) == "no numbers"


def test_two_processes_of_an_mps_tenant_share_one_memory_limit(run: Callable[..., dict[str, Any]]) -> None:
    """MPS alone would limit each of the two processes separately. libvgpu limits their sum."""
    mps = run("memory_exact", "mps")["mps"]
    assert mps["said"][0]["total_mib"] == 1600
    assert mps["said"][1]["result"] == 2
    assert mps["limit_mib"] - 32 < mps["nvml_sum_mib"] <= mps["limit_mib"]
    assert mps["ledger_mib"] == mps["nvml_sum_mib"]
    assert mps["each_context_mib"] == [348, 348]
