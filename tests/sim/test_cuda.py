"""The simulated driver through ctypes, in one process."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from tests.simnode import ROOT, SimNode

Make = Callable[..., SimNode]

HEAD = """
import ctypes as c, json, os, time
from tests.sim.cuda import MIB, PTX, CudaError, Driver
cu = Driver()
def code(function, *args):
    return cu.raw(function, *args)
def used():
    free, total = cu.info()
    return (total - free) // MIB
u64, size = c.c_uint64, c.c_size_t
"""
CONTEXT_MIB = 526
OUT_OF_MEMORY, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED = 2, 1, 500, 801


def ask(node: SimNode, body: str, env: Mapping[str, str] | None = None) -> object:
    code = HEAD + body + "\nprint(json.dumps(out))"
    return json.loads(node.python(code, {"PYTHONPATH": str(ROOT), **(env or {})}))


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node()


def test_device_attributes_match_those_recorded_on_a_card(node: SimNode) -> None:
    out = ask(
        node,
        """
cu.init()
name, uuid, total, bus, dev = c.create_string_buffer(64), c.create_string_buffer(16), size(), c.create_string_buffer(16), c.c_int()
cu("cuDeviceGetName", name, 64, 0); cu("cuDeviceGetUuid_v2", uuid, 3); cu("cuDeviceTotalMem_v2", c.byref(total), 0)
cu("cuDeviceGetPCIBusId", bus, 16, 3); cu("cuDeviceGetByPCIBusId", c.byref(dev), bus)
attribute = lambda a: cu.integer("cuDeviceGetAttribute", a, 0)
out = dict(count=cu.integer("cuDeviceGetCount"), version=cu.integer("cuDriverGetVersion"), name=name.value.decode(), uuid=uuid.raw.hex(),
  total=total.value, bus=bus.value.decode(), dev=dev.value, attributes=[attribute(a) for a in (16, 75, 76, 10, 1, 39)],
  bad=[code("cuDeviceGet", c.byref(dev), 8), code("cuDeviceGetAttribute", c.byref(dev), 100000, 0), code("cuDeviceGetName", None, 64, 0)])
""",
    )
    uuid = node.dump()["devices"][3]["uuid"].removeprefix("GPU-").replace("-", "")
    assert out == {
        "count": 8,
        "version": 13000,
        "name": "NVIDIA H200",
        "uuid": uuid,
        "total": 150754820096 - 644939776,
        "bus": "0000:61:00.0",
        "dev": 3,
        "attributes": [132, 9, 0, 32, 1024, 2048],
        "bad": [101, 1, 1],
    }


def test_cuda_visible_devices_selects_and_orders_devices(node: SimNode) -> None:
    uuids = [d["uuid"] for d in node.dump()["devices"]]
    body = """
first = code("cuInit", 0)
out = []
for i in range(cu.integer("cuDeviceGetCount") if first == 0 else 0):
    b = c.create_string_buffer(16)
    cu("cuDeviceGetUuid_v2", b, i)
    out.append(b.raw.hex())
"""
    cases = {
        "3,1": [3, 1],
        uuids[5]: [5],
        uuids[5][:10]: [5],
        f"2,{uuids[7]}": [2, 7],
        "1,9,2": [1],  # CUDA_VISIBLE_DEVICES ends at its first invalid entry
        "": [],
        "-1": [],
        "NoDevFiles": [],
    }
    for text, wanted in cases.items():
        seen = ask(node, body, {"CUDA_VISIBLE_DEVICES": text})
        assert seen == [uuids[i].removeprefix("GPU-").replace("-", "") for i in wanted], text


FAMILIES = """
from ctypes import Structure, c_int, c_uint, c_size_t, c_ushort, c_ubyte
class Location(Structure): _fields_ = [("type", c_int), ("id", c_int)]
class Prop(Structure): _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win", c.c_void_p), ("flags", c_ubyte * 8)]
class Array(Structure): _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]
class Array3(Structure): _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_int), ("channels", c_uint), ("flags", c_uint)]
cu.init(); cu.context()
out = {"context": used()}
base = used()
def family(name, make, unmake):
    made = make()
    out[name] = used() - base
    unmake(made)
    out[name + " after"] = used() - base
family("plain", lambda: cu.alloc(32 * MIB), cu.free)
def small():
    return [cu.alloc(1024) for _ in range(2048)]
family("2048 of 1 KiB share a page", small, lambda ps: [cu.free(p) for p in ps])
family("1 byte", lambda: cu.alloc(1), cu.free)
def pitch():
    p, w = u64(), size()
    cu("cuMemAllocPitch_v2", c.byref(p), c.byref(w), size(1000), size(4096), 4)
    assert w.value == 1024
    return p.value
