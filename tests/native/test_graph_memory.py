"""Memory that graphs allocate when they run."""

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
class Location(c.Structure): _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Props(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("at", Location), ("rest", c.c_char * 72)]
class Node(c.Structure):
    _fields_ = [("props", Props), ("access", c.c_void_p), ("count", c.c_size_t), ("bytes", c.c_size_t),
                ("pointer", c.c_uint64)]
MIB = 1 << 20
context, stream = c.c_void_p(), c.c_void_p()
assert cuda.cuInit(0) == 0
for device in (1, 0):
    assert cuda.cuDevicePrimaryCtxRetain(c.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuStreamCreate(c.byref(stream), 1) == 0
class Graph:
    def __init__(self, *sizes):
        graph, self.exec, before = c.c_void_p(), c.c_void_p(), None
        assert cuda.cuGraphCreate(c.byref(graph), 0) == 0
        for device, size in sizes:
            node, what = c.c_void_p(), Node(Props(1, 0, Location(1, device)), None, 0, size * MIB, 0)
            after = (c.byref(before), 1) if before is not None else (None, 0)
            assert cuda.cuGraphAddMemAllocNode(c.byref(node), graph, *after, c.byref(what)) == 0
            before = node
        assert cuda.cuGraphInstantiateWithFlags(c.byref(self.exec), graph, c.c_uint64(0)) == 0
    def launch(self):
        return cuda.cuGraphLaunch(self.exec, stream)
def plain(size):
    return cuda.cuMemAlloc_v2(c.byref(c.c_uint64()), c.c_size_t(size * MIB))
both = Graph((0, 640), (1, 32))
said = {"launch": both.launch(), "plain": plain(640), "past the limit": Graph((0, 512), (1, 32)).launch()}
print(json.dumps(said))
"""
OUT_OF_MEMORY = 2


def test_memory_of_a_graph_is_claimed_on_each_of_its_devices(sim_node: Make, tmp_path: Path) -> None:
    node = sim_node("h200x8")
    limits = [DeviceLimits(device["uuid"], 1900 * MIB) for device in node.dump()["devices"][:2]]
    lease = write_lease(tmp_path, "a1", limits, os.getuid(), os.getgid())
    said = node.python(PROGRAM, {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease)})
    assert json.loads(said) == {"launch": 0, "plain": 0, "past the limit": OUT_OF_MEMORY}
