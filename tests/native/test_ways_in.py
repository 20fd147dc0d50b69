"""Per-thread default streams: each variant of a driver function is wrapped by libvgpu."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.harness import GIB, GID, LIBVGPU, MIB, UID
from tests.simnode import SimNode
from vgpud.lease import DeviceLimits, write_lease

# Looks up functions as the CUDA runtime does, and allocates through the functions found.
PROGRAM = """
import ctypes, json
class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_char_p if n in ("file", "name") else ctypes.c_void_p)
                for n in ("file", "base", "name", "at")]
cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
context, address, status, info = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), Info()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
def look_up(name, flags):
    out = ctypes.byref(address), 12000, ctypes.c_uint64(flags), ctypes.byref(status)
    assert cuda.cuGetProcAddress_v2(name, *out) == 0 and status.value == 0
    assert libc.dladdr(address, ctypes.byref(info)) != 0
    return address.value, [info.file.decode().rsplit("/", 1)[1], info.name.decode()]
names = (b"cuMemAllocAsync", b"cuMemAllocFromPoolAsync", b"cuMemFreeAsync", b"cuStreamSynchronize",
         b"cuGraphLaunch", b"cuLaunchKernel", b"cuMemAlloc")
found = {name.decode(): [look_up(name, flags)[1] for flags in (1, 2)] for name in names}
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
allocate = kind(look_up(names[0], 2)[0])
pointer, pieces = ctypes.c_uint64(), 0
while allocate(ctypes.byref(pointer), 32 << 20, None) == 0:
    pieces += 1
print(json.dumps({"found": found, "pieces": pieces}))
"""


@pytest.mark.parametrize("size_gib", [1, 2])
def test_the_memory_limit_holds_in_a_program_with_per_thread_default_streams(
    sim_node: Callable[..., SimNode], tmp_path: Path, size_gib: int
) -> None:
    node = sim_node("h200x1")
    devices = [DeviceLimits(node.dump()["devices"][0]["uuid"], size_gib * GIB)]
    env = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(write_lease(tmp_path, "one", devices, UID, GID))}
    done = node.run([sys.executable, "-c", PROGRAM], env)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for name, (legacy, per_thread) in said["found"].items():
        assert legacy[0] == per_thread[0] == "libvgpu.so", name
        plain = name + "_v2" if name == "cuMemAlloc" else name
        assert (legacy[1], per_thread[1]) == (plain, plain if plain != name else f"{name}_ptsz")
    assert said["pieces"] == (size_gib * GIB - 526 * MIB) // (32 * MIB)
