"""CUDA graphs, their memory, and stream capture, through ctypes on a simulated node."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.test_cuda import ask
from tests.simnode import SimNode

Make = Callable[..., SimNode]
NOT_SUPPORTED = 801

HEAD = """
from ctypes import Structure, c_int, c_uint, c_size_t, c_ubyte, c_void_p, c_float
class Kernel(Structure): _fields_ = [("func", c_void_p), ("dims", c_uint * 7), ("params", c_void_p), ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p)]
class Location(Structure): _fields_ = [("type", c_int), ("id", c_int)]
class Pool(Structure): _fields_ = [("alloc", c_int), ("handles", c_int), ("location", Location), ("win", c_void_p), ("most", c_size_t), ("usage", c.c_ushort), ("reserved", c_ubyte * 54)]
class Alloc(Structure): _fields_ = [("pool", Pool), ("access", c_void_p), ("count", c_size_t), ("bytes", c_size_t), ("dptr", c.c_uint64)]
class Set(Structure): _fields_ = [("dst", c.c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element", c_uint), ("width", c_size_t), ("height", c_size_t)]
cu.init(); ctx = cu.context(); f = cu.function()
def new(function, *args):
    p = c_void_p()
    cu(function, c.byref(p), *args)
    return p
def before(*nodes):
    return (c_void_p * len(nodes))(*[n.value for n in nodes]), size(len(nodes))
def alloc_node(graph, n, *deps):
    a = Alloc(pool=Pool(alloc=1, location=Location(1, 0)), bytes=n)
    node = c_void_p()
    cu("cuGraphAddMemAllocNode", c.byref(node), graph, *before(*deps), c.byref(a))
    return node, a.dptr
def free_node(graph, p, *deps):
    return new("cuGraphAddMemFreeNode", graph, *before(*deps), u64(p))
def kernel_node(graph, *deps):
    k = Kernel(f, (c_uint * 7)(1, 1, 1, 32, 1, 1, 0))
    return new("cuGraphAddKernelNode_v2", graph, *before(*deps), c.byref(k))
def memory():
    out = []
    for a in range(4):
        v = u64()
        cu("cuDeviceGetGraphMemAttribute", 0, a, c.byref(v))
        out.append(v.value // MIB)
    return out
def types(graph):
    n = size(64); nodes = (c_void_p * 64)()
    cu("cuGraphGetNodes", graph, nodes, c.byref(n))
    return [node_type(c_void_p(x)) for x in nodes[:n.value]]
def node_type(node):
    t = c_int()
    cu("cuGraphNodeGetType", node, c.byref(t))
    return t.value
def capture(mode=0):
    s = new("cuStreamCreate", 1)
    cu("cuStreamBeginCapture_v2", s, mode)
    return s
def end(s):
    g = c_void_p()
    return code("cuStreamEndCapture", s, c.byref(g)), g
base = used()
"""


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node()


def test_a_cuda_graph_runs_its_kernels_in_the_order_of_its_nodes(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
cu.kernel_us(2000)
g = new("cuGraphCreate", 0)
a = kernel_node(g); b = kernel_node(g, a); d = kernel_node(g, a, b)
exe = new("cuGraphInstantiateWithFlags", g, u64(0))
s, t, ms = new("cuEventCreate", 0), new("cuEventCreate", 0), c_float()
cu("cuEventRecord", s, None); cu("cuGraphLaunch", exe, None); cu("cuEventRecord", t, None)
pending = code("cuEventQuery", t)
cu("cuEventSynchronize", t); cu("cuEventElapsedTime", c.byref(ms), s, t)
cu("cuGraphNodeSetEnabled", exe, b, 0)
cu("cuEventRecord", s, None); cu("cuGraphLaunch", exe, None); cu("cuEventRecord", t, None); cu("cuEventSynchronize", t)
half = c_float(); cu("cuEventElapsedTime", c.byref(half), s, t)
n, e = size(), size()
cu("cuGraphGetRootNodes", g, None, c.byref(n)); cu("cuGraphGetEdges", g, None, None, c.byref(e))
cycle = code("cuGraphAddDependencies", g, c.byref(d), c.byref(a), size(1))
out = [pending, ms.value, half.value, n.value, e.value, cycle, code("cuGraphInstantiateWithFlags", c.byref(c_void_p()), g, u64(0)),
  code("cuGraphLaunch", None, None), code("cuGraphDestroy", g), code("cuGraphLaunch", exe, None), code("cuGraphExecDestroy", exe), code("cuCtxSynchronize")]
""",
    )
    assert isinstance(out, list)
    assert out[0] == 600  # 600 is "not ready": a launch only queues the graph
    assert 6.0 <= out[1] < 7.0 and 4.0 <= out[2] < 5.0
    assert out[3:] == [1, 3, 0, 1, 1, 0, 0, 0, 0]


def test_memory_of_a_cuda_graph_is_charged_at_launch_and_freed_by_a_trim(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
out = []
def now(): return [used() - base, *memory()]
g = new("cuGraphCreate", 0)
a, p = alloc_node(g, 64 * MIB)
k = kernel_node(g, a)
fr = free_node(g, p, k)
b, q = alloc_node(g, 32 * MIB, fr)
exe = new("cuGraphInstantiateWithFlags", g, u64(0))
out.append(now())
out.append([code("cuGraphClone", c.byref(c_void_p()), g), code("cuGraphInstantiateWithFlags", c.byref(c_void_p()), g, u64(0)), code("cuMemFree_v2", u64(q))])
cu("cuGraphLaunch", exe, None); cu("cuCtxSynchronize")
out.append(now())
out.append([code("cuMemsetD8_v2", u64(q), 1, size(32 * MIB)), code("cuMemsetD8_v2", u64(p), 1, size(1)), code("cuGraphLaunch", exe, None)])
cu("cuMemFreeAsync", u64(q), None); cu("cuCtxSynchronize")
out.append(now())
cu("cuGraphLaunch", exe, None); cu("cuMemFree_v2", u64(q)); cu("cuCtxSynchronize")
cu("cuDeviceGraphMemTrim", 0)
out.append(now())
cu("cuGraphExecDestroy", exe); cu("cuGraphDestroy", g)
out.append(used() - base)
""",
    )
    assert out == [
        [0, 0, 0, 0, 0],  # MiB at five moments; a graph has no memory before its first launch
        [NOT_SUPPORTED, NOT_SUPPORTED, 1],
        [64, 64, 64, 64, 64],  # the second allocation reuses the memory that the first has freed
        # a live allocation can be used and a freed one cannot; a second launch would allocate twice
        [0, 1, 1],
        [64, 64, 64, 64, 64],  # all reserved memory counts as used, as on an H200
        [0, 0, 64, 0, 64],
        0,
    ]


def test_a_cuda_graph_launch_without_enough_memory_is_refused_as_a_whole(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
g = new("cuGraphCreate", 0)
a, p = alloc_node(g, 100 << 30); alloc_node(g, 100 << 30, a)
exe = new("cuGraphInstantiateWithFlags", g, u64(0))
out = [code("cuGraphLaunch", exe, None), used() - base - memory()[2], code("cuGraphLaunch", exe, None)]
cu("cuDeviceGraphMemTrim", 0)
auto = new("cuGraphCreate", 0)
alloc_node(auto, 8 * MIB)
exe = new("cuGraphInstantiateWithFlags", auto, u64(1))
out += [code("cuGraphLaunch", exe, None), code("cuGraphLaunch", exe, None), memory()[0]]
""",
    )
    assert out == [2, 0, 2, 0, 0, 32]


def test_a_stream_capture_records_the_work_of_its_stream(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
x, y = cu.alloc(MIB), cu.alloc(MIB)
s, other = capture(), new("cuStreamCreate", 1)
host = c.CFUNCTYPE(None, c_void_p)
ran = []
call = host(lambda _: ran.append(1))
p, ev, done = u64(), new("cuEventCreate", 2), new("cuEventCreate", 2)
seen = used()
cu("cuMemAllocAsync", c.byref(p), size(4 * MIB), s)
cu("cuMemsetD8Async", p, 7, size(4096), s)
cu("cuEventRecord", ev, s); cu("cuStreamWaitEvent", other, ev, 0)
cu("cuLaunchKernel", f, 1, 1, 1, 32, 1, 1, 0, other, None, None)
cu("cuMemcpyDtoDAsync_v2", u64(x), p, size(4096), s)
cu("cuEventRecord", done, other); cu("cuStreamWaitEvent", s, done, 0)
cu("cuLaunchHostFunc", s, call, None)
cu("cuMemFreeAsync", p, s)
status, ident, inner, deps, n = c_int(), u64(), c_void_p(), c_void_p(), size()
cu("cuStreamGetCaptureInfo_v2", other, c.byref(status), c.byref(ident), c.byref(inner), c.byref(deps), c.byref(n))
out = [status.value, ident.value > 0, n.value, used() - seen, list(ran)]
result, g = end(s)
out += [result, g.value == inner.value, types(g)]
exe = new("cuGraphInstantiateWithFlags", g, u64(0))
cu("cuGraphLaunch", exe, s); cu("cuStreamSynchronize", s)
back = c.create_string_buffer(4)
cu("cuMemcpyDtoH_v2", back, u64(x + 4092), size(4))
out += [back.raw.hex(), list(ran), memory()]
""",
    )
    assert out == [
        *[1, True, 1, 0, []],
        *[0, True, [10, 2, 0, 1, 3, 11]],  # nodes: alloc, memset, kernel, copy, host, free
        *["07070707", [1], [32, 32, 32, 32]],
    ]


def test_calls_forbidden_during_a_stream_capture_are_refused(node: SimNode) -> None:
    """Codes: 900 unsupported, 901 invalidated, 903 unmatched, 905 isolation, 906 implicit, 907 captured
    event.
    """
    out = ask(
        node,
        HEAD
        + """
def spoil(act, mode=0):
    s = capture(mode)
    return [act(s), end(s)[0]]
out = [
  spoil(lambda s: code("cuStreamSynchronize", s)),
  spoil(lambda s: code("cuStreamQuery", s)),
  spoil(lambda s: code("cuMemAlloc_v2", c.byref(u64()), size(1))),
  spoil(lambda s: code("cuMemAlloc_v2", c.byref(u64()), size(1)), 2),
  spoil(lambda s: code("cuCtxSynchronize")),
  spoil(lambda s: code("cuStreamBeginCapture_v2", s, 0)),
  spoil(lambda s: (cu("cuEventRecord", ev, s), code("cuEventQuery", ev))[1]) if (ev := new("cuEventCreate", 0)) else 0,
  spoil(lambda s: code("cuStreamWaitEvent", s, new("cuEventCreate", 0), 0)),
]
s, other, ev = capture(), new("cuStreamCreate", 1), new("cuEventCreate", 0)
cu("cuEventRecord", ev, s); cu("cuStreamWaitEvent", other, ev, 0)
cu("cuLaunchKernel", f, 1, 1, 1, 32, 1, 1, 0, other, None, None)
out += [[end(other)[0], end(s)[0]]]
blocking = new("cuStreamCreate", 0)
cu("cuStreamBeginCapture_v2", blocking, 0)
out += [[code("cuLaunchKernel", f, 1, 1, 1, 32, 1, 1, 0, None, None, None), end(blocking)[0]],
  [code("cuStreamBeginCapture_v2", None, 0), end(blocking)[0], code("cuLaunchKernel", f, 1, 1, 1, 32, 1, 1, 0, None, None, None)]]
""",
    )
    assert out == [
        *[[900, 901], [900, 901], [900, 901], [0, 0], [900, 901]],
        *[[401, 0], [907, 901], [905, 901]],
        *[[903, 901], [906, 901], [900, 401, 0]],
    ]


def test_an_instantiated_cuda_graph_is_updated_in_place(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
class Info(Structure): _fields_ = [("result", c_int), ("node", c_void_p), ("source", c_void_p)]
x = cu.alloc(MIB)
def filled(value, extra=False):
    g = new("cuGraphCreate", 0)
    n = new("cuGraphAddMemsetNode", g, None, size(0), c.byref(Set(x, 0, value, 1, 16, 1)), ctx)
    if extra:
        new("cuGraphAddEmptyNode", g, None, size(0))
    return g, n
def byte():
    b = c.create_string_buffer(1)
    cu("cuMemcpyDtoH_v2", b, u64(x), size(1))
    return b.raw[0]
g, n = filled(1)
exe = new("cuGraphInstantiateWithFlags", g, u64(0))
def run():
    cu("cuGraphLaunch", exe, None)
    return byte()
info = Info()
out = [run()]
out += [code("cuGraphExecUpdate_v2", exe, filled(2)[0], c.byref(info)), info.result, run()]
out += [code("cuGraphExecUpdate_v2", exe, filled(3, True)[0], c.byref(info)), info.result, run()]
out += [code("cuGraphExecMemsetNodeSetParams", exe, n, c.byref(Set(x, 0, 9, 1, 16, 1)), ctx), run()]
parent = new("cuGraphCreate", 0)
new("cuGraphAddChildGraphNode", parent, None, size(0), filled(5)[0])
exe = new("cuGraphInstantiateWithFlags", parent, u64(0))
out += [run()]
twin = new("cuGraphClone", g)
out += [code("cuGraphNodeFindInClone", c.byref(c_void_p()), n, twin)]
""",
    )
    assert out == [1, 0, 0, 2, 910, 2, 2, 0, 9, 5, 0]


def test_user_objects_end_with_the_cuda_graphs_that_hold_them(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
ended = []
destroy = c.CFUNCTYPE(None, c_void_p)(lambda p: ended.append(p))
o = c_void_p()
cu("cuUserObjectCreate", c.byref(o), c_void_p(42), destroy, 1, 1)
g = new("cuGraphCreate", 0)
cu("cuGraphRetainUserObject", g, o, 1, 1)
out = [list(ended)]
cu("cuGraphDestroy", g)
out += [list(ended)]
""",
    )
    assert out == [[], [42]]
