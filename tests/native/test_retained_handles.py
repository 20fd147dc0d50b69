"""A program retains a memory handle by an address in the middle of the handle's mapping."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.native.harness import LIBVGPU, MIB
from tests.simnode import SimNode
from vgpud.lease import DeviceLimits, write_lease

Make = Callable[..., SimNode]

PROGRAM = """
import ctypes as c, json
cuda = c.CDLL("libcuda.so.1")
class Property(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("kind", c.c_int), ("device", c.c_int),
                ("rest", c.c_char * 64)]
SIZE = c.c_size_t(256 << 20)
physical, context = Property(1, 0, 1, 0), c.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
def held_by_its_middle():
    handle, again, at = c.c_uint64(), c.c_uint64(), c.c_uint64()
    result = cuda.cuMemCreate(c.byref(handle), SIZE, c.byref(physical), c.c_uint64(0))
    if result != 0:
        return result
    assert cuda.cuMemAddressReserve(c.byref(at), SIZE, c.c_size_t(0), c.c_uint64(0), c.c_uint64(0)) == 0
    assert cuda.cuMemMap(at, SIZE, c.c_size_t(0), handle, c.c_uint64(0)) == 0
    assert cuda.cuMemRetainAllocationHandle(c.byref(again), c.c_void_p(at.value + (2 << 20))) == 0
    assert cuda.cuMemRelease(handle) == 0 and cuda.cuMemUnmap(at, SIZE) == 0
    return result
print(json.dumps([held_by_its_middle() for _ in range(4)]))
"""
OUT_OF_MEMORY = 2


def test_physical_memory_that_a_retained_handle_holds_stays_charged(sim_node: Make, tmp_path: Path) -> None:
    node = sim_node("h200x1")
    # the limit has room for a context and two allocations of 256 MiB
    limit = DeviceLimits(node.dump()["devices"][0]["uuid"], 1200 * MIB)
    lease = write_lease(tmp_path, "a1", [limit], os.getuid(), os.getgid())
    results = json.loads(node.python(PROGRAM, {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease)}))
    assert results == [0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY]
