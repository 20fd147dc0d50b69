"""Moving tenants: their memory is unchanged on the other device, or the move is undone."""

import json
import sys

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import ROOMY, NodeMaker, PreparedNode
from tests.e2e.support import (
    GIB,
    MIB,
    allocate,
    client,
    eventually,
    is_killed_at_its_starts,
    quota,
    release,
    simulate,
    states,
    was_killed,
)
from tests.e2e.test_suspend import PROGRAM, end, goes_on, holding, resume, suspend
from tests.gpu import move_h200
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_limits, read_usage
from vgpud.model.errors import ErrorCode, VgpuError

SIZE_MIB = 8  # MiB that each process holds besides its context
CONTEXT_MIB = 256  # less than the memory of one context
SHARED = ("--isolation", "quota", "--memory", "4GiB", "--device")


def uuids(node: DemoNode) -> list[str]:
    with client(node) as calls:
        return [device.uuid for device in calls.list_devices().devices]


def move(node: DemoNode, allocation: str, *to: int, source: str = "") -> pb.Allocation:
    names = uuids(node)
    with client(node) as calls:
        return calls.move(allocation, [names[index] for index in to], source)


def refusal(node: DemoNode, allocation: str, *to: int) -> VgpuError:
    with pytest.raises(VgpuError) as refused:
        move(node, allocation, *to)
    return refused.value


