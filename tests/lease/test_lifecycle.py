"""However a tenant's processes start and end, their memory is counted once and given back."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.lease.conftest import Node, eventually, lease_used
from tests.native.harness import (
    ARBITER,
    CONTEXT_BYTES,
    GIB,
    GID,
    MIB,
    PROBE,
    ROOT,
    TEST_BUILD,
    UID,
    UUIDS,
    Tenant,
    static_program,
)
from vgpud.lease import DeviceLimits, read_usage, update_limits, write_lease

HOLD = (PROBE, "hold", "256MiB", "--then-wait-on-stdin")
HELD = CONTEXT_BYTES + 256 * MIB

# A Python process with a context and 100 MiB, which then runs the test's code
CUDA = """
import ctypes, os, subprocess, sys
cuda = ctypes.CDLL("libcuda.so.1")
def begin(mib):
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    return cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20))
def say(*words):
    print(*words, flush=True)
    sys.stdin.readline()
assert begin(100) == 0
"""
OWN = CONTEXT_BYTES + 100 * MIB


def told(process: "subprocess.Popen[str]", word: str) -> list[str]:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:1] == [word], (words, process.poll())
    return words[1:]


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def python(node: Node, lease: Path, code: str) -> "subprocess.Popen[str]":
    return node.tenant(lease, sys.executable, "-c", CUDA + code)


# --- kill -9 at any instruction


@pytest.mark.parametrize("family", ["alloc", "vmm", "async", "array", "managed"])
def test_a_kill_at_any_instruction_of_libvgpu_gives_the_memory_back(node: Node, family: str) -> None:
    """Some processes are killed in the middle of a reservation, a settlement, a change of the table, or a
    change of a page's count.
    """
    lease = node.lease(memory_bytes=2 * GIB)
    survivor = node.tenant(lease, *HOLD)
    assert survivor.stdout is not None
    survivor.stdout.readline()
    dice = random.Random(family)
    places = set()
    for _ in range(6):
        process = node.tenant(
            lease, PROBE, "--family", family, "churn", "100000000", "--piece", "2MiB", "--then-wait-on-stdin"
        )
        assert process.stdout is not None and process.stdin is not None
        assert json.loads(process.stdout.readline())["state"] == "ready"
        process.stdin.close()
        process.stdin = None
        words = [str(TEST_BUILD / "stepkill"), str(process.pid), str(dice.randrange(300))]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == 3:
            unmet("ptrace", done.stderr.strip())
        process.kill()
        process.communicate()
        if done.returncode == 0:
            places.add(done.stdout)
        eventually(lambda: lease_used(lease) == HELD)
    assert len(places) > 1
    # the whole limit can be filled, so no reservation of the killed process is left
    filled = Tenant(lease).run(PROBE, "fill", "--piece", "4MiB")
    assert json.loads(filled.stdout)["total_bytes"] == 2 * GIB - HELD - CONTEXT_BYTES


@pytest.mark.parametrize("call", [1, 2, 5, 9, 14])
@pytest.mark.parametrize("family", ["alloc", "vmm", "array", "managed"])
def test_a_kill_inside_the_driver_gives_the_memory_back(node: Node, family: str, call: int) -> None:
    lease = node.lease()
    process = node.tenant(
        lease, PROBE, "--family", family, "churn", "1000", "--piece", "16MiB", FAKE_DIE_AT_CALL=str(call)
    )
    assert process.wait(300) == -9
    eventually(lambda: lease_used(lease) == 0 and read_usage(lease).processes == ())


# --- fork, vfork, exec


def test_children_that_exec_hold_no_memory_or_slot(node: Node) -> None:
    """subprocess uses vfork. The child has libvgpu loaded (unless the child is static), and does not count as
    a process of the tenant.
    """
    lease = node.lease()
    program = str(static_program("static-program"))
    process = python(
        node,
        lease,
        f"""
