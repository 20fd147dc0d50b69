"""A tenant's program for measurements. It calls the driver API through ctypes, follows commands line by line
and needs no packages.

One JSON object a line. On standard input: "work SECONDS BLOCKS ITERATIONS", "launch COUNT", "fault", "end".
"""

import ctypes
import json
import sys
import time

# The kernel does a fixed amount of work and not of time, so that the cost of a block does not depend on how
# many processes share the device.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry work(.param .u64 out, .param .u32 n)
{
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [n];
    mov.f32 %f1, 0f3F800001;
    mov.f32 %f2, 0f3F7FFFFE;
    mov.f32 %f3, 0f33D6BF95;
LOOP:
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra LOOP;
    setp.eq.f32 %p2, %f1, 0f00000000;
    @%p2 st.global.f32 [%rd1], %f1;
    ret;
}
.visible .entry stray(.param .u64 out, .param .u32 n)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [n];
    st.global.u32 [%rd1], %r1;
    ret;
}
\0"""
THREADS = 256


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Driver:
    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        began = time.perf_counter()
        self.check("cuInit", 0)
        self.init_seconds = time.perf_counter() - began
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.check("cuDeviceGet", ctypes.byref(device), 0)
        self.check("cuCtxCreate_v2", ctypes.byref(self.context), 0, device)
        self.context_seconds = time.perf_counter() - began - self.init_seconds
        self.module, self.kernel, self.out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        self.check("cuModuleLoadData", ctypes.byref(self.module), PTX)
        self.check("cuModuleGetFunction", ctypes.byref(self.kernel), self.module, b"work")
        self.check("cuMemAlloc_v2", ctypes.byref(self.out), ctypes.c_size_t(256))
        count = ctypes.c_int()
        self.check("cuDeviceGetAttribute", ctypes.byref(count), 16, device)
        self.multiprocessors = count.value

    def check(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            say(state="error", call=name, code=code, at=time.time())
            sys.exit(3)

    def launch(self, blocks: int, iterations: int) -> None:
        out, n = ctypes.c_uint64(self.out.value), ctypes.c_uint32(iterations)
        parameters = (ctypes.c_void_p * 2)(
            ctypes.cast(ctypes.byref(out), ctypes.c_void_p), ctypes.cast(ctypes.byref(n), ctypes.c_void_p)
        )
        self.check("cuLaunchKernel", self.kernel, blocks, 1, 1, THREADS, 1, 1, 0, None, parameters, None)

    def work(self, seconds: float, blocks: int, iterations: int) -> None:
        """Launches in pairs, so the next kernel is queued when one ends."""
        launches, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(2):
                self.launch(blocks, iterations)
                launches += 1
            self.check("cuCtxSynchronize")
        passed = time.perf_counter() - began
        say(state="worked", launches=launches, blocks_per_second=launches * blocks / passed)

    def fault(self) -> None:
        """Writes to an unmapped address: without MPS an error of this process alone, with MPS of all
        clients.
        """
        self.check("cuModuleGetFunction", ctypes.byref(self.kernel), self.module, b"stray")
        self.out = ctypes.c_uint64(0x1000)
        self.launch(1, 1)
        code = self.cuda.cuCtxSynchronize()
        say(state="faulted", code=code, at=time.time())

    def launches(self, count: int) -> None:
        began = time.perf_counter()
        for _ in range(count):
            self.launch(1, 1)
        issued = time.perf_counter() - began
        self.check("cuCtxSynchronize")
        say(state="launched", microseconds=issued / count * 1e6)


def main() -> None:
    driver = Driver()
    say(
        state="ready",
        init_milliseconds=driver.init_seconds * 1e3,
        context_milliseconds=driver.context_seconds * 1e3,
        multiprocessors=driver.multiprocessors,
    )
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["work"]:
            driver.work(float(words[1]), int(words[2]), int(words[3]))
        elif words[:1] == ["fault"]:
            driver.fault()
        elif words[:1] == ["launch"]:
            driver.launches(int(words[1]))
        else:
            break


if __name__ == "__main__":
    main()
