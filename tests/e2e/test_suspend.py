"""Suspending tenants: their device memory becomes free, and after the resumption they continue with the same
contents.
"""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.demo.node import BUILD, DemoNode, Tenant
from tests.e2e.conftest import ROOMY, NodeMaker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import (
    GIB,
    MIB,
    allocate,
    client,
    eventually,
    quota,
    release,
    simulate,
    states,
    was_killed,
)
from tests.otheruser import as_user
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_activity, read_limits
from vgpud.model.errors import ErrorCode, VgpuError

# Holds memory with a pattern. For each line of input it prints whether the pattern is unchanged.
PROGRAM = cuda_program("""
memory, back = c.c_uint64(), (c.c_uint32 * 1024)()
size = int(sys.argv[1]) << 20
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
call("cuMemsetD32_v2", memory, c.c_uint(0x5eed), c.c_size_t(size // 4))
say(holds=size)
for line in sys.stdin:
    call("cuMemcpyDtoH_v2", back, c.c_uint64(memory.value + size - 4096), c.c_size_t(4096))
    say(whole=all(word == 0x5eed for word in back))
""")
SIZE_MIB = 8
BIG = 100 * GIB


def holding(node: DemoNode, gib: int = 1, *options: str, size_mib: int = SIZE_MIB) -> tuple[Tenant, str]:
    """A tenant that holds memory, and its allocation."""
    before = states(node)
    asked = options or ("--isolation", "quota", "--memory", f"{gib}GiB", "--device", "0")
    tenant = node.tenant(list(asked), [sys.executable, "-c", PROGRAM, str(size_mib)])
    tenant.line()
    (new,) = states(node).keys() - before.keys()
    return tenant, new


def beside(node: DemoNode, lease: Path, size_mib: int = SIZE_MIB) -> Tenant:
    """Starts another process in an existing allocation."""
    library = str(BUILD / "lib/libvgpu.so")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(size_mib)],
        env={**node.environment, "VGPU_LEASE": str(lease), "LD_PRELOAD": library},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Tenant(process)


def goes_on(tenant: Tenant) -> bool:
    assert tenant.process.stdin is not None
    tenant.process.stdin.write("\n")
    tenant.process.stdin.flush()
    return bool(tenant.line()["whole"])


def used_mib(node: DemoNode, index: int = 0) -> int:
    with client(node) as calls:
        return int(calls.list_devices().devices[index].memory_used_bytes) // MIB


def suspend(node: DemoNode, allocation: str) -> pb.Allocation:
    with client(node) as calls:
        return calls.suspend(allocation)


def resume(node: DemoNode, allocation: str) -> pb.Allocation:
    with client(node) as calls:
        return calls.resume(allocation)


def refusal(node: DemoNode, verb: str, allocation: str) -> VgpuError:
    with client(node) as calls, pytest.raises(VgpuError) as refused:
        getattr(calls, verb)(allocation)
    return refused.value


def end(node: DemoNode, tenant: Tenant, allocation: str) -> None:
    assert tenant.end()[0] == 0
    eventually(lambda: allocation not in states(node), "its allocation goes with it")


@pytest.fixture(scope="module")
def node(shared_node: DemoNode) -> DemoNode:
    return shared_node


@needs("driver-580")
def test_a_suspended_tenants_memory_is_free_until_it_is_resumed(node: DemoNode) -> None:
    tenant, name = holding(node, 100)
    eventually(lambda: used_mib(node) > SIZE_MIB, "NVML shows its memory")
    gone = suspend(node, name)
    assert (gone.state, len(gone.suspended_pids)) == ("suspended", 1)
    assert gone.suspended_bytes >= SIZE_MIB * MIB
    eventually(lambda: used_mib(node) < SIZE_MIB, "NVML shows none of its memory")
    other, second = holding(node, 100)
    refused = refusal(node, "resume", name)
    assert refused.code is ErrorCode.NO_CAPACITY
    assert "other allocations leave" in refused.sentence
    assert states(node)[name] == "suspended"
    end(node, other, second)
    assert resume(node, name).state == "active"
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_suspended_tenant_waits_at_its_next_call(node: DemoNode) -> None:
    tenant, name = holding(node)
    suspend(node, name)
    assert tenant.process.stdin is not None
    tenant.process.stdin.write("\n")
    tenant.process.stdin.flush()
    assert suspend(node, name).state == "suspended"  # a repeated call changes nothing
    resume(node, name)
    assert tenant.line()["whole"]
    assert resume(node, name).state == "active"
    end(node, tenant, name)


