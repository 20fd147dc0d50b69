"""Suspending a process from another process with cuCheckpointProcess*, as NVIDIA's manual describes it."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.tenant import Tenant
from tests.simnode import BUILD, SimNode
from vgpud.proc import start_ticks

Make = Callable[..., SimNode]
MIB = 1 << 20
CONTEXT_MIB = 526
BAD_VALUE, NO_MEMORY, NOT_INITIALIZED, UNAVAILABLE = 1, 2, 3, 46
SYSTEM, ILLEGAL, NOT_READY, NOT_SUPPORTED = 304, 401, 600, 801


class Controller:
    """A process that calls cuCheckpointProcess*: `call("Lock", pid)` returns the CUresult."""

    CODE = """
import ctypes as c, sys, uuid
u = c.CDLL("libcuda.so.1")
class Lock(c.Structure):
    _fields_ = [("ms", c.c_uint), ("rest", c.c_char * 60)]
class Restore(c.Structure):
    _fields_ = [("pairs", c.c_void_p), ("count", c.c_uint), ("rest", c.c_char * 52)]
print(u.cuInit(0), flush=True)
for line in sys.stdin:
    verb, pid, *more = line.split()
    call = getattr(u, "cuCheckpointProcess" + verb)
    state, args = c.c_int(-1), None
    if verb == "GetState":
        code = call(int(pid), c.byref(state))
        print(code if code else ["running", "locked", "checkpointed", "failed"][state.value], flush=True)
        continue
    if verb == "Lock" and more:
        args = c.byref(Lock(int(more[0])))
    if verb == "Restore" and more:
        raw = b"".join(uuid.UUID(w[4:]).bytes for w in more)
        array = c.create_string_buffer(raw, len(raw))
        args = c.byref(Restore(c.addressof(array), len(raw) // 32))
    print(call(int(pid), args), flush=True)
"""

    def __init__(self, node: SimNode) -> None:
        self.process = node.start([sys.executable, "-c", self.CODE])
        assert self.line() == "0"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def call(self, verb: str, pid: int, *more: object) -> int:
        return int(self.say(verb, pid, *more))

    def state(self, pid: int) -> str:
        return self.say("GetState", pid)

    def say(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.line()

    def suspend(self, pid: int) -> list[int]:
        return [self.call("Lock", pid), self.call("Checkpoint", pid)]

    def resume(self, pid: int, *more: object) -> list[int]:
        return [self.call("Restore", pid, *more), self.call("Unlock", pid)]


def swap(uuids: list[str], one: int, other: int) -> list[str]:
    """Device pairs for a restore that exchanges two devices. They name every device of the node, as the
    driver requires.
    """
    change = {one: other, other: one}
    return [uuid for i, old in enumerate(uuids) for uuid in (old, uuids[change.get(i, i)])]


def used_mib(node: SimNode) -> list[int]:
    return [d["memory_used"] // MIB for d in node.dump()["devices"]]


def test_a_suspended_process_holds_no_memory_and_resumes_with_its_contents(sim_node: Make) -> None:
    node = sim_node("h200x1")
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    assert tenant.say("alloc 1000") == "ok"
    assert tenant.write(4242) == "ok"
    assert control.state(pid) == "running"
    assert control.suspend(pid) == [0, 0]
    assert control.state(pid) == "checkpointed"
    assert used_mib(node) == [0]
    lists = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0); print(len(n.nvmlDeviceGetComputeRunningProcesses(h)))"
    assert node.python(lists).strip() == "0"
    other = Tenant(node)
    # another process can have all the memory that the suspended process has freed
    assert other.say("alloc 142000") == "ok"
    other.kill()
    assert tenant.process.stdin is not None
    tenant.process.stdin.write(f"do {Tenant.READ}\n")  # this call waits in the driver until the restore
    tenant.process.stdin.flush()
    assert control.resume(pid) == [0, 0]
    assert tenant.line() == "4242"
    assert used_mib(node) == [CONTEXT_MIB + 1000]
    assert [tenant.say("launch 3 10"), tenant.say("sync"), tenant.say("alloc 1")] == ["ok"] * 3


LIBRARY = """
image = b".version 7.8\\n.target sm_80\\n.address_size 64\\n.visible .entry work(){ ret; }\\n"
module, function, library, kernel, late = (c.c_void_p() for _ in range(5))
cu("cuModuleLoadData", c.byref(module), image)
cu("cuModuleGetFunction", c.byref(function), module, b"work")
cu("cuLibraryLoadData", c.byref(library), image, None, None, 0, None, None, 0)
cu("cuLibraryGetKernel", c.byref(kernel), library, b"work")
cu("cuKernelGetFunction", c.byref(late), kernel)
number = c.c_size_t()
"""
ASKED = """
out = [
    cu.raw("cuMemGetInfo_v2", c.byref(number), c.byref(number)),
    cu.raw("cuCtxGetDevice", c.byref(number)),
    cu.raw("cuStreamGetCtx", None, c.byref(number)),
    cu.raw("cuDeviceGetAttribute", c.byref(number), 10, 0),
    cu.raw("cuFuncGetAttribute", c.byref(number), 4, function),
]
"""


def test_calls_in_a_suspended_process_return_or_block_as_on_an_h200(sim_node: Make) -> None:
    """As recorded on an H200 with driver 580.159.04, a kernel that is loaded lazily has no attributes in a
    suspended process.
    """
    node = sim_node("h200x1")
    tenant, control = Tenant(node), Controller(node)
    assert tenant.do(f"exec({LIBRARY!r}, globals())") == "ok"
    assert tenant.do(f"exec({ASKED!r})") == "[0, 0, 0, 0, 0]"
    assert control.suspend(tenant.process.pid) == [0, 0]
    assert tenant.do(f"exec({ASKED!r})") == f"[{SYSTEM}, 0, 0, 0, 0]"
    assert tenant.process.stdin is not None
    tenant.process.stdin.write('do out = cu.raw("cuFuncGetAttribute", c.byref(number), 4, late)\n')
    tenant.process.stdin.flush()
    assert tenant.process.stdout is not None
    assert select.select([tenant.process.stdout], [], [], 0.2)[0] == []
    assert control.resume(tenant.process.pid) == [0, 0]
    assert tenant.line() == "0"


def test_each_checkpoint_step_requires_the_previous_state(sim_node: Make) -> None:
    node = sim_node("h200x1")
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    assert [control.call(v, pid) for v in ("Checkpoint", "Restore", "Unlock")] == [ILLEGAL] * 3
    assert control.call("Lock", pid) == 0
    assert [control.call(v, pid) for v in ("Lock", "Restore")] == [ILLEGAL] * 2
    assert used_mib(node) == [CONTEXT_MIB]
    assert control.call("Checkpoint", pid) == 0
    assert [control.call(v, pid) for v in ("Lock", "Checkpoint", "Unlock")] == [ILLEGAL] * 3
    assert control.resume(pid) == [0, 0]
    assert control.call("Unlock", pid) == ILLEGAL
    assert control.call("Lock", 1 << 30) == BAD_VALUE
    # the test's own process does not use CUDA
    assert control.say("GetState", os.getpid()) == str(BAD_VALUE)


def test_a_checkpoint_lock_waits_for_running_work_until_its_timeout(sim_node: Make) -> None:
    node = sim_node("h200x1")
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    assert tenant.say("launch 20 500000") == "ok"  # ten seconds of work
    assert control.call("Lock", pid, 20) == NOT_READY
    assert control.state(pid) == "running"
    other = Tenant(node)
    assert other.say("launch 3 10000") == "ok"
    assert control.call("Lock", other.process.pid) == 0
    (mine,) = [p for p in node.dump()["processes"] if p["pid"] == other.process.pid]
    assert mine["uses"][0]["done_ns"] == mine["uses"][0]["submitted_ns"] > 0


def test_a_restore_without_memory_makes_the_process_unrestorable(sim_node: Make) -> None:
    """The device lacks memory for the restore. The process cannot be restored afterwards, as reported in
    NVIDIA/cuda-checkpoint issue 44 for driver 580.95.05.
    """
    node = sim_node("t4x1")
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    tenant.say("alloc 8000")
    assert control.suspend(pid) == [0, 0]
    other = Tenant(node)
    other.say("alloc 9000")
    assert control.call("Restore", pid) == NO_MEMORY
    assert control.state(pid) == "checkpointed"
    other.kill()
    assert [control.call("Restore", pid), control.call("Unlock", pid)] == [SYSTEM, ILLEGAL]
    tenant.kill()
    assert used_mib(node) == [0]


def test_a_process_is_restored_on_other_devices(sim_node: Make) -> None:
    node = sim_node("h200x8")
    uuids = [d["uuid"] for d in node.dump()["devices"]]
    tenant, control = Tenant(node, {"CUDA_VISIBLE_DEVICES": "0,1"}), Controller(node)
    pid = tenant.process.pid
    tenant.say("alloc 1000")
    tenant.write(7)
    for old, new in ((0, 1), (1, 5), (5, 0)):
        assert control.suspend(pid) == [0, 0]
        # the pairs must name all eight devices
        assert control.call("Restore", pid, uuids[old], uuids[new]) == BAD_VALUE
        assert control.resume(pid, *swap(uuids, old, new)) == [0, 0]
        assert used_mib(node) == [(CONTEXT_MIB + 1000) * (i == new) for i in range(8)]
        assert [tenant.read(), tenant.say("launch 2 100"), tenant.say("sync")] == ["7", "ok", "ok"]
        assert (
            tenant.do("out = cu.integer('cuDeviceGetAttribute', 33, 0)")
            == f"{[0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF][new]}"
        )
    assert tenant.say("alloc 500") == "ok"
    assert used_mib(node)[0] == CONTEXT_MIB + 1500


def test_a_restore_is_refused_on_another_model_or_on_a_device_that_another_process_has_exclusively(
    sim_node: Make,
) -> None:
    node = sim_node("mixed")
    devices = node.dump()["devices"]
    other = next(d for d in devices if d["name"] != devices[0]["name"])
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    assert control.suspend(pid) == [0, 0]
    swapped = swap([d["uuid"] for d in devices], devices.index(devices[0]), devices.index(other))
    assert control.call("Restore", pid, *swapped) == BAD_VALUE
    mode = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetComputeMode(n.nvmlDeviceGetHandleByIndex(0), {})"
    node.python(mode.format(3))
    second = Tenant(node)
    assert second.first.startswith("ready")
    assert control.call("Restore", pid) == UNAVAILABLE
    second.kill()
    assert control.resume(pid) == [0, 0]


@pytest.mark.parametrize("driver", ["565.57.01", "575.57.08"])
def test_older_drivers_cannot_restore_a_process_on_other_devices(sim_node: Make, driver: str) -> None:
    node = sim_node("h200x8")
    node.sim("driver", driver)
    uuids = [d["uuid"] for d in node.dump()["devices"]]
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    if driver < "570":
        assert control.call("Lock", pid) == NOT_SUPPORTED
        return
    assert control.suspend(pid) == [0, 0]
    assert control.call("Restore", pid, *swap(uuids, 0, 1)) == NOT_SUPPORTED
    assert control.resume(pid) == [0, 0]


def test_a_checkpoint_of_a_process_with_managed_memory_leaves_it_in_state_failed(sim_node: Make) -> None:
    node = sim_node("h200x1")
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    assert tenant.do("cu('cuMemAllocManaged', c.byref(c.c_uint64()), c.c_size_t(10 << 20), 1)") == "ok"
    assert control.suspend(pid) == [0, NOT_SUPPORTED]
    assert control.state(pid) == "failed"
    assert tenant.say("sync") == "error 999"
    tenant.kill()
    assert used_mib(node) == [0]


def test_a_suspension_by_a_killed_controller_can_be_continued_by_another(sim_node: Make) -> None:
    """The controlling process is killed at a random moment of a suspension. The process to be suspended is
    then in one of the four states, and another controller continues from there.
    """
    node = sim_node("h200x1")
    tenant = Tenant(node)
    pid = tenant.process.pid
    tenant.say("alloc 100")
    choose = random.Random(3)
    for _ in range(12):
        one = Controller(node)
        assert one.process.stdin is not None
        one.process.stdin.write(f"Lock {pid}\nCheckpoint {pid}\nRestore {pid}\nUnlock {pid}\n" * 40)
        one.process.stdin.flush()
        for _ in range(choose.randrange(120)):
            one.line()
        one.process.send_signal(signal.SIGKILL)
        one.process.wait()
        two = Controller(node)
        state = two.state(pid)
        if state == "checkpointed":
            assert used_mib(node) == [0]
            assert two.call("Restore", pid) == 0
        if state != "running":
            assert two.call("Unlock", pid) == 0
        assert used_mib(node) == [CONTEXT_MIB + 100]
        assert [tenant.say("alloc 1"), tenant.say("free"), tenant.say("sync")] == ["ok"] * 3
        two.process.kill()


def test_memory_sums_agree_after_random_suspensions_moves_and_kills(sim_node: Make) -> None:
    """The sums of memory are checked after every step."""
    node = sim_node("h200x8")
    uuids = [d["uuid"] for d in node.dump()["devices"]]
    control, choose = Controller(node), random.Random(11)
    tenants = [Tenant(node, {"CUDA_VISIBLE_DEVICES": "0"}) for _ in range(3)]
    card, held, out = [0] * 3, [0] * 3, [False] * 3
    for _ in range(60):
        i = choose.randrange(3)
        pid = tenants[i].process.pid
        what = choose.choice(["suspend", "resume", "move", "alloc", "kill"])
        if what == "kill" and choose.random() < 0.3:
            tenants[i].kill()
            tenants[i] = Tenant(node, {"CUDA_VISIBLE_DEVICES": "0"})
            card[i], held[i], out[i] = 0, 0, False
        elif what == "alloc" and not out[i]:
            assert tenants[i].say("alloc 16") == "ok"
            held[i] += 16
        elif what == "suspend" and not out[i]:
            assert control.suspend(pid) == [0, 0]
            out[i] = True
        elif what == "resume" and out[i]:
            assert control.resume(pid) == [0, 0]
            out[i] = False
        elif what == "move" and out[i]:
            to = choose.randrange(8)
            assert control.resume(pid, *swap(uuids, card[i], to)) == [0, 0]
            card[i], out[i] = to, False
        want = [sum(CONTEXT_MIB + held[j] for j in range(3) if card[j] == d and not out[j]) for d in range(8)]
        assert used_mib(node) == want
    states = {p["pid"]: p["state"] for p in node.dump()["processes"]}
    assert [states[t.process.pid] for t in tenants] == ["checkpointed" if o else "running" for o in out]


def test_a_suspension_meant_for_an_earlier_process_of_the_same_pid_does_nothing(
    sim_node: Make, tmp_path: Path
) -> None:
    """vgpu-suspend identifies a process by its start time too, and holds its pidfd during the driver's
    call.
    """
    node = sim_node("h200x1")
    tenant, control = Tenant(node), Controller(node)
    pid = tenant.process.pid
    ticks = start_ticks(pid)
    assert tenant.say("alloc 10") == "ok" and ticks is not None
    orders = "".join(f"{verb} {pid} {ticks - 1} {rest}\n" for verb, rest in (("lock", 1000), ("save", "")))
    words = [str(BUILD / "bin/vgpu-suspend"), str(tmp_path / "lock"), "1"]
    given = f"{orders}lock {pid} {ticks} 1000\nunlock {pid} {ticks}\n"
    told, _ = node.start(words).communicate(given, timeout=300)
    assert told.splitlines() == ["ready", *["-1 ENDED -1"] * 2, "0 CUDA_SUCCESS 1", "0 CUDA_SUCCESS 0"]
    assert control.state(pid) == "running"
