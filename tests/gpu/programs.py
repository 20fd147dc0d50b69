"""Ordinary programs: `python -m tests.gpu.programs KIND`, driven by lines on standard input.

It prints `{"state": "ready", "libvgpu": bool}` when it is set up. For each line `BEGIN END` (ns of
CLOCK_MONOTONIC) it works from BEGIN to END and prints `{"per_second", "p50_ms", "p99_ms", "each_second"}` of
its steps; it ends with its input.

    decoder     a 12 GiB decoder's weights, one CUDA graph a token, the host reads each token
    batches     the same with batches of 1, 8 or 32 that come at random, after 1 ms on average
    training    an eager transformer of 8 layers with AdamW, the loss read every tenth step
    compiled    the same under torch.compile
    inference   ResNet-50 fed by a data loader of four processes, the classes read
    kernels:US  kernels of US microseconds through the driver API alone (also on a simulated node)
    request:US  one such kernel every 5 ms, timed from when it was due
    gaps:US     one such kernel at a time, and after each a pause of the same length, or of PAUSE:
                gaps:US:PAUSE
"""

from __future__ import annotations

import bisect
import ctypes as c
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Step = Callable[[], float | None]  # returns the step's duration in s; None: the caller measures it
#: The program measures at its start how many loop steps the kernel's duration needs. The simulator takes the
#: duration from the PTX comment.
PTX = """.version 6.0
.target sm_50
.address_size 64
// vgpu-sim-microseconds={us}
.visible .entry spin(.param .u64 steps, .param .u64 out)
{{
 .reg .pred %p; .reg .u64 %n, %o; .reg .f32 %f;
 ld.param.u64 %n, [steps]; ld.param.u64 %o, [out]; mov.f32 %f, 0f3F800000;
again: fma.rn.f32 %f, %f, 0f3F7FFFFF, 0f33D6BF95; sub.u64 %n, %n, 1; setp.ne.u64 %p, %n, 0; @%p bra again;
 st.global.f32 [%o], %f; ret;
}}
"""


class Driver:
    """A kernel of a given duration, launched through libcuda alone."""

    def __init__(self, us: float) -> None:
        self.lib = c.CDLL("libcuda.so.1")
        context, module, self.kernel = c.c_void_p(), c.c_void_p(), c.c_void_p()
        self.out = c.c_uint64()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", c.byref(context), 0)
        self("cuCtxSetCurrent", context)
        self("cuModuleLoadData", c.byref(module), PTX.format(us=us).encode())
        self("cuModuleGetFunction", c.byref(self.kernel), module, b"spin")
        self("cuMemAlloc_v2", c.byref(self.out), c.c_size_t(64))
        self.steps = c.c_uint64(1_000_000)
        # the clocks rise at first, so the fastest of many runs counts
        fastest = min(self.timed() for _ in range(20))
        self.steps = c.c_uint64(max(1, int(1_000_000 * us / 1e6 / fastest)))

    def __call__(self, function: str, *arguments: Any) -> None:
        code = getattr(self.lib, function)(*arguments)
        if code != 0:
            raise RuntimeError(f"{function} returned {code}")

    def timed(self) -> float:
        begin = time.monotonic()
        self.launch()
        self("cuCtxSynchronize")
        return time.monotonic() - begin

    def launch(self) -> None:
        pointers = (c.c_void_p * 2)(c.addressof(self.steps), c.addressof(self.out))
        self("cuLaunchKernel", self.kernel, 132, 1, 1, 256, 1, 1, 0, None, pointers, None)


def kernels(us: float) -> Step:
    driver, ahead = Driver(us), max(1, int(20_000 / us))

    def step() -> None:
        for _ in range(ahead):
            driver.launch()
        driver("cuCtxSynchronize")

    return step


def request(us: float) -> Step:
    driver, due = Driver(us), [0.0]

    def step() -> float:
        due[0] = max(due[0] + 0.005, time.monotonic() - 0.2)
        time.sleep(max(0.0, due[0] - time.monotonic()))
        driver.launch()
        driver("cuCtxSynchronize")
        return time.monotonic() - due[0]

    return step


def gaps(us: float, pause_us: float | None = None) -> Step:
    driver = Driver(us)
    pause_s = (us if pause_us is None else pause_us) / 1e6

    def step() -> None:
        driver.launch()
        driver("cuCtxSynchronize")
        time.sleep(pause_s)

    return step


def token_graph(weights: list[Any], batch: int) -> tuple[Any, Any]:
    import torch  # type: ignore[import-not-found,unused-ignore]

    x = torch.randn(batch, weights[0].shape[0], device="cuda", dtype=torch.bfloat16)

    def forward() -> Any:
        y = x
        for w in weights:
            y = torch.nn.functional.rms_norm(y @ w, (w.shape[1],))
        return y.argmax(dim=-1)

    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        forward()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        token = forward()
    return graph, token


