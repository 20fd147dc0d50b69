"""Inside a slice every tool shows only the slice: nvidia-smi's private process lists, nvitop, NVML and the
driver.

The programs are real (tests/sim/outside.py fetches them), and the node is simulated.
"""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pynvml as n
import pytest

from tests.conditions import needs, unmet
from tests.e2e.support import eventually
from tests.native.harness import GIB, GID, LIBVGPU, MIB, PROBE, UID
from tests.sim import outside
from tests.simnode import SimNode
from vgpud.lease import DeviceLimits, write_lease

Make = Callable[..., SimNode]
CONTEXT_BYTES = 526 * MIB  # bytes of a context on the simulated H200


class Slices:
    """Two tenants on one simulated card. Each has one process that holds memory."""

    def __init__(self, node: SimNode, folder: Path) -> None:
        self.node = node
        self.uuid = node.dump()["devices"][0]["uuid"]
        self.leases = {
            name: write_lease(folder, name, [DeviceLimits(self.uuid, size)], UID, GID)
            for name, size in (("one", 4 * GIB), ("two", 8 * GIB))
        }
        self.pids = {name: self._hold(name, size) for name, size in (("one", 100), ("two", 200))}

    def env(self, name: str) -> dict[str, str]:
        return {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(self.leases[name])}

    def _hold(self, name: str, mib: int) -> int:
        process = self.node.start([str(PROBE), "hold", f"{mib}MiB", "--then-wait-on-stdin"], self.env(name))
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "held"
        return process.pid

    def run(self, name: str, *argv: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.node.run(list(argv), self.env(name) | env)


@pytest.fixture
def slices(sim_node: Make, tmp_path: Path, request: pytest.FixtureRequest) -> Slices:
    (tmp_path / "leases").mkdir()
    return Slices(sim_node("h200x1", driver=getattr(request, "param", "")), tmp_path / "leases")


@needs("debian-archive")
@pytest.mark.parametrize("branch", ["535", "550"])
def test_nvidia_smi_shows_only_the_slice(slices: Slices, branch: str) -> None:
    program = outside.nvidia_smi(branch)
    if program is None:
        unmet("debian-archive", outside.why.get("nvidia-smi"))
    for name, total, used in (("one", 4096, 626), ("two", 8192, 726)):
        own, other = slices.pids[name], slices.pids["two" if name == "one" else "one"]
        table = slices.run(name, str(program)).stdout
        assert re.search(rf" {used}MiB / +{total}MiB ", table), table
        assert f" {own} " in table and f" {other} " not in table
        rows = slices.run(
            name, str(program), "--query-compute-apps=pid,used_memory", "--format=csv,noheader"
        ).stdout
        assert rows.strip() == f"{own}, {used} MiB"
        log = ElementTree.fromstring(slices.run(name, str(program), "-q", "-x").stdout)
        assert [e.text for e in log.iter("pid")] == [str(own)]
        assert next(e.text for e in log.iter("process_name"))
        memory = log.find("gpu/fb_memory_usage")
        assert memory is not None
        assert memory.findtext("total") == f"{total} MiB" and memory.findtext("used") == f"{used} MiB"


@needs("debian-archive")
def test_nvidia_smi_outside_of_slices_shows_all_processes(slices: Slices) -> None:
    program = outside.nvidia_smi("550")
    if program is None:
        unmet("debian-archive", outside.why.get("nvidia-smi"))
    done = slices.node.run(
        [str(program), "--query-compute-apps=pid", "--format=csv,noheader"], {"LD_PRELOAD": str(LIBVGPU)}
    )
    assert sorted(map(int, done.stdout.split())) == sorted(slices.pids.values())


NVITOP = """
from nvitop import Device
d = Device(0)
print([d.memory_total() >> 20, d.memory_used() >> 20, d.memory_free() >> 20, sorted(d.processes())])
"""


@needs("python-index")
def test_nvitop_shows_only_the_slice(slices: Slices) -> None:
    folder = outside.python_tools()
    if folder is None:
        unmet("python-index", outside.why.get("python-tools"))
    done = slices.run("one", sys.executable, "-c", NVITOP, PYTHONPATH=str(folder))
    assert json.loads(done.stdout) == [4096, 626, 4096 - 626, [slices.pids["one"]]]


# The pids in each list of NVML, and in the lists of the private table that nvidia-smi reads
LISTS = """
import ctypes as c, json, pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByIndex(0)
nvml = c.CDLL("libnvidia-ml.so.1")
class Short(c.Structure):
    _fields_ = [("pid", c.c_uint), ("bytes", c.c_ulonglong)]
class Full(c.Structure):
    _fields_ = [*Short._fields_, ("gpu_instance", c.c_uint), ("compute_instance", c.c_uint)]
class Listed(c.Structure):
    _fields_ = [*Full._fields_, ("unknown", c.c_ulonglong), ("name", c.c_char * 4096)]
def listed(call, form, room=8):
    count, entries = c.c_uint(room), (form * 8)()
    return call(card, c.byref(count), entries), [one.pid for one in entries[:count.value]]
def pids(call, form):
    result, found = listed(call, form)
    assert result == 0
    return found
def used(call):
    try:
        return [one.pid for one in call(card, 0)]
    except n.NVMLError_NotFound:
        return []
found = {}
for kind in ("Compute", "Graphics", "MPSCompute"):
    for version, form in (("", Short), ("_v2", Full), ("_v3", Full)):
        found[kind + version] = pids(nvml[f"nvmlDeviceGet{kind}RunningProcesses{version}"], form)
name = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
table = c.POINTER(c.c_void_p)()
assert nvml.nvmlInternalGetExportTable(c.byref(table), name) == 0
entry = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)
for index, kind in enumerate(("compute", "graphics", "mps")):
    found[f"table {kind}"] = pids(entry(table[213 + index]), Listed)
found["utilization"] = used(n.nvmlDeviceGetProcessUtilization)
found["utilization info"] = used(n.nvmlDeviceGetProcessesUtilizationInfo)
result, entries = listed(nvml.nvmlDeviceGetComputeRunningProcesses_v3, Full, room=0)
found["no room"] = [result, len(entries)]
found["accounting"] = list(n.nvmlDeviceGetAccountingPids(card))
print(json.dumps(found))
"""


@pytest.mark.parametrize("slices", ["580", "615"], indirect=True)
def test_every_list_of_processes_has_only_those_of_the_slice(slices: Slices) -> None:
    """The form of the private table is known for driver 580. For 615 it is recognised by the pids in it."""
    node = slices.node
    node.python(
        "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetAccountingMode(n.nvmlDeviceGetHandleByIndex(0), 1)"
    )
    spin = [str(PROBE.with_name("vgpu-spin")), "--kernel-us", "1000", "--seconds", "3000"]
    spinning = {name: node.start(spin, slices.env(name)).pid for name in slices.leases}
    own = {slices.pids["one"], spinning["one"]}
    everyone = {*slices.pids.values(), *spinning.values()}

    def lists(**env: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = json.loads(node.run([sys.executable, "-c", LISTS], env).stdout)
        return found

    eventually(
        lambda: set(lists()["utilization"]) == set(spinning.values()), "both tenants have used the card"
    )
    outside, inside = lists(), lists(**slices.env("one"))
    assert {kind for kind, pids in outside.items() if set(pids) == everyone} == {
        "Compute",
        "Compute_v2",
        "Compute_v3",
        "table compute",
        "accounting",
    }
    shown = {kind: [pid for pid in pids if pid in own] for kind, pids in outside.items()}
    assert {kind: sorted(pids) for kind, pids in inside.items()} == {
        kind: sorted(pids) for kind, pids in shown.items()
    } | {"no room": [len(own), n.NVML_ERROR_INSUFFICIENT_SIZE]}


def test_cuda_and_nvml_report_the_same_memory_of_the_slice(slices: Slices) -> None:
    """The process that queries the driver has a CUDA context too, so two contexts are counted."""
    line = json.loads(slices.run("two", str(PROBE), "info").stdout)
    used = 200 * MIB + 2 * CONTEXT_BYTES
    assert (line["total_bytes"], line["device_total_bytes"]) == (8 * GIB, 8 * GIB)
    assert line["free_bytes"] == 8 * GIB - used


DEVICES = """
import json, sys, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
def refusal(call, *arguments):
    try:
        return str(call(*arguments)) and 0
    except n.NVMLError as error:
        return error.value
names = [n.nvmlDeviceGetUUID(h) for h in handles], [n.nvmlDeviceGetIndex(h) for h in handles]
others = [
    refusal(n.nvmlDeviceGetHandleByIndex, len(handles)),
    refusal(n.nvmlDeviceGetHandleByUUID, sys.argv[1]),
    refusal(n.nvmlDeviceGetHandleBySerial, sys.argv[2]),
    refusal(n.nvmlDeviceGetHandleByUUID, names[0][0]),
    len(n.nvmlSystemGetTopologyGpuSet(0)),
]
print(json.dumps([*names, others]))
"""


def test_nvml_lists_only_the_devices_of_the_lease(sim_node: Make, tmp_path: Path) -> None:
    """NVML lists only the lease's devices, in NVML's own order, both on the host and in a container that has
    no other devices.
    """
    node = sim_node("h200x8")
    cards = node.dump()["devices"]
    held = [cards[5]["uuid"], cards[2]["uuid"]]
    lease = write_lease(tmp_path, "a", [DeviceLimits(uuid, GIB) for uuid in held], UID, GID)
    env = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease)}
    serial = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetSerial(n.nvmlDeviceGetHandleByIndex(0)))"
    asked = [sys.executable, "-c", DEVICES, cards[0]["uuid"], node.python(serial).strip()]
    listed = json.loads(node.run(asked, env).stdout)
    assert listed == [[held[1], held[0]], [0, 1], [2, 6, 6, 0, 1]]
    assert len(json.loads(node.run(asked).stdout)[0]) == 8


