"""Eviction of physical memory that the program itself creates (cuMemCreate), as PyTorch's expandable segments
do.
"""

import sys
from collections.abc import Iterator

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import MIB, client, eventually, states
from tests.e2e.test_evict import EVICTS, LIMIT, suspend
from tests.e2e.test_move import check_at, move
from tests.e2e.test_suspend import resume
from tests.e2e.test_turns import used_mib
from vgpud.lease import read_swaps

# Holds pieces of 20 MiB in one range of addresses, each with its own content. Follows commands from standard
# input.
PROGRAM = cuda_program("""
import os, random
PIECE, PIECES = 20 << 20, 8
class Location(c.Structure): _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Flags(c.Structure):
    _fields_ = [("compression", c.c_ubyte), ("rdma", c.c_ubyte), ("usage", c.c_ushort),
                ("rest", c.c_ubyte * 4)]
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location), ("win32", c.c_void_p),
                ("flags", Flags)]
class Access(c.Structure): _fields_ = [("location", Location), ("flags", c.c_int)]
def data(at): return random.Random(at).randbytes(4096)
prop = Prop(1, 1, Location(1, 0), None, Flags(0, 1, 0))
both, read = Access(Location(1, 0), 3), Access(Location(1, 0), 1)
base, filler, handles, also = c.c_uint64(), c.c_uint64(), {}, []
def at(piece): return c.c_uint64(base.value + piece * PIECE)
def make(piece, access=both):
    handle = c.c_uint64()
    call("cuMemCreate", c.byref(handle), c.c_size_t(PIECE), c.byref(prop), c.c_uint64(0))
    call("cuMemMap", at(piece), c.c_size_t(PIECE), c.c_size_t(0), handle, c.c_uint64(0))
    call("cuMemSetAccess", at(piece), c.c_size_t(PIECE), c.byref(both), c.c_size_t(1))
    for offset in (0, PIECE - 4096):
        call("cuMemcpyHtoD_v2", c.c_uint64(at(piece).value + offset), data(piece + offset), c.c_size_t(4096))
    handles[piece] = handle
def drop(piece):
    call("cuMemUnmap", at(piece), c.c_size_t(PIECE))
    if handles[piece]: call("cuMemRelease", handles[piece])
    del handles[piece]
def whole():
    back, good = c.create_string_buffer(4096), True
    for piece in handles:
        for offset in (0, PIECE - 4096):
            call("cuMemcpyDtoH_v2", back, c.c_uint64(at(piece).value + offset), c.c_size_t(4096))
            good = good and back.raw == data(piece + offset)
    return good
begin()
none = c.c_uint64(0)
call("cuMemAddressReserve", c.byref(base), c.c_size_t(64 * PIECE), c.c_size_t(0), none, none)
for piece in range(PIECES): make(piece)
say(ready=True)
for line in sys.stdin:
    word, *rest = line.split() or ["look"]
    piece = int(rest[0]) if rest else 0
    if word == "make": make(piece)
    if word == "drop": drop(piece)
    if word == "release":
        call("cuMemRelease", handles[piece])
        handles[piece] = None
    if word == "retain":
        again = c.c_uint64()
        call("cuMemRetainAllocationHandle", c.byref(again), c.c_void_p(at(piece).value + 4096))
        if handles[piece] and again.value != handles[piece].value: sys.exit("another handle")
        handles[piece] = again
        told = Prop()
        call("cuMemGetAllocationPropertiesFromHandle", c.byref(told), again)
        if told.location.type != 1 or told.handles != 1: sys.exit("other properties")
    if word == "export":
        fd = c.c_int()
        call("cuMemExportToShareableHandle", c.byref(fd), handles[piece], 1, c.c_uint64(0))
        os.close(fd.value)
    if word == "twice":
        call("cuMemMap", at(piece + 32), c.c_size_t(PIECE), c.c_size_t(0), handles[piece], c.c_uint64(0))
    if word == "once": call("cuMemUnmap", at(piece + 32), c.c_size_t(PIECE))
    if word == "read": call("cuMemSetAccess", at(piece), c.c_size_t(PIECE), c.byref(read), c.c_size_t(1))
    if word == "write": call("cuMemSetAccess", at(piece), c.c_size_t(PIECE), c.byref(both), c.c_size_t(1))
    if word == "unmap": call("cuMemUnmap", at(piece), c.c_size_t(PIECE))
    if word == "map":
        call("cuMemMap", at(piece), c.c_size_t(PIECE), c.c_size_t(0), handles[piece], c.c_uint64(0))
        call("cuMemSetAccess", at(0), c.c_size_t(PIECES * PIECE), c.byref(both), c.c_size_t(1))
    say(whole=word in ("unmap", "read") or whole())
""")
PIECE_MIB, PIECES = 20, 8
ALL_MIB = PIECE_MIB * PIECES


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    made = make_shared_node(policy=f'{EVICTS}unevictable = "keep"\n')
    made.start()
    return made


