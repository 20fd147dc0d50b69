"""Turns by libvgpu's swaps on a real GPU: prints one JSON object for each scene, whose `held` says whether
the scene's claim is true.

    python -m tests.gpu.turns_h200 [--gib 40] [--limit 105] [--seconds 60] [SCENE...]

Scenes: `swap` (tenants of 1, 8 and 32 GiB go out and come in three times, bit-equal: seconds beside those of
a pinned copy in the same run; claim: within 1.2 times), `turns` (two tenants whose limits are 75 % of a card
each, and that hold --gib each, take turns of 5 s: their rate compared with a tenant alone, and how long a
switch takes). Needs root, build/native, and a python3 with PyTorch. It ends every process that it started.

On the simulated node it runs with plain driver calls instead of PyTorch, and smaller (figures mean nothing):

    build/native/bin/vgpu-sim run --profile h200x8 --state FOLDER -- python -m tests.gpu.turns_h200
"""

import argparse
import json
import mmap
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tests.demo.node import DemoNode, Tenant
from tests.demo.scenes import torch_python
from tests.e2e.support import eventually, states
from tests.gpu.idle_h200 import SIMULATED, running
from tests.gpu.scenes import say
from vgpud.lease import ArbiterClient, LeaseMemory, SwapPhase, read_limits, read_swaps, update_limits

SIZES_MIB = (64, 256) if SIMULATED else (1 << 10, 8 << 10, 32 << 10)
ROUNDS = 3
TURN_SECONDS = 0.5 if SIMULATED else 5.0
LIMIT = "105GiB"  # 75 % of an H200
AIM_OF_COPY = 1.2
AIM_OF_SOLO = 0.8
PATIENCE_SECONDS = 120.0
HOLD = """
import json, sys, torch
mib = int(sys.argv[1]); pieces = max(mib >> 10, 1); words = (mib << 17) // pieces
def make(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-2**62, 2**62, (words,), generator=generator, device="cuda", dtype=torch.int64)
held = [make(seed) for seed in range(pieces)]
torch.cuda.synchronize()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    whole = all(torch.equal(piece, make(seed)) for seed, piece in enumerate(held))
    print(json.dumps({"whole": whole}), flush=True)
"""
PLAIN_HOLD = """
import ctypes as c, json, random, sys
u = c.CDLL("libcuda.so.1")
context, memory = c.c_void_p(), c.c_uint64()
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
size = int(sys.argv[1]) << 20
data = b"".join(random.Random(part).randbytes(1 << 20) for part in range(size >> 20))
back = c.create_string_buffer(size)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
call("cuMemcpyHtoD_v2", memory, data, c.c_size_t(size))
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    call("cuMemcpyDtoH_v2", back, memory, c.c_size_t(size))
    print(json.dumps({"whole": back.raw == data}), flush=True)
"""
PINNED = """
import json, sys, time, torch
size = int(sys.argv[1]) << 20; part = min(size, 8 << 30)
device = torch.empty(part, dtype=torch.uint8, device="cuda")
host = torch.empty(part, dtype=torch.uint8, pin_memory=True)
def seconds(copy):
    copy(); torch.cuda.synchronize(); began = time.perf_counter()
    for _ in range(3): copy()
    torch.cuda.synchronize(); return (time.perf_counter() - began) / 3 * size / part
print(json.dumps({"out": seconds(lambda: host.copy_(device, non_blocking=True)),
                  "in": seconds(lambda: device.copy_(host, non_blocking=True))}))
"""
# Counts its rounds in a file that can be read while the program waits for its turn. At its end it prints
# whether its memory was unchanged.
WORK = """
import json, mmap, struct, sys, threading, torch
# in pieces: a kernel of torch.arange counts its first 2^32 elements only
step, count = 1 << 27, int(sys.argv[1]) >> 10
def numbers(part): return torch.arange(part * step, (part + 1) * step, dtype=torch.int64, device="cuda")
held = [numbers(part) for part in range(count)]
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
file = open(sys.argv[2], "r+b")
told = mmap.mmap(file.fileno(), 8)
print(json.dumps({"ready": True}), flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
rounds = 0
while not ended.is_set():
    for _ in range(10): b = a @ a
    torch.cuda.synchronize()
    rounds += 1
    struct.pack_into("<Q", told, 0, rounds)
whole = all(torch.equal(piece, numbers(part)) for part, piece in enumerate(held))
print(json.dumps({"whole": whole}), flush=True)
"""
PLAIN_WORK = """
import ctypes as c, json, mmap, struct, sys, threading
u = c.CDLL("libcuda.so.1")
context, memory, back = c.c_void_p(), c.c_uint64(), (c.c_uint32 * 1024)()
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
size = int(sys.argv[1]) << 20
file = open(sys.argv[2], "r+b")
count = mmap.mmap(file.fileno(), 8)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
print(json.dumps({"ready": True}), flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
rounds, whole = 0, True
while not ended.is_set():
    rounds += 1
    call("cuMemsetD32_v2", memory, c.c_uint(rounds), c.c_size_t(size // 4))
    call("cuMemcpyDtoH_v2", back, c.c_uint64(memory.value + size - 4096), c.c_size_t(4096))
    whole = whole and all(word == rounds for word in back)
    struct.pack_into("<Q", count, 0, rounds)
print(json.dumps({"whole": whole}), flush=True)
"""


