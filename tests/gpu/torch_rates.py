"""Rates of a PyTorch process: `python -m tests.gpu.torch_rates SECONDS`.

One JSON line: calls a second of an eager decoder step, of the same step as a CUDA graph, and of a large
matrix product, each with a synchronization per step as a server's loop has, and whether libvgpu is loaded.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch  # type: ignore[import-not-found,unused-ignore]

WIDTH, LAYERS = 1024, 12


def rate(step: Callable[[], object], seconds: float) -> float:
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    calls, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        step()
        torch.cuda.synchronize()
        calls += 1
    return calls / (time.monotonic() - start)


def main() -> None:
    seconds = float(sys.argv[1])
    layers = [
        torch.nn.TransformerEncoderLayer(WIDTH, 16, WIDTH * 4, 0.0, batch_first=True) for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers).half().cuda().eval()
    tokens = torch.randn(8, 32, WIDTH, device="cuda", dtype=torch.half)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(tokens)
        rates = {
            "eager decoder steps": rate(lambda: model(tokens), seconds),
            "graph decoder steps": rate(graph.replay, seconds),
            "8192 cubed products": rate(lambda: a @ a, seconds),
        }
    loaded = "/libvgpu.so" in Path("/proc/self/maps").read_text()
    print(json.dumps({"state": "rates", "libvgpu": loaded, **rates}), flush=True)


if __name__ == "__main__":
    main()