MIG = """
import json, sys, pynvml as n
n.nvmlInit()
cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
def found(uuid):
    try:
        return n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    except n.NVMLError_NotFound:
        return False
print(json.dumps([[n.nvmlDeviceGetUUID(card) for card in cards], [found(uuid) for uuid in sys.argv[1:]]]))
"""


def test_nvml_lists_only_the_tenants_own_mig_device_and_its_card(sim_node: Make, tmp_path: Path) -> None:
    """The tenant finds its own MIG device and the card of it, and no other MIG device and no other card."""
    node = sim_node("h200x8")
    made = """import json, pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByIndex(3)
n.nvmlDeviceSetMigMode(card, 1)
profile = n.nvmlDeviceGetGpuInstanceProfileInfo(card, n.NVML_GPU_INSTANCE_PROFILE_2_SLICE)
for _ in range(2):
    instance = n.nvmlDeviceCreateGpuInstance(card, profile.id)
    whole = n.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 1, 0)
    n.nvmlGpuInstanceCreateComputeInstance(instance, whole.id)
print(json.dumps([n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(card, i)) for i in range(2)]))
"""
    own, other = json.loads(node.python(made))
    card, second = (node.dump()["devices"][i]["uuid"] for i in (3, 2))
    lease = write_lease(tmp_path, "a", [DeviceLimits(own, GIB)], UID, GID)
    env = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease)}
    done = node.run([sys.executable, "-c", MIG, own, card, other, second], env)
    assert json.loads(done.stdout) == [[card], [True, True, False, False]]


def test_the_refusal_of_a_device_outside_the_lease_names_the_allocation(
    sim_node: Make, tmp_path: Path
) -> None:
    node = sim_node("h200x8")
    cards = node.dump()["devices"]
    lease = write_lease(tmp_path, "a", [DeviceLimits(cards[2]["uuid"], GIB)], UID, GID)
    env = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease), "VGPU_ALLOCATION": "b870bd653642"}
    done = node.run([str(PROBE), "info"], env | {"CUDA_VISIBLE_DEVICES": "0"}, check=False)
    assert json.loads(done.stdout)["result"] == "CUDA_ERROR_NOT_PERMITTED"
    assert "libvgpu: CUDA device 0 (GPU-" in done.stderr
    assert f"is refused: allocation b870bd653642 has {cards[2]['uuid']}; " in done.stderr
