"""Processes share memory and events: by IPC handles, and by file descriptors of virtual memory allocations
and pools.
"""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.tenant import Tenant
from tests.sim.test_checkpoint import NOT_SUPPORTED, Controller
from tests.simnode import SimNode

Make = Callable[..., SimNode]
MIB = 1 << 20
CONTEXT_MIB = 526
NOT_READY, INVALID_HANDLE, MAP_FAILED, INVALID_CONTEXT = "600", "400", "205", "201"
NOT_SUPPORTED_TEXT = "801"

#: Prints the handle of the newest allocation in hexadecimal.
GIVE = "h = (c.c_char * 64)(); cu('cuIpcGetMemHandle', h, c.c_uint64(pointers[-1])); out = bytes(h).hex()"
HANDLE = "class H(c.Structure): _fields_ = [('b', c.c_char * 64)]"
TAKE = "p = c.c_uint64(); out = cu.raw('cuIpcOpenMemHandle_v2', c.byref(p), H.from_buffer_copy(bytes.fromhex('{}')), 1)"
CLOSE = "out = cu.raw('cuIpcCloseMemHandle', c.c_uint64(pointers.pop()))"


def take(tenant: Tenant, handle: str) -> str:
    tenant.do(HANDLE)
    code = tenant.do(TAKE.format(handle))
    if code == "0":
        tenant.do("pointers.append(p.value)")
    return code


def used_mib(node: SimNode) -> int:
    return int(node.dump()["devices"][0]["memory_used"]) // MIB


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x1")


@pytest.mark.parametrize("size", ["100", "1"], ids=["of its own pages", "in a shared page"])
def test_two_processes_share_an_allocation(node: SimNode, size: str) -> None:
    one, two = Tenant(node), Tenant(node)
    assert [one.say("alloc 1"), one.say(f"alloc {size}"), one.write(11)] == ["ok"] * 3
    handle = one.do(GIVE)
    before = used_mib(node)
    assert take(one, handle) == INVALID_CONTEXT  # a process cannot open its own handle
    assert take(two, handle) == "0"
    assert two.read() == "11"
    two.write(12)
    assert one.read() == "12"
    assert used_mib(node) == before  # the memory is charged only to the process that owns it
    assert take(two, handle) == "0"  # the second mapping has the same address
    assert two.do("out = pointers[-1] == pointers[-2]") == "True"
    wrong = "out = cu.raw('cuMemFree_v2', c.c_uint64(pointers[-1]))"
    assert [two.do(wrong), two.do(CLOSE), two.read(), two.do(CLOSE)] == ["1", "0", "12", "0"]
    assert two.do("out = cu.raw('cuIpcCloseMemHandle', c.c_uint64(0))") == "1"
    assert used_mib(node) == before
    # the new allocation may be at an address that was mapped before
    assert [two.say("alloc 100"), two.read()] == ["ok", "0"]


