"""Green contexts: multiprocessors (SMs) are split, described and used under the primary context, also with
libvgpu.
"""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.test_cuda import CONTEXT_MIB, INVALID_VALUE, ask
from tests.simnode import ROOT, SimNode, build_dir
from vgpud.lease import DeviceLimits, SharePolicy, write_lease

Make = Callable[..., SimNode]

NOT_READY, INVALID_CONTEXT, INVALID_HANDLE, DESTROYED = 600, 201, 400, 709
INVALID_TYPE, INVALID_CONFIGURATION = 914, 915
GREEN_MIB = 6

GREEN = """
class Resource(c.Structure):
    _fields_ = [("type", c.c_int), ("own", c.c_ubyte * 92), ("count", c.c_uint), ("least", c.c_uint), ("multiple", c.c_uint), ("rest", c.c_ubyte * 36)]
assert c.sizeof(Resource) == 144
def whole(device=0):
    r = Resource()
    cu("cuDeviceGetDevResource", device, c.byref(r), 1)
    return r
def split(least, groups=32, flags=0, of=None):
    parts, n, rest = (Resource * 32)(), c.c_uint(groups), Resource()
    result = code("cuDevSmResourceSplitByCount", parts, c.byref(n), c.byref(of or whole()), c.byref(rest), flags, least)
    return result, [p.count for p in parts[:n.value]] if result == 0 else None, rest.count, parts, rest
def describe(*resources):
    d = c.c_void_p()
    return code("cuDevResourceGenerateDesc", c.byref(d), (Resource * len(resources))(*resources), len(resources)), d
def green(d, flags=1):
    g = c.c_void_p()
    return code("cuGreenCtxCreate", c.byref(g), d, 0, flags), g
def view(g):
    ctx = c.c_void_p()
    cu("cuCtxFromGreenCtx", c.byref(ctx), g)
    return ctx
def stream_of(g, flags=1, priority=-9):
    s = c.c_void_p()
    return code("cuGreenCtxStreamCreate", c.byref(s), g, flags, priority), s
cu.init()
"""


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x1")


def test_multiprocessors_are_split_in_the_granularity_of_the_card(node: SimNode) -> None:
    out = ask(
        node,
        GREEN
        + """
w = whole()
n = c.c_uint()
asked = code("cuDevSmResourceSplitByCount", None, c.byref(n), c.byref(w), None, 0, 16), n.value
out = dict(whole=[w.type, w.count, w.least, w.multiple], sixteen=split(16)[:3], odd=split(17)[:3], none=split(0)[:3], two=split(60, 1)[:3], most=split(131)[:3], unknown=split(16, 32, 8)[:3],
  fine=split(10, 32, 1)[:3], asked=asked, wrong=[split(133)[0], split(8, 0)[0], split(8, of=Resource())[0],
  code("cuDeviceGetDevResource", 0, c.byref(w), 1000), code("cuDeviceGetDevResource", 1, c.byref(w), 1), code("cuDeviceGetDevResource", 0, None, 1),
  split(8, of=split(64)[3][0])[0]])
""",
    )
    assert out == {
        "whole": [1, 132, 8, 8],
        "sixteen": [0, [16] * 8, 4],
        "odd": [0, [24] * 5, 12],
        "none": [0, [8] * 15, 12],
        "two": [0, [64], 68],
        "most": [0, [132], 0],
        "unknown": [0, [16] * 8, 4],
        "fine": [0, [10] * 13, 2],
        "asked": [0, 8],
        "wrong": [INVALID_CONFIGURATION, 1, INVALID_TYPE, INVALID_TYPE, 101, 1, INVALID_CONFIGURATION],
    }


def test_an_older_card_splits_its_multiprocessors_into_finer_parts(sim_node: Make) -> None:
    out = ask(sim_node("t4x1"), GREEN + "w = whole()\nout = [w.count, w.least, w.multiple, split(3)[:3]]")
    assert out == [40, 2, 2, [0, [4] * 10, 0]]