@needs("driver-580")
def test_all_processes_of_a_tenant_are_suspended_and_resumed(node: DemoNode) -> None:
    script = f'for i in 1 2 3; do "$0" -c "$1" {SIZE_MIB} <&0 & done; wait'
    asked = ["--isolation", "quota", "--memory", "4GiB", "--device", "0"]
    tenant = node.tenant(
        asked, ["sh", "-c", f"exec 3<&0; {script.replace('<&0', '<&3')}", sys.executable, PROGRAM]
    )
    for _ in range(3):
        tenant.line()
    (name,) = states(node)
    assert len(suspend(node, name).suspended_pids) == 3
    eventually(lambda: used_mib(node) < SIZE_MIB, "NVML shows none of their memory")
    assert resume(node, name).suspended_pids == []
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_tenant_of_a_whole_card_is_suspended_and_resumed(node: DemoNode) -> None:
    tenant, name = holding(node, 0, "--isolation", "device", "--device", "2")
    suspend(node, name)
    other = allocate(node, isolation="quota", memory_bytes=GIB, selector=pb.Selector(indices=[2]))
    refused = refusal(node, "resume", name)
    assert refused.code is ErrorCode.DEVICE_IN_USE
    release(node, other.id)
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("root", "driver-580")
def test_another_users_process_on_a_whole_card_is_not_suspended(node: DemoNode) -> None:
    """NVML lists a process of another user on the tenant's device. vgpud does not suspend that process."""
    tenant, name = holding(node, 0, "--isolation", "device", "--device", "2")
    words = [*as_user(4242, 4242), sys.executable, "-c", PROGRAM, str(SIZE_MIB)]
    environment = {**node.environment, "CUDA_VISIBLE_DEVICES": "2"}
    pipe = subprocess.PIPE
    stranger = Tenant(
        subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    )
    stranger.line()
    gone = suspend(node, name)
    assert list(gone.suspended_pids) == [tenant.process.pid]
    assert goes_on(stranger)
    assert stranger.end()[0] == 0
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_suspended_tenant_of_a_whole_card_is_released_beside_the_cards_new_tenant(node: DemoNode) -> None:
    tenant, name = holding(node, 0, "--isolation", "device", "--device", "2")
    suspend(node, name)
    other = allocate(node, isolation="quota", memory_bytes=GIB, selector=pb.Selector(indices=[2]))
    tenant.process.kill()
    eventually(lambda: list(states(node)) == [other.id], "it goes with its process")
    tenant.end()
    release(node, other.id)
    release(node, allocate(node, isolation="device", selector=pb.Selector(indices=[2])).id)


@pytest.mark.parametrize("isolation", ["compute", "hardware"])
def test_a_suspension_is_refused_in_modes_that_cannot_suspend(node: DemoNode, isolation: str) -> None:
    held = allocate(node, isolation=isolation, memory_bytes=GIB, selector=pb.Selector(indices=[4]))
    refused = refusal(node, "suspend", held.id)
    assert refused.code is ErrorCode.UNSUPPORTED
    assert held.slices[0].mode in refused.sentence
    assert states(node)[held.id] == "active"
    release(node, held.id)


@needs("driver-580")
def test_a_suspended_tenant_cannot_be_released_or_resized(node: DemoNode) -> None:
    tenant, name = holding(node)
    suspend(node, name)
    with client(node) as calls:
        for force in (False, True):
            with pytest.raises(VgpuError) as refused:
                calls.release(name, force)
            assert refused.value.code is ErrorCode.TENANT_ALIVE
            assert refused.value.hint == "resume the allocation first, or end its processes"
        with pytest.raises(VgpuError) as busy:
            calls.resize(name, memory_bytes=2 * GIB)
        assert busy.value.code is ErrorCode.ALLOCATION_BUSY
    tenant.process.kill()
    eventually(lambda: name not in states(node), "it goes with its process")
    tenant.end()


@needs("driver-580")
def test_a_new_process_of_a_suspended_tenant_waits(node: DemoNode) -> None:
    first, name = holding(node, 4)
    suspend(node, name)
    lease = node.run_dir / "leases" / name
    second = beside(node, lease)
    eventually(lambda: read_activity(lease).wants == 1, "it says that it waits")
    assert read_limits(lease).away
    resume(node, name)
    assert not read_limits(lease).away
    second.line()
    assert goes_on(second)
    assert second.end()[0] == 0
    end(node, first, name)


