"""Programs of other projects work on the simulated node: nvidia-smi 535 and 550, nvitop, gpustat, and every
query of nvidia-ml-py.

They are fetched once (tests/sim/outside.py) and never committed.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.sim import outside
from tests.sim.tenant import Tenant
from tests.simnode import ROOT, SimNode

Make = Callable[..., SimNode]
Smi = Callable[..., subprocess.CompletedProcess[str]]

#: Output of `nvidia-smi mig -lgip` and `-lgipp` on an H200 and an H100 (driver 580.159.04, MIG mode off).
CARDS = {
    card: (Path(__file__).parent / "data" / f"{card}_mig_profiles.txt").read_text().split("\n\n")
    for card in ("h200", "h100")
}
CARD = CARDS["h200"]


def fetched(branch: str) -> Path:
    program = outside.nvidia_smi(branch)
    if program is None:
        unmet("debian-archive", outside.why[f"smi-{branch}"])
    return program


@pytest.fixture(scope="session")
def tools() -> Path:
    folder = outside.python_tools()
    if folder is None:
        unmet("python-index", outside.why["python-tools"])
    return folder


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node()


def run(branch: str, node: SimNode, words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return node.run([str(fetched(branch)), *words.split()], check=check)


BRANCHES = pytest.mark.parametrize("branch", ["535", "550"])
NVIDIA_SMI = needs("debian-archive")


@NVIDIA_SMI
@BRANCHES
def test_nvidia_smi_lists_and_queries_all_devices(node: SimNode, branch: str) -> None:
    devices = node.dump()["devices"]
    lines = run(branch, node, "-L").stdout.splitlines()
    assert lines == [f"GPU {d['index']}: {d['name']} (UUID: {d['uuid']})" for d in devices]
    text = run(branch, node, "-q").stdout
    assert "Function Not Found" not in text and "Unknown Error" not in text
    assert text.count("Product Name") == 8 and "GSP Firmware Version" in text
    log = ElementTree.fromstring(run(branch, node, "-q -x").stdout)
    assert [g.findtext("uuid") for g in log.findall("gpu")] == [d["uuid"] for d in devices]
    assert {g.findtext("mig_mode/current_mig") for g in log.findall("gpu")} == {"Disabled"}
    assert {g.findtext("fb_memory_usage/total") for g in log.findall("gpu")} == {"143771 MiB"}
    rows = [r.split("\t") for r in run(branch, node, "topo -m").stdout.splitlines() if r.startswith("GPU")]
    assert len(rows) == 8
    for i, row in enumerate(rows):
        assert [c.strip() for c in row[1:9]] == ["X" if i == j else "NV18" for j in range(8)]


@NVIDIA_SMI
@BRANCHES
def test_nvidia_smi_shows_a_tenants_process(node: SimNode, branch: str) -> None:
    tenant = Tenant(node)
    assert tenant.say("alloc 100") == "ok"
    pid = str(tenant.process.pid)
    table = run(branch, node, "-i 0").stdout
    assert pid in table and "626MiB" in table
    asked = run(branch, node, "--query-compute-apps=pid,used_memory --format=csv,noheader").stdout
    assert asked.strip() == f"{pid}, 626 MiB"
    assert pid in run(branch, node, "pmon -c 1 -i 0").stdout
    rows = [r.split() for r in run(branch, node, "dmon -c 2 -i 0").stdout.splitlines() if r[:1] != "#"]
    assert len(rows) == 2 and all(r[0] == "0" for r in rows)


@NVIDIA_SMI
@BRANCHES
def test_nvidia_smi_sets_the_compute_mode(node: SimNode, branch: str) -> None:
    assert "to EXCLUSIVE_PROCESS" in run(branch, node, "-c 3 -i 2").stdout
    assert node.dump()["devices"][2]["compute_mode"] == 3
    run(branch, node, "-c DEFAULT -i 2")
    assert node.dump()["devices"][2]["compute_mode"] == 0


def instances(node: SimNode) -> list[tuple[int, int, int]]:
    found = node.dump()["devices"][0]["gpu_instances"]
    return sorted((g["profile_id"], g["start"], len(g["compute_instances"])) for g in found)


@NVIDIA_SMI
@BRANCHES
def test_nvidia_smi_makes_and_destroys_mig_instances(node: SimNode, branch: str) -> None:
    assert "Enabled MIG Mode" in run(branch, node, "-i 0 -mig 1").stdout
    # the largest profile comes first, because the driver fills the device from its high end (NVIDIA's MIG
    # user guide)
    made = run(branch, node, "mig -i 0 -cgi 9,14,19").stdout
    assert made.count("Successfully created GPU instance") == 3
    assert instances(node) == [(9, 4, 0), (14, 2, 0), (19, 1, 0)]
    assert run(branch, node, "mig -i 0 -cci").stdout.count("Successfully created compute instance") == 3
    assert [n for _, _, n in instances(node)] == [1, 1, 1]
    listed = run(branch, node, "-L").stdout
    assert listed.count("MIG 3g.71gb") == listed.count("MIG 2g.35gb") == listed.count("MIG 1g.18gb") == 1
    assert "3g.71gb" in run(branch, node, "mig -lgi").stdout
    assert "2g.35gb" in run(branch, node, "mig -lci").stdout
    refused = run(branch, node, "mig -i 0 -cgi 0", check=False)
    assert refused.returncode != 0 and "Insufficient Resources" in refused.stdout
    # GPU instances that have compute instances cannot be destroyed
    assert run(branch, node, "mig -i 0 -dgi", check=False).returncode != 0
    run(branch, node, "mig -i 0 -dci")
    run(branch, node, "mig -i 0 -dgi")
    assert instances(node) == []
    assert "Disabled MIG Mode" in run(branch, node, "-i 0 -mig 0").stdout


def body(text: str) -> list[str]:
    """Collapses spaces and lines in the rows of a table, because branch 580 made the column of names wider by
    two.
    """
    return [" ".join(line.replace("-", "").replace("=", "").split()) for line in text.splitlines()]


@NVIDIA_SMI
@pytest.mark.parametrize("card", CARDS)
def test_nvidia_smi_prints_the_profiles_as_on_the_card(sim_node: Make, card: str) -> None:
    node = sim_node(f"{card}x1")
    assert body(run("550", node, "mig -lgip").stdout) == body(CARDS[card][0])
    assert run("550", node, "mig -lgipp").stdout.split("\n")[:7] == CARDS[card][1].split("\n")[:7]


@NVIDIA_SMI
def test_nvidia_smi_535_lists_profiles_only_in_mig_mode(sim_node: Make) -> None:
    """Before branch 550, nvidia-smi itself refuses to list the profiles of a device whose MIG mode is off."""
    node = sim_node("h200x1")
    refused = run("535", node, "mig -lgip", check=False)
    assert refused.returncode == 6 and "No MIG-enabled devices found" in refused.stdout
    run("535", node, "-mig 1")
    assert body(run("535", node, "mig -lgip").stdout) == body(CARD[0])
    assert run("535", node, "mig -lgipp").stdout.split("\n")[:7] == CARD[1].split("\n")[:7]


@needs("python-index")
def test_nvitop_and_gpustat_show_a_tenants_process(node: SimNode, tools: Path) -> None:
    tenant = Tenant(node)
    tenant.say("alloc 100")
    env = {"PYTHONPATH": str(tools), "TERM": "xterm", "COLUMNS": "100", "LINES": "60"}
    seen = node.run([sys.executable, "-m", "nvitop", "-1"], env).stdout
    assert "580.159.04" in seen and "626.0MiB" in seen and str(tenant.process.pid) in seen
    found = json.loads(node.run([sys.executable, "-m", "gpustat", "--json"], env).stdout)
    assert len(found["gpus"]) == 8
    assert [p["pid"] for p in found["gpus"][0]["processes"]] == [tenant.process.pid]
    assert found["gpus"][0]["memory.used"] == 626


def test_simulated_nvml_has_every_function_that_nvidia_ml_py_looks_up(node: SimNode) -> None:
    """The functions are those that the source text of pynvml names."""
    import re

    import pynvml

    assert pynvml.__file__ is not None
    text = Path(pynvml.__file__).read_text()
    names = sorted(set(re.findall(r"_nvmlGetFunctionPointer\(['\"](nvml\w+)['\"]\)", text)))
    assert len(names) > 300
    library = ctypes.CDLL(str(node.build / "sim/lib/libnvidia-ml.so.1"))
    assert [n for n in names if not hasattr(library, n)] == []


QUERIES = """
import inspect, json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
good, codes = 0, {}
for name, f in sorted(vars(n).items()):
    if not name.startswith(("nvmlDeviceGet", "nvmlDeviceIs", "nvmlSystemGet")) or not inspect.isfunction(f):
        continue
    required = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    if len(required) > 1 or (required and not name.startswith("nvmlDevice")):
        continue
    if required and required[0].name not in ("handle", "device"):
        continue
    try:
        f(*([h] if required else []))
        good += 1
    except n.NVMLError as e:
        codes.setdefault(e.value, []).append(name)
