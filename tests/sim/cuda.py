"""The driver API through ctypes, imported by programs that run on a simulated node.

`python -m tests.sim.cuda` is a small tenant for tests of several processes. It takes commands on standard
input: `alloc MIB`, `free`, `launch N US`, `sync`, `info`, `do PYTHON`. It answers each command with one line.
`quit` ends it.
"""

from __future__ import annotations

import ctypes as c
import os
import sys
from typing import Any

PTX = b".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry work(.param .u64 p)\n{\nret;\n}\n"
MIB = 1 << 20


class CudaError(Exception):
    """A driver call has returned an error. `code` is the CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


class Driver:
    """libcuda.so.1. Every call is checked and raises CudaError."""

    def __init__(self) -> None:
        self.lib = c.CDLL("libcuda.so.1")
        self.lib.vgpuSimSetKernelMicroseconds.argtypes = [c.c_double]

    def raw(self, function: str, *args: Any) -> int:
        return int(getattr(self.lib, function)(*args))

    def __call__(self, function: str, *args: Any) -> None:
        code = self.raw(function, *args)
        if code != 0:
            raise CudaError(function, code)

    def init(self) -> None:
        self("cuInit", 0)

    def context(self, device: int = 0) -> c.c_void_p:
        ctx = c.c_void_p()
        self("cuCtxCreate_v2", c.byref(ctx), 0, device)
        return ctx

    def integer(self, function: str, *args: Any) -> int:
        value = c.c_int()
        self(function, c.byref(value), *args)
        return value.value

    def info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = c.c_size_t(), c.c_size_t()
        self("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value, total.value

    def alloc(self, size: int) -> int:
        pointer = c.c_uint64()
        self("cuMemAlloc_v2", c.byref(pointer), c.c_size_t(size))
        return pointer.value

    def free(self, pointer: int) -> None:
        self("cuMemFree_v2", c.c_uint64(pointer))

    def function(self, name: bytes = b"work", image: bytes = PTX) -> c.c_void_p:
        module, function = c.c_void_p(), c.c_void_p()
        self("cuModuleLoadData", c.byref(module), image)
        self("cuModuleGetFunction", c.byref(function), module, name)
        return function

    def launch(self, function: c.c_void_p, count: int = 1) -> None:
        for _ in range(count):
            self("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None)

    def kernel_us(self, microseconds: float) -> None:
        self.lib.vgpuSimSetKernelMicroseconds(microseconds)


def _obey(cu: Driver, function: c.c_void_p, pointers: list[int], words: list[str]) -> str:
    match words:
        case ["alloc", mib]:
            pointers.append(cu.alloc(int(mib) * MIB))
        case ["free"]:
            cu.free(pointers.pop())
        case ["launch", count, us]:
            cu.kernel_us(float(us))
            cu.launch(function, int(count))
        case ["sync"]:
            cu("cuCtxSynchronize")
        case ["info"]:
            return " ".join(str(n) for n in cu.info())
        case _:
            return "what"
    return "ok"


def _tenant() -> None:
    cu = Driver()
    try:
        cu.init()
        cu.context()
        function = cu.function()
    except CudaError as error:
        print(f"error {error.code}", flush=True)
        return
    print(f"ready {os.getpid()}", flush=True)
    pointers: list[int] = []
    names: dict[str, Any] = {"cu": cu, "c": c, "pointers": pointers, "function": function}
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            break
        try:
            if words[:1] == ["do"]:
                exec(line[3:], names)
                print(names.pop("out", "ok"), flush=True)
            else:
                print(_obey(cu, function, pointers, words), flush=True)
        except CudaError as error:
            print(f"error {error.code}", flush=True)


if __name__ == "__main__":
    _tenant()
