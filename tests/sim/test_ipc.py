"""Memory and events of another process: IPC handles, and VMM allocations by file descriptor."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.tenant import Tenant
from tests.sim.test_checkpoint import NOT_SUPPORTED, Controller
from tests.simnode import SimNode

Make = Callable[..., SimNode]
MIB = 1 << 20
CONTEXT_MIB = 526
NOT_READY, INVALID_HANDLE, MAP_FAILED, INVALID_CONTEXT = "600", "400", "205", "201"

#: Handle of the newest allocation, as hexadecimal digits.
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
    assert take(one, handle) == INVALID_CONTEXT  # never one's own
    assert take(two, handle) == "0"
    assert two.read() == "11"
    two.write(12)
    assert one.read() == "12"
    assert used_mib(node) == before  # charged to its owner alone
    assert take(two, handle) == "0"  # the same address, once more
    assert two.do("out = pointers[-1] == pointers[-2]") == "True"
    wrong = "out = cu.raw('cuMemFree_v2', c.c_uint64(pointers[-1]))"
    assert [two.do(wrong), two.do(CLOSE), two.read(), two.do(CLOSE)] == ["1", "0", "12", "0"]
    assert two.do("out = cu.raw('cuIpcCloseMemHandle', c.c_uint64(0))") == "1"
    assert used_mib(node) == before
    assert [two.say("alloc 100"), two.read()] == ["ok", "0"]  # new memory, whatever was mapped there


def test_a_handle_of_the_dead_opens_nothing(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    one.say("alloc 100")
    handle = one.do(GIVE)
    assert take(two, handle) == "0"
    one.kill()
    assert two.write(5) == "ok"  # what is mapped stays mapped
    assert used_mib(node) == CONTEXT_MIB
    three = Tenant(node)
    assert take(three, handle) == MAP_FAILED
    assert take(three, "00" * 64) == INVALID_HANDLE


def test_an_event_of_another_process(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    give = (
        "e = c.c_void_p(); cu('cuEventCreate', c.byref(e), {}); h = (c.c_char * 64)(); "
        "out = cu.raw('cuIpcGetEventHandle', h, e), bytes(h).hex()"
    )
    assert one.do(give.format(2)).startswith("(1,")  # not made for it
    assert (
        one.do("e = c.c_void_p(); out = cu.raw('cuEventCreate', c.byref(e), 4)") == "1"
    )  # timing must be off
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
    assert two.do("out = cu.raw('cuStreamWaitEvent', None, e, 0)") == "0"  # nobody's work any more


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


def test_a_vmm_allocation_by_file_descriptor(node: SimNode) -> None:
    one, two = Tenant(node), Tenant(node)
    for tenant in (one, two):
        for line in VMM:
            tenant.do(line)
    one.do(CREATE.format(0))
    assert one.do(EXPORT).startswith("(1,")  # not made for it
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


def test_shared_memory_keeps_a_process_from_being_suspended(node: SimNode) -> None:
    one, control = Tenant(node), Controller(node)
    one.say("alloc 10")
    one.do(GIVE)
    one.say("free")  # with the memory its handle is gone
    assert control.suspend(one.process.pid) == [0, 0]
    assert control.resume(one.process.pid) == [0, 0]
    one.say("alloc 10")
    one.do(GIVE)
    assert control.suspend(one.process.pid) == [0, NOT_SUPPORTED]