print(json.dumps([good, codes]))
"""


def test_every_query_of_nvidia_ml_py_about_a_device_alone_has_a_valid_answer(node: SimNode) -> None:
    good, codes = json.loads(node.python(QUERIES))
    assert good > 75
    # 3 (NOT_SUPPORTED by this device) may be the only error; 13 (FUNCTION_NOT_FOUND) or 999 would be a gap of
    # the simulator
    assert {int(c) for c in codes} <= {3}, codes


def test_accounting_data_of_a_process_outlive_it(node: SimNode) -> None:
    ask = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
{}
print(json.dumps(out))
"""
    on = "out = [n.nvmlDeviceSetAccountingMode(h, 1), n.nvmlDeviceGetAccountingMode(h)]"
    assert json.loads(node.python(ask.format(on))) == [None, 1]
    tenant = Tenant(node)
    tenant.say("alloc 1000")
    tenant.say("launch 10 1000")
    tenant.say("sync")
    stats = """
pids = n.nvmlDeviceGetAccountingPids(h)
stats = [n.nvmlDeviceGetAccountingStats(h, p) for p in pids]
out = [list(pids)] + [[s.maxMemoryUsage >> 20, s.isRunning, s.time > 0] for s in stats]
"""
    pid = tenant.process.pid
    assert json.loads(node.python(ask.format(stats))) == [[pid], [1526, 1, False]]
    tenant.kill()
    assert json.loads(node.python(ask.format(stats))) == [[pid], [1526, 0, True]]
    gone = "n.nvmlDeviceClearAccountingPids(h)\nout = list(n.nvmlDeviceGetAccountingPids(h))"
    assert json.loads(node.python(ask.format(gone))) == []


def test_tools_of_nvidia_are_not_committed() -> None:
    done = subprocess.run(["git", "ls-files", "build"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