family("pitch", pitch, cu.free)
def managed():
    p = u64()
    cu("cuMemAllocManaged", c.byref(p), size(64 * MIB), 1)
    return p.value
family("managed", managed, cu.free)
def asynchronous():
    p = u64()
    cu("cuMemAllocAsync", c.byref(p), size(32 * MIB), None)
    return p.value
family("async", asynchronous, lambda p: cu("cuMemFreeAsync", u64(p), None))
def vmm():
    h, prop = u64(), Prop(type=1, location=Location(1, 0))
    cu("cuMemCreate", c.byref(h), size(32 * MIB), c.byref(prop), u64(0))
    return h
family("vmm", vmm, lambda h: cu("cuMemRelease", h))
def array():
    a = c.c_void_p()
    cu("cuArrayCreate_v2", c.byref(a), c.byref(Array(1024, 8192, 0x20, 1)))
    return a
family("array", array, lambda a: cu("cuArrayDestroy", a))
def mipmap():
    a = c.c_void_p()
    cu("cuMipmappedArrayCreate", c.byref(a), c.byref(Array3(1024, 1024, 0, 0x20, 4, 0)), 4)
    return a
family("mipmap", mipmap, lambda a: cu("cuMipmappedArrayDestroy", a))
def host():
    p = c.c_void_p()
    cu("cuMemAllocHost_v2", c.byref(p), size(64 * MIB))
    return p
family("host", host, lambda p: cu("cuMemFreeHost", p))
"""


def test_memory_of_every_family_is_charged_and_freed(node: SimNode) -> None:
    out = ask(node, FAMILIES)
    assert isinstance(out, dict)
    assert out.pop("context") == CONTEXT_MIB
    assert all(value == 0 for name, value in out.items() if name.endswith("after"))
    grown = {name: value for name, value in out.items() if not name.endswith("after")}
    assert grown == {
        "plain": 32,
        "2048 of 1 KiB share a page": 2,
        "1 byte": 2,
        "pitch": 4,
        "managed": 0,
        "async": 32,
        "vmm": 32,
        "array": 32,
        "mipmap": 22,  # MiB: 16 for the first level; 5.25 for three more levels, rounded to 6
        "host": 0,
    }


def test_a_full_device_refuses_allocations(node: SimNode) -> None:
    out = ask(
        node,
        """
cu.init(); cu.context()
free, total = cu.info()
p = cu.alloc(free - free % (2 * MIB))
left = cu.info()[0]
out = [left < 2 * MIB, code("cuMemAlloc_v2", c.byref(u64()), size(2 * MIB)), code("cuMemAlloc_v2", c.byref(u64()), size(1))]
cu.free(p)
q = u64()
out += [code("cuMemAlloc_v2", c.byref(q), size(free - free % (2 * MIB))), code("cuMemAlloc_v2", c.byref(q), size(1 << 63)),
        code("cuMemAlloc_v2", c.byref(q), size(0)), code("cuMemAlloc_v2", None, size(1))]
resident = int(open("/proc/self/statm").read().split()[1]) * 4096
out.append(resident < 200 * MIB)
""",
    )
    assert out == [True, 2, 2, 0, 2, 1, 1, True]


def test_memory_copies_work_and_invalid_pointers_are_refused(node: SimNode) -> None:
    out = ask(
        node,
        """
cu.init(); cu.context()
a, b = cu.alloc(4 * MIB), cu.alloc(300)
text = bytes(range(256))
cu("cuMemcpyHtoD_v2", u64(a + 5), text, size(256))
cu("cuMemcpyDtoD_v2", u64(b), u64(a + 5), size(256))
cu("cuMemsetD32_v2", u64(b + 16), 0xDEADBEEF, size(2))
back = c.create_string_buffer(256)
cu("cuMemcpyDtoHAsync_v2", back, u64(b), size(256), None)
wanted = text[:16] + bytes.fromhex("efbeadde") * 2 + text[24:]
out = [back.raw == wanted, code("cuMemcpyHtoD_v2", u64(0x1000), text, size(8)), code("cuMemcpyHtoD_v2", u64(a), text, size(5 * MIB)),
  code("cuMemcpyDtoH_v2", back, u64(b + 290), size(16)), code("cuMemFree_v2", u64(a + 1)), code("cuMemFree_v2", u64(0x1234)), code("cuMemFree_v2", u64(0))]
