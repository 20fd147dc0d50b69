"""Memory that graphs allocate when they run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native.harness import LIBVGPU, MIB
from tests.simnode import SimNode
from vgpud.lease import DeviceLimits, write_lease

Make = Callable[..., SimNode]

PROGRAM = """
import ctypes as c, json, threading
cuda = c.CDLL("libcuda.so.1")
class Location(c.Structure): _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Props(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("at", Location), ("rest", c.c_char * 72)]
class Node(c.Structure):
    _fields_ = [("props", Props), ("access", c.c_void_p), ("count", c.c_size_t), ("bytes", c.c_size_t),
                ("pointer", c.c_uint64)]
class Host(c.Structure): _fields_ = [("call", c.CFUNCTYPE(None, c.c_void_p)), ("argument", c.c_void_p)]
MIB = 1 << 20
context, stream = c.c_void_p(), c.c_void_p()
assert cuda.cuInit(0) == 0
for device in (1, 0):
    assert cuda.cuDevicePrimaryCtxRetain(c.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuStreamCreate(c.byref(stream), 1) == 0
class Graph:
    # Allocations one behind the other; with `frees` the graph frees each. The graph first calls `wait`.
    def __init__(self, *sizes, frees=False, wait=None):
        graph, self.exec, before = c.c_void_p(), c.c_void_p(), None
        assert cuda.cuGraphCreate(c.byref(graph), 0) == 0
        if wait is not None:
            before, self.host = c.c_void_p(), Host(Host._fields_[0][1](lambda _: wait()), None)
            assert cuda.cuGraphAddHostNode(c.byref(before), graph, None, 0, c.byref(self.host)) == 0
        for device, size in sizes:
            node, what = c.c_void_p(), Node(Props(1, 0, Location(1, device)), None, 0, size * MIB, 0)
            after = (c.byref(before), 1) if before is not None else (None, 0)
            assert cuda.cuGraphAddMemAllocNode(c.byref(node), graph, *after, c.byref(what)) == 0
            before, self.pointer = node, c.c_uint64(what.pointer)
            if frees:
                end = c.c_void_p()
                assert cuda.cuGraphAddMemFreeNode(c.byref(end), graph, c.byref(node), 1, self.pointer) == 0
                before = end
        assert cuda.cuGraphInstantiateWithFlags(c.byref(self.exec), graph, c.c_uint64(0)) == 0
    def launch(self, on=None):
        return cuda.cuGraphLaunch(self.exec, on or stream)
    def free(self):
        return cuda.cuMemFree_v2(self.pointer)
    def destroy(self):
        return cuda.cuGraphExecDestroy(self.exec)
def plain(size):
    return cuda.cuMemAlloc_v2(c.byref(c.c_uint64()), c.c_size_t(size * MIB))
def held():
    value = c.c_uint64()
    assert cuda.cuDeviceGetGraphMemAttribute(0, 2, c.byref(value)) == 0
    return value.value // MIB
"""
OUT_OF_MEMORY = 2


LIMIT_MIB = 1900


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x8")


@pytest.fixture
def say(node: SimNode, tmp_path: Path) -> Callable[[str], Any]:
    """Runs a program under the memory limit and returns the value of its last line."""
    limits = [DeviceLimits(device["uuid"], LIMIT_MIB * MIB) for device in node.dump()["devices"][:2]]
    lease = write_lease(tmp_path, "a1", limits, os.getuid(), os.getgid())
    env = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease)}
    return lambda steps: json.loads(node.python(f"{PROGRAM}\n{steps}\nprint(json.dumps(said))", env))


def test_memory_of_a_cuda_graph_is_charged_on_each_of_its_devices(say: Callable[[str], Any]) -> None:
    steps = """
both = Graph((0, 640), (1, 32))
said = [both.launch(), plain(640), Graph((0, 512), (1, 32)).launch()]"""
    assert say(steps) == [0, 0, OUT_OF_MEMORY]


def test_a_cuda_graph_whose_memory_another_graph_holds_needs_free_memory_to_run_again(
    say: Callable[[str], Any],
) -> None:
    """The second graph takes the memory of the first graph and keeps it. The first graph can run again in
    that memory only after the second has freed it.
    """
    steps = """
first, second = Graph((0, 512), frees=True), Graph((0, 512))
said = [first.launch(), second.launch(), plain(512), held()]
said += [first.launch(), held(), second.free(), first.launch(), held()]"""
    assert say(steps) == [0, 0, 0, 512, OUT_OF_MEMORY, 512, 0, 0, 512]


def test_cuda_graphs_that_fit_one_after_the_other_run(say: Callable[[str], Any]) -> None:
    """The limit has no room for all graphs together. Each graph runs in the memory that the previous one has
    freed.
    """
    steps = """
graphs = [Graph((0, size), frees=True) for size in (512, 640, 576)]
assert plain(512) == 0
said = [[graph.launch() for graph in graphs] for _ in range(3)] + [held() < 1024]"""
    assert say(steps) == [[0, 0, 0], [0, 0, 0], [0, 0, 0], True]


def test_unused_memory_of_cuda_graphs_is_given_to_other_allocations(say: Callable[[str], Any]) -> None:
    steps = """
graph = Graph((0, 640), frees=True)
said = [graph.launch(), held(), plain(800), held(), graph.launch()]"""
    assert say(steps) == [0, 640, 0, 0, OUT_OF_MEMORY]


def test_two_cuda_graphs_that_alternate_on_two_streams_need_no_room_beyond_their_sum(
    say: Callable[[str], Any],
) -> None:
    """The memory that the driver has for both graphs is enough, so further launches are charged nothing."""
    steps = """
other = c.c_void_p()
assert cuda.cuStreamCreate(c.byref(other), 1) == 0
keeper, frees = Graph((0, 256)), Graph((0, 256), frees=True)
said = [keeper.launch(), frees.launch(other), held(), plain(700)]
said += [frees.launch(on) for on in (stream, other, stream)]
said += [keeper.free(), keeper.launch(other), held()]"""
    assert say(steps) == [0, 0, 512, 0, 0, 0, 0, 0, 0, 512]


def test_the_next_cuda_graph_can_use_the_memory_of_a_destroyed_one(say: Callable[[str], Any]) -> None:
    steps = """
assert plain(512) == 0
said = []
for _ in range(5):
    graph = Graph((0, 576), frees=True)
    said += [graph.launch(), graph.launch(), graph.destroy()]
said.append(held())"""
    assert say(steps) == [0] * 15 + [576]


def test_small_allocations_of_a_cuda_graph_are_charged_by_their_sum_and_not_one_by_one(
    say: Callable[[str], Any],
) -> None:
    steps = """
graph = Graph(*[(0, 1)] * 64)
said = [plain(1024), graph.launch(), held() <= 128]"""
    assert say(steps) == [0, 0, True]


def test_graph_memory_that_a_launch_of_another_thread_may_need_is_not_given_away(
    say: Callable[[str], Any],
) -> None:
    """A graph's launch relies on the memory of its last launch. Meanwhile a graph on another stream takes
    that memory and keeps it. The room for the first graph must not be given to a third allocation.
    """
    steps = """
entered, go, results, other = threading.Event(), threading.Event(), [], c.c_void_p()
def wait():
    entered.set()
    assert go.wait(60)
assert cuda.cuStreamCreate(c.byref(other), 1) == 0
first, second = Graph((0, 512), frees=True, wait=wait), Graph((0, 512))
go.set()
said = [first.launch()]
entered.clear(), go.clear()
launching = threading.Thread(target=lambda: results.append(first.launch()))
launching.start()
assert entered.wait(60)
said += [second.launch(other), plain(512)]
go.set()
launching.join()
said += results + [held(), plain(320)]"""
    assert say(steps) == [0, 0, OUT_OF_MEMORY, 0, 1024, 0]


def test_a_trim_keeps_the_graph_memory_that_a_launch_of_another_thread_needs(
    say: Callable[[str], Any],
) -> None:
    steps = """
entered, go, results = threading.Event(), threading.Event(), []
def wait():
    entered.set()
    assert go.wait(60)
first = Graph((0, 512), frees=True, wait=wait)
go.set()
said = [first.launch()]
entered.clear(), go.clear()
launching = threading.Thread(target=lambda: results.append(first.launch()))
launching.start()
assert entered.wait(60)
said += [cuda.cuDeviceGraphMemTrim(0), plain(1024)]
go.set()
launching.join()
said += results + [held(), plain(800)]"""
    assert say(steps) == [0, 0, OUT_OF_MEMORY, 0, 512, 0]


def test_a_graph_launch_waits_for_the_memory_of_the_graph_before_it(
    say: Callable[[str], Any], node: SimNode
) -> None:
    """The driver cannot free the memory of a running graph. The next graph of the stream uses that memory."""
    node.sim("fault", "fail", "--function", "cuDeviceGraphMemTrim", "--code", "999", "--count", "1")
    steps = """
module, function = c.c_void_p(), c.c_void_p()
image = b".version 7.8\\n.target sm_80\\n.address_size 64\\n.visible .entry work(){ ret; }\\n"
assert cuda.cuModuleLoadData(c.byref(module), image) == 0
assert cuda.cuModuleGetFunction(c.byref(function), module, b"work") == 0
first, second = Graph((0, 640), frees=True), Graph((0, 576), frees=True)
said = [first.launch(), plain(512)]
cuda.vgpuSimSetKernelMicroseconds.argtypes = [c.c_double]
cuda.vgpuSimSetKernelMicroseconds(200000.0)
said += [cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, None, None), second.launch(), held()]"""
    assert say(steps) == [0, 0, 0, 0, 576]
