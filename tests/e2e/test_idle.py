"""vgpud suspends idle tenants and resumes them when they call the driver. Tenants that do not fit together
take turns.
"""

import sys

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import ROOMY, NodeMaker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import GIB, allocate, client, eventually, release, states, was_killed
from tests.e2e.test_move import tenant_on
from tests.e2e.test_move_suspended import check_waits_at
from tests.e2e.test_relocate import places
from tests.e2e.test_suspend import PROGRAM, SIZE_MIB, end, goes_on, holding, resume, suspend, used_mib
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_activity, read_limits

IDLE = """version = 1
[[device]]
mode = "auto"
[device.preload]
idle_suspend = "300ms"
min_residence = "100ms"
evictable = false  # so that the driver saves it; tests/e2e/test_evict.py has the other way
"""
TURNS = """version = 1
[[device]]
mode = "auto"
[device.preload]
memory_overcommit = 2.0
turn = "500ms"
"""

# Launches only memsets and checks each of them. Prints their number for each line of input. sys.argv: MiB to
# hold
BUSY = cuda_program("""
import select
memory, back = c.c_uint64(), (c.c_uint32 * 1024)()
size = int(sys.argv[1]) << 20
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
say(holds=size)
round, whole = 0, True
while True:
    round += 1
    call("cuMemsetD32_v2", memory, c.c_uint(round), c.c_size_t(size // 4))
    call("cuMemcpyDtoH_v2", back, c.c_uint64(memory.value + size - 4096), c.c_size_t(4096))
    whole = whole and all(word == round for word in back)
    if select.select([sys.stdin], [], [], 0.005)[0]:
        if not sys.stdin.readline(): break
        say(rounds=round, whole=whole)
""")


# Makes the driver call that each line of input names
CALLS = cuda_program("""
import struct
memory, event, stream = c.c_uint64(), c.c_void_p(), c.c_void_p()
text = c.create_string_buffer(4 << 20)
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(4 << 20))
call("cuEventCreate", c.byref(event), 0)
module, function, number = c.c_void_p(), c.c_void_p(), c.c_size_t()
ptx = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry e(){ ret; }\\n"
call("cuModuleLoadData", c.byref(module), ptx)
call("cuModuleGetFunction", c.byref(function), module, b"e")
library, kernel, loaded, graph = c.c_void_p(), c.c_void_p(), c.c_void_p(), c.c_void_p()
call("cuLibraryLoadData", c.byref(library), ptx, None, None, 0, None, None, 0)
call("cuLibraryGetKernel", c.byref(kernel), library, b"e")
call("cuKernelGetFunction", c.byref(loaded), kernel)
call("cuGraphCreate", c.byref(graph), 0)
once = struct.pack("P7I4x4P", function.value, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0)
free, total = c.c_size_t(), c.c_size_t()
def figures():
    call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
    return free.value, total.value
figures()
blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
calls = {
    "memset": lambda: call("cuMemsetD8_v2", memory, c.c_ubyte(7), c.c_size_t(4 << 20)),
    "large copy": lambda: call("cuMemcpyHtoD_v2", memory, text, c.c_size_t(4 << 20)),
    "small copy": lambda: call("cuMemcpyHtoD_v2", memory, text, c.c_size_t(8)),
    "synchronise": lambda: call("cuCtxSynchronize"),
    "record": lambda: call("cuEventRecord", event, None),
    "query": lambda: call("cuEventQuery", event),
    "stream": lambda: call("cuStreamCreate", c.byref(stream), 0),
    "host": lambda: call("cuMemAllocHost_v2", c.byref(c.c_void_p()), c.c_size_t(4096)),
    "occupancy": lambda: call(blocks, c.byref(number), function, 128, c.c_size_t(0)),
    "pointer": lambda: call("cuPointerGetAttribute", c.byref(number), 2, memory),
    "attribute": lambda: call("cuFuncSetAttribute", function, 8, 0),
    "attribute of a kernel": lambda: call("cuFuncGetAttribute", c.byref(number), 4, loaded),
    "node of a graph": lambda: call("cuGraphAddKernelNode_v2", c.byref(c.c_void_p()), graph, None, 0, once),
    "limit": lambda: call("cuCtxGetLimit", c.byref(number), 0),
    "name": lambda: call("cuDeviceGetName", text, 64, 0),
    "elapsed": lambda: call("cuEventElapsedTime", c.byref(number), event, event),
    "init": lambda: call("cuInit", 0),
    "capture": lambda: call("cuStreamBeginCapture_v2", stream, 2),
    "clock": lambda: call("cuDeviceGetAttribute", c.byref(number), 13, 0),
    "end": lambda: call("cuEventDestroy_v2", event),
}
say(calls=list(calls))
for line in sys.stdin:
    if line.strip() == "memory":
        say(memory=figures())
        continue
    calls[line.strip()]()
    say(done=line.strip())
""")


