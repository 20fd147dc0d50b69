"""Suspension by eviction: libvgpu copies what it can to the host, and the driver's checkpoint saves the rest
if it must leave the device.
"""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import (
    GIB,
    MIB,
    client,
    eventually,
    is_killed_at_its_starts,
    simulate,
    states,
    was_killed,
)
from tests.e2e.test_idle import CALLS, ask, eventually_stands, shown
from tests.e2e.test_move import check_at, in_use, move
from tests.e2e.test_suspend import beside, refusal, resume
from tests.e2e.test_turns import HOLD, LARGE_MIB, answer, simulated, used_mib
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import LeaseMemory, SwapPhase, read_activity, read_limits, read_swaps
from vgpud.model.errors import ErrorCode, VgpuError

EVICTS = """version = 1
[[device]]
mode = "auto"
[device.preload]
evictable = true
[pool]
host_memory_reserve = "1MiB"
"""
EVICTION_FAILS = ("fault", "fail", "--function", "cuMemHostRegister_v2", "--code", "304", "--count", "1")
IDLE = EVICTS.replace("evictable = true", 'idle_suspend = "300ms"\nmin_residence = "100ms"')
HELD_MIB = 8 + LARGE_MIB + 3 + 2
NO_DRIVER = ("fault", "fail", "--function", "cuCheckpointProcess*", "--code", "801")
# the devices cannot reach each other's memory, so moves go through host memory
BY_HOST = ("fault", "fail", "--function", "cuDeviceCanAccessPeer")
LIMIT = ("--isolation", "quota", "--memory", "4GiB", "--device")


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    made = make_shared_node(policy=EVICTS)
    made.start()
    return made


@pytest.fixture
def cut_node(make_node: NodeMaker) -> Iterator[DemoNode]:
    made = make_node(policy=EVICTS)
    yield made
    if made.daemon is not None and made.daemon.poll() is None:
        made.stop()


def holding(node: DemoNode, *large: str) -> tuple[Tenant, str]:
    """Starts a tenant with 19 MiB of memory, or HELD_MIB if `large` is LARGE_MIB. libvgpu can evict all of it
    except one page.
    """
    before = states(node)
    tenant = node.tenant([*LIMIT, "0"], [sys.executable, "-c", HOLD, "8", *large])
    assert tenant.line()["ready"]
    (name,) = states(node).keys() - before.keys()
    return tenant, name


def suspend(node: DemoNode, name: str, deep: bool = False) -> pb.Allocation:
    with client(node) as calls:
        return calls.suspend(name, deep)


def refused(node: DemoNode, name: str, deep: bool = False) -> VgpuError:
    with pytest.raises(VgpuError) as error:
        suspend(node, name, deep)
    return error.value


def goes_on(tenant: Tenant) -> bool:
    return bool(answer(tenant)["whole"])


def buffer_bytes(node: DemoNode, name: str) -> int:
    """The size of libvgpu's host buffer."""
    (swap,) = read_swaps(node.run_dir / "leases" / name)
    return swap.host_bytes


def end(node: DemoNode, tenant: Tenant, name: str) -> None:
    assert tenant.end()[0] == 0
    eventually(lambda: name not in states(node), "its allocation goes with it")


def test_a_suspension_evicts_memory_without_the_drivers_checkpoint_and_leaves_the_context(
    node: DemoNode,
) -> None:
    tenant, name = holding(node, str(LARGE_MIB))
    simulate(node, *NO_DRIVER)
    full = used_mib(node)
    gone = suspend(node, name)
    assert (gone.state, gone.cause, len(gone.suspended_pids)) == ("suspended", "hand", 1)
    assert HELD_MIB - 16 < gone.suspended_bytes // MIB <= HELD_MIB + 16
    left = used_mib(node)
    assert full - left >= HELD_MIB - 16
    assert gone.stays_bytes // MIB == pytest.approx(left, abs=8)
    with client(node) as calls:
        assert calls.list_devices().devices[0].memory_allocated_bytes == gone.stays_bytes
    assert f"{gone.stays_bytes // MIB}MiB (contexts and arrays " in shown(node, name).standing
    assert {one.kind for one in gone.stays} == {"contexts and arrays", "small allocations"}
    assert resume(node, name).stays_bytes == 0
    assert goes_on(tenant)
    simulate(node, "fault", "clear")
    end(node, tenant, name)