def used_mib(node: DemoNode) -> list[int]:
    with client(node) as calls:
        return [int(device.memory_used_bytes) // MIB for device in calls.list_devices().devices]


def in_use(node: DemoNode) -> list[int]:
    """Indices of the devices on which NVML reports the memory of at least one context."""
    return [index for index, mib in enumerate(used_mib(node)) if mib > CONTEXT_MIB]


def allocated(node: DemoNode) -> dict[int, int]:
    """Allocated bytes by device, without the devices that have none."""
    with client(node) as calls:
        devices = calls.list_devices().devices
    return {d.index: int(d.memory_allocated_bytes) for d in devices if d.memory_allocated_bytes}


def check_at(node: DemoNode, name: str, index: int, gib: int = 4) -> None:
    """Asserts that API, lease, CDI edits and NVML show the allocation only on this device."""
    uuid = uuids(node)[index]
    with client(node) as calls:
        held = calls.get_allocation(name)
    assert (held.state, [part.device_uuid for part in held.slices]) == ("active", [uuid])
    assert [d.uuid for d in read_limits(node.run_dir / "leases" / name).devices] == [uuid]
    assert read_limits(node.run_dir / "leases" / name).devices[0].memory_bytes == gib * GIB
    assert dict(held.edits.env)["CUDA_VISIBLE_DEVICES"] == uuid
    eventually(lambda: in_use(node) == [index], "NVML shows it there alone")
    # the contexts of vgpu-suspend on the device end only after the move
    used = held.use[0].memory_used_bytes // MIB
    eventually(lambda: used == used_mib(node)[index], "NVML shows as much as the lease counts")
    assert len(held.use[0].pids) == 1


@pytest.fixture(scope="module")
def node(shared_node: DemoNode) -> DemoNode:
    return shared_node


def tenant_on(node: DemoNode, device: int) -> tuple[Tenant, str]:
    return holding(node, 0, *SHARED, str(device), size_mib=SIZE_MIB)


@needs("driver-580")
def test_a_tenant_moves_to_other_devices_and_back(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    eventually(lambda: used_mib(node)[0] > CONTEXT_MIB, "NVML shows its memory")
    for to in (3, 5, 0):
        assert move(node, name, to).state == "active"
        check_at(node, name, to)
        assert allocated(node) == {to: 4 * GIB}
        assert goes_on(tenant)
    # the tenant is already on this device, so the move changes nothing
    assert move(node, name, 0).state == "active"
    end(node, tenant, name)


@needs("driver-580")
def test_a_moved_tenants_limit_holds_on_the_new_device(node: DemoNode) -> None:
    """After a move, lease and NVML count new memory on the new device. NVML inside the tenant lists only the
    device of the slice, with the slice's size.
    """
    program = """
import ctypes as c, json, pynvml, sys
u = c.CDLL("libcuda.so.1")
pynvml.nvmlInit()
context, memory = c.c_void_p(), c.c_uint64()
say = lambda **words: print(json.dumps(words), flush=True)
assert u.cuInit(0) == 0 and u.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
assert u.cuCtxSetCurrent(context) == 0
say(ready=True)
for line in sys.stdin:
    if line.startswith("GPU"):
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(line.strip())
        except pynvml.NVMLError_NotFound:
            say(total=0)
        else:
            say(total=pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        continue
    say(code=u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(int(line) << 20)))
"""
    tenant = node.tenant([*SHARED, "1"], [sys.executable, "-c", program])
    tenant.line()
    (name,) = states(node)

    def ask(line: str) -> dict[str, int]:
        assert tenant.process.stdin is not None
        tenant.process.stdin.write(f"{line}\n")
        tenant.process.stdin.flush()
        return tenant.line()

    def allocates(mib: int) -> int:
        return ask(str(mib))["code"]

    names = uuids(node)
    assert allocates(1000) == 0
    assert [ask(names[i])["total"] for i in (1, 6)] == [4 * GIB, 0]
    move(node, name, 6)
    assert [ask(names[i])["total"] for i in (1, 6)] == [0, 4 * GIB]
    assert allocates(2000) == 0
    assert allocates(2000) == 2  # CUDA_ERROR_OUT_OF_MEMORY: the limit of 4 GiB includes the context
    meter = read_usage(node.run_dir / "leases" / name).device(0)
    held = (meter.used_bytes + meter.context_bytes) // MIB
    assert held > 3000
    eventually(lambda: used_mib(node)[6] == held, "NVML shows as much as the lease counts")
    assert used_mib(node)[1] < CONTEXT_MIB
    assert meter.refusals_limit == 1
    end(node, tenant, name)


@needs("driver-580")
def test_programs_started_after_a_move_see_the_new_device(node: DemoNode) -> None:
    """A program that starts after a move inherits an environment that names the old device. libvgpu shows it
    the new device.
    """
    program = """
import ctypes as c, json, sys, uuid
u = c.CDLL("libcuda.so.1")
name, context = c.create_string_buffer(16), c.c_void_p()
code = u.cuInit(0) or u.cuDeviceGetUuid_v2(name, 0) or u.cuDevicePrimaryCtxRetain(c.byref(context), 0)
print(json.dumps({"code": code, "uuid": f"GPU-{uuid.UUID(bytes=name.raw)}"}), flush=True)
"""
    shell = 'while read line; do "$0" -c "$1"; done'
    tenant = node.tenant([*SHARED, "0"], ["sh", "-c", shell, sys.executable, program])
    eventually(lambda: states(node), "it is allocated")
    (name,) = states(node)

    def look() -> dict[str, object]:
        assert tenant.process.stdin is not None
        tenant.process.stdin.write("\n")
        tenant.process.stdin.flush()
        return tenant.line()

    names = uuids(node)
    assert look() == {"code": 0, "uuid": names[0]}
    for to in (2, 4, 0):
        eventually(lambda: not node.ctl_json("show", name)["use"][0]["pids"], "the last program has gone")
        move(node, name, to)
        assert look() == {"code": 0, "uuid": names[to]}
    end(node, tenant, name)


@needs("driver-580")
def test_a_tenant_of_a_whole_card_moves_to_a_free_card(node: DemoNode) -> None:
    tenant, name = holding(node, 0, "--isolation", "device", "--device", "2", size_mib=SIZE_MIB)
    held = quota(node, selector=pb.Selector(indices=[3]))
    assert refusal(node, name, 3).code is ErrorCode.DEVICE_IN_USE
    release(node, held.id)
    move(node, name, 3)
    assert list(allocated(node)) == [3]
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_move_to_a_full_drained_or_used_device_is_refused(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    full = quota(node, 138, selector=pb.Selector(indices=[1]))
    assert "fit in the" in refusal(node, name, 1).sentence
    assert refusal(node, name, 1, 2).code is ErrorCode.BAD_REQUEST
    with client(node) as calls:
        calls.drain_device(uuids(node)[2])
        assert "it is drained" in refusal(node, name, 2).sentence
        calls.drain_device(uuids(node)[2], undrain=True)
    shared = allocate(node, isolation="compute", memory_bytes=GIB, selector=pb.Selector(indices=[4]))
    assert refusal(node, name, 4).code is ErrorCode.DEVICE_IN_USE
    refused = refusal(node, shared.id, 5)
    assert refused.code is ErrorCode.UNSUPPORTED
    assert "MPS clients" in refused.sentence
    assert allocated(node)[0] == 4 * GIB
    assert goes_on(tenant)
    release(node, full.id, shared.id)
    end(node, tenant, name)


@needs("namespaces", "driver-580")
def test_a_tenant_that_cannot_open_the_new_device_is_not_moved(node: DemoNode) -> None:
    """As in a container, the tenant has its own mounts, without the node of the new device."""
    tenant = node.tenant([*SHARED, "0"], ["unshare", "-m", sys.executable, "-c", PROGRAM, str(SIZE_MIB)])
    tenant.line()
    (name,) = states(node)
    refused = refusal(node, name, 1)
    assert refused.code is ErrorCode.UNSUPPORTED
    assert "has no node of device" in refused.sentence
    assert goes_on(tenant)
    suspend(node, name)
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_moves_to_another_model_or_under_an_old_driver_are_refused(make_node: NodeMaker) -> None:
    node = make_node("mixed", policy=ROOMY)
    node.start()
    with client(node) as calls:
        devices = calls.list_devices().devices
    other = next(d.index for d in devices if d.name != devices[0].name)
    held = quota(node)
    refused = refusal(node, held.id, other)
    assert refused.code is ErrorCode.UNSUPPORTED
    assert devices[other].name in refused.sentence
    release(node, held.id)
    node.stop()
    simulate(node, "driver", "575.57.08")
    node.start()
    held = quota(node)
    refused = refusal(node, held.id, other)
    assert "575.57.08" in refused.sentence
    node.stop()


@needs("driver-580")
def test_a_move_that_fails_leaves_the_tenant_where_it_was(node: DemoNode) -> None:
    tenant, name = tenant_on(node, 0)
    eventually(lambda: used_mib(node)[0] > CONTEXT_MIB, "NVML shows its memory")
    for function in ("Lock", "Checkpoint", "Restore"):
        fault = ["--function", f"cuCheckpointProcess{function}", "--code", "801", "--count", "1"]
        simulate(node, "fault", "fail", *fault)
        assert refusal(node, name, 3).code is ErrorCode.SUSPEND_FAILED, function
        check_at(node, name, 0)
        assert allocated(node) == {0: 4 * GIB}
        assert goes_on(tenant), function
    end(node, tenant, name)


def tenant_of_three(node: DemoNode) -> tuple[Tenant, str]:
    script = f'exec 3<&0; for i in 1 2 3; do "$0" -c "$1" {SIZE_MIB} <&3 & done; wait'
    tenant = node.tenant([*SHARED, "0"], ["sh", "-c", script, sys.executable, PROGRAM])
    for _ in range(3):
        tenant.line()
    (name,) = states(node)
    return tenant, name


def cut(node: DemoNode, name: str, to: int) -> None:
    """Starts a move and asserts that the fault point killed vgpud."""
    assert refusal(node, name, to).code is ErrorCode.UNREACHABLE
    was_killed(node)


@needs("driver-580")
def test_a_move_that_can_be_neither_done_nor_undone_stays_open(node: DemoNode) -> None:
    """While the move is open, vgpud reserves room on both devices and refuses other changes. It resumes the
    tenant when the fault is gone.
    """
    tenant, name = tenant_on(node, 0)
    simulate(node, "fault", "fail", "--function", "cuCheckpointProcessRestore", "--code", "304")
    assert refusal(node, name, 3).code is ErrorCode.SUSPEND_FAILED
    assert states(node) == {name: "suspending"}
    assert allocated(node) == {0: 4 * GIB, 3: 4 * GIB}
    assert refusal(node, name, 5).code is ErrorCode.ALLOCATION_BUSY
    with client(node) as calls, pytest.raises(VgpuError) as alive:
        calls.release(name, force=True)
    assert alive.value.code is ErrorCode.TENANT_ALIVE
    simulate(node, "fault", "clear")
    assert resume(node, name).state == "active"
    check_at(node, name, 0)
    assert allocated(node) == {0: 4 * GIB}
    assert goes_on(tenant)
    end(node, tenant, name)


NO_RESTORE = "fault", "fail", "--function", "cuCheckpointProcessRestore", "--code", "304", "--count", "1"


@needs("driver-580")
def test_a_move_cut_after_any_step_is_undone_before_its_save_is_recorded_and_finished_afterwards(
    cut_node: DemoNode,
) -> None:
    """vgpud is killed one step later in each round. Once the save is recorded, the starts that finish the
    move are killed as well.
    """
    node = cut_node
    node.start(fault_point="move.record-intent")
    tenant, name = tenant_on(node, 0)
    for following in ("apply-mode", "lock-0", "save-0", "record-move"):
        cut(node, name, 3)
        node.start(fault_point=f"move.{following}")
        check_at(node, name, 0)
        assert allocated(node) == {0: 4 * GIB}, following
        assert goes_on(tenant), following
    cut(node, name, 3)
    is_killed_at_its_starts(node, "move.attach-0", "move.restore-0", "move.unlock-0", "move.commit")
    node.start()
    check_at(node, name, 3)
    assert allocated(node) == {3: 4 * GIB}
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_cut_move_whose_restore_fails_is_undone(cut_node: DemoNode) -> None:
    """The restore on the new device fails, and vgpud is killed after steps of the restore on the old one."""
    node = cut_node
    node.start(fault_point="move.record-back")
    tenant, name = tenant_on(node, 0)
    simulate(node, *NO_RESTORE)
    cut(node, name, 3)
    is_killed_at_its_starts(node, "move.restore-0")
    node.start()
    check_at(node, name, 0)
    assert allocated(node) == {0: 4 * GIB}
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_the_program_that_checks_moves_on_real_cards_passes_on_the_simulator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_h200, "DemoNode", PreparedNode)
    assert move_h200.main(["--simulated", "grown", "suspended"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["held"] for one in said if "held" in one] == [True, True]


@needs("driver-580")
def test_a_move_of_several_processes_that_is_cut_moves_all_or_none(cut_node: DemoNode) -> None:
    """vgpud is killed when one process has moved. Then the restore of another process fails, and the first
    process is moved back. A later attempt moves both.
    """
    node = cut_node
    node.start(fault_point="move.restore-0")
    tenant, name = tenant_of_three(node)
    cut(node, name, 3)
    simulate(node, *NO_RESTORE)
    node.start()
    eventually(lambda: in_use(node) == [0], "all are back")
    assert states(node) == {name: "active"}
    assert goes_on(tenant)
    move(node, name, 3)
    eventually(lambda: in_use(node) == [3], "all have gone there")
    assert goes_on(tenant)
    end(node, tenant, name)