cu.free(b)
out += [code("cuMemcpyDtoH_v2", back, u64(b), size(16)), code("cuMemFree_v2", u64(b))]
base, length = u64(), size()
cu("cuMemGetAddressRange_v2", c.byref(base), c.byref(length), u64(a + 77))
kind = c.c_uint()
out += [base.value == a, length.value == 4 * MIB, code("cuPointerGetAttribute", c.byref(kind), 2, u64(a)), kind.value, code("cuPointerGetAttribute", c.byref(kind), 2, u64(0x10))]
""",
    )
    assert out == [True, 1, 1, 1, 1, 1, 0, 1, 1, True, True, 0, 2, 1]


def test_copies_and_fills_agree_with_a_model_and_keep_device_memory_sparse(node: SimNode) -> None:
    """Device memory is a sparse file: copied zeros leave holes in it, at any alignment and across
    mappings.
    """
    out = ask(
        node,
        """
import random
class Location(c.Structure): _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Prop(c.Structure): _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location), ("rest", c.c_ubyte * 16)]
class Access(c.Structure): _fields_ = [("location", Location), ("flags", c.c_int)]
cu.init(); cu.context()
SIZE, DENSE = 6 * MIB, 64 * MIB
def mapped():
    prop, base, handle = Prop(type=1, location=Location(1, 0)), u64(), u64()
    cu("cuMemAddressReserve", c.byref(base), size(SIZE), size(0), u64(0), u64(0))
    for at in range(0, SIZE, 2 * MIB):
        cu("cuMemCreate", c.byref(handle), size(2 * MIB), c.byref(prop), u64(0))
        cu("cuMemMap", u64(base.value + at), size(2 * MIB), size(0), handle, u64(0))
    cu("cuMemSetAccess", base, size(SIZE), c.byref(Access(Location(1, 0), 3)), size(1))
    return base.value
draw, memories = random.Random(7), [(cu.alloc(SIZE), bytearray(SIZE)), (mapped(), bytearray(SIZE))]
back, wrong = c.create_string_buffer(SIZE), []
def bounds():
    length = draw.choice([1, 4096, 65536, 100_001, MIB, 3 * MIB])
    return length, draw.randrange(0, SIZE - length, 4), draw.randrange(0, SIZE - length, draw.choice([4, 4096]))
