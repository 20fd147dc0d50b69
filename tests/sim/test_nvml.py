"""NVML through nvidia-ml-py, compared with the answers of a real H200 (driver 580.159.04)."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.simnode import SimNode, build_dir

Make = Callable[..., SimNode]

HEAD = """
import ctypes, json, pynvml as n
def places(device, profile_id):
    count = ctypes.c_uint(8)
    array = (n.c_nvmlGpuInstancePlacement_t * 8)()
    n.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, array, ctypes.byref(count))
    return [[array[i].start, array[i].size] for i in range(count.value)]
def ask(function, *args):
    try:
        return function(*args)
    except n.NVMLError as e:
        return f"error {e.value}"
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
"""


def ask(node: SimNode, body: str) -> object:
    return json.loads(node.python(HEAD + body + "\nprint(json.dumps(out))"))


def test_nvml_queries_answer_as_recorded_on_a_card(sim_node: Make) -> None:
    out = ask(
        sim_node(),
        """
m1, m2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
out = dict(versions=[n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion(), n.nvmlSystemGetCudaDriverVersion()],
  count=n.nvmlDeviceGetCount(), name=n.nvmlDeviceGetName(h), mig=n.nvmlDeviceGetMigMode(h),
  max_mig=n.nvmlDeviceGetMaxMigDeviceCount(h), m1=[m1.total, m1.free, m1.used],
  m2=[m2.total, m2.reserved, m2.free, m2.used], mode=n.nvmlDeviceGetComputeMode(h),
  persistence=n.nvmlDeviceGetPersistenceMode(h), cores=n.nvmlDeviceGetNumGpuCores(h),
  cc=n.nvmlDeviceGetCudaComputeCapability(h), arch=n.nvmlDeviceGetArchitecture(h), brand=n.nvmlDeviceGetBrand(h),
  vbios=n.nvmlDeviceGetVbiosVersion(h), bus=n.nvmlDeviceGetMemoryBusWidth(h), ecc=n.nvmlDeviceGetEccMode(h),
  numa=ask(n.nvmlDeviceGetNumaNodeId, h), attributes=ask(n.nvmlDeviceGetAttributes, h),
  virtual=n.nvmlDeviceGetVirtualizationMode(h), pci=[n.nvmlDeviceGetPciInfo(h).pciDeviceId, n.nvmlDeviceGetPciInfo(h).pciSubSystemId],
  procs=len(n.nvmlDeviceGetComputeRunningProcesses(h)))
""",
    )
    assert out == {
        "versions": ["580.159.04", "13.580.159.04", 13000],
        "count": 8,
        "name": "NVIDIA H200",
        "mig": [0, 0],
        "max_mig": 0,
        "m1": [150754820096, 150109880320, 644939776],
        "m2": [150754820096, 644939776, 150109880320, 0],
        "mode": 0,
        "persistence": 1,
        "cores": 16896,
        "cc": [9, 0],
        "arch": 9,
        "brand": 14,
        "vbios": "96.00.A5.00.1A",
        "bus": 6016,
        "ecc": [1, 1],
        "numa": "error 3",
        "attributes": "error 3",
        "virtual": 1,
        "pci": [590680286, 415174878],
        "procs": 0,
    }


def test_the_gpu_instance_profiles_are_those_of_the_card(sim_node: Make) -> None:
    out = ask(
        sim_node(),
        """
out = []
for p in range(20):
    i = ask(lambda: n.nvmlDeviceGetGpuInstanceProfileInfo(h, p, version=2))
    if isinstance(i, str):
        out.append(i)
        continue
    out.append([i.id, i.sliceCount, i.instanceCount, i.multiprocessorCount, i.copyEngineCount, i.decoderCount,
      i.encoderCount, i.jpegCount, i.ofaCount, i.memorySizeMB, i.name if isinstance(i.name, str) else i.name.decode(),
      places(h, i.id)])
""",
    )
    no, bad = "error 3", "error 2"
    seven, four = [[i, 1] for i in range(7)], [[0, 2], [2, 2], [4, 2], [6, 2]]
    assert out == [
        [19, 1, 7, 16, 1, 1, 0, 1, 0, 16384, "MIG 1g.18gb", seven],
        [14, 2, 3, 32, 2, 2, 0, 2, 0, 33280, "MIG 2g.35gb", four[:3]],
        [9, 3, 2, 60, 3, 3, 0, 3, 0, 71424, "MIG 3g.71gb", [[0, 4], [4, 4]]],
        [5, 4, 1, 64, 4, 4, 0, 4, 0, 71424, "MIG 4g.71gb", [[0, 4]]],
        [0, 7, 1, 132, 8, 7, 0, 7, 1, 143360, "MIG 7g.141gb", [[0, 8]]],
        no,
        no,
        [20, 1, 1, 16, 1, 1, 0, 1, 1, 16384, "MIG 1g.18gb+me", seven],
        no,
        [15, 1, 4, 26, 1, 1, 0, 1, 0, 33280, "MIG 1g.35gb", four],
        *[no] * 7,
        *[bad] * 3,
    ]


def test_devices_are_distinct_and_are_found_by_every_kind_of_identifier(sim_node: Make) -> None:
    out = ask(
        sim_node(),
        """
hs = [n.nvmlDeviceGetHandleByIndex(i) for i in range(8)]
names = [[n.nvmlDeviceGetUUID(x), n.nvmlDeviceGetSerial(x), n.nvmlDeviceGetPciInfo(x).busId, n.nvmlDeviceGetMinorNumber(x)] for x in hs]
names = [[w.decode() if isinstance(w, bytes) else w for w in row] for row in names]
back = [[n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(r[0])), n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleBySerial(r[1])),
         n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(r[2]))] for r in names]