def test_an_ipc_handle_of_a_dead_process_is_refused(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    one.say("alloc 100")
    handle = one.do(GIVE)
    assert take(two, handle) == "0"
    one.kill()
    assert two.write(5) == "ok"  # the memory of the killed owner stays mapped in the other process
    assert used_mib(node) == CONTEXT_MIB
    three = Tenant(node)
    assert take(three, handle) == MAP_FAILED
    assert take(three, "00" * 64) == INVALID_HANDLE


def test_an_ipc_event_is_opened_by_another_process(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    give = (
        "e = c.c_void_p(); cu('cuEventCreate', c.byref(e), {}); h = (c.c_char * 64)(); "
        "out = cu.raw('cuIpcGetEventHandle', h, e), bytes(h).hex()"
    )
    assert one.do(give.format(2)).startswith("(1,")  # the event was made without CU_EVENT_INTERPROCESS
    # an event for IPC must be made without timing
    assert one.do("e = c.c_void_p(); out = cu.raw('cuEventCreate', c.byref(e), 4)") == "1"
    handle = one.do(give.format(6)).split("'")[1]
    two.do(HANDLE)
    opened = f"e = c.c_void_p(); out = cu.raw('cuIpcOpenEventHandle', c.byref(e), H.from_buffer_copy(bytes.fromhex('{handle}')))"
    query = "out = cu.raw('cuEventQuery', e)"
    assert [two.do(opened), two.do(query)] == ["0", "0"]
    one.say("launch 1 400000")
    one.do("cu('cuEventRecord', e, None)")
    assert two.do(query) == NOT_READY
    assert two.do("out = cu.raw('cuEventSynchronize', e)") == "0"
    assert one.do(query) == "0"
    one.say("launch 100 1000000")
    one.do("cu('cuEventRecord', e, None)")
    assert two.do(query) == NOT_READY
    one.kill()
    # the wait succeeds, because the dead process's work no longer exists
    assert two.do("out = cu.raw('cuStreamWaitEvent', None, e, 0)") == "0"


VMM = (
    "class P(c.Structure): _fields_ = [('type', c.c_int), ('types', c.c_int), ('kind', c.c_int), ('id', c.c_int), ('rest', c.c_char * 24)]",
    "m, a = c.c_uint64(), c.c_uint64(); size = c.c_size_t(4 << 20)",
    "class A(c.Structure): _fields_ = [('kind', c.c_int), ('id', c.c_int), ('flags', c.c_int)]",
)
MAP = (
    "cu('cuMemAddressReserve', c.byref(a), size, c.c_size_t(0), c.c_uint64(0), c.c_ulonglong(0)); "
    "cu('cuMemMap', a, size, c.c_size_t(0), m, c.c_ulonglong(0)); "
    "cu('cuMemSetAccess', a, size, c.byref(A(1, 0, 3)), c.c_size_t(1)); pointers.append(a.value)"
)
CREATE = "cu('cuMemCreate', c.byref(m), size, c.byref(P(1, {}, 1, 0)), c.c_ulonglong(0))"
EXPORT = (
    "f = c.c_int(); out = cu.raw('cuMemExportToShareableHandle', c.byref(f), m, 1, c.c_ulonglong(0)), f.value"
)


def test_a_virtual_memory_allocation_is_imported_by_file_descriptor(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    for tenant in (one, two):
        for line in VMM:
            tenant.do(line)
    one.do(CREATE.format(0))
    assert one.do(EXPORT).startswith("(1,")  # the memory was made without a handle type, so the export fails
    one.do(CREATE.format(1))
    code, fd = one.do(EXPORT).strip("()").split(", ")
    assert code == "0"
    assert [one.do(MAP), one.write(21)] == ["ok", "ok"]
    before = used_mib(node)
    two.do(f"import os; fd = os.open('/proc/{one.process.pid}/fd/{fd}', os.O_RDWR)")
    take_it = "out = cu.raw('cuMemImportFromShareableHandle', c.byref(m), c.c_void_p(fd), 1)"
    assert [two.do(take_it), two.do("os.close(fd)"), two.do(MAP), two.read()] == ["0", "ok", "ok", "21"]
    two.write(22)
    assert one.read() == "22"
    assert used_mib(node) == before
    two.do("fd = os.open('/dev/null', os.O_RDWR)")
    assert two.do(take_it) == "1"


POOL = (
    "class PP(c.Structure): _fields_ = [('type', c.c_int), ('types', c.c_int), ('kind', c.c_int), ('id', c.c_int), ('win', c.c_void_p), ('most', c.c_size_t), ('rest', c.c_ubyte * 56)]",
    "class D(c.Structure): _fields_ = [('b', c.c_char * 64)]",
    "import os; pool, data, a, f = c.c_void_p(), (c.c_char * 64)(), c.c_uint64(), c.c_int()",
)
MAKE_POOL = "out = cu.raw('cuMemPoolCreate', c.byref(pool), c.byref(PP(1, {}, 1, 0)))"
ALLOC = "out = cu.raw('cuMemAllocFromPoolAsync', c.byref(a), c.c_size_t({} << 20), pool, None); pointers.append(a.value)"
GIVE_POOL = "out = cu.raw('cuMemPoolExportToShareableHandle', c.byref(f), pool, 1, c.c_ulonglong(0)), f.value"
GIVE_POINTER = "out = cu.raw('cuMemPoolExportPointer', data, c.c_uint64(pointers[-1])), bytes(data).hex()"
TAKE_POOL = (
    "out = cu.raw('cuMemPoolImportFromShareableHandle', c.byref(pool), c.c_void_p(fd), 1, c.c_ulonglong(0))"
)
TAKE_POINTER = "out = cu.raw('cuMemPoolImportPointer', c.byref(a), pool, c.byref(D.from_buffer_copy(bytes.fromhex('{}')))); pointers.append(a.value)"
FREE_POINTER = "out = cu.raw('cuMemFreeAsync', c.c_uint64(pointers.pop()), None)"
END_POOL = "out = cu.raw('cuMemPoolDestroy', pool)"


def pool_tenants(node: SimNode) -> tuple[Tenant, Tenant]:
    made = Tenant(node), Tenant(node)
    for tenant in made:
        for line in POOL:
            tenant.do(line)
    return made


def hand_over(giver: Tenant, fd: str, taker: Tenant) -> None:
    """Opens a descriptor of one process as `fd` in another."""
    taker.do(f"fd = os.open('/proc/{giver.process.pid}/fd/{fd}', os.O_RDWR)")


def test_a_memory_pool_is_imported_by_file_descriptor(node: SimNode) -> None:
    one, two = pool_tenants(node)
    assert one.do(MAKE_POOL.format(8)) == NOT_SUPPORTED_TEXT  # 8 asks for fabric handles
    assert [one.do(MAKE_POOL.format(0)), one.do(ALLOC.format(4))] == ["0", "0"]
    assert one.do(GIVE_POOL).startswith("(1,")  # the pool was made without a handle type, so the export fails
    assert one.do(GIVE_POINTER).startswith("(1,")
    assert [one.do(MAKE_POOL.format(1)), one.do(ALLOC.format(8))] == ["0", "0"]
    code, fd = one.do(GIVE_POOL).strip("()").split(", ")
    pointer = one.do(GIVE_POINTER).split("'")[1]
    assert [code, one.write(31)] == ["0", "ok"]
    before = used_mib(node)
    assert two.do(TAKE_POINTER.format(pointer)) == "1"  # the pointer does not belong to a pool
    hand_over(one, fd, two)
    assert [two.do(TAKE_POOL), two.do("os.close(fd)")] == ["0", "ok"]
    assert two.do(TAKE_POINTER.format("00" * 64)) == "1"
    assert [two.do(TAKE_POINTER.format(pointer)), two.read(), two.write(32), one.read()] == [
        "0",
        "31",
        "ok",
        "32",
    ]
    assert used_mib(node) == before  # the memory is charged only to the process that owns it
    set_pool = "out = cu.raw('cuDeviceSetMemPool', 0, pool)"
    assert [two.do(ALLOC.format(1)), two.do(set_pool)] == ["1", "1"]  # an imported pool cannot allocate
    two.do("pointers.pop()")
    assert [two.do(FREE_POINTER), two.do(END_POOL)] == ["0", "0"]
    assert one.read() == "32"
    assert [one.do(FREE_POINTER), one.do(END_POOL)] == ["0", "0"]
    assert [one.do(ALLOC.format(8)), used_mib(node)] == ["1", 2 * CONTEXT_MIB + 32]
    two.do("fd = os.open('/dev/null', os.O_RDWR)")
    assert two.do(TAKE_POOL) == "1"


def test_an_imported_memory_pool_of_a_dead_process_allocates_nothing(node: SimNode) -> None:
    one, two = pool_tenants(node)
    assert [one.do(MAKE_POOL.format(1)), one.do(ALLOC.format(8)), one.write(41)] == ["0", "0", "ok"]
    fd = one.do(GIVE_POOL).strip("()").split(", ")[1]
    pointer = one.do(GIVE_POINTER).split("'")[1]
    hand_over(one, fd, two)
    assert [two.do(TAKE_POOL), two.do(TAKE_POINTER.format(pointer))] == ["0", "0"]
    one.kill()
    assert two.read() == "41"  # the memory of the killed owner stays mapped in the other process
    assert used_mib(node) == CONTEXT_MIB
    assert two.do(TAKE_POOL) == "304"  # 304 is CUDA_ERROR_OPERATING_SYSTEM


EXTERNAL = (
    "class E(c.Structure): _fields_ = [('type', c.c_int), ('pad', c.c_int), ('fd', c.c_int), ('rest', c.c_char * 12), ('size', c.c_ulonglong), ('flags', c.c_uint), ('end', c.c_uint * 17)]",
    "class B(c.Structure): _fields_ = [('offset', c.c_ulonglong), ('size', c.c_ulonglong), ('flags', c.c_uint), ('end', c.c_uint * 17)]",
    "import os; x, p, m = c.c_void_p(), c.c_uint64(), c.c_uint64(); assert c.sizeof(E) == 104 and c.sizeof(B) == 88",
)
IMPORT = "out = cu.raw('cuImportExternalMemory', c.byref(x), c.byref(E(type={}, fd=fd, size={} << 20)))"
BUFFER = "out = cu.raw('cuExternalMemoryGetMappedBuffer', c.byref(p), x, c.byref(B({0} << 20, {1} << 20, 0))); pointers.append(p.value)"


def test_external_memory_maps_the_exported_allocation(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    for line in VMM:
        one.do(line)
    for line in EXTERNAL:
        two.do(line)
    one.do(CREATE.format(1))
    _, fd = one.do(EXPORT).strip("()").split(", ")
    assert [one.do(MAP), one.do("pointers.append(pointers[-1] + (2 << 20))"), one.write(51)] == ["ok"] * 3
    before = used_mib(node)
    two.do("fd = os.open('/dev/null', os.O_RDWR)")
    assert [two.do(IMPORT.format(1, 4)), two.do("os.close(fd)")] == ["999", "ok"]
    hand_over(one, fd, two)
    assert [two.do(IMPORT.format(*case)) for case in ((0, 4), (4, 4), (1, 0), (1, 5), (1, 4))] == [
        *["1", NOT_SUPPORTED_TEXT, "1", "1", "0"]
    ]
    assert [two.do(BUFFER.format(*case)) for case in ((3, 2), (0, 0), (2, 2))] == ["1", "1", "0"]
    assert [two.read(), two.write(52), one.read()] == ["51", "ok", "52"]
    assert used_mib(node) == before
    assert two.do("out = cu.raw('cuMemFree_v2', c.c_uint64(pointers[-1]))") == "0"
    ended = "out = cu.raw('cuDestroyExternalMemory', x), os.path.exists(f'/proc/self/fd/{fd}')"
    assert two.do(ended) == "(0, False)"  # the driver took over the descriptor, and has closed it
    assert two.do("out = cu.raw('cuDestroyExternalMemory', None)") == INVALID_HANDLE


@pytest.mark.parametrize(
    ("driver", "in_job", "saved"),
    [("595", True, NOT_SUPPORTED), ("615", False, NOT_SUPPORTED), ("615", True, 0)],
)
def test_processes_of_a_job_that_share_memory_by_ipc_are_suspended_by_drivers_from_610_on(
    sim_node: Make, tmp_path: Path, driver: str, in_job: bool, saved: int
) -> None:
    node = sim_node("h200x1", driver=driver)
    (job := tmp_path / "job").touch()
    env = {"CUDA_CHECKPOINT_JOB_FILE": str(job)} if in_job else {}
    one, two, control = Tenant(node, env), Tenant(node, env), Controller(node)
    one.say("alloc 10")
    handle = one.do(GIVE)
    assert [take(two, handle), two.do(CLOSE)] == ["0", "0"]
    one.say("free")  # an IPC handle ends with its memory
    for tenant in (one, two):
        assert control.suspend(tenant.process.pid) == [0, 0]
        assert control.resume(tenant.process.pid) == [0, 0]
    one.say("alloc 10")
    assert take(two, one.do(GIVE)) == "0"
    assert one.write(21) == "ok"
    pids = (one.process.pid, two.process.pid)
    assert [control.call("Lock", pid) for pid in pids] == [0, 0]
    assert [control.call("Checkpoint", pid) for pid in pids] == [saved, saved]
    if saved == 0:
        assert [control.call("Restore", pid) for pid in pids] == [0, 0]
        assert [control.call("Unlock", pid) for pid in pids] == [0, 0]
        assert [two.read(), two.write(22), one.read()] == ["21", "ok", "22"]


@pytest.mark.parametrize("driver", ["595", "615"])
def test_a_process_with_a_shared_memory_pool_cannot_be_suspended(sim_node: Make, driver: str) -> None:
    node = sim_node("h200x1", driver=driver)
    one, _ = pool_tenants(node)
    control = Controller(node)
    assert [one.do(MAKE_POOL.format(1)), one.do(GIVE_POOL)[:3]] == ["0", "(0,"]
    one.do(END_POOL)
    assert control.suspend(one.process.pid) == [0, 0]
    assert control.resume(one.process.pid) == [0, 0]
    assert [one.do(MAKE_POOL.format(1)), one.do(GIVE_POOL)[:3]] == ["0", "(0,"]
    assert control.suspend(one.process.pid) == [0, NOT_SUPPORTED]