subprocess.run(["true"], check=True)
os.posix_spawn("/bin/true", ["true"], os.environ)
child = subprocess.Popen([{program!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
say("children")
child.communicate()
say("done")
""",
    )
    told(process, "children")
    assert lease_used(lease) == OWN and len(read_usage(lease).processes) == 1
    eventually(lambda: node.client.list("a1") == (process.pid,))
    go_on(process)
    told(process, "done")
    assert lease_used(lease) == OWN
    process.kill()
    eventually(lambda: lease_used(lease) == 0)


def test_a_process_that_executes_a_static_program_gives_its_memory_back(node: Node) -> None:
    lease = node.lease()
    program = str(static_program("static-program"))
    process = python(node, lease, f"say('in')\nos.execv({program!r}, ['static'])")
    told(process, "in")
    assert lease_used(lease) == OWN
    go_on(process)
    told(process, "static")
    eventually(lambda: lease_used(lease) == 0 and node.client.list("a1") == ())
    assert process.poll() is None


def test_the_memory_of_a_parent_is_given_back_while_its_forked_child_runs(node: Node) -> None:
    """The forked child still has all descriptors of the ended parent open."""
    lease = node.lease()
    process = python(
        node,
        lease,
        """
if os.fork() == 0:
    os.setsid()
    say("child", os.getpid())
    assert begin(10) == 0
    say("used")
    os._exit(0)
import time; time.sleep(60)
""",
    )
    (child,) = map(int, told(process, "child"))
    assert lease_used(lease) == OWN
    process.kill()
    process.wait()
    eventually(lambda: lease_used(lease) == 0)
    go_on(process)
    told(process, "used")
    assert lease_used(lease) == CONTEXT_BYTES + 10 * MIB
    eventually(lambda: node.client.list("a1") == (child,))
    os.kill(child, 9)
    eventually(lambda: lease_used(lease) == 0)


def test_memory_stays_charged_after_the_end_of_the_thread_that_allocated_it(node: Node) -> None:
    lease = node.lease()
    process = python(
        node,
        lease,
        """
import threading
thread = threading.Thread(target=begin, args=(50,)); thread.start(); thread.join()
say("ended")
""",
    )
    told(process, "ended")
    assert lease_used(lease) == OWN + 50 * MIB


def test_a_parent_can_allocate_the_memory_of_its_dead_child_at_once(node: Node) -> None:
    """libvgpu waits until the arbiter has cleared the slot of the dead child, which the parent has reaped."""
    lease = node.lease()
    process = python(
        node,
        lease,
        """
pointer = ctypes.c_uint64()
child = "import ctypes, sys\\n" + SOURCE + "\\nassert begin(600) == 0; say('in')"
for _ in range(10):
    held = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    held.stdout.readline()
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(600 << 20)) == 2
    held.kill()
    held.wait()
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(600 << 20)) == 0
    assert cuda.cuMemFree_v2(pointer) == 0
say("done")
""".replace("SOURCE", repr(CUDA.replace("assert begin(100) == 0\n", ""))),
    )
    told(process, "done")


# --- pids

IN_A_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@needs("namespaces")
def test_the_arbiter_knows_a_tenant_in_a_pid_namespace(node: Node) -> None:
    """The arbiter knows the process by its pid on the host. libvgpu's NVML wrappers show its pid in the
    namespace.
    """
    lease = node.lease()
    code = """
class Info(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong), ("instances", ctypes.c_uint * 2)]
nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
count, infos = ctypes.c_uint(8), (Info * 8)()
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), infos) == 0
say("in", os.getpid(), *[infos[i].pid for i in range(count.value)])
"""
    process = node.tenant(lease, *IN_A_NAMESPACE, sys.executable, "-c", CUDA + code)
    own, *listed = map(int, told(process, "in"))
    assert own == 1 and listed == [1]
    assert lease_used(lease) == OWN
    eventually(lambda: len(node.client.list("a1")) == 1)
    (pid,) = node.client.list("a1")
    assert b"-c" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != own
    os.kill(pid, 9)
    process.wait()
    eventually(lambda: lease_used(lease) == 0)


REUSE = """
import json, os, subprocess, sys, time
from pathlib import Path
from tests.lease.conftest import Node, eventually, lease_used
from tests.native.harness import PROBE

def with_pid(pid, start):
    for _ in range(50):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = start()
        if process.pid == pid:
            return process
        process.kill(); process.wait()
    sys.exit(3)

def hold(mib):
    process = node.tenant(lease, PROBE, "hold", f"{mib}MiB", "--then-wait-on-stdin")
    return process