def weights() -> list[Any]:
    import torch

    return [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90 for _ in range(96)]


def decoder() -> Step:
    graph, token = token_graph(weights(), 1)

    def step() -> None:
        graph.replay()
        token.cpu()

    return step


def batches() -> Step:
    shared, dice = weights(), random.Random(7)
    graphs = [token_graph(shared, batch) for batch in (1, 8, 32)]

    def step() -> None:
        time.sleep(dice.expovariate(1000.0))
        graph, token = dice.choice(graphs)
        graph.replay()
        token.cpu()

    return step


def training(compiled: bool = False) -> Step:
    import torch

    width, count = 1024, [0]
    layers = [torch.nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, batch_first=True) for _ in range(8)]
    model: Any = torch.nn.Sequential(*layers, torch.nn.Linear(width, 4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = torch.compile(model) if compiled else model
    x = torch.randn(32, 512, width, device="cuda")
    target = torch.randint(0, 4096, (32 * 512,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(run(x).view(-1, 4096), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count[0] += 1
        if count[0] % 10 == 0:
            loss.item()

    return step


def inference() -> Step:
    import timm  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch

    class Pictures(torch.utils.data.Dataset):  # type: ignore[misc,name-defined,unused-ignore]
        def __len__(self) -> int:
            return 10**7

        def __getitem__(self, index: int) -> Any:
            return torch.full((3, 224, 224), index % 251, dtype=torch.uint8)

    model = timm.create_model("resnet50").to("cuda", torch.bfloat16, memory_format=torch.channels_last).eval()
    loader = iter(torch.utils.data.DataLoader(Pictures(), batch_size=64, num_workers=4, pin_memory=True))

    def step() -> None:
        with torch.no_grad():
            pictures = next(loader).cuda(non_blocking=True).to(torch.bfloat16) / 255
            model(pictures.contiguous(memory_format=torch.channels_last)).argmax(dim=1).cpu()

    return step


KINDS: dict[str, Callable[[], Step]] = {
    "decoder": decoder,
    "batches": batches,
    "training": training,
    "compiled": lambda: training(compiled=True),
    "inference": inference,
}


def made(kind: str) -> tuple[Step, Step]:
    """Returns a function that makes a step of the program, and one that waits for all work that the steps
    have submitted.
    """
    name, *times = kind.split(":")
    if times:
        steps: dict[str, Callable[..., Step]] = {"kernels": kernels, "request": request, "gaps": gaps}
        return steps[name](*map(float, times)), lambda: None
    import torch

    return KINDS[kind](), torch.cuda.synchronize


def each_second(marks: list[int]) -> list[float]:
    """Returns the number of steps in each whole second. `marks` has times in nanoseconds: the start of the
    first step, and then the end of every step. A step that lasts from one second into the next counts in
    both, in proportion to its time there.
    """

    def steps(at: int) -> float:
        after = bisect.bisect_right(marks, at, hi=len(marks) - 1)
        begin, end = marks[after - 1], marks[after]
        return after - 1 + (at - begin) / max(1, end - begin)

    whole = range(marks[0], marks[-1] + 1, 1_000_000_000)
    return [round(steps(b) - steps(a), 3) for a, b in itertools.pairwise(whole)]


def work(step: Step, settle: Step, begin: int, end: int) -> dict[str, Any]:
    """Steps per second, and their times. An unfinished step at the end counts by its time."""
    time.sleep(max(0.0, (begin - time.monotonic_ns()) / 1e9))
    marks = [time.monotonic_ns()]
    took: list[float] = []
    while marks[-1] < end:
        seconds = step()
        marks.append(time.monotonic_ns())
        took.append((marks[-1] - marks[-2]) / 1e6 if seconds is None else 1e3 * seconds)
    settle()
    rate = len(took) / ((time.monotonic_ns() - marks[0]) / 1e9)
    took.sort()
    p99 = took[min(len(took) - 1, len(took) * 99 // 100)]
    p50 = took[len(took) // 2]
    return {"per_second": rate, "p50_ms": p50, "p99_ms": p99, "each_second": each_second(marks)}


def main() -> None:
    step, settle = made(sys.argv[1])
    for _ in range(12):
        step()
    settle()
    loaded = "/libvgpu.so" in Path("/proc/self/maps").read_text()
    print(json.dumps({"state": "ready", "libvgpu": loaded}), flush=True)
    for line in sys.stdin:
        begin, end, *_ = line.split()
        print(json.dumps(work(step, settle, int(begin), int(end))), flush=True)


if __name__ == "__main__":
    main()
