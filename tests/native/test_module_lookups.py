"""A kernel function that a program looks up repeatedly, as NCCL does at each collective operation. Later
look-ups must not query NVML.
"""

import json
import sys
from pathlib import Path

from tests.native.harness import GIB, GID, UID, UUIDS, Tenant
from vgpud.lease import DeviceLimits, write_lease

PROGRAM = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
looks = ctypes.c_uint.in_dll(ctypes.CDLL("libnvidia-ml.so.1"), "fake_nvml_looks")
def loaded():
    assert cuda.cuModuleLoadData(ctypes.byref(module), b"code") == 0
def looked_up(times):
    before = looks.value
    for _ in range(times):
        assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"kernel") == 0
        assert cuda.cuCtxSynchronize() == 0
    return looks.value - before
loaded()
# a measurement that is disturbed is made again later, so one of the hundreds may have one
first, again = looked_up(1), min(looked_up(100) for _ in range(5))
assert cuda.cuModuleUnload(module) == 0
loaded()
print(json.dumps({"first": first, "again": again, "of_another_module": looked_up(1)}))
"""


REFUSED = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuModuleLoadData(ctypes.byref(module), b"0 1048576") == 0  # globals, local memory of a thread
print(json.dumps([cuda.cuModuleGetFunction(ctypes.byref(function), module, b"kernel") for _ in range(3)]))
"""
OUT_OF_MEMORY = 2


def test_each_lookup_of_a_kernel_whose_local_memory_exceeds_the_limit_is_refused(
    tmp_path: Path,
) -> None:
    lease = write_lease(tmp_path, "a1", [DeviceLimits(UUIDS[0], GIB)], UID, GID)
    done = Tenant(lease).run(sys.executable, "-c", REFUSED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [OUT_OF_MEMORY] * 3


def test_memory_is_measured_only_at_the_first_lookup_of_a_kernel_function(tmp_path: Path) -> None:
    lease = write_lease(tmp_path, "a1", [DeviceLimits(UUIDS[0], GIB)], UID, GID)
    done = Tenant(lease).run(sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    looks = json.loads(done.stdout)
    assert looks["first"] > 0
    assert looks["again"] == 0
    assert looks["of_another_module"] > 0