@needs("driver-580")
def test_a_suspension_or_resumption_that_fails_leaves_the_tenant_as_it_was(node: DemoNode) -> None:
    tenant, name = holding(node)
    for function in ("cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"):
        simulate(node, "fault", "fail", "--function", function, "--code", "801", "--count", "1")
        refused = refusal(node, "suspend", name)
        assert refused.code is ErrorCode.SUSPEND_FAILED, function
        assert "CUDA_ERROR_NOT_SUPPORTED" in refused.sentence
        assert states(node)[name] == "active"
        assert read_limits(node.run_dir / "leases" / name).devices[0].memory_bytes == GIB
        assert goes_on(tenant), function
    suspend(node, name)
    simulate(
        node, "fault", "fail", "--function", "cuCheckpointProcessRestore", "--code", "304", "--count", "1"
    )
    assert refusal(node, "resume", name).code is ErrorCode.SUSPEND_FAILED
    assert states(node)[name] == "suspended"
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_suspension_without_a_driver_is_refused_with_the_reason(node: DemoNode) -> None:
    held = quota(node)
    simulate(node, "fault", "fail", "--function", "cuInit", "--code", "100")
    refused = refusal(node, "suspend", held.id)
    simulate(node, "fault", "clear")
    assert refused.code is ErrorCode.UNSUPPORTED
    assert "CUDA_ERROR_NO_DEVICE" in refused.sentence
    release(node, held.id)


@needs("driver-580")
def test_the_policy_bounds_the_host_memory_of_suspended_tenants(make_node: NodeMaker) -> None:
    node = make_node(policy=f'{ROOMY}host_memory = "1GiB"\n')
    node.start()
    first, one = holding(node, 2, size_mib=300)
    second, two = holding(node, 2, size_mib=300)
    suspend(node, one)
    refused = refusal(node, "suspend", two)
    assert refused.code is ErrorCode.NO_CAPACITY
    assert "exceed the host memory for suspended tenants" in refused.sentence
    assert goes_on(second)
    resume(node, one)
    end(node, first, one)
    end(node, second, two)
    node.stop()


@needs("driver-580")
def test_kill_of_vgpud_leaves_a_suspended_tenant_suspended(cut_node: DemoNode) -> None:
    node = cut_node
    node.start()
    tenant, name = holding(node, 100)
    suspend(node, name)
    node.kill()
    node.start()
    assert states(node) == {name: "suspended"}
    other, second = holding(node, 100)
    end(node, other, second)
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_suspension_or_resumption_cut_after_any_step_converges(cut_node: DemoNode) -> None:
    node = cut_node
    points = [
        *(f"suspend.{step}" for step in ("record-intent", "limit", "lock-0", "save-0")),
        *(f"resume.{step}" for step in ("record-intent", "restore-0", "unlock-0")),
    ]
    node.start(fault_point=points[0])
    tenant, name = holding(node)
    for point, following in pairwise([*points, ""]):
        verb = point.partition(".")[0]
        if verb == "resume":
            suspend(node, name)
        assert refusal(node, verb, name).code is ErrorCode.UNREACHABLE
        was_killed(node)
        node.start(fault_point=following)
        assert states(node) == {name: "active"}, point
        assert read_limits(node.run_dir / "leases" / name).devices[0].memory_bytes == GIB, point
        assert goes_on(tenant), point
    end(node, tenant, name)


@needs("driver-580")
def test_a_tenant_can_be_resumed_after_one_of_its_suspended_processes_died(node: DemoNode) -> None:
    one = f'"$0" -c "$1" {SIZE_MIB} <&3'
    script = f"exec 3<&0; {one} & echo '{{\"child\": '$!'}}'; {one}; wait"
    asked = ["--isolation", "quota", "--memory", "4GiB", "--device", "0"]
    tenant = node.tenant(asked, ["sh", "-c", script, sys.executable, PROGRAM])
    # three lines: the pid of the child, and one line from each of the two processes when it holds memory
    said = [tenant.line() for _ in range(3)]
    child = next(line["child"] for line in said if "child" in line)
    (name,) = states(node)
    assert child in suspend(node, name).suspended_pids
    os.kill(child, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{child}/task").exists() or _is_zombie(child), "it is gone")
    assert resume(node, name).state == "active"
    tenant.end()
    eventually(lambda: name not in states(node), "its allocation goes with it")


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_refused_suspension_names_the_driver_that_cannot_suspend(node: DemoNode) -> None:
    def driver() -> str:
        return str(json.loads(node.ctl("status", "-o", "json").stdout)["driverVersion"])

    held, before = quota(node), driver()
    simulate(node, "driver", "550.163.01")
    try:
        eventually(lambda: driver() == "550.163.01", "vgpud sees the driver")
        told = [node.ctl("suspend", held.id, *how, check=False).stderr for how in ([], ["--deep"])]
    finally:
        simulate(node, "driver", before)
        eventually(lambda: driver() == before, "vgpud sees the driver")
    for sentence in ("driver 550.163.01 cannot suspend a process (E403)", "branch 570 is the first"):
        assert all(sentence in errors for errors in told), told
    release(node, held.id)
