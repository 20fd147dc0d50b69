"""Real programs: a few steps whose numbers must not depend on the limiter, then out of memory.

    python -m tests.gpu.memory_programs NAME [--until-out-of-memory]

Prints one JSON object: the numbers, the memory that the framework reports, and its out-of-memory error.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Outcome = dict[str, Any]


def _torch_model() -> tuple[Any, Any, Any]:
    import torch  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512), torch.nn.LayerNorm(512)
    ).cuda()
    return torch, model, torch.randn(256, 512, device="cuda")


def _train(torch: Any, step: Callable[[Any], Any], model: Any, data: Any) -> list[float]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = (step(data) - data).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def _torch_until_out_of_memory(torch: Any) -> Outcome:
    free, total = torch.cuda.mem_get_info()
    held: list[Any] = []
    error = ""
    try:
        while True:
            held.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as refused:
        error = type(refused).__name__
    count = len(held)
    held.clear()
    torch.cuda.empty_cache()
    after = torch.ones(1 << 20, device="cuda").sum().item()
    return {"free": free, "total": total, "pieces": count, "error": error, "after": after}


def torch_eager(exhaust: bool) -> Outcome:
    torch, model, data = _torch_model()
    return {"numbers": _train(torch, model, model, data)} | (
        _torch_until_out_of_memory(torch) if exhaust else {}
    )


def torch_compile(exhaust: bool) -> Outcome:
    torch, model, data = _torch_model()
    return {"numbers": _train(torch, torch.compile(model), model, data)} | (
        _torch_until_out_of_memory(torch) if exhaust else {}
    )


def torch_graphs(exhaust: bool) -> Outcome:
    torch, model, data = _torch_model()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(data)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(data)
    numbers = []
    for i in range(5):
        data.mul_(1.0 + i / 10)
        graph.replay()
        numbers.append(out.double().square().mean().item())
    return {"numbers": numbers} | (_torch_until_out_of_memory(torch) if exhaust else {})


def jax_train(exhaust: bool) -> Outcome:
    import jax  # type: ignore[import-not-found,unused-ignore]
    import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]

    weights = jax.random.normal(jax.random.PRNGKey(1), (512, 512)) * 0.05
    data = jax.random.normal(jax.random.PRNGKey(2), (256, 512))

    @jax.jit  # type: ignore[untyped-decorator,unused-ignore]
    def step(weights: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(data @ w) - data) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    losses = []
    for _ in range(5):
        weights, loss = step(weights)
        losses.append(float(loss))
    result: Outcome = {"numbers": losses}
    if exhaust:
        held: list[Any] = []
        try:
            while len(held) < 1000:
                held.append(jnp.ones((64 << 20,), dtype=jnp.float32).block_until_ready())
        except Exception as refused:
            result["error"] = "RESOURCE_EXHAUSTED" if "RESOURCE_EXHAUSTED" in str(refused) else str(refused)
        result["pieces"] = len(held)
    return result


def cupy_arrays(exhaust: bool) -> Outcome:
    import cupy  # type: ignore[import-not-found,unused-ignore]

    rng = cupy.random.default_rng(3)
    a = rng.standard_normal((1024, 1024))
    numbers = []
    for _ in range(5):
        a = cupy.tanh(a @ a / 32)
        numbers.append(float(cupy.abs(a).sum()))
    result: Outcome = {"numbers": numbers}
    free, total = cupy.cuda.runtime.memGetInfo()
    if exhaust:
        held: list[Any] = []
        try:
            while len(held) < 1000:
                held.append(cupy.empty(256 << 20, dtype=cupy.uint8))
        except cupy.cuda.memory.OutOfMemoryError as refused:
            result["error"] = type(refused).__name__
        result |= {"pieces": len(held), "free": free, "total": total}
    return result


def cupy_async(exhaust: bool) -> Outcome:
    import cupy  # type: ignore[import-not-found,unused-ignore]

    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    return cupy_arrays(exhaust)


def triton_kernel(exhaust: bool) -> Outcome:
    import torch  # type: ignore[import-not-found,unused-ignore]

    from tests.gpu.triton_add import add

    torch.manual_seed(5)
    x = torch.randn(1 << 20, device="cuda")
    y = torch.randn(1 << 20, device="cuda")
    numbers = [add(x, y * i).double().sum().item() for i in range(5)]
    return {"numbers": numbers} | (_torch_until_out_of_memory(torch) if exhaust else {})


def nccl_train(exhaust: bool) -> Outcome:
    """Runs one of two ranks, each on its own GPU: training steps of a model whose gradients both reduce."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as group  # type: ignore[import-not-found,unused-ignore]

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch, model, _ = _torch_model()
    group.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(11 + rank)
    data = torch.randn(256, 512, device="cuda")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        for parameter in model.parameters():
            group.all_reduce(parameter.grad)
            parameter.grad /= group.get_world_size()
        optimiser.step()
        losses.append(loss.item())
    outcome = {"numbers": losses} | (_torch_until_out_of_memory(torch) if exhaust else {})
    group.barrier()
    group.destroy_process_group()
    return outcome


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"CUDA error {result}")


def driver_copies(exhaust: bool) -> Outcome:
    """Uses the driver alone, through ctypes, and checks that copies return the values that were set."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, stream, pointer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    _check(cuda.cuInit(0))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(cuda.cuCtxSetCurrent(context))
    _check(cuda.cuStreamCreate(ctypes.byref(stream), 0))
    numbers = []
    for words in (1, 1000, 1 << 20):
        back = (ctypes.c_uint32 * words)()
        _check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 * words)))
        _check(cuda.cuMemsetD32_v2(pointer, ctypes.c_uint32(3 * words), ctypes.c_size_t(words)))
        _check(cuda.cuMemcpyDtoH_v2(back, pointer, ctypes.c_size_t(4 * words)))
        numbers.append(float(sum(memoryview(back).cast("B").cast("I"))))
        _check(cuda.cuMemFree_v2(pointer))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    outcome: Outcome = {"numbers": numbers, "free": free.value, "total": total.value}
    result = pieces = 0
    while exhaust and result == 0:
        result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(256 << 20))
        pieces += result == 0
    errors = {0: "", 2: "CUDA_ERROR_OUT_OF_MEMORY"}
    return outcome | {"pieces": pieces, "error": errors.get(result, str(result))}


PROGRAMS: dict[str, Callable[[bool], Outcome]] = {
    "driver_copies": driver_copies,
    "nccl_train": nccl_train,
    "torch_eager": torch_eager,
    "torch_compile": torch_compile,
    "torch_graphs": torch_graphs,
    "jax_train": jax_train,
    "cupy_arrays": cupy_arrays,
    "cupy_async": cupy_async,
    "triton_kernel": triton_kernel,
}


if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]]("--until-out-of-memory" in sys.argv)))