def test_a_green_context_belongs_to_the_primary_context(node: SimNode) -> None:
    out = ask(
        node,
        GREEN
        + """
one, two = split(32, 2)[3][:2]
refused = [describe(one, whole())[0], describe()[0], describe(Resource())[0]]
bad, d = describe(one)
result, g = green(d)
refused += [bad, green(d, 0)[0], green(None)[0], code("cuCtxGetDevice", c.byref(c.c_int()))]
ctx, now, primary = view(g), c.c_void_p(), c.c_void_p()
cu("cuCtxSetCurrent", ctx)
cu("cuCtxGetCurrent", c.byref(now))
p = cu.alloc(8 * MIB)
held = used()
of, there = c.c_void_p(), Resource()
cu("cuPointerGetAttribute", c.byref(of), 1, u64(p))
cu("cuDevicePrimaryCtxRetain", c.byref(primary), 0)
both = describe(one, two)[1]
h = green(both)[1]
counts = []
for f, of_what in (("cuGreenCtxGetDevResource", g), ("cuGreenCtxGetDevResource", h), ("cuCtxGetDevResource", ctx), ("cuCtxGetDevResource", primary)):
    cu(f, of_what, c.byref(there), 1)
    counts.append(there.count)
ids = [u64(), u64(), u64()]
cu("cuGreenCtxGetId", g, c.byref(ids[0])); cu("cuGreenCtxGetId", None, c.byref(ids[1])); cu("cuGreenCtxGetId", h, c.byref(ids[2]))
cu("cuGreenCtxDestroy", g); cu("cuGreenCtxDestroy", h); cu("cuDevicePrimaryCtxRelease_v2", 0)
out = dict(made=result, refused=refused, current=now.value == ctx.value, owner=of.value == primary.value, held=held, counts=counts,
  ids=[ids[0].value == ids[1].value, ids[0].value != ids[2].value], after=[code("cuCtxGetDevice", c.byref(c.c_int())), code("cuGreenCtxDestroy", g), code("cuCtxSetCurrent", ctx)])
""",
    )
    assert out == {
        "made": 0,
        "refused": [0, 1, INVALID_TYPE, 0, INVALID_VALUE, INVALID_VALUE, INVALID_CONTEXT],
        "current": True,
        "owner": True,
        "held": CONTEXT_MIB + GREEN_MIB + 8,
        "counts": [32, 64, 32, 132],
        "ids": [True, True],
        "after": [DESTROYED, INVALID_CONTEXT, INVALID_CONTEXT],
    }
    assert node.dump()["processes"] == []


STREAMS = (
    GREEN
    + """
parts = split(32, 2)[3]
g, h = green(describe(parts[0])[1])[1], green(describe(parts[1])[1])[1]
primary = c.c_void_p()
cu("cuDevicePrimaryCtxRetain", c.byref(primary), 0)
cu("cuCtxSetCurrent", primary)
f = cu.function()
cu.kernel_us(200000)
def launch(s):
    return code("cuLaunchKernel", f, 1, 1, 1, 32, 1, 1, 0, s, None, None)
refused = [stream_of(g, 0)[0], stream_of(None)[0]]
(_, s), (_, t) = stream_of(g), stream_of(h)
"""
)


def test_a_green_context_has_its_own_streams(node: SimNode) -> None:
    out = ask(
        node,
        STREAMS
        + """
e, priority, ctx, of, plain = c.c_void_p(), c.c_int(), c.c_void_p(), c.c_void_p(), c.c_void_p()
cu("cuStreamGetPriority", s, c.byref(priority))
cu("cuStreamGetCtx", s, c.byref(ctx)); cu("cuStreamGetGreenCtx", s, c.byref(of))
mine = [priority.value, ctx.value == view(g).value, of.value == g.value]
cu("cuStreamGetCtx_v2", s, c.byref(ctx), c.byref(of))
mine += [ctx.value == primary.value, of.value == g.value]
cu("cuStreamCreate", c.byref(plain), 1); cu("cuStreamGetGreenCtx", plain, c.byref(of))
mine.append(of.value)
cu("cuEventCreate", c.byref(e), 2)
order = [launch(s), launch(t), launch(t)]
cu("cuGreenCtxRecordEvent", g, e)
order += [code("cuGreenCtxWaitEvent", h, e), code("cuEventQuery", e)]
cu("cuEventSynchronize", e)
order += [code("cuStreamQuery", s), code("cuStreamQuery", t), code("cuCtxSynchronize_v2", view(g)), code("cuStreamQuery", t)]
cu("cuCtxRecordEvent", view(h), e)
order += [code("cuEventQuery", e), code("cuCtxWaitEvent", primary, e), code("cuCtxRecordEvent", None, e), code("cuCtxRecordEvent", primary, None)]
cu("cuCtxSynchronize")
order.append(code("cuStreamQuery", t))
cu("cuStreamBeginCapture_v2", s, 2)
state = c.c_int()
cu("cuGreenCtxDestroy", g)
orphaned = [launch(s), code("cuStreamQuery", s), launch(t), code("cuStreamDestroy_v2", s)]
out = dict(refused=refused, mine=mine, order=order, orphaned=orphaned)
""",
    )
    assert out == {
        "refused": [INVALID_VALUE, INVALID_CONTEXT],
        "mine": [-5, True, True, True, True, None],
        "order": [
            *[0, 0, 0, 0, NOT_READY, 0, NOT_READY, 0, NOT_READY],
            *[NOT_READY, 0, INVALID_CONTEXT, INVALID_HANDLE, 0],
        ],
        "orphaned": [DESTROYED, DESTROYED, 0, DESTROYED],
    }


def test_green_contexts_end_with_the_primary_context(node: SimNode) -> None:
    out = ask(
        node,
        STREAMS + "cu('cuDevicePrimaryCtxReset_v2', 0)\n"
        "out = [launch(s), code('cuGreenCtxDestroy', g), code('cuGreenCtxRecordEvent', h, None)]\n"
        "cu.context(); out.append(used())",
    )
    assert out == [DESTROYED, INVALID_CONTEXT, INVALID_CONTEXT, CONTEXT_MIB]


