"""Several processes on one simulated node see each other's memory, share the device's time, and leave nothing
behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable

from tests.sim.tenant import Tenant
from tests.simnode import SimNode

Make = Callable[..., SimNode]

CONTEXT_MIB = 526
MIB = 1 << 20
UNAVAILABLE, OUT_OF_MEMORY = "error 46", "error 2"

LIST = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used] +
  [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]))
"""


def used_mib(node: SimNode, device: int = 0) -> int:
    return int(node.dump()["devices"][device]["memory_used"]) // MIB


def test_memory_of_a_process_is_seen_by_all_processes_and_freed_by_its_kill(sim_node: Make) -> None:
    node = sim_node()
    one, two = Tenant(node), Tenant(node)
    assert [one.say("alloc 1000"), two.say("alloc 24")] == ["ok", "ok"]
    total = 2 * CONTEXT_MIB + 1024
    free, size = map(int, two.say("info").split())
    assert size - free == total * MIB
    rows = json.loads(node.python(LIST))
    assert rows[0] == total * MIB
    assert sorted(rows[1:]) == sorted(
        [[one.process.pid, (CONTEXT_MIB + 1000) * MIB], [two.process.pid, (CONTEXT_MIB + 24) * MIB]]
    )
    one.kill()
    free, size = map(int, two.say("info").split())
    assert size - free == (CONTEXT_MIB + 24) * MIB
    two.kill()
    assert json.loads(node.python(LIST)) == [0]


def test_a_zombie_holds_no_memory(sim_node: Make) -> None:
    """A killed process that its parent has not reaped yet holds no memory."""
    node = sim_node()
    one = Tenant(node)
    one.say("alloc 1000")
    os.kill(one.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    assert used_mib(node) == 0


def test_an_allocation_beyond_free_memory_is_refused(sim_node: Make) -> None:
    node = sim_node("t4x1")
    one, two = Tenant(node), Tenant(node)
    assert one.say("alloc 10000") == "ok"
    assert two.say("alloc 6000") == OUT_OF_MEMORY
    assert two.say("alloc 4000") == "ok"
    one.kill()
    assert two.say("alloc 6000") == "ok"


def test_racing_processes_never_exceed_the_memory_of_the_device(sim_node: Make) -> None:
    node = sim_node("t4x1")
    tenants = [Tenant(node) for _ in range(6)]
    for tenant in tenants:
        assert tenant.process.stdin is not None
        tenant.process.stdin.write("alloc 64\n" * 60)
        tenant.process.stdin.flush()
    granted = 0
    for tenant in tenants:
        assert tenant.process.stdout is not None
        granted += [tenant.process.stdout.readline().strip() for _ in range(60)].count("ok")
    context = 105
    room = (15360 - 451 - 6 * context) // 64
    assert granted == room
    assert used_mib(node) == 6 * context + 64 * room


def test_memory_sums_agree_after_random_kills(sim_node: Make) -> None:
    node = sim_node()
    choose = random.Random(7)
    tenants = [Tenant(node) for _ in range(6)]
    held = dict.fromkeys(range(6), 0)
    for _ in range(30):
        i = choose.randrange(6)
        if choose.random() < 0.3:
            if choose.random() < 0.5:  # some processes are killed in the middle of a command
                stdin = tenants[i].process.stdin
                assert stdin is not None
                stdin.write("alloc 8\nfree\n" * 50)
                stdin.flush()
            tenants[i].kill()
            tenants[i], held[i] = Tenant(node), 0
        else:
            assert tenants[i].say("alloc 8") == "ok"
            held[i] += 8
        assert used_mib(node) == 6 * CONTEXT_MIB + sum(held.values())
    for tenant in tenants:
        tenant.kill()
    assert node.dump()["processes"] == []


def test_exclusive_process_mode_admits_one_process(sim_node: Make) -> None:
    node = sim_node()
    mode = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetComputeMode(n.nvmlDeviceGetHandleByIndex(0), {})"
    node.python(mode.format(3))
    one = Tenant(node)
    assert one.first.startswith("ready")
    assert Tenant(node).first == UNAVAILABLE
    assert Tenant(node, {"CUDA_VISIBLE_DEVICES": "1"}).first.startswith("ready")
    one.kill()
    assert Tenant(node).first.startswith("ready")
    node.python(mode.format(2))
    assert Tenant(node).first == UNAVAILABLE


def engine_ns(node: SimNode) -> tuple[float, dict[int, float]]:
    """Nanoseconds for which the first device was busy, and the nanoseconds of work done for each process."""
    state = node.dump()
    return state["devices"][0]["busy_ns"], {p["pid"]: p["uses"][0]["done_ns"] for p in state["processes"]}


def test_two_processes_share_the_time_of_the_device(sim_node: Make) -> None:
    """The driver gives two processes time slices of 2 ms. Together they have 94.3 % of the rate of one alone.
    When one ends, the other has the whole rate again.
    """
    node = sim_node()
    one, two = Tenant(node), Tenant(node)
    for tenant in (one, two):
        assert tenant.say("launch 1000 1000000") == "ok"  # queues a thousand seconds of work
    slice_ns, switch_ns, busy_ns = 2e6, 120_900, 0.0
    before, first = engine_ns(node)
    while busy_ns < 100e6:
        now, second = engine_ns(node)
        busy_ns, done = now - before, [second[p] - first[p] for p in first]
    assert abs(done[0] - done[1]) <= slice_ns + 1e3
    assert abs(sum(done) - 0.943 * busy_ns) <= switch_ns + 1e4
    two.kill()
    before, first = engine_ns(node)
    now, second = engine_ns(node)
    assert list(second) == [one.process.pid]
    assert now - before - (second[one.process.pid] - first[one.process.pid]) <= switch_ns + 1e3


def test_the_launch_queue_of_a_process_is_bounded(sim_node: Make) -> None:
    """A launch queue has 1024 entries. The 1025th launch waits for the end of the first, as with a full
    channel.
    """
    node = sim_node()
    one = Tenant(node)
    assert one.say("launch 1030 100") == "ok"
    (use,) = node.dump()["processes"][0]["uses"]
    assert use["done_ns"] >= 6 * 100_000
    assert one.say("sync") == "ok"
