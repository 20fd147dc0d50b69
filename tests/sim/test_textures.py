"""Texture and surface objects: what they can be made of, and the queries about them."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.test_cuda import ask
from tests.simnode import SimNode

Make = Callable[..., SimNode]

INVALID_HANDLE = 400

HEAD = """
from ctypes import Structure, c_int, c_uint, c_size_t, c_float, c_ubyte
class Array3(Structure): _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_int), ("channels", c_uint), ("flags", c_uint)]
class Linear(Structure): _fields_ = [("p", c.c_uint64), ("format", c_int), ("channels", c_uint), ("a", c_size_t), ("b", c_size_t), ("pitch", c_size_t)]
class Any(c.Union): _fields_ = [("handle", c.c_void_p), ("linear", Linear), ("all", c_int * 32)]
class Resource(Structure): _fields_ = [("type", c_int), ("of", Any), ("flags", c_uint)]
class Texture(Structure): _fields_ = [("address", c_int * 3), ("filter", c_int), ("flags", c_uint), ("anisotropy", c_uint), ("mipmap", c_int), ("bias", c_float * 3), ("border", c_float * 4), ("rest", c_int * 12)]
class View(Structure): _fields_ = [("format", c_int), ("size", c_size_t * 3), ("range", c_uint * 4), ("rest", c_uint * 16)]
ARRAY, MIPMAP, LINEAR, PITCH2D = range(4)
def array(flags=0, channels=4):
    a = c.c_void_p()
    cu("cuArray3DCreate_v2", c.byref(a), c.byref(Array3(64, 64, 0, 0x20, channels, flags)))
    return a
def of(type, handle):
    r = Resource(type=type)
    r.of.handle = handle if handle is None else handle.value
    return r
def linear(p, size, format=0x20, channels=4):
    r = Resource(type=LINEAR)
    r.of.linear = Linear(p, format, channels, size)
    return r
def rows(p, width, height, pitch):
    r = Resource(type=PITCH2D)
    r.of.linear = Linear(p, 0x20, 1, width, height, pitch)
    return r
t = u64()
def make(r, texture=Texture(), view=None):
    return code("cuTexObjectCreate", c.byref(t), c.byref(r), texture and c.byref(texture), view and c.byref(view))
cu.init(); cu.context()
assert c.sizeof(Resource) == 144 and c.sizeof(Texture) == 104 and c.sizeof(View) == 112
"""


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x1")


def test_textures_are_made_of_arrays_and_memory(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
a, m, p = array(), c.c_void_p(), cu.alloc(4 * MIB)
cu("cuMipmappedArrayCreate", c.byref(m), c.byref(Array3(64, 64, 0, 0x20, 4, 0)), 3)
before = used()
good = [make(of(ARRAY, a)), make(of(MIPMAP, m)), make(linear(p, 1 << 20)), make(linear(p + 512, 4)), make(linear(p, 0)), make(rows(p, 100, 50, 416)), make(rows(p, 105, 50, 416)), make(rows(p, 100, 0, 416)), make(linear(p, 64), view=View()), make(of(ARRAY, a), view=View(3, (c_size_t * 3)(64, 64)))]
bad = [make(of(ARRAY, None)), make(of(ARRAY, m)), make(of(MIPMAP, a)), make(of(7, a))]
bad += [make(linear(p + 16, 64)), make(linear(p, 5 * MIB)), make(linear(p, 64, 0x99)), make(linear(p, 64, 0x20, 3)), make(linear(0x1000, 64))]
bad += [make(rows(p, 100, 50, 417)), make(rows(p, 100, 20000, 416))]
bad += [make(of(ARRAY, a), Texture(filter=2)), make(of(ARRAY, a), Texture(address=(c_int * 3)(4))), make(of(ARRAY, a), Texture(flags=0x100)), make(of(ARRAY, a), None)]
out = dict(good=good, bad=bad, cost=used() - before)
""",
    )
    assert out == {
        "good": [0] * 10,
        "bad": [INVALID_HANDLE] * 3 + [1] * 12,
        "cost": 0,
    }


def test_a_texture_returns_its_resource_descriptor(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
a = array()
made = make(of(ARRAY, a), Texture((c_int * 3)(1, 2, 3), 1, 2, 16), View(3, (c_size_t * 3)(64, 64)))
r, x, v, s = Resource(), Texture(), View(), u64(t.value)
told = [code("cuTexObjectGetResourceDesc", c.byref(r), s), code("cuTexObjectGetTextureDesc", c.byref(x), s), code("cuTexObjectGetResourceViewDesc", c.byref(v), s)]
told += [r.of.handle == a.value, list(x.address), x.filter, x.flags, x.anisotropy, v.size[1]]
make(of(ARRAY, a))
without = [code("cuTexObjectGetResourceViewDesc", c.byref(v), t), v.format]
ended = [code("cuSurfObjectDestroy", t), code("cuTexObjectDestroy", t), code("cuTexObjectDestroy", t), code("cuTexObjectGetTextureDesc", c.byref(x), t), code("cuTexObjectDestroy", s)]
out = [made, told, without, ended]
""",
    )
    assert out == [0, [0, 0, 0, True, [1, 2, 3], 1, 2, 16, 64], [0, 0], [1, 0, 1, 1, 0]]


def test_surfaces_are_made_of_arrays(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
a, b, s, r = array(2), array(), u64(), Resource()
def surface(r):
    return code("cuSurfObjectCreate", c.byref(s), c.byref(r))
out = [surface(of(ARRAY, b)), surface(linear(cu.alloc(64), 64)), surface(of(ARRAY, None)), surface(of(ARRAY, a)), code("cuSurfObjectGetResourceDesc", c.byref(r), s),
  r.of.handle == a.value, code("cuTexObjectDestroy", s), code("cuSurfObjectDestroy", s), code("cuSurfObjectDestroy", s)]
""",
    )
    assert out == [0, 1, INVALID_HANDLE, 0, 0, True, 1, 0, 1]