for step in range(120):
    (one, model), (other, copied) = draw.choice(memories), draw.choice(memories)
    length, at, to = bounds()
    match draw.choice(["host", "fill", "fill", "copy", "copy", "zero"]):
        case "host":
            text = draw.randbytes(5000).ljust(length // 2, bytes(1)).rjust(length, bytes(1))[:length]
            cu("cuMemcpyHtoD_v2", u64(one + at), text, size(length))
            model[at:at + length] = text
        case "fill":
            word = draw.choice([0, 0x01020304])
            cu("cuMemsetD32_v2", u64(one + at), word, size(length // 4))
            model[at:at + length // 4 * 4] = word.to_bytes(4, "little") * (length // 4)
        case "zero":
            cu("cuMemsetD8_v2", u64(one + at), 0, size(length))
            model[at:at + length] = bytes(length)
        case "copy":
            cu("cuMemcpyDtoD_v2", u64(other + to), u64(one + at), size(length))
            copied[to:to + length] = model[at:at + length]
    if step % 10 == 9:
        cu("cuMemcpyDtoH_v2", back, u64(other), size(SIZE))
        if memoryview(back).cast("B") != copied: wrong.append(step)
def stored():
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.stat(f).st_blocks for f in files if os.path.exists(f) and "vgpu-sim-device-memory" in os.readlink(f)) * 512
large, before = [cu.alloc(DENSE) for _ in range(3)], stored()
cu("cuMemsetD8_v2", u64(large[0] + DENSE // 2), 1, size(1))
cu("cuMemcpyDtoD_v2", u64(large[1]), u64(large[0]), size(DENSE))
cu("cuMemcpyDtoD_v2", u64(large[2]), u64(large[1]), size(DENSE))
cu("cuMemcpyDtoH_v2", back, u64(large[2] + DENSE // 2), size(2))
out = [wrong, back.raw[:2].hex(), stored() - before]
""",
    )
    assert out == [[], "0100", 3 * 4096]


def test_virtual_memory_calls_map_physical_memory_into_a_range(node: SimNode) -> None:
    out = ask(
        node,
        """
from ctypes import Structure, c_int, c_ubyte
class Location(Structure): _fields_ = [("type", c_int), ("id", c_int)]
class Prop(Structure): _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win", c.c_void_p), ("flags", c_ubyte * 8)]
class Access(Structure): _fields_ = [("location", Location), ("flags", c_int)]
cu.init(); cu.context()
prop, base, step = Prop(type=1, location=Location(1, 0)), u64(), 2 * MIB
cu("cuMemAddressReserve", c.byref(base), size(4 * step), size(0), u64(0), u64(0))
hs = [u64(), u64()]
for i, h in enumerate(hs):
    cu("cuMemCreate", c.byref(h), size(step), c.byref(prop), u64(0))
    cu("cuMemMap", u64(base.value + i * step), size(step), size(0), h, u64(0))
back = c.create_string_buffer(4)
out = [code("cuMemcpyDtoH_v2", back, base, size(4))]
access = Access(Location(1, 0), 3)
cu("cuMemSetAccess", base, size(2 * step), c.byref(access), size(1))
cu("cuMemsetD8_v2", u64(base.value + step - 2), 7, size(4))
cu("cuMemcpyDtoH_v2", back, u64(base.value + step - 2), size(4))
out += [back.raw.hex(), code("cuMemcpyDtoH_v2", back, u64(base.value + 2 * step), size(4)), code("cuMemAddressFree", base, size(4 * step))]
for h in hs:
    cu("cuMemRelease", h)
out.append(used())
cu("cuMemUnmap", base, size(2 * step))
out += [used(), code("cuMemAddressFree", base, size(4 * step)), code("cuMemCreate", c.byref(hs[0]), size(step + 1), c.byref(prop), u64(0))]
""",
    )
    assert out == [1, "07070707", 1, 1, CONTEXT_MIB + 4, CONTEXT_MIB, 0, 1]


def test_kernels_of_a_module_are_found_by_name(node: SimNode) -> None:
    out = ask(
        node,
        """
cu.init(); cu.context()
m, f, p, n = c.c_void_p(), c.c_void_p(), u64(), size()
image = PTX + b".visible .global .align 4 .b8 table[64];\\n.visible .entry\\n other(){ret;}"
cu("cuModuleLoadData", c.byref(m), image)
out = [code("cuModuleGetFunction", c.byref(f), m, w) for w in (b"work", b"other", b"wor", b"work2")]
out += [code("cuModuleGetGlobal_v2", c.byref(p), c.byref(n), m, b"table"), n.value, code("cuModuleGetGlobal_v2", None, None, m, b"tab"),
  code("cuModuleLoadData", c.byref(m), b"no image at all"), code("cuModuleLoadData", c.byref(m), None)]
""",
    )
    assert out == [0, 0, NOT_FOUND, NOT_FOUND, 0, 64, NOT_FOUND, 200, INVALID_VALUE]


def test_kernels_take_the_configured_time_and_events_measure_it(node: SimNode) -> None:
    out = ask(
        node,
        """
cu.init(); cu.context()
f, a, b, ms = cu.function(), c.c_void_p(), c.c_void_p(), c.c_float()
cu.kernel_us(20000)
cu("cuEventCreate", c.byref(a), 0); cu("cuEventCreate", c.byref(b), 0)
start = time.monotonic()
cu("cuEventRecord", a, None); cu.launch(f, 50); cu("cuEventRecord", b, None)
launched, pending = time.monotonic() - start, [code("cuEventQuery", b), code("cuStreamQuery", None), code("cuEventElapsedTime", c.byref(ms), a, b)]
cu("cuEventSynchronize", b)
waited = time.monotonic() - start
cu("cuEventElapsedTime", c.byref(ms), a, b)
bad = [code("cuLaunchKernel", f, *g, *t, 0, None, None, None) for g, t in (((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((1, 70000, 1), (1, 1, 1)))]
out = [pending, launched < waited, waited, ms.value, bad, code("cuStreamQuery", None)]
""",
    )
    assert isinstance(out, list)
    pending, asynchronous, waited, milliseconds, bad, idle = out
    assert pending == [600] * 3 and idle == 0  # 600 is CUDA_ERROR_NOT_READY
    assert asynchronous
    assert 1000 <= milliseconds <= 1000 * waited  # 50 kernels of 20 ms
    assert bad == [INVALID_VALUE] * 3


def test_contexts_are_pushed_popped_and_destroyed(node: SimNode) -> None:
    out = ask(
        node,
        """
from tests.sim.cuda import Driver
out = [code("cuMemAlloc_v2", c.byref(u64()), size(1))]
cu.init()
out.append(code("cuMemAlloc_v2", c.byref(u64()), size(1)))
p = c.c_void_p()
cu("cuDevicePrimaryCtxRetain", c.byref(p), 1)
out.append(code("cuCtxGetDevice", c.byref(c.c_int())))
cu("cuCtxPushCurrent_v2", p)
made = cu.context(0)
out += [cu.integer("cuCtxGetDevice")]
x = cu.alloc(8 * MIB)
cu("cuCtxDestroy_v2", made)
out += [cu.integer("cuCtxGetDevice"), code("cuCtxPushCurrent_v2", made), used()]
cu("cuDevicePrimaryCtxRelease_v2", 1)
out += [code("cuMemAlloc_v2", c.byref(u64()), size(1)), code("cuDevicePrimaryCtxRelease_v2", 1)]
if (child := os.fork()) == 0:
    os._exit(code("cuInit", 0) * 10 + code("cuDeviceGetCount", c.byref(c.c_int())))
out.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    )
    # 3: not initialised; 201: no context; 709: the context was destroyed; a forked child must not use CUDA
    assert out == [3, 201, 201, 0, 1, 201, CONTEXT_MIB, 709, 201, 33]
    assert node.dump()["processes"] == []


def test_cu_get_proc_address_returns_existing_symbols_and_versions(node: SimNode) -> None:
    out = ask(
        node,
        """
def look(name, version, flags=0):
    f, status = c.c_void_p(), c.c_int(-1)
    result = code("cuGetProcAddress_v2", name, c.byref(f), version, u64(flags), c.byref(status))
    symbols = ["cuMemAlloc_v2", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuMemcpyHtoD_v2_ptds", "cuCtxCreate_v2", "cuCtxCreate_v4", "cuDeviceGetUuid", "cuDeviceGetUuid_v2"]
    found = [s for s in symbols if c.cast(getattr(cu.lib, s), c.c_void_p).value == f.value]
    return [result, status.value, found[0] if found else (None if f.value is None else "other")]
out = [look(b"cuMemAlloc", 12000), look(b"cuMemAlloc_v2", 12000), look(b"cuMemAlloc", 2000), look(b"cuNothing", 12000), look(b"cuLaunchKernel", 12000, 1),
  look(b"cuLaunchKernel", 12000, 2), look(b"cuMemcpyHtoD", 12000, 2), look(b"cuCtxCreate", 11000), look(b"cuCtxCreate", 12050),
  look(b"cuDeviceGetUuid", 11030), look(b"cuDeviceGetUuid", 11040), look(b"cuLaunchKernel", 12000, 3)[:1], look(b"cuLaunchKernel", 12000, 8)[:1],
  code("cuGetProcAddress", b"cuNothing", c.byref(c.c_void_p()), 12000, u64(0)), code("cuGetExportTable", c.byref(c.c_void_p()), None)]
""",
    )
    assert out == [
        *[
            [0, 0, "cuMemAlloc_v2"],
            [0, 0, "cuMemAlloc_v2"],
            [0, 2, None],
            [0, 1, None],
            [0, 0, "cuLaunchKernel"],
        ],
        *[
            [0, 0, "cuLaunchKernel_ptsz"],
            [0, 0, "cuMemcpyHtoD_v2_ptds"],
            [0, 0, "cuCtxCreate_v2"],
            [0, 0, "cuCtxCreate_v4"],
        ],
        *[[0, 0, "cuDeviceGetUuid"], [0, 0, "cuDeviceGetUuid_v2"], [0], [1], NOT_FOUND, NOT_SUPPORTED],
    ]


def test_every_driver_symbol_is_in_the_table_of_cu_get_proc_address(node: SimNode) -> None:
    """cuGetProcAddress must find every exported function."""
    import re
    import subprocess

    library = node.build / "sim/lib/libcuda.so.1"
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in lines.splitlines()}
    table = (ROOT / "native/sim/cuda/api.def").read_text()
    rows = re.findall(r"^API(?:_PT)?\(\w+, (\w+), \d+(?:, (\w+))?\)", table, re.MULTILINE)
    listed = {name for row in rows for name in row if name}
    assert {name for name in exported if re.match(r"cu[A-Z]", name)} == listed
    assert len(listed) > 200
    assert "vgpuSimStatePath" in exported


def test_an_injected_fault_fails_a_driver_call(node: SimNode) -> None:
    node.sim("fault", "fail", "--function", "cuMemAlloc*", "--code", "719", "--count", "2")
    body = "cu.init(); cu.context()\nout = [code('cuMemAlloc_v2', c.byref(u64()), size(1)) for _ in range(3)]"
    assert ask(node, body) == [719, 719, 0]
    node.sim("fault", "gpu-lost", "--device", "0")
    assert ask(node, "out = [code('cuInit', 0), cu.integer('cuDeviceGetCount')]") == [0, 7]