# Holds 64 MiB that libvgpu can evict, and memory of the kinds that it cannot evict.
KINDS = cuda_program("""
memory, piece = c.c_uint64(), c.c_uint64()
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", c.c_int * 2), ("rest", c.c_uint64 * 2)]
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(64 << 20))
call("cuMemAlloc_v2", c.byref(piece), c.c_size_t(4096))
call("cuMemAllocAsync", c.byref(piece), c.c_size_t(20 << 20), None)
call("cuMemAllocManaged", c.byref(piece), c.c_size_t(6 << 20), 1)
call("cuMemCreate", c.byref(piece), c.c_size_t(10 << 20), c.byref(Prop(1, 0, (1, 0))), c.c_uint64(0))
say(ready=True)
sys.stdin.read()
""")


def test_memory_that_stays_on_the_device_is_reported_by_kind(node: DemoNode) -> None:
    before = states(node)
    tenant = node.tenant([*LIMIT, "0"], [sys.executable, "-c", KINDS])
    assert tenant.line()["ready"]
    (name,) = states(node).keys() - before.keys()
    gone = suspend(node, name)
    kinds = {one.kind: one.bytes // MIB for one in gone.stays}
    contexts = kinds.pop("contexts and arrays")
    assert kinds == {
        "physical memory": 10,  # MiB of cuMemCreate without a mapping
        "pools": 32,  # MiB; a memory pool takes memory in blocks of 32 MiB
        "managed": 6,
        "small allocations": 2,  # MiB: one page of the driver
    }
    assert contexts + sum(kinds.values()) - kinds["managed"] == gone.stays_bytes // MIB
    assert (
        ", pools 32MiB, physical memory 10MiB, managed 6MiB, small allocations 2MiB) of it"
        in shown(node, name).standing
    )
    resume(node, name)
    assert not shown(node, name).stays
    end(node, tenant, name)


def test_an_evicted_tenant_waits_at_its_next_call_until_it_is_resumed(node: DemoNode) -> None:
    tenant, name = holding(node)
    suspend(node, name)
    ask(tenant)
    eventually_stands(node, name, "by hand, wants to work")
    resume(node, name)
    assert tenant.line()["whole"]
    end(node, tenant, name)


@needs("driver-580")
def test_a_deep_suspension_leaves_nothing_on_the_device(node: DemoNode) -> None:
    tenant, name = holding(node)
    for _ in range(2):
        gone = suspend(node, name, deep=True)
        assert (gone.state, gone.stays_bytes) == ("suspended", 0)
        assert {swap.phase for swap in read_swaps(node.run_dir / "leases" / name)} == {SwapPhase.OUT}
        eventually(lambda: in_use(node) == [], "nothing of it is on the device")
        assert used_mib(node) == 0
        resume(node, name)
        assert goes_on(tenant)
    suspend(node, name)
    assert used_mib(node) > 0
    at_once = gone.suspended_bytes
    # the driver's checkpoint saves what the eviction left on the device
    gone = suspend(node, name, deep=True)
    assert (gone.stays_bytes, used_mib(node)) == (0, 0)
    assert gone.suspended_bytes == pytest.approx(at_once, abs=8 * MIB)
    assert suspend(node, name, deep=True).revision == gone.revision
    assert suspend(node, name).revision == gone.revision
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_deep_suspension_that_fails_leaves_the_tenant_as_it_was(node: DemoNode) -> None:
    tenant, name = holding(node)
    for function in ("cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"):
        fails = ("fault", "fail", "--function", function, "--code", "801", "--count", "1")
        simulate(node, *fails)
        assert refused(node, name, deep=True).code is ErrorCode.SUSPEND_FAILED, function
        assert states(node)[name] == "active"
        assert goes_on(tenant), function
        suspend(node, name)
        simulate(node, *fails)
        assert refused(node, name, deep=True).code is ErrorCode.SUSPEND_FAILED, function
        assert "swapped out by libvgpu" in shown(node, name).standing
        resume(node, name)
        assert goes_on(tenant), function
    end(node, tenant, name)


@needs("driver-580")
def test_a_failed_resumption_after_a_deep_suspension_leaves_the_tenant_suspended(node: DemoNode) -> None:
    tenant, name = holding(node)
    for function in ("cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"):
        suspend(node, name, deep=True)
        simulate(node, "fault", "fail", "--function", function, "--code", "304", "--count", "1")
        assert refusal(node, "resume", name).code is ErrorCode.SUSPEND_FAILED
        assert states(node)[name] == "suspended"
        resume(node, name)
        assert goes_on(tenant), function
    end(node, tenant, name)


@needs("driver-580")
def test_all_processes_of_a_tenant_are_evicted_saved_and_resumed(node: DemoNode) -> None:
    first, name = holding(node)
    second = beside(node, node.run_dir / "leases" / name)
    second.line()
    for deep in (False, True):
        assert len(suspend(node, name, deep).suspended_pids) == 2
        resume(node, name)
        assert goes_on(first) and goes_on(second)
    suspend(node, name, deep=True)
    second.process.kill()
    second.process.wait()
    resume(node, name)
    assert goes_on(first)
    end(node, first, name)


@needs("driver-580")
def test_a_suspension_whose_eviction_fails_falls_back_to_the_drivers_checkpoint(node: DemoNode) -> None:
    tenant, name = holding(node)
    simulate(node, *EVICTION_FAILS)
    gone = suspend(node, name)
    assert gone.stays_bytes == 0
    assert "swap_out_failed_suspending_by_driver" in node.log.read_text()
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_a_tenant_moves_by_an_eviction_and_the_drivers_checkpoint_of_the_rest(node: DemoNode) -> None:
    tenant, name = holding(node, str(LARGE_MIB))
    eventually(lambda: in_use(node) == [0], "it is there")
    for to in (3, 5, 0):
        assert move(node, name, to).state == "active"
        check_at(node, name, to)
        assert buffer_bytes(node, name) == 0
        assert goes_on(tenant)
    simulate(node, *BY_HOST)
    for to in (3, 0):
        assert move(node, name, to).state == "active"
        check_at(node, name, to)
        assert buffer_bytes(node, name) >= HELD_MIB * MIB
        assert goes_on(tenant)
    simulate(node, "fault", "clear")
    end(node, tenant, name)


@needs("driver-580")
def test_memory_that_cannot_be_parked_in_large_blocks_is_parked_in_smaller_ones(node: DemoNode) -> None:
    tenant, name = holding(node, str(LARGE_MIB))
    to = 3
    for function in ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap"):
        simulate(node, "fault", "fail", "--function", function, "--code", "2", "--count", "1")
        move(node, name, to)
        check_at(node, name, to)
        assert simulated(node)["faults"] == []
        assert buffer_bytes(node, name) == 0, function
        assert goes_on(tenant), function
        to = 3 - to
    end(node, tenant, name)


@needs("driver-580")
def test_memory_that_cannot_be_parked_in_blocks_of_any_size_moves_through_host_memory(
    node: DemoNode,
) -> None:
    tenant, name = holding(node, str(LARGE_MIB))
    for to, function in ((3, "cuMemCreate"), (0, "cuMemMap")):
        simulate(node, "fault", "fail", "--function", function, "--code", "2", "--count", "3")
        move(node, name, to)
        check_at(node, name, to)
        assert simulated(node)["faults"] == [], function
        assert buffer_bytes(node, name) >= HELD_MIB * MIB, function
        assert goes_on(tenant), function
    end(node, tenant, name)


@needs("driver-580")
def test_a_move_whose_copy_between_devices_fails_goes_through_host_memory_at_once(node: DemoNode) -> None:
    tenant, name = holding(node, str(LARGE_MIB))
    move(node, name, 3)  # made first, because the engine probe of a new device makes contexts
    for to, function in (
        (0, "cuDevicePrimaryCtxRetain"),
        (3, "cuDevicePrimaryCtxRetain"),
        (0, "cuEventSynchronize"),
    ):
        simulate(node, "fault", "fail", "--function", function, "--code", "700", "--count", "1")
        assert move(node, name, to).state == "active"
        check_at(node, name, to)
        assert simulated(node)["faults"] == []
        assert (buffer_bytes(node, name) >= HELD_MIB * MIB, goes_on(tenant)) == (True, True)
    end(node, tenant, name)


@needs("driver-580")
def test_the_hosts_buffers_of_a_moving_tenant_are_not_page_locked_while_the_driver_saves(
    node: DemoNode,
) -> None:
    """The simulated driver is set to refuse one call that page-locks host memory, and one that unlocks it.
    The refusals show that both calls were made, and do no harm.
    """
    simulate(node, *BY_HOST)
    tenant, name = holding(node, str(LARGE_MIB))
    unlock = ("fault", "fail", "--function", "cuMemHostUnregister", "--code", "304", "--count", "1")
    simulate(node, *unlock)
    simulate(node, "fault", "fail", "--function", "cuCheckpointProcessLock", "--code", "801", "--count", "1")
    with pytest.raises(VgpuError, match="cannot lock process"):
        move(node, name, 3)
    assert len(simulated(node)["faults"]) == 1, "the buffer is unlocked before the driver is asked"
    assert goes_on(tenant)
    move(node, name, 3)
    assert goes_on(tenant)
    # the buffer exists, so this call page-locks it again for the copies to the other device
    simulate(node, "fault", "fail", "--function", "cuMemHostRegister_v2", "--code", "304", "--count", "1")
    move(node, name, 0)
    assert len(simulated(node)["faults"]) == 1
    assert goes_on(tenant)
    suspend(node, name)
    simulate(node, *unlock)
    resume(node, name)
    assert len(simulated(node)["faults"]) == 2, "an eviction alone leaves it locked"
    simulate(node, "fault", "clear")
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
def test_host_buffers_are_not_page_locked_while_the_driver_saves_a_deeply_suspended_tenant(
    node: DemoNode,
) -> None:
    """As above, for a tenant that runs and for one that was evicted before. The refused lock shows that the
    buffer was unlocked before the driver was asked.
    """
    tenant, name = holding(node, str(LARGE_MIB))
    for evicted in (False, True):
        if evicted:
            suspend(node, name)
        simulate(node, "fault", "fail", "--function", "cuMemHostUnregister", "--code", "304", "--count", "1")
        simulate(
            node, "fault", "fail", "--function", "cuCheckpointProcessLock", "--code", "801", "--count", "1"
        )
        assert refused(node, name, deep=True).code is ErrorCode.SUSPEND_FAILED
        assert simulated(node)["faults"] == []
        assert states(node)[name] == ("suspended" if evicted else "active")
        suspend(node, name, deep=True)
        resume(node, name)
        assert goes_on(tenant)
    end(node, tenant, name)


STACK = cuda_program("""
memory, stack = c.c_uint64(), c.c_size_t()
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(8 << 20))
call("cuCtxSetLimit", 0, c.c_size_t(4096))
say(ready=True)
for line in sys.stdin:
    call("cuCtxGetLimit", c.byref(stack), 0)
    say(stack=stack.value)
""")


@needs("driver-580")
def test_the_stack_is_small_while_the_driver_saves_a_tenant_and_the_programs_own_afterwards(
    cut_node: DemoNode,
) -> None:
    """The simulated driver refuses calls that set the stack limit, so the test sees that they were made. A
    refused reduction does no harm, and an increase for which the device has no memory is tried again.
    """
    node = cut_node
    node.start()
    refuse = ("fault", "fail", "--function", "cuCtxSetLimit", "--code", "2", "--count")
    tenant = node.tenant([*LIMIT, "0"], [sys.executable, "-c", STACK])
    assert tenant.line()["ready"]
    (name,) = states(node)
    simulate(node, *refuse, "1")
    move(node, name, 3)
    assert (simulated(node)["faults"], answer(tenant)) == ([], {"stack": 4096})
    simulate(node, *refuse, "1")
    suspend(node, name, deep=True)
    assert simulated(node)["faults"] == [], "a deep suspension lowers it, too"
    resume(node, name)
    assert answer(tenant) == {"stack": 4096}
    suspend(node, name, deep=True)
    simulate(node, *refuse, "1")
    resume(node, name)
    assert (simulated(node)["faults"], answer(tenant)) == ([], {"stack": 4096})
    node.stop()
    node.start(fault_point="move.save-0")
    with pytest.raises(VgpuError):
        move(node, name, 0)
    was_killed(node)
    simulate(node, *refuse, "2")
    node.start()
    assert (simulated(node)["faults"], answer(tenant)) == ([], {"stack": 4096})
    end(node, tenant, name)


@needs("driver-580")
def test_an_evicted_tenant_is_moved_and_then_resumed_on_the_other_device(node: DemoNode) -> None:
    tenant, name = holding(node)
    suspend(node, name)
    moved = move(node, name, 2)
    assert (moved.state, moved.stays_bytes) == ("suspended", 0)
    eventually(lambda: in_use(node) == [], "nothing of it is on a device")
    resume(node, name)
    check_at(node, name, 2)
    assert goes_on(tenant)
    end(node, tenant, name)


def test_a_move_whose_restore_fails_brings_the_evicted_memory_back(node: DemoNode) -> None:
    tenant, name = holding(node)
    simulate(
        node, "fault", "fail", "--function", "cuCheckpointProcessRestore", "--code", "304", "--count", "1"
    )
    with pytest.raises(VgpuError):
        move(node, name, 3)
    check_at(node, name, 0)
    assert goes_on(tenant)
    end(node, tenant, name)


# Pairs of steps: vgpud is killed at the first of a pair in a suspension, and at the second in the resumption
# after it. No start of vgpud passes the step at which it is to be killed later.
POINTS = [
    ("swap-out.record-intent", "swap-in.open"),
    ("swap-out.limit", "swap-in.limit"),
    ("swap-out.out", "swap-in.here"),
    ("suspend.record-intent", "swap-in.record-intent"),
    ("suspend.limit", "resume.record-intent"),
    ("suspend.lock-0", "resume.restore-0"),
    ("suspend.save-0", "resume.unlock-0"),
]


def killed(node: DemoNode, error: VgpuError) -> None:
    """Asserts that vgpud was killed during a call that got this error."""
    assert error.code is ErrorCode.UNREACHABLE
    was_killed(node)


@needs("driver-580")
def test_a_kill_of_vgpud_at_each_step_of_an_eviction_loses_no_memory(cut_node: DemoNode) -> None:
    """vgpud is killed at each step. The next start completes an interrupted eviction, undoes an interrupted
    step of the driver's checkpoint, and completes an interrupted resumption.
    """
    node = cut_node
    node.start(fault_point=POINTS[0][0])
    tenant, name = holding(node)
    lease = node.run_dir / "leases" / name
    for number, (going, coming) in enumerate(POINTS, start=1):
        killed(node, refused(node, name, deep=going.startswith("suspend.")))
        node.start(fault_point=coming)
        assert states(node) == {name: "suspended"}, going
        assert "swapped out by libvgpu" in shown(node, name).standing, going
        if coming.startswith("resume."):
            suspend(node, name, deep=True)
        killed(node, refusal(node, "resume", name))
        node.start(fault_point=POINTS[number][0] if number < len(POINTS) else "")
        assert states(node) == {name: "active"}, coming
        assert read_limits(lease).devices[0].memory_bytes == 4 * GIB, coming
        assert goes_on(tenant), coming
    suspend(node, name, deep=True)
    resume(node, name)
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
@pytest.mark.parametrize("by_host", [False, True])
def test_a_kill_of_vgpud_at_each_step_of_the_move_of_an_evicted_tenant_loses_no_memory(
    cut_node: DemoNode, by_host: bool
) -> None:
    """vgpud is killed at each step. Until the move is recorded, the next start undoes it. From then on each
    next start continues it, and is killed one step later.
    """
    node = cut_node
    if by_host:
        simulate(node, *BY_HOST)
    undone = ["prepared", "out", "save-0"] if by_host else ["record-intent", "out", "lock-0", "save-0"]
    continued = ["unlock-0"] if by_host else ["restore-0", "unlock-0", "copied", "commit"]
    node.start(fault_point=f"move.{undone[0]}")
    tenant, name = holding(node)
    lease = node.run_dir / "leases" / name

    def move_is_cut() -> None:
        with pytest.raises(VgpuError) as error:
            move(node, name, 3)
        killed(node, error.value)

    for point, following in pairwise([*undone, "record-move"]):
        move_is_cut()
        node.start(fault_point=f"move.{following}")
        check_at(node, name, 0)
        assert read_limits(lease).memory is LeaseMemory.HERE, "it makes no buffer ahead"
        assert goes_on(tenant), point
    move_is_cut()
    is_killed_at_its_starts(node, *(f"move.{point}" for point in continued))
    node.start()
    check_at(node, name, 3)
    assert read_limits(lease).memory is LeaseMemory.HERE, "it makes no buffer ahead"
    assert goes_on(tenant)
    end(node, tenant, name)


@needs("driver-580")
@pytest.mark.parametrize(("point", "by_host"), [("save-0", False), ("record-move", True)])
def test_a_kill_of_vgpud_while_several_tenants_move_loses_no_memory(
    cut_node: DemoNode, point: str, by_host: bool
) -> None:
    """The first tenant that reaches the fault point ends vgpud, while the other tenants are at any step of
    their moves. The next start undoes the move of the first tenant, or finishes it.
    """
    node = cut_node
    if by_host:
        simulate(node, *BY_HOST)
    node.start(fault_point=f"move.{point}")
    tenants = [holding(node) for _ in range(3)]
    node.ctl("drain", "0", "--move", check=False)
    was_killed(node)
    node.start()
    assert states(node) == {name: "active" for _, name in tenants}
    for tenant, name in tenants:
        with client(node) as calls:
            (part,) = calls.get_allocation(name).slices
        lease = read_limits(node.run_dir / "leases" / name)
        assert [device.uuid for device in lease.devices] == [part.device_uuid]
        assert goes_on(tenant)
    said = json.loads(node.ctl("drain", "0", "--move", "-o", "json", check=False).stdout)
    assert not said["staying"]
    eventually(lambda: 0 not in in_use(node), "nothing is left on the drained device")
    for tenant, name in tenants:
        assert goes_on(tenant)
        end(node, tenant, name)


def test_an_idle_tenant_is_evicted_and_wakes_by_its_next_call(make_node: NodeMaker) -> None:
    node = make_node(policy=IDLE)
    node.start()
    simulate(node, *NO_DRIVER)
    tenant, name = holding(node)
    for _ in range(3):
        eventually_stands(node, name, "idle; swapped out by libvgpu")
        assert goes_on(tenant)
    eventually(lambda: states(node)[name] in ("active", "suspended"), "no change of it is under way")
    end(node, tenant, name)
    node.stop()


def test_every_kind_of_call_of_an_evicted_tenant_waits_until_it_is_resumed(make_node: NodeMaker) -> None:
    node = make_node(policy=f'{EVICTS}unevictable = "keep"\n')
    node.start()
    tenant = node.tenant([*LIMIT, "0"], [sys.executable, "-c", CALLS])
    kinds = tenant.line()["calls"]
    (name,) = states(node)
    lease = node.run_dir / "leases" / name
    # after the call "capture" a stream is being captured, and libvgpu does not evict the tenant meanwhile
    for kind in kinds[: kinds.index("capture") + 1]:
        assert suspend(node, name).stays_bytes > 0
        ask(tenant, kind)
        eventually(lambda: read_activity(lease).wants == 1, f"{kind} waits in libvgpu")
        resume(node, name)
        assert tenant.line() == {"done": kind}
    end(node, tenant, name)
    node.stop()


PINNED = cuda_program("""
memory, small = c.c_uint64(), [c.c_uint64() for _ in range(int(sys.argv[1]))]
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(2 << 20))
for one in small: call("cuMemAlloc_v2", c.byref(one), c.c_size_t(1 << 20))
say(ready=True)
for line in sys.stdin: say(whole=True)
""")


@needs("driver-580")
def test_the_policy_decides_about_memory_that_cannot_be_evicted(make_node: NodeMaker) -> None:
    """The tenant has 2 MiB that libvgpu can evict, and 8 MiB in small allocations that it cannot."""
    node = make_node(policy=EVICTS)
    node.start()
    tenant = node.tenant([*LIMIT, "0"], [sys.executable, "-c", PINNED, "8"])
    assert tenant.line()["ready"]
    (name,) = states(node)
    for otherwise in ("keep", "refuse", "checkpoint"):
        (node.folder / "etc" / "vgpud.toml").write_text(f'{EVICTS}unevictable = "{otherwise}"\n')
        node.ctl("policy", "reload")
        if otherwise == "keep":
            # the driver does not save a tenant whose eviction fails
            simulate(node, *EVICTION_FAILS)
            assert refused(node, name).code is ErrorCode.SUSPEND_FAILED
            assert states(node) == {name: "active"}
        if otherwise == "refuse":
            error = refused(node, name)
            assert error.code is ErrorCode.SUSPEND_FAILED
            assert "2MiB of its 10MiB" in error.sentence
            assert "--deep" in error.hint
            assert states(node) == {name: "active"}
        else:
            gone = suspend(node, name)
            assert (gone.stays_bytes > 8 * MIB) == (otherwise == "keep")
            resume(node, name)
        assert suspend(node, name, deep=True).stays_bytes == 0
        resume(node, name)
        assert goes_on(tenant), otherwise
    end(node, tenant, name)
    node.stop()