node = Node(Path(sys.argv[1]))
node.start_arbiter()
lease = node.lease()
first = hold(100)
first.stdout.readline()
eventually(lambda: node.client.list("a1") == (first.pid,))
node.kill_arbiter()
first.kill(); first.wait()
stranger = with_pid(first.pid, lambda: subprocess.Popen(["sleep", "60"]))
node.start_arbiter()
assert node.client.list("a1") == ()
eventually(lambda: lease_used(lease) == 0)
stranger.kill(); stranger.wait()
second = with_pid(first.pid, lambda: hold(50))
second.stdout.readline()
eventually(lambda: node.client.list("a1") == (first.pid,))
held = lease_used(lease)
second.kill(); second.wait()
third = with_pid(first.pid, lambda: hold(50))
third.stdout.readline()
eventually(lambda: lease_used(lease) == held)
eventually(lambda: node.client.list("a1") == (first.pid,))
third.kill(); third.wait()
eventually(lambda: lease_used(lease) == 0)
node.end()
print("fine")
"""


@needs("namespaces")
def test_a_process_with_the_reused_pid_of_a_dead_tenant_is_not_taken_for_the_tenant(tmp_path: Path) -> None:
    """A process that gets the pid of the dead tenant is not treated as that tenant, whether it belongs to
    another user or to the same one.
    """
    (tmp_path / "leases").mkdir()
    done = subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-c", REUSE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode == 3 or "ns_last_pid" in done.stderr:
        unmet("namespaces", f"pids cannot be chosen: {done.stderr.strip()}")
    assert done.stdout == "fine\n", done.stderr


# --- limits that change, several devices


def test_a_limit_below_the_memory_in_use_stops_new_allocations(node: Node) -> None:
    """No memory is granted until the use falls below the limit. No process is killed. The free memory that
    the program sees is never negative or wrapped.
    """
    lease = node.lease()
    process = python(
        node,
        lease,
        """
free, total = ctypes.c_size_t(), ctypes.c_size_t()
while True:
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    say("seen", total.value >> 20, free.value >> 20, begin(20))
""",
    )

    def seen() -> list[int]:
        words = [int(word) for word in told(process, "seen")]
        go_on(process)
        return words

    assert seen() == [1024, 1024 - 64 - 100, 0]
    update_limits(lease, [DeviceLimits(UUIDS[0], 128 * MIB)])
    seen()  # the current call of the thread may have begun before the change of the limit
    assert seen() == [128, 0, 2]
    assert process.poll() is None
    assert read_usage(lease).device(0).refusals_limit >= 1
    update_limits(lease, [DeviceLimits(UUIDS[0], 512 * MIB)])
    seen()
    total, free, result = seen()
    assert (total, result) == (512, 0) and 0 < free <= 512 - 64 - 120


def test_the_limits_of_a_lease_belong_to_the_uuids_of_its_devices(node: Node) -> None:
    """The lease lists the second device first. The limits follow the UUIDs and not the positions."""
    leases = node.run_dir / "leases"
    lease = write_lease(
        leases, "two", [DeviceLimits(UUIDS[1], 300 * MIB), DeviceLimits(UUIDS[0], GIB)], uid=UID, gid=GID
    )
    node.client.add("two")
    for device, limit in ((0, GIB), (1, 300 * MIB)):
        filled = Tenant(lease).run(PROBE, "--device", str(device), "fill", "--piece", "4MiB")
        assert json.loads(filled.stdout)["total_bytes"] == limit - CONTEXT_BYTES
    processes = [
        node.tenant(lease, PROBE, "--device", str(i), "hold", f"{mib}MiB", "--then-wait-on-stdin")
        for i, mib in ((0, 200), (1, 100))
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    eventually(lambda: len(read_usage(lease).processes) == 2)
    usage = read_usage(lease)
    assert usage.device(0).used_bytes == 100 * MIB and usage.device(1).used_bytes == 200 * MIB
    assert [usage.device(i).refusals_limit for i in (0, 1)] == [1, 1]


def test_an_overwritten_usage_page_harms_only_its_own_tenant(node: Node) -> None:
    lease, other = node.lease("a1"), node.lease("a2")
    mine = node.tenant(lease, *HOLD)
    neighbour = node.tenant(other, *HOLD)
    for process in (mine, neighbour):
        assert process.stdout is not None
        process.stdout.readline()
    dice = random.Random(9)
    with (lease / "usage").open("r+b") as page:
        size = page.seek(0, os.SEEK_END)
        for _ in range(20):
            page.seek(dice.randrange(size - 4096))
            page.write(dice.randbytes(4096))
            page.flush()
            Tenant(lease).run(PROBE, "info")
            assert read_usage(lease).device(0).used_bytes >= 0
    assert lease_used(other) == HELD
    filled = Tenant(other).run(PROBE, "fill", "--piece", "32MiB")
    assert json.loads(filled.stdout)["total_bytes"] == GIB - HELD - CONTEXT_BYTES
    assert neighbour.poll() is None
    eventually(lambda: node.client.list("a2") == (neighbour.pid,))
    assert node.arbiter is not None and node.arbiter.poll() is None
    assert ARBITER.exists()
