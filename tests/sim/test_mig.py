"""MIG on the simulated node: placements compared with the oracle, instances, handles, changes of mode, reboot
and reset.
"""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.sim.tenant import Tenant
from tests.simnode import ROOT, SimNode

Make = Callable[..., SimNode]

HEAD = """
import ctypes, json, pynvml as n
def ask(function, *args):
    try:
        return function(*args)
    except n.NVMLError as e:
        return f"error {e.value}"
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
def slice(profile, start=None, size=1):
    gi = n.nvmlDeviceCreateGpuInstance(h, profile) if start is None else \\
        n.nvmlDeviceCreateGpuInstanceWithPlacement(h, profile, ctypes.byref(n.c_nvmlGpuInstancePlacement_t(start, size)))
    for p in range(8):
        try:
            i = n.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, p, 0)
        except n.NVMLError:
            continue
        if n.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, i.id) == i.instanceCount == 1:
            ci = n.nvmlGpuInstanceCreateComputeInstance(gi, i.id)
    return gi, ci, n.nvmlComputeInstanceGetInfo_v2(ci).device
out = None
"""


def ask(node: SimNode, body: str) -> object:
    return json.loads(node.python(HEAD + body + "\nprint(json.dumps(out, default=lambda o: o.value))"))


@pytest.mark.parametrize(
    ("profile", "walk", "table", "layouts"),
    [
        ("h200x8", "all", "seven", 723),
        ("h200x8", "random", "seven+me", None),
        ("a100x8", "all", "seven", 723),
        ("h100x8", "random", "seven", None),
        ("b200x8", "random", "seven", None),
        ("b300x8", "random", "seven", None),
        ("gb300x4", "random", "seven", None),
        ("a30x4", "all", "a30", 84),
        ("rtxpro6000x2", "all", "rtx", 1249),
        ("rtxpro5000x2", "all", "rtx5000", 36),
        ("rtxpro4500x2", "all", "rtx4500", 26),
    ],
)
def test_mig_placements_agree_with_a_brute_force_model(
    sim_node: Make, profile: str, walk: str, table: str, layouts: int | None
) -> None:
    """The program visits every legal layout of the device, and compares every possible creation and every
    capacity in it.
    """
    node = sim_node(profile)
    if profile in ("a100x8", "a30x4"):  # on Ampere the change of MIG mode is pending until a reset
        ask(node, "n.nvmlDeviceSetMigMode(h, 1)")
        node.sim("reset", "0")
    done = node.run([sys.executable, "-m", "tests.sim.mig_walk", walk, table], {"PYTHONPATH": str(ROOT)})
    seen, answers = map(int, done.stdout.split())
    assert seen == layouts or (layouts is None and seen > 90)
    assert answers > 10 * seen


def test_a_gpu_instance_has_a_mig_device(sim_node: Make) -> None:
    node = sim_node()
    out = ask(
        node,
        """
out = [n.nvmlDeviceSetMigMode(h, 1), n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetMaxMigDeviceCount(h)]
gi, ci, m = slice(14, 4, 2)
a, mem = n.nvmlDeviceGetAttributes(m), n.nvmlDeviceGetMemoryInfo(m)
name = n.nvmlDeviceGetName(m)
out += [name, [a.multiprocessorCount, a.memorySizeMB, a.gpuInstanceSliceCount, a.computeInstanceSliceCount],
  [mem.total, mem.used], n.nvmlDeviceIsMigDeviceHandle(m), n.nvmlDeviceIsMigDeviceHandle(h),
  n.nvmlDeviceGetGpuInstanceId(m), n.nvmlDeviceGetComputeInstanceId(m),
  n.nvmlDeviceGetIndex(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m)),
  n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(m))) == n.nvmlDeviceGetUUID(m),
  n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0)) == n.nvmlDeviceGetUUID(m),
  ask(n.nvmlDeviceGetMigDeviceHandleByIndex, h, 1), ask(n.nvmlGpuInstanceDestroy, gi)]
""",
    )
    assert out == [
        *[0, [1, 1], 7, "NVIDIA H200 MIG 2g.35gb", [32, 33280, 2, 2], [33280 << 20, 0], 1, 0],
        # 5 is the id of the GPU instance: 3 is the first id for instances of 2 slices, and 2 of them fit
        # before slice 4. Error 19: a GPU instance that has a compute instance cannot be destroyed.
        *[5, 0, 0, True, True, "error 6", "error 19"],
    ]
    access = node.host_root / "proc/driver/nvidia/capabilities/gpu0/mig/gi5"
    assert (access / "access").read_text().startswith("DeviceFileMinor: 48\n")  # minor number 3 + 5 * 9
    assert (access / "ci0/access").read_text().startswith("DeviceFileMinor: 49\n")
    assert (
        ask(
            node,
            "n.nvmlComputeInstanceDestroy(n.nvmlGpuInstanceGetComputeInstanceById(n.nvmlDeviceGetGpuInstanceById(h, 5), 0))",
        )
        is None
    )
    assert ask(node, "n.nvmlGpuInstanceDestroy(n.nvmlDeviceGetGpuInstanceById(h, 5))") is None
    assert not access.exists()