def tenant(
    node: DemoNode, program: str, plain: str, mib: int, *words: str, limit: str = LIMIT
) -> tuple[Tenant, str]:
    """Starts a tenant and returns it after its first line."""
    python = None if SIMULATED else torch_python()
    assert python or SIMULATED, "no python3 with PyTorch here"
    before = states(node)
    asked = ["--isolation", "quota", "--memory", limit, "--device", "0"]
    code = plain if python is None else program
    made = node.tenant(asked, [python or sys.executable, "-c", code, str(mib), *words])
    assert made.line()["ready"]
    (name,) = states(node).keys() - before.keys()
    return made, name


def whole(one: Tenant) -> bool:
    assert one.process.stdin is not None
    one.process.stdin.write("\n")
    one.process.stdin.flush()
    return bool(one.line()["whole"])


def pinned_seconds(mib: int) -> dict[str, float]:
    if SIMULATED:
        return {"out": mib / 4096, "in": mib / 4096}
    done = subprocess.run(
        [str(torch_python()), "-c", PINNED, str(mib)], capture_output=True, text=True, check=True
    )
    return {way: float(seconds) for way, seconds in json.loads(done.stdout).items()}


def swapped(node: DemoNode, name: str, out: bool) -> float:
    """Waits until the last process has followed the order in the lease. Returns the seconds."""
    folder = node.run_dir / "leases" / name
    arbiter = ArbiterClient(node.run_dir / "arbiter" / "control.sock", 10)
    began = time.perf_counter()
    memory = LeaseMemory.OUT if out else LeaseMemory.HERE
    update_limits(folder, read_limits(folder).devices, away=out, memory=memory)
    arbiter.look(name)
    wanted = SwapPhase.OUT if out else SwapPhase.HERE
    while any(swap.phase is not wanted for swap in read_swaps(folder)):
        assert time.perf_counter() < began + PATIENCE_SECONDS, read_swaps(folder)
        time.sleep(0.0005)
    return time.perf_counter() - began


def swap(_arguments: argparse.Namespace) -> None:
    with running('memory_overcommit = 2.0\nturn = "1h"\n') as node:
        for mib in SIZES_MIB:
            copy = pinned_seconds(mib)
            one, name = tenant(node, HOLD, PLAIN_HOLD, mib)
            first = swapped(node, name, True), swapped(node, name, False)
            went, came, good = [], [], []
            for _ in range(ROUNDS):
                went.append(swapped(node, name, True))
                came.append(swapped(node, name, False))
                good.append(whole(one))
            movable = sum(each.movable_bytes for each in read_swaps(node.run_dir / "leases" / name))
            one.end()
            eventually(lambda: not states(node), "it ends", PATIENCE_SECONDS)
            both = [out + back for out, back in zip(went, came, strict=True)]
            ratio = median(both) / (copy["out"] + copy["in"])
            say(
                "swap",
                held=all(good) and (SIMULATED or ratio <= AIM_OF_COPY),
                mib=mib,
                movable_mib=movable >> 20,
                whole=good,
                out_seconds=[round(seconds, 3) for seconds in went],
                in_seconds=[round(seconds, 3) for seconds in came],
                first_out_with_the_buffer_made=round(first[0], 3),
                first_in=round(first[1], 3),
                pinned_out_seconds=round(copy["out"], 3),
                pinned_in_seconds=round(copy["in"], 3),
                ratio=round(ratio, 3),
                ratio_out=round(median(went) / copy["out"], 3),
                ratio_in=round(median(came) / copy["in"], 3),
            )