@pytest.fixture
def tenant(node: DemoNode) -> Iterator[Tenant]:
    made = node.tenant([*LIMIT, "0"], [sys.executable, "-c", PROGRAM])
    assert made.line()["ready"]
    yield made
    assert made.end()[0] == 0
    eventually(lambda: not states(node), "its allocation goes with it")
    assert used_mib(node) == 0


def name(node: DemoNode) -> str:
    (only,) = states(node)
    return only


def do(tenant: Tenant, *words: str) -> bool:
    """Sends each word as a command. Returns whether all contents were right after each command."""
    good = True
    for word in words:
        assert tenant.process.stdin is not None
        tenant.process.stdin.write(f"{word}\n")
        tenant.process.stdin.flush()
        good = bool(tenant.line()["whole"]) and good
    return good


def movable_mib(node: DemoNode) -> int:
    (swap,) = read_swaps(node.run_dir / "leases" / name(node))
    return swap.movable_bytes // MIB


def there_and_back(node: DemoNode, tenant: Tenant, leaves_mib: int) -> None:
    """Suspends and resumes the tenant. Asserts that this much memory leaves the device, and that the contents
    are unchanged.
    """
    assert movable_mib(node) == leaves_mib
    full = used_mib(node)
    gone = suspend(node, name(node))
    assert full - used_mib(node) == leaves_mib
    assert gone.suspended_bytes // MIB == leaves_mib
    assert gone.stays_bytes // MIB == used_mib(node)
    with client(node) as calls:
        assert calls.list_devices().devices[0].memory_allocated_bytes == gone.stays_bytes
    resume(node, name(node))
    assert used_mib(node) == full
    assert do(tenant, "look")


def test_physical_memory_that_a_program_creates_and_frees_leaves_the_device_and_comes_back(
    node: DemoNode, tenant: Tenant
) -> None:
    there_and_back(node, tenant, ALL_MIB)
    assert do(tenant, "drop 3", "drop 7", "make 9")
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)
    assert do(tenant, "make 3", "retain 9", "drop 0")
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)


def test_memory_whose_handle_is_released_moves_and_is_freed_with_its_mapping(
    node: DemoNode, tenant: Tenant
) -> None:
    assert do(tenant, "release 2")
    there_and_back(node, tenant, ALL_MIB)
    assert do(tenant, "retain 2", "release 2")
    full = used_mib(node)
    assert do(tenant, "drop 2")
    assert full - used_mib(node) == PIECE_MIB
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)


def test_an_exported_handle_keeps_its_memory_on_the_device(node: DemoNode, tenant: Tenant) -> None:
    assert do(tenant, "export 4")
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)
    assert do(tenant, "unmap 4", "map 4")
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)


@pytest.mark.parametrize(("word", "undo"), [("read", "write"), ("unmap", "map")])
def test_memory_without_full_access_stays_on_the_device_until_full_access_is_restored(
    node: DemoNode, tenant: Tenant, word: str, undo: str
) -> None:
    assert do(tenant, f"{word} 5")
    assert movable_mib(node) == ALL_MIB - PIECE_MIB
    suspend(node, name(node))
    resume(node, name(node))
    assert do(tenant, f"{undo} 5")
    there_and_back(node, tenant, ALL_MIB)


def test_memory_once_mapped_at_two_addresses_is_evicted_only_after_it_is_mapped_anew(
    node: DemoNode, tenant: Tenant
) -> None:
    assert do(tenant, "twice 6")
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)
    assert do(tenant, "once 6")
    there_and_back(node, tenant, ALL_MIB - PIECE_MIB)
    assert do(tenant, "unmap 6", "map 6")
    there_and_back(node, tenant, ALL_MIB)


@needs("driver-580")
def test_a_tenant_with_physical_memory_moves_and_is_suspended_deeply(node: DemoNode, tenant: Tenant) -> None:
    for to in (3, 0):
        move(node, name(node), to)
        check_at(node, name(node), to)
        assert do(tenant, "look")
    assert suspend(node, name(node), deep=True).stays_bytes == 0
    assert used_mib(node) == 0
    resume(node, name(node))
    assert do(tenant, "look")