out = dict(names=names, back=back, past=ask(n.nvmlDeviceGetHandleByIndex, 8), none=ask(n.nvmlDeviceGetHandleByUUID, "GPU-x"),
  near=n.nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[1]), far=n.nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[7]),
  link=n.nvmlDeviceGetNvLinkState(hs[0], 17), p2p=n.nvmlDeviceGetP2PStatus(hs[0], hs[7], n.NVML_P2P_CAPS_INDEX_NVLINK),
  affinity=[list(n.nvmlDeviceGetMemoryAffinity(x, 1, n.NVML_AFFINITY_SCOPE_NODE)) for x in (hs[0], hs[7])])
""",
    )
    assert isinstance(out, dict)
    assert out["back"] == [[i, i, i] for i in range(8)]
    assert all(len({row[k] for row in out["names"]}) == 8 for k in range(4))
    assert (out["past"], out["none"]) == ("error 2", "error 6")
    assert (out["near"], out["far"], out["link"], out["p2p"]) == (40, 50, 1, 0)
    assert out["affinity"] == [[1], [2]]


def test_uuids_of_devices_are_stable_and_follow_the_seed(sim_node: Make) -> None:
    uuids = [[d["uuid"] for d in sim_node(seed=seed).dump()["devices"]] for seed in ("", "", "other")]
    assert uuids[0] == uuids[1]
    assert not set(uuids[0]) & set(uuids[2])


@pytest.mark.parametrize("state", [None, "", "relative", "/nonexistent/state", "/dev/null", "/etc/passwd"])
def test_without_a_simulated_node_the_libraries_answer_as_without_a_driver(state: str | None) -> None:
    env = {"LD_LIBRARY_PATH": str(build_dir() / "sim" / "lib")}
    if state is not None:
        env["VGPU_SIM_STATE"] = state
    code = (
        "import ctypes as c; m = c.CDLL('libnvidia-ml.so.1'); u = c.CDLL('libcuda.so.1');"
        "print(m.nvmlInit_v2(), m.nvmlDeviceGetCount_v2(None), u.cuInit(0), u.cuDeviceGetCount(None), u.cuMemAlloc_v2(None, 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9", "1", "100", "3", "3"]


def test_nvml_calls_fail_with_injected_faults_and_for_a_lost_device(sim_node: Make) -> None:
    node = sim_node()
    node.sim(
        "fault", "fail", "--function", "nvmlDeviceGetName", "--code", "999", "--count", "1", "--device", "1"
    )
    node.sim("fault", "gpu-lost", "--device", "2")
    node.sim("fault", "memory", "--device", "3", "--bytes", str(1 << 30))
    body = """
hs = [n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1, 3)]
out = [[ask(n.nvmlDeviceGetName, x) for x in hs] for _ in range(2)]
out.append([ask(n.nvmlDeviceGetHandleByIndex, 2), n.nvmlDeviceGetMemoryInfo(hs[2]).used])
"""
    good = "NVIDIA H200"
    assert ask(node, body) == [[good, "error 999", good], [good] * 3, ["error 15", 644939776 + (1 << 30)]]
    node.sim("fault", "clear")
    assert ask(node, "out = ask(n.nvmlDeviceGetName, n.nvmlDeviceGetHandleByIndex(2))") == good


def test_nvml_events_reach_a_waiting_process(sim_node: Make) -> None:
    node = sim_node()
    code = f"""
import pynvml as n
n.nvmlInit()
s = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(4), n.nvmlEventTypeXidCriticalError, s)
print("waiting", flush=True)
e = n.nvmlEventSetWait_v2(s, {30_000})
print(n.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData, flush=True)
try:
    n.nvmlEventSetWait_v2(s, 1)
except n.NVMLError_Timeout:
    print("timeout")
"""
    process = node.start([sys.executable, "-c", code])
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    node.sim("fault", "xid", "--device", "3", "--code", "31")
    node.sim("fault", "xid", "--device", "4", "--code", "48")
    assert process.communicate(timeout=300)[0].splitlines() == ["4 8 48", "timeout"]


def test_a_change_of_the_mig_layout_is_an_nvml_event(sim_node: Make) -> None:
    code = """
import pynvml as n
n.nvmlInit()
h, s = n.nvmlDeviceGetHandleByIndex(0), n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(h, n.nvmlEventMigConfigChange, s)
n.nvmlDeviceSetMigMode(h, 1)
gi = n.nvmlDeviceCreateGpuInstance(h, n.nvmlDeviceGetGpuInstanceProfileInfo(h, 0).id)
n.nvmlGpuInstanceDestroy(gi)
events = [n.nvmlEventSetWait_v2(s, 1000) for _ in range(3)]
print([e.eventType == n.nvmlEventMigConfigChange for e in events], events[1].gpuInstanceId == events[2].gpuInstanceId)
"""
    assert sim_node().python(code) == "[True, True, True] True\n"


def test_the_root_of_a_simulated_node_has_the_files_that_tools_read(sim_node: Make) -> None:
    node = sim_node()
    nvidia = node.host_root / "proc/driver/nvidia"
    assert "580.159.04" in (nvidia / "version").read_text()
    assert len(list((nvidia / "gpus").iterdir())) == 8
    information = (nvidia / "gpus/0000:1b:00.0/information").read_text()
    assert node.dump()["devices"][0]["uuid"] in information and "Device Minor: \t 0" in information
    minors = (node.host_root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    # the driver's fixed table: 135 minor numbers for a GPU, 9 for a GPU instance
    assert {"config 1", "gpu0/gi0/access 3", "gpu0/gi1/ci0/access 13", "gpu1/gi0/access 138"} <= set(minors)
    node.sim("driver", "590.1.2")
    assert "590.1.2" in (nvidia / "version").read_text()