def lease(node: SimNode, folder: Path, limit: int) -> dict[str, str]:
    """Environment variables that run a program under libvgpu with a limit of `limit` bytes on the first
    device.
    """
    uuid = node.dump()["devices"][0]["uuid"]
    limits = [DeviceLimits(uuid, limit, 10000, SharePolicy.NONE)]
    made = write_lease(folder, "a", limits, uid=os.getuid(), gid=os.getgid())
    return {"LD_PRELOAD": str(build_dir() / "lib" / "libvgpu.so"), "VGPU_LEASE": str(made)}


def test_a_tenant_under_libvgpu_can_use_green_contexts(node: SimNode, tmp_path: Path) -> None:
    """Launches in streams of green contexts run like others, and memory allocated in a green context counts
    against the limit.
    """
    out = ask(
        node,
        STREAMS
        + """
out = [launch(s), launch(t), code("cuCtxSynchronize")]
cu("cuCtxSetCurrent", view(g))
total = cu.info()[1] // MIB
p = cu.alloc(400 * MIB)
out += [total, code("cuMemAlloc_v2", c.byref(u64()), size(400 * MIB)), code("cuMemFree_v2", u64(p)), launch(None), code("cuCtxSynchronize")]
cu("cuStreamDestroy_v2", s); cu("cuGreenCtxDestroy", g)
out.append(code("cuMemAlloc_v2", c.byref(u64()), size(4)))
""",
        lease(node, tmp_path, 1 << 30),
    )
    assert out == [0, 0, 0, 1024, 2, 0, 0, 0, DESTROYED]


KEPT = """
many = code("cuMemAlloc_v2", c.byref(u64()), size(400 * MIB))  # no context yet
_, g = green(describe(split(32, 2)[3][0])[1])
cu("cuCtxSetCurrent", view(g))
held = [used()]
cu.alloc(300 * MIB)
primary = c.c_void_p()
cu("cuDevicePrimaryCtxRetain", c.byref(primary), 0); cu("cuDevicePrimaryCtxRelease_v2", 0)
held.append(used())
more = code("cuMemAlloc_v2", c.byref(u64()), size(300 * MIB))
stream = [cu.raw("cuCtxSetCurrent", None), stream_of(g)[0]]
cu("cuGreenCtxDestroy", g)
cu("cuDevicePrimaryCtxRetain", c.byref(primary), 0); cu("cuCtxSetCurrent", primary)
out = [many, held, more, stream, used(), code("cuMemAlloc_v2", c.byref(u64()), size(400 * MIB))]
"""


def test_under_libvgpu_a_primary_context_lives_as_long_as_its_green_contexts(
    node: SimNode, tmp_path: Path
) -> None:
    """Objects of the green context stay charged after the program releases the primary context. They are
    freed with the green context.
    """
    out = ask(node, GREEN + KEPT, lease(node, tmp_path, 1 << 30))
    green = CONTEXT_MIB + GREEN_MIB
    assert out == [INVALID_CONTEXT, [green, green + 300], 2, [0, 0], CONTEXT_MIB, 0]


def test_under_libvgpu_the_primary_context_of_a_green_context_is_charged(
    node: SimNode, tmp_path: Path
) -> None:
    body = "out = green(describe(split(32, 2)[3][0])[1])[0]"
    assert ask(node, GREEN + body, lease(node, tmp_path, 256 << 20)) == 2
    assert node.dump()["processes"] == []


AT_THE_LIMIT = """
primary, d = c.c_void_p(), describe(split(32, 2)[3][0])[1]
cu("cuDevicePrimaryCtxRetain", c.byref(primary), 0); cu("cuCtxSetCurrent", primary)
first, g = green(d)
held = [used()]
out = [first, green(d)[0]]
held.append(used())
if first == 0:
    cu("cuGreenCtxDestroy", g)
held.append(used())
out += [held, code("cuMemAlloc_v2", c.byref(u64()), size(10 * MIB)), green(d)[0]]
"""


def test_under_libvgpu_a_green_context_is_charged_its_memory(node: SimNode, tmp_path: Path) -> None:
    """The memory of a green context is charged when the context is made, and is given back at its end."""
    out = ask(node, GREEN + AT_THE_LIMIT, lease(node, tmp_path, CONTEXT_MIB + 10 << 20))
    green = CONTEXT_MIB + GREEN_MIB
    assert out == [0, 2, [green, green, CONTEXT_MIB], 0, 2]


def test_under_libvgpu_a_green_context_larger_than_its_claim_is_destroyed(
    sim_node: Make, tmp_path: Path
) -> None:
    """The green contexts of this device are larger than those of an H200, and so larger than what libvgpu
    charges for them in advance.
    """
    profile = tmp_path / "dear.toml"
    text = (ROOT / "configs/sim/h200x1.toml").read_text()
    profile.write_text(text.replace("green_context_bytes = 6291456", "green_context_bytes = 20971520"))
    node = sim_node(str(profile))
    out = ask(node, GREEN + AT_THE_LIMIT, lease(node, tmp_path, CONTEXT_MIB + 10 << 20))
    assert out == [2, 2, [CONTEXT_MIB] * 3, 0, 2]