def test_a_mig_uuid_is_the_same_after_recreation(sim_node: Make) -> None:
    body = """
n.nvmlDeviceSetMigMode(h, 1)
out = []
for start in (0, 2, 0):
    gi, ci, m = slice(14, start, 2)
    out.append(n.nvmlDeviceGetUUID(m))
    n.nvmlComputeInstanceDestroy(ci), n.nvmlGpuInstanceDestroy(gi)
"""
    out = ask(sim_node(), body)
    assert isinstance(out, list)
    assert out[0] == out[2] != out[1]


def test_mig_instances_without_a_given_place_fill_the_device_from_its_high_end(sim_node: Make) -> None:
    """NVIDIA's MIG user guide says this: `-cgi 19,19,14,9` fails and `9,14,19,19` succeeds."""
    body = """
n.nvmlDeviceSetMigMode(h, 1)
def tour(profiles):
    made, seen = [], []
    for p in profiles:
        gi = ask(n.nvmlDeviceCreateGpuInstance, h, p)
        seen.append(gi if isinstance(gi, str) else n.nvmlGpuInstanceGetInfo(gi).placement.start)
        made += [] if isinstance(gi, str) else [gi]
    for gi in made:
        n.nvmlGpuInstanceDestroy(gi)
    return seen
out = [tour([19, 19, 14, 9]), tour([9, 14, 19, 19])]
"""
    assert ask(sim_node(), body) == [[6, 5, 2, "error 23"], [4, 2, 1, 0]]


def test_several_compute_instances_share_a_gpu_instance(sim_node: Make) -> None:
    body = """
n.nvmlDeviceSetMigMode(h, 1)
gi = n.nvmlDeviceCreateGpuInstance(h, 9)
def room():
    return [ask(n.nvmlGpuInstanceGetComputeInstanceRemainingCapacity, gi, p) for p in range(4)]
def sms(ci):
    return n.nvmlDeviceGetAttributes(n.nvmlComputeInstanceGetInfo_v2(ci).device).multiprocessorCount
out = [room()]
a = n.nvmlGpuInstanceCreateComputeInstance(gi, 1)
b = n.nvmlGpuInstanceCreateComputeInstance(gi, 0)
out += [room(), sms(a), sms(b), ask(n.nvmlGpuInstanceCreateComputeInstance, gi, 0)]
n.nvmlComputeInstanceDestroy(a)
out.append(room())
"""
    assert ask(sim_node(), body) == [
        [3, 1, 1, "error 3"],
        [0, 0, 0, "error 3"],
        32,
        16,
        "error 23",
        [2, 1, 0, "error 3"],
    ]


def test_a_change_of_mig_mode_acts_at_once_or_needs_a_reset_as_the_architecture_does(sim_node: Make) -> None:
    hopper, ampere, turing = sim_node("h200x8"), sim_node("a100x8"), sim_node("t4x1")
    flip = "out = [ask(n.nvmlDeviceSetMigMode, h, 1), ask(n.nvmlDeviceGetMigMode, h)]"
    assert ask(hopper, flip) == [0, [1, 1]]
    reset_required = 16
    assert ask(ampere, flip) == [reset_required, [0, 1]]
    assert ask(turing, flip) == ["error 3", "error 3"]
    ampere.sim("reset", "0")
    assert ask(ampere, "out = n.nvmlDeviceGetMigMode(h)") == [1, 1]
    assert ask(
        hopper,
        "g = n.nvmlDeviceCreateGpuInstance(h, 19)\nout = [ask(n.nvmlDeviceSetMigMode, h, 0), n.nvmlDeviceGetMigMode(h)]",
    ) == ["error 19", [1, 1]]
    for node, mode in ((hopper, [0, 0]), (ampere, [1, 1])):
        node.sim("reboot")
        assert ask(node, "out = n.nvmlDeviceGetMigMode(h)") == mode
        assert node.dump()["devices"][0]["gpu_instances"] == []