class Count:
    """The counter of a tenant's rounds, in a file that the tenant writes."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self.path = str(path)
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), 8)

    def read(self) -> int:
        (rounds,) = struct.unpack_from("<Q", self._words, 0)
        return int(rounds)


def switches(node: DemoNode) -> dict[str, object]:
    """Durations of the swaps by direction, and their number, from vgpud's log."""
    took: dict[str, list[float]] = {"out": [], "in": [], "by_the_driver": []}
    for line in node.log.read_text().splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("audit") == "suspend" and entry["outcome"] == "done":
            way = "out" if str(entry.get("did")).startswith("swapped out") else "by_the_driver"
            took[way].append(entry["seconds"])
        elif entry.get("audit") == "resume" and entry["outcome"] == "done":
            took["in"].append(entry["seconds"])
    return {way: [round(seconds, 2) for seconds in all_] for way, all_ in took.items()}


def reaches(node: DemoNode, times: int) -> int:
    """Waits until tenants have been swapped out `times` times, and 0.1 s for the swap-in that follows.
    Returns the number of swap-outs so far.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while (gone := node.log.read_text().count("swapped out at the end of its turn")) < times:
        assert time.monotonic() < until, f"{gone} of {times} turns have ended"
        time.sleep(0.1)
    return gone


@contextmanager
def worker(node: DemoNode, number: int, mib: int, limit_gib: int) -> Iterator[tuple[Tenant, Count]]:
    count = Count(node.folder / f"rounds-{number}")
    one, _name = tenant(node, WORK, PLAIN_WORK, mib, count.path, limit=f"{limit_gib}GiB")
    try:
        yield one, count
    finally:
        if one.process.poll() is None:
            one.process.kill()


def turns(arguments: argparse.Namespace) -> None:
    mib = 128 if SIMULATED else arguments.gib << 10
    seconds = 8.0 if SIMULATED else arguments.seconds
    with running(f'memory_overcommit = 2.0\nturn = "{TURN_SECONDS:g}s"\n') as node:
        with worker(node, 1, mib, arguments.limit) as (one, first):
            time.sleep(TURN_SECONDS / 5)  # the first rounds of a program are slower
            start, began = first.read(), time.perf_counter()
            time.sleep(2 * TURN_SECONDS)
            alone = (first.read() - start) / (time.perf_counter() - began)
            with worker(node, 2, mib, arguments.limit) as (two, second):
                # the first two make the host buffers, and each cycle from here on has a whole switch
                gone = reaches(node, 3)
                begun, starts = time.perf_counter(), (first.read(), second.read())
                reaches(node, gone + 2 * max(int(seconds / (2 * TURN_SECONDS + 2)), 1))
                ends, lasted = (first.read(), second.read()), time.perf_counter() - begun
                lines = []
                for each in (one, two):
                    assert each.process.stdin is not None
                    each.process.stdin.close()
                for each in (one, two):
                    lines.append(each.line())
        of_solo = [(b - a) / lasted / alone for a, b in zip(starts, ends, strict=True)]
        good = all(bool(line["whole"]) for line in lines)
        say(
            "turns",
            held=good and (SIMULATED or sum(of_solo) >= AIM_OF_SOLO),
            whole=good,
            turn_seconds=TURN_SECONDS,
            mib_of_each=mib,
            rounds_per_second_alone=round(alone, 2),
            of_solo_each=[round(part, 3) for part in of_solo],
            of_solo_together=round(sum(of_solo), 3),
            seconds=round(lasted, 1),
            switches=switches(node),
        )


SCENES: dict[str, Callable[[argparse.Namespace], None]] = {"swap": swap, "turns": turns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=int, default=40, help="what each tenant of `turns` holds")
    parser.add_argument("--limit", type=int, default=105, help="GiB, of each tenant of `turns`")
    parser.add_argument("--seconds", type=float, default=60.0, help="of `turns`")
    parser.add_argument("scenes", nargs="*", metavar="SCENE")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.scenes or list(SCENES):
        try:
            began = time.monotonic()
            SCENES[name](arguments)
            say(name, scene_seconds=round(time.monotonic() - began, 1))
        except Exception as error:
            failed += 1
            say(name, held=False, error=repr(error), trace=traceback.format_exc()[-1500:])
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
