"""Programs that hold device memory and change it on request, and functions that send them orders."""

import time

from tests.demo.node import DemoNode, Tenant
from tests.e2e.support import eventually
from vgpud.lease import LeaseMemory, read_limits, read_swaps, update_limits

PATIENCE_SECONDS = 120.0
# A program that holds memory and reads lines of input. For "all" it adds 1 to each word that it holds, and
# for a number N to N random words. For an empty line it prints whether the contents are what they should be.
HOLD = """
import json, random, sys, torch
mib = int(sys.argv[1]); pieces = max(mib >> 10, 1); words = (mib << 17) // pieces
def make(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-2**62, 2**62, (words,), generator=generator, device="cuda", dtype=torch.int64)
held, added, singles = [make(seed) for seed in range(pieces)], 0, [{} for _ in range(pieces)]
torch.cuda.synchronize()
def whole(seed, piece):
    want = make(seed)
    want += added
    for word, count in singles[seed].items(): want[word] += count
    return torch.equal(piece, want)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if line.strip() == "all":
        for piece in held: piece += 1
        added += 1
    elif line.strip():
        for _ in range(int(line)):
            seed, word = random.randrange(pieces), random.randrange(words)
            held[seed][word] += 1
            singles[seed][word] = singles[seed].get(word, 0) + 1
    else:
        print(json.dumps({"whole": all(whole(seed, piece) for seed, piece in enumerate(held))}), flush=True)
        continue
    torch.cuda.synchronize()
    print(json.dumps({"whole": None}), flush=True)
"""
PLAIN_HOLD = """
import ctypes as c, json, random, sys
u = c.CDLL("libcuda.so.1")
context, memory = c.c_void_p(), c.c_uint64()
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
size = int(sys.argv[1]) << 20
data = bytearray(b"".join(random.Random(part).randbytes(1 << 20) for part in range(size >> 20)))
back = c.create_string_buffer(size)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
call("cuMemcpyHtoD_v2", memory, bytes(data), c.c_size_t(size))
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if line.strip():
        for at in range(0, size, 64 << 20) if line.strip() == "all" else [random.randrange(size)]:
            data[at] ^= 255
            call("cuMemsetD8_v2", c.c_uint64(memory.value + at), c.c_ubyte(data[at]), c.c_size_t(1))
        print(json.dumps({"whole": None}), flush=True)
        continue
    call("cuMemcpyDtoH_v2", back, memory, c.c_size_t(size))
    print(json.dumps({"whole": back.raw == bytes(data)}), flush=True)
"""


def told(one: Tenant, words: str = "") -> object:
    assert one.process.stdin is not None
    one.process.stdin.write(words + "\n")
    one.process.stdin.flush()
    return one.line()["whole"]


def make_buffer(node: DemoNode, name: str) -> float:
    """Makes libvgpu allocate the host buffer while the tenant runs, and returns the seconds that this
    takes.
    """
    lease = node.run_dir / "leases" / name

    def is_made() -> bool:
        (swap,) = read_swaps(lease)
        return swap.host_bytes + (256 << 20) > swap.movable_bytes

    began = time.perf_counter()
    update_limits(lease, read_limits(lease).devices, memory=LeaseMemory.SOON)
    eventually(is_made, "the host's buffer is made", PATIENCE_SECONDS)
    seconds = round(time.perf_counter() - began, 2)
    update_limits(lease, read_limits(lease).devices, memory=LeaseMemory.HERE)
    return seconds