def test_mig_instances_in_use_cannot_be_destroyed(sim_node: Make) -> None:
    node = sim_node()
    tenant = Tenant(node, {"CUDA_VISIBLE_DEVICES": "0"})
    assert ask(node, "out = [n.nvmlDeviceSetMigMode(h, 1), n.nvmlDeviceGetMigMode(h)]") == [19, [0, 1]]
    tenant.kill()
    uuid = ask(node, "n.nvmlDeviceSetMigMode(h, 1)\ngi, ci, m = slice(19)\nout = n.nvmlDeviceGetUUID(m)")
    tenant = Tenant(node, {"CUDA_VISIBLE_DEVICES": str(uuid)})
    assert tenant.first.startswith("ready")
    assert tenant.say("alloc 1024") == "ok"
    free, total = map(int, tenant.say("info").split())
    assert (total, total - free) == (16384 << 20, (1024 + 526) << 20)
    assert tenant.say("alloc 16384") == "error 2"
    body = """
m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0)
ps = [[[p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId] for p in n.nvmlDeviceGetComputeRunningProcesses(x)] for x in (h, m)]
ci = n.nvmlGpuInstanceGetComputeInstanceById(n.nvmlDeviceGetGpuInstanceById(h, 13), 0)
out = [ps, ask(n.nvmlComputeInstanceDestroy, ci), ask(n.nvmlDeviceGetUtilizationRates, h)]
"""
    row = [tenant.process.pid, (1024 + 526) << 20, 13, 0]
    assert ask(node, body) == [[[row], [row]], "error 19", "error 3"]
    tenant.kill()
    assert ask(node, body.replace("out =", "out = 1,")) == [1, [[[], []], 0, "error 3"]]


LOOK = """
out = [[n.nvmlDeviceGetMigMode(x), n.nvmlDeviceGetComputeMode(x), n.nvmlDeviceGetPersistenceMode(x), n.nvmlDeviceGetAccountingMode(x)]
       for x in (n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))]
"""
CHANGE = """
for i in (0, 1):
    x = n.nvmlDeviceGetHandleByIndex(i)
    n.nvmlDeviceSetMigMode(x, 1)
    n.nvmlDeviceSetComputeMode(x, 3)
    n.nvmlDeviceSetAccountingMode(x, 1)
"""


@pytest.mark.parametrize(
    ("profile", "reset", "reboot"),
    [
        # [MIG mode current, pending], compute mode, persistence, accounting. On Ampere a reset enables MIG,
        # and a reboot keeps its mode (in the InfoROM). From Hopper on a reboot loses it
        ("a100x8", [[1, 1], 3, 1, 1], [[1, 1], 0, 0, 0]),
        ("h200x8", [[1, 1], 3, 1, 1], [[0, 0], 0, 0, 0]),
    ],
)
def test_a_reset_and_a_reboot_keep_the_modes_that_the_architecture_keeps(
    sim_node: Make, profile: str, reset: list[object], reboot: list[object]
) -> None:
    node = sim_node(profile)
    changed = [[0, 1] if profile == "a100x8" else [1, 1], 3, 1, 1]
    ask(node, CHANGE)
    assert ask(node, LOOK) == [changed, changed]
    node.sim("fault", "memory", "--device", "0", "--bytes", "1073741824")
    node.sim("fault", "gpu-lost", "--device", "0")
    node.sim("reset", "0")
    assert ask(node, LOOK) == [reset, changed]  # after the reset the lost device is back, too
    assert node.dump()["devices"][0]["hidden_bytes"] == 0
    ask(node, "slice(19)\nslice(14)")
    assert len(node.dump()["devices"][0]["gpu_instances"]) == 2
    node.sim("reset", "0")
    # MIG instances survive neither a reset nor a reboot
    assert node.dump()["devices"][0]["gpu_instances"] == []
    ask(node, "slice(19)")
    node.sim("reboot")
    assert ask(node, LOOK) == [reboot, reboot]
    state = node.dump()
    assert (state["boot_count"], state["devices"][0]["gpu_instances"], state["processes"]) == (1, [], [])
    minors = node.host_root / "proc/driver/nvidia/capabilities/gpu0/mig"
    assert list(minors.iterdir()) == []


def test_a_device_in_use_is_not_reset_and_a_reboot_ends_its_processes(sim_node: Make) -> None:
    node = sim_node()
    tenant = Tenant(node)
    tenant.say("alloc 10")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        node.sim("reset", "0")
    assert "device 0 is in use by a process" in refused.value.stderr
    node.sim("reset", "1")
    node.sim("reboot")
    assert node.dump()["processes"] == []
    # error 4 is DEINITIALIZED: the driver under the process is gone
    assert tenant.say("alloc 10") == tenant.say("sync") == "error 4"
    assert Tenant(node).first.startswith("ready")