@pytest.fixture(scope="module")
def shared_policy() -> str:
    return IDLE


@pytest.fixture(scope="module")
def idle(shared_node: DemoNode) -> DemoNode:
    return shared_node


@pytest.fixture(scope="module")
def turns(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node(policy=TURNS)
    node.start()
    return node


def shown(node: DemoNode, name: str) -> pb.Allocation:
    with client(node) as calls:
        return calls.get_allocation(name)


def eventually_stands(node: DemoNode, name: str, words: str) -> None:
    eventually(lambda: shown(node, name).standing.startswith(words), f"{name}: {words}")


def goes_idle(node: DemoNode, name: str) -> None:
    eventually(lambda: states(node)[name] == "suspended", "it is suspended as idle")


@needs("driver-580")
def test_an_idle_tenant_is_suspended_and_its_next_call_resumes_it(idle: DemoNode) -> None:
    tenant, name = holding(idle, 100)
    goes_idle(idle, name)
    eventually(lambda: used_mib(idle) < SIZE_MIB, "NVML shows none of its memory")
    assert (shown(idle, name).cause, shown(idle, name).standing) == ("idle", "idle")
    other, second = holding(idle, 100)  # another tenant uses the freed memory
    goes_idle(idle, second)
    for _ in range(2):
        # the tenant's call waits until its memory is back on the device, and then succeeds
        assert goes_on(tenant)
        assert goes_on(other)
    end(idle, tenant, name)
    end(idle, other, second)


@needs("driver-580")
def test_an_idle_suspended_tenant_is_resumed_on_the_device_that_it_was_moved_to(idle: DemoNode) -> None:
    tenant, name = tenant_on(idle, 0)
    goes_idle(idle, name)
    assert idle.ctl("drain", "0", "--move", check=False).returncode == 0
    (to,) = places(idle)[name]
    assert to != 0
    check_waits_at(idle, name, to, "idle")
    assert goes_on(tenant)
    assert places(idle)[name] == [to]
    idle.ctl("undrain", "0")
    end(idle, tenant, name)


def ask(tenant: Tenant, call: str = "") -> None:
    assert tenant.process.stdin is not None
    tenant.process.stdin.write(f"{call}\n")
    tenant.process.stdin.flush()


def follow(node: DemoNode, policy: str) -> None:
    (node.folder / "etc" / "vgpud.toml").write_text(policy)
    with client(node) as calls:
        calls.reload_policy()


@needs("driver-580")
def test_an_idle_rule_set_by_a_reload_suspends_an_idle_tenant(make_node: NodeMaker) -> None:
    """vgpud observes the activity of tenants only while the policy has an idle rule."""
    node = make_node(policy=ROOMY)
    node.start()
    tenant, name = holding(node)
    follow(node, IDLE)
    goes_idle(node, name)
    follow(node, ROOMY)
    assert goes_on(tenant), "who is away comes back whatever the rules have become"
    end(node, tenant, name)
    node.stop()


@needs("driver-580")
def test_a_tenant_suspended_by_hand_stays_suspended_and_shows_that_it_wants_to_work(idle: DemoNode) -> None:
    tenant, name = holding(idle)
    goes_idle(idle, name)
    assert suspend(idle, name).cause == "hand"
    ask(tenant)
    eventually(lambda: shown(idle, name).standing == "by hand, wants to work", "it says so")
    resume(idle, name)
    assert tenant.line()["whole"]
    end(idle, tenant, name)


@needs("driver-580")
def test_every_kind_of_call_of_a_suspended_tenant_waits_and_asks_for_its_resume(idle: DemoNode) -> None:
    asked = ["--isolation", "quota", "--memory", "1GiB", "--device", "0"]
    tenant = idle.tenant(asked, [sys.executable, "-c", CALLS])
    kinds = tenant.line()["calls"]
    (name,) = states(idle)
    lease = idle.run_dir / "leases" / name
    for kind in kinds:
        suspend(idle, name)
        ask(tenant, kind)
        eventually(lambda: read_activity(lease).wants == 1, f"{kind} waits in libvgpu")
        resume(idle, name)
        assert tenant.line() == {"done": kind}
    end(idle, tenant, name)


@needs("driver-580")
def test_memory_queries_are_answered_without_a_resume(idle: DemoNode) -> None:
    asked = ["--isolation", "quota", "--memory", "1GiB", "--device", "0"]
    tenant = idle.tenant(asked, [sys.executable, "-c", CALLS])
    tenant.line()
    (name,) = states(idle)
    ask(tenant, "memory")
    before = tenant.line()
    assert before["memory"][1] == GIB
    goes_idle(idle, name)
    ask(tenant, "memory")
    assert tenant.line() == before
    assert (states(idle)[name], shown(idle, name).standing) == ("suspended", "idle")
    ask(tenant, "memset")
    assert tenant.line() == {"done": "memset"}
    end(idle, tenant, name)


@needs("driver-580")
def test_a_tenant_without_room_waits_in_the_resume_queue(idle: DemoNode) -> None:
    first, one = holding(idle, 100)
    goes_idle(idle, one)
    second, two = holding(idle, 100)
    goes_idle(idle, two)
    follow(idle, IDLE.replace("300ms", "1h"))
    third, three = holding(idle, 100)
    for place, name, tenant in (("1st", one, first), ("2nd", two, second)):
        ask(tenant)
        words = f"waits to resume, {place} in the queue: "
        eventually_stands(idle, name, words)
    (row,) = [item for item in idle.ctl_json("ps")["items"] if item["allocationId"] == two]
    assert row["standing"].startswith("waits to resume, 2nd in the queue: others wait for longer")
    assert "suspended (waits to resume, 1st in the queue)" in idle.ctl("ls").stdout
    end(idle, third, three)
    assert first.line()["whole"]
    assert states(idle)[two] == "suspended"
    follow(idle, IDLE)
    assert second.line()["whole"]  # the second tenant's line arrives when the first tenant has become idle
    end(idle, first, one)
    end(idle, second, two)


@needs("driver-580")
def test_a_vgpud_killed_during_an_idle_suspension_or_resumption_loses_no_tenant(cut_node: DemoNode) -> None:
    node = cut_node
    node.start(fault_point="suspend.save-0")
    tenant = node.tenant(
        ["--isolation", "quota", "--memory", "100GiB", "--device", "0"],
        [sys.executable, "-c", PROGRAM, str(SIZE_MIB)],
    )
    tenant.line()
    # the daemon may have been killed already, so the id is read from the folder and not by a call
    (lease,) = (node.run_dir / "leases").iterdir()
    was_killed(node)
    node.start(fault_point="resume.restore-0")
    goes_idle(node, lease.name)
    ask(tenant)
    was_killed(node)
    node.start()
    assert tenant.line()["whole"]
    goes_idle(node, lease.name)
    assert goes_on(tenant)
    end(node, tenant, lease.name)


@needs("driver-580")
def test_a_tenant_that_waits_while_vgpud_is_down_is_resumed_at_its_start(cut_node: DemoNode) -> None:
    node = cut_node
    node.start()
    tenant, name = holding(node, 100)
    goes_idle(node, name)
    node.kill()
    ask(tenant)
    node.start()
    assert tenant.line()["whole"]
    end(node, tenant, name)


def busy(node: DemoNode, gib: int) -> tuple[Tenant, str]:
    before = states(node)
    asked = ["--isolation", "quota", "--memory", f"{gib}GiB", "--device", "0"]
    tenant = node.tenant(asked, [sys.executable, "-c", BUSY, "4"])
    eventually(lambda: states(node).keys() - before.keys(), "it is there")
    (name,) = states(node).keys() - before.keys()
    return tenant, name


def rounds(tenant: Tenant) -> int:
    ask(tenant)
    said = tenant.line()
    assert said["whole"]
    return int(said["rounds"])


@needs("driver-580")
def test_two_tenants_that_exceed_the_card_take_turns(turns: DemoNode) -> None:
    first, _one = busy(turns, 100)
    first.line()
    second, two = busy(turns, 100)
    eventually(lambda: shown(turns, two).state != "allocating", "it is made")
    assert shown(turns, two).state in ("suspending", "suspended", "resuming", "active")
    second.line()  # printed during the second tenant's first turn
    seen = [rounds(first), rounds(second)]
    for _ in range(2):
        now = [rounds(first), rounds(second)]
        assert all(b > a for a, b in zip(seen, now, strict=True))
        seen = now
    # During a swap, the tenant that comes in may be active before the ledger has recorded the suspension of
    # the one that goes out.
    eventually(lambda: list(states(turns).values()).count("active") <= 1, "one is active")
    for tenant in (first, second):
        assert tenant.process.stdin is not None
        tenant.process.stdin.close()
    eventually(lambda: not states(turns), "both end")


@needs("driver-580")
def test_a_new_tenant_that_does_not_fit_waits_for_its_turn(turns: DemoNode) -> None:
    first = allocate(turns, isolation="quota", memory_bytes=100 * GIB, selector=pb.Selector(indices=[0]))
    second = allocate(turns, isolation="quota", memory_bytes=100 * GIB, selector=pb.Selector(indices=[0]))
    assert (first.state, second.state, second.cause) == ("active", "suspended", "turn")
    assert read_limits(turns.run_dir / "leases" / second.id).away
    release(turns, first.id, second.id)