# A decoder with CUDA graphs: its weights stay the same and its cache grows. Like TRAIN, the program takes a
# number of steps and a file that slows it while the file exists, and prints a digest of its state at the end.
DECODE = """
import hashlib, json, os, sys, time, torch
torch.manual_seed(7)
width, layers, context = 2048, 12, 512
weights = [torch.randn(width, width, device="cuda").bfloat16() / width ** 0.5 for _ in range(layers)]
cache = torch.zeros(layers, context, width, device="cuda", dtype=torch.bfloat16)
token, at = torch.randn(1, width, device="cuda").bfloat16(), torch.zeros(1, device="cuda", dtype=torch.int64)
def step():
    y = token
    for layer, weight in enumerate(weights):
        y = torch.tanh(y @ weight)
        cache[layer].index_copy_(0, at, y)
        y = torch.softmax((y @ cache[layer].T).float(), -1).bfloat16() @ cache[layer] + y
    token.copy_(y / y.norm() * width ** 0.5)
    at.copy_((at + 1) % context)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
print(json.dumps({"ready": True}), flush=True)
for _ in range(int(sys.argv[1])):
    graph.replay()
    torch.cuda.synchronize()
    if os.path.exists(sys.argv[2]): time.sleep(0.02)
state = cache.view(torch.int16).cpu().numpy().tobytes() + token.view(torch.int16).cpu().numpy().tobytes()
print(json.dumps({"digest": hashlib.sha256(state).hexdigest()}), flush=True)
"""
# As TRAIN, in JAX
JAX = """
import hashlib, json, os, sys, time
import jax, jax.numpy as np
keys = jax.random.split(jax.random.key(7), 5)
weights = [jax.random.normal(key, (2048, 2048)) / 45 for key in keys[:4]]
data = jax.random.normal(keys[4], (512, 2048))
def loss(weights):
    y = data
    for weight in weights: y = np.tanh(y @ weight)
    return np.mean((y - data) ** 2)
step = jax.jit(lambda weights: [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))])
weights = jax.block_until_ready(step(weights))
print(json.dumps({"ready": True}), flush=True)
for _ in range(int(sys.argv[1])):
    weights = jax.block_until_ready(step(weights))
    if os.path.exists(sys.argv[2]): time.sleep(0.02)
state = b"".join(jax.device_get(weight).tobytes() for weight in weights)
print(json.dumps({"digest": hashlib.sha256(state).hexdigest()}), flush=True)
"""
# As TRAIN: a CUDA graph of a kernel that needs 8 KiB of local memory for each thread, twice the stack limit
LOCAL = """
import ctypes as c, hashlib, json, os, sys, time, torch
u = c.CDLL("libcuda.so.1")
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
code = b'''
.version 7.0
.target sm_70
.address_size 64
.visible .entry step(.param .u64 state) {
    .local .align 4 .b8 words[8192];
    .reg .b64 %rd<5>;
    .reg .b32 %r<8>;
    .reg .pred %p;
    ld.param.u64 %rd1, [state];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd1, %rd1, %rd2;
    ld.global.u32 %r4, [%rd1];
    mov.u64 %rd3, words;
    mov.u32 %r5, 0;
FILL:
    mad.lo.u32 %r4, %r4, 1664525, 1013904223;
    mul.wide.u32 %rd4, %r5, 4;
    add.u64 %rd4, %rd3, %rd4;
    st.local.u32 [%rd4], %r4;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p, %r5, 2048;
    @%p bra FILL;
    mov.u32 %r5, 0;
MIX:
    shr.u32 %r6, %r4, 7;
    and.b32 %r6, %r6, 2047;
    mul.wide.u32 %rd4, %r6, 4;
    add.u64 %rd4, %rd3, %rd4;
    ld.local.u32 %r7, [%rd4];
    xor.b32 %r4, %r4, %r7;
    mad.lo.u32 %r4, %r4, 1664525, 1013904223;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p, %r5, 64;
    @%p bra MIX;
    st.global.u32 [%rd1], %r4;
    ret;
}
'''
state = torch.arange(1 << 20, device="cuda", dtype=torch.int32)
module, kernel, at = c.c_void_p(), c.c_void_p(), c.c_uint64(state.data_ptr())
call("cuModuleLoadData", c.byref(module), code)
call("cuModuleGetFunction", c.byref(kernel), module, b"step")
call("cuCtxSetLimit", 0, c.c_size_t(4096))
words = (c.c_void_p * 1)(c.addressof(at))
def step():
    stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
    call("cuLaunchKernel", kernel, 4096, 1, 1, 256, 1, 1, 0, stream, words, None)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
print(json.dumps({"ready": True}), flush=True)
for _ in range(int(sys.argv[1])):
    graph.replay()
    torch.cuda.synchronize()
    if os.path.exists(sys.argv[2]): time.sleep(0.02)
print(json.dumps({"digest": hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest()}), flush=True)
"""
