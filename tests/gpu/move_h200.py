"""Moving between two real GPUs of one kind: prints one JSON object for each scene, whose `held` says whether
the scene's claim is true.

    python -m tests.gpu.move_h200 [--simulated] [SCENE...]

Scenes: `driver` (which lists of GPU pairs the driver takes, without vgpud, and what the process sees
afterwards), `sizes` (a tenant of 1, 8 and 32 GiB moved three times: new, with unchanged and with changed
memory, and for how long its calls are held, beside pinned copies of as much out and in; claim: 1.5 s),
`steps` (what the driver's own part takes), `exact` (training runs in PyTorch and JAX, a decoder with CUDA
graphs and a graph with local memory, all at once, each moved back and forth 20 times, end bit-equal to
undisturbed ones), `grown` (a tenant that allocates more before each of several moves keeps all of it),
`limit` (its memory limit goes with it), `killed` (vgpud killed in the middle of moves), `peers` (two slices
with peer access, suspended and resumed), `drain` (drain --move), `suspended` (moved while it is suspended,
several times over: its memory is whole, NVML shows it only where it was resumed, and a training run ends
bit-equal).
Needs root, build/native, two GPUs of one kind, driver 580 or later, and a python3 with PyTorch. On the
simulator: what needs no PyTorch, in MiB. It ends every process that it started.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE

from tests.demo.node import BUILD, POLICY, DemoNode, Tenant
from tests.demo.scenes import torch_python
from tests.e2e.conftest import simulated
from tests.e2e.support import client, states
from tests.gpu import holding
from tests.gpu.scenes import HOLD, ask, play, say, started
from tests.gpu.suspend_h200 import PINNED, STEPS, TIMES, TRAIN, timed, whole
from vgpud.lease import read_limits, read_swaps, read_usage
from vgpud.model.errors import VgpuError
from vgpud.proc import start_ticks

SIZES_GIB = (1, 8, 32)
KILLS = 6
AIM_SECONDS = 1.5
AWAY_TIMES = 6  # how often a training run is moved while it is suspended

# Needs only ctypes. Fills MIB on each visible device with a pattern. For an empty line of input it prints
# whether the patterns are whole and what CUDA reports of device 0; for a number, the result of allocating so
# many MiB more, which get a pattern, too.
BARE = """
import ctypes as c, json, sys, uuid
u = c.CDLL("libcuda.so.1")
contexts, memories, grown, size = [], [], [], int(sys.argv[1]) << 20
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
def say(**words):
    print(json.dumps(words), flush=True)
call("cuInit", 0)
for i in range(int(sys.argv[2])):
    context, memory = c.c_void_p(), c.c_uint64()
    call("cuDevicePrimaryCtxRetain", c.byref(context), i)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
    call("cuMemsetD32_v2", memory, c.c_uint(0x5eed + i), c.c_size_t(size // 4))
    contexts.append(context); memories.append(memory)
for i in range(1, len(contexts)):
    call("cuCtxSetCurrent", contexts[0]); call("cuCtxEnablePeerAccess", contexts[i], 0)
call("cuCtxSynchronize")
say(ready=True)
for line in sys.stdin:
    if line.strip():
        more, most = c.c_uint64(), int(line) << 20
        code = u.cuMemAlloc_v2(c.byref(more), c.c_size_t(most))
        if not code:
            call("cuMemsetD32_v2", more, c.c_uint(0xfeed + len(grown)), c.c_size_t(most // 4))
            grown.append(more.value + most - 4096)
        say(code=code)
        continue
    good, back = True, (c.c_uint32 * 1024)()
    for i, memory in enumerate(memories):
        call("cuCtxSetCurrent", contexts[i])
        call("cuMemcpyDtoH_v2", back, c.c_uint64(memory.value + size - 4096), c.c_size_t(4096))
        good = good and all(word == 0x5eed + i for word in back)
    for i, end in enumerate(grown):
        call("cuMemcpyDtoH_v2", back, c.c_uint64(end), c.c_size_t(4096))
        good = good and all(word == 0xfeed + i for word in back)
    name, bus, count = c.create_string_buffer(16), c.create_string_buffer(32), c.c_int()
    call("cuDeviceGetUuid_v2", name, 0); call("cuDeviceGetPCIBusId", bus, 32, 0)
    call("cuDeviceGetCount", c.byref(count))
    for i in range(1, len(memories)):
        call("cuMemcpyPeer", memories[0], contexts[0], memories[i], contexts[i], c.c_size_t(4096))
    named = f"GPU-{uuid.UUID(bytes=name.raw)}"
    say(whole=good, uuid=named, bus=bus.value.decode().lower(), count=count.value)
"""


@dataclass
class Bench:
    """A node, real or simulated."""

    node: DemoNode
    simulated: bool

    @property
    def uuids(self) -> list[str]:
        with client(self.node) as calls:
            return [device.uuid for device in calls.list_devices().devices]

    def bare(self, mib: int, *options: str, slices: int = 1) -> tuple[Tenant, str]:
        before = states(self.node)
        asked = ["--isolation", "quota", *options] if options else WANTED
        made = self.node.tenant(asked, [sys.executable, "-c", BARE, str(mib), str(slices)])
        assert made.line()["ready"]
        (name,) = states(self.node).keys() - before.keys()
        return made, name

    def torch(self, gib: int, program: str, *words: str) -> tuple[Tenant, str]:
        before = states(self.node)
        asked = ["--isolation", "quota", "--memory", f"{gib}GiB", "--device", "0"]
        made = self.node.tenant(asked, [str(torch_python()), "-c", program, *words])
        assert made.line()["ready"]
        (name,) = states(self.node).keys() - before.keys()
        return made, name

    def move(self, name: str, to: int) -> float:
        target = self.uuids[to]
        with client(self.node, timeout_seconds=300) as calls:
            began = time.perf_counter()
            calls.move(name, [target])
            return time.perf_counter() - began

    def used_mib(self) -> list[int]:
        """The current use of the first two devices in MiB, by NVML."""
        time.sleep(1.1)  # a listing may be one second old
        with client(self.node) as calls:
            return [int(device.memory_used_bytes) >> 20 for device in calls.list_devices().devices[:2]]

    def place(self, name: str) -> int:
        with client(self.node) as calls:
            return self.uuids.index(calls.get_allocation(name).slices[0].device_uuid)


WANTED = ["--isolation", "quota", "--memory", "4GiB", "--device", "0"]


# --- scenes


class Hand:
    """Drives vgpu-suspend directly, without vgpud."""

    def __init__(self, bench: Bench) -> None:
        lock = bench.node.folder / "by-hand.lock"
        self._program = subprocess.Popen(
            [BUILD / "bin" / "vgpu-suspend", lock, "0"],
            env=bench.node.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._program.stdout is not None
        return self._program.stdout.readline().strip()

    def order(self, *words: object) -> str:
        """Sends an order to the program; returns its answer as "RESULT STATE" (a name and a number)."""
        assert self._program.stdin is not None
        self._program.stdin.write(" ".join(map(str, words)) + "\n")
        self._program.stdin.flush()
        _, name, state = self._read().split()
        return f"{name} {state}"

    def close(self) -> None:
        self._program.kill()
        self._program.wait()


def lists(uuids: list[str], old: str, new: str) -> dict[str, list[str]]:
    """Returns lists of device pairs for a restore: all forms that are documented or reported. vgpud uses the
    last.
    """
    change = {old: new, new: old}
    around = {uuid: uuids[(i + 1) % len(uuids)] for i, uuid in enumerate(uuids)}
    return {
        "own pair only": [old, new],
        "the two swapped": [old, new, new, old],
        "all rotated": [word for uuid in uuids for word in (uuid, around[uuid])],
        "all, the two swapped": [word for uuid in uuids for word in (uuid, change.get(uuid, uuid))],
    }


def driver(bench: Bench) -> None:
    for visible in ("all", "one"):
        uuids = bench.uuids
        for form, pairs in lists(uuids, uuids[0], uuids[1]).items():
            environment = dict(bench.node.environment)
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            if visible == "one":
                environment["CUDA_VISIBLE_DEVICES"] = uuids[0]
            process = subprocess.Popen(
                [sys.executable, "-c", BARE, "64", "1"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            one, hand = Tenant(process), Hand(bench)
            try:
                one.line()
                before = ask(one)
                who = process.pid, start_ticks(process.pid)
                answers = [hand.order("lock", *who, 10000), hand.order("save", *who)]
                answers.append(hand.order("restore", *who, *pairs))
                taken = answers[-1].startswith("CUDA_SUCCESS")
                if not taken:
                    answers.append(hand.order("restore", *who))
                answers.append(hand.order("unlock", *who))
                after = ask(one)
                right = not taken or after["uuid"] == uuids[1]
                is_ours = form.startswith("all, ")
                held = bool(after["whole"]) and right and (taken or not is_ours)
                say(
                    "driver", held=held, visible=visible, pairs=form, taken=taken,
                    answers=answers, before=before, after=after,
                )  # fmt: skip
            finally:
                hand.close()
                process.kill()
                process.wait()


@contextmanager
def held_seconds(node: DemoNode, name: str) -> Iterator[Callable[[], float]]:
    """Measures for how long the lease holds the tenant's calls. The yielded function returns the seconds
    after the block.
    """
    ended, times = threading.Event(), [0.0, 0.0]

    def look() -> None:
        while not ended.wait(0.001):
            if read_limits(node.run_dir / "leases" / name).away:
                times[1] = time.perf_counter()
                times[0] = times[0] or times[1]

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield lambda: times[1] - times[0]
    finally:
        ended.set()
        watch.join()


def sizes(bench: Bench) -> None:
    pinned = {"out": 0.0, "in": 0.0}
    if not bench.simulated:
        done = subprocess.run([str(torch_python()), "-c", PINNED], capture_output=True, text=True, check=True)
        pinned = json.loads(done.stdout)
    for gib in SIZES_GIB:
        program = holding.HOLD, str(gib << 10)
        one, name = bench.bare(gib) if bench.simulated else bench.torch(gib + 6, *program)
        spans, paused, good = {}, {}, []
        for kind, to in (("first", 1), ("unchanged", 0), ("changed", 1)):
            if kind == "changed" and not bench.simulated:
                holding.told(one, "all")
            with held_seconds(bench.node, name) as held:
                spans[kind] = round(bench.move(name, to), 2)
            paused[kind] = round(held(), 2)
            good.append(whole(one))
        (swap,) = read_swaps(bench.node.run_dir / "leases" / name)
        one.end()
        say(
            "sizes",
            held=all(good) and (bench.simulated or spans["changed"] <= AIM_SECONDS),
            gib=gib,
            direct=swap.host_bytes == 0,
            move_seconds=spans,
            held_seconds=paused,
            pinned_out_and_in_seconds=round(gib * (pinned["out"] + pinned["in"]), 3),
        )


def steps(bench: Bench) -> None:
    """What the driver's part of a move takes: a program with a context and 64 MiB, moved by vgpu-suspend."""
    uuids = bench.uuids
    environment = {**bench.node.environment, "CUDA_VISIBLE_DEVICES": uuids[0]}
    command = [sys.executable, "-c", BARE, "64", "1"]
    if not bench.simulated:
        command = [str(torch_python()), "-c", holding.HOLD, "64"]
    process = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)
    one, who = Tenant(process), (process.pid, start_ticks(process.pid))
    spans: dict[str, list[float]] = {}
    try:
        one.line()
        for old, new in ((0, 1), (1, 0), (0, 1)):
            pairs = lists(uuids, uuids[old], uuids[new])["all, the two swapped"]
            began = time.perf_counter()
            hand = Hand(bench)
            spans.setdefault("start", []).append(time.perf_counter() - began)
            for order in (("lock", *who, 10000), ("save", *who), ("restore", *who, *pairs), ("unlock", *who)):
                began = time.perf_counter()
                answer = hand.order(*order)
                spans.setdefault(str(order[0]), []).append(time.perf_counter() - began)
                assert answer.startswith("CUDA_SUCCESS"), (order, answer)
            hand.close()
        good = bool(ask(one)["whole"])
    finally:
        process.kill()
        process.wait()
    say("steps", held=good, seconds={step: [round(s, 3) for s in times] for step, times in spans.items()})


_starts = threading.Lock()  # a new tenant is known by the allocation that appears


def train(
    bench: Bench, times: int, disturb: Callable[[str, int], float], program: str = TRAIN, kind: str = ""
) -> tuple[object, list[float]]:
    """Returns the final state of a training run that is disturbed this many times, and the seconds that each
    disturbance takes.
    """
    slow = bench.node.folder / f"slow-{threading.get_ident()}"
    slow.touch() if times else slow.unlink(missing_ok=True)
    with _starts:
        bench.node.environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{'expandable' in kind}"
        one, name = bench.torch(8, program, str(STEPS), str(slow))
    spans = [disturb(name, (number + 1) % 2) for number in range(times)]
    slow.unlink(missing_ok=True)
    digest = one.line()
    one.end()
    return digest, spans


def exact(bench: Bench) -> None:
    # with autotuning, two undisturbed runs of JAX may differ
    bench.node.environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    programs = {"training": TRAIN, "training, expandable segments": TRAIN}
    programs |= {"decoder": holding.DECODE, "local memory": holding.LOCAL, "JAX": holding.JAX}
    runs = [(kind, times) for kind in programs for times in (0, TIMES)]
    with ThreadPoolExecutor(len(runs)) as pool:
        begun = [pool.submit(train, bench, times, bench.move, programs[kind], kind) for kind, times in runs]
    ended = dict(zip(runs, [run.result() for run in begun], strict=True))
    for kind in programs:
        (undisturbed, _), (digest, spans) = (ended[kind, times] for times in (0, TIMES))
        say(
            "exact",
            held=digest == undisturbed,
            program=kind,
            times=TIMES,
            digests=[undisturbed, digest],
            seconds=[round(s, 2) for s in spans],
        )


def suspended(bench: Bench) -> None:
    empty = bench.used_mib()
    one, name = bench.bare(64) if bench.simulated else bench.torch(12, HOLD, str(8 << 10))
    here = bench.used_mib()
    timed(bench.node, "suspend", name)
    spans = [bench.move(name, to) for to in (1, 0, 1)]
    away = bench.used_mib()
    spans.append(timed(bench.node, "resume", name))
    good, there = whole(one), bench.used_mib()
    timed(bench.node, "suspend", name)  # suspends the run on its new device
    spans.append(bench.move(name, 0))
    spans.append(timed(bench.node, "resume", name))
    good = good and whole(one)
    back = bench.used_mib()
    one.end()
    grown = [
        [now - before for now, before in zip(used, empty, strict=True)] for used in (here, away, there, back)
    ]
    say(
        "suspended",
        held=good
        and [[mib > 64 for mib in used] for used in grown]
        == [[True, False], [False, False], [False, True], [True, False]],
        whole=good,
        mib_here_away_there_back=grown,
        seconds=[round(s, 2) for s in spans],
    )
    if not bench.simulated:
        _suspended_exact(bench)


def _suspended_exact(bench: Bench) -> None:
    def moved(name: str, to: int) -> float:
        timed(bench.node, "suspend", name)
        seconds = bench.move(name, to)
        timed(bench.node, "resume", name)
        return seconds

    undisturbed, _ = train(bench, 0, moved)
    digest, spans = train(bench, AWAY_TIMES, moved)
    say(
        "suspended",
        held=digest == undisturbed,
        times=AWAY_TIMES,
        digests=[undisturbed, digest],
        seconds=[round(s, 2) for s in spans],
    )


def grown(bench: Bench) -> None:
    mib = 8 if bench.simulated else 512
    one, name = bench.bare(mib)
    codes, good, spans = [], [], []
    for to in (1, 0, 1, 0):
        codes.append(ask(one, str(mib))["code"])
        spans.append(bench.move(name, to))
        good.append(bool(ask(one)["whole"]))
    used = read_usage(bench.node.run_dir / "leases" / name).device(0).used_bytes >> 20
    one.end()
    say(
        "grown",
        held=all(good) and not any(codes) and used >= 5 * mib,
        used_mib=used,
        seconds=[round(s, 2) for s in spans],
    )


def limit(bench: Bench) -> None:
    mib, memory = (125, "1GiB") if bench.simulated else (1000, "4GiB")
    one, name = bench.bare(mib // 2, "--memory", memory, "--device", "0")
    codes = [ask(one, str(mib))["code"]]
    bench.move(name, 1)
    codes += [ask(one, str(mib))["code"], ask(one, str(5 * mib // 2))["code"]]
    meter = read_usage(bench.node.run_dir / "leases" / name).device(0)
    uuid = read_limits(bench.node.run_dir / "leases" / name).devices[0].uuid
    seen = ask(one)
    say(
        "limit",
        held=codes == [0, 0, 2] and seen["whole"] and uuid == bench.uuids[1] and meter.refusals_limit == 1,
        codes=codes,
        seen=seen,
        used_mib=meter.used_bytes >> 20,
        context_mib=meter.context_bytes >> 20,
    )
    one.end()


def killed(bench: Bench) -> None:
    one, name = bench.bare(256 if bench.simulated else 3000)
    ends = []
    for number in range(KILLS):
        to = 1 - bench.place(name)
        mover = subprocess.Popen(
            [sys.executable, "-m", "vgpud.ctl", "move", name, "--to", str(to)],
            env=bench.node.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.3 + 0.3 * number)
        bench.node.kill()
        mover.wait()
        bench.node.start(timeout_seconds=120)
        ends.append((states(bench.node)[name], bench.place(name), bool(ask(one)["whole"])))
    say("killed", held=all(state == "active" and good for state, _, good in ends), ends=ends)
    one.end()


def peers(bench: Bench) -> None:
    both = ["--memory", "2GiB", "--count", "2", "--device", "0", "--device", "1"]
    one, name = bench.bare(64, *both, slices=2)
    refused = ""
    try:
        timed(bench.node, "suspend", name)
        timed(bench.node, "resume", name)
    except VgpuError as error:
        refused = str(error)
    say("peers", held=bool(ask(one)["whole"]) and not refused, refused=refused)
    one.end()


def drain(bench: Bench) -> None:
    for count in (1, 3):
        made = [bench.bare(64) for _ in range(count)]
        began = time.perf_counter()
        said = bench.node.ctl("drain", "0", "--move", "-o", "json", check=False)
        seconds = time.perf_counter() - began
        moved = {move["allocationId"] for move in json.loads(said.stdout)["moved"]}
        good = all(ask(one)["whole"] and bench.place(name) != 0 for one, name in made)
        held = good and moved == {name for _, name in made}
        say("drain", held=held, tenants=count, moved=len(moved), seconds=round(seconds, 2))
        bench.node.ctl("undrain", "0")
        for one, _ in made:
            one.end()


SCENES: dict[str, Callable[[Bench], None]] = {
    "driver": driver,
    "sizes": sizes,
    "steps": steps,
    "exact": exact,
    "grown": grown,
    "limit": limit,
    "killed": killed,
    "peers": peers,
    "drain": drain,
    "suspended": suspended,
}
NEED_TORCH = ("exact",)


@contextmanager
def running(simulate: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if simulate:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            environment = simulated(Path(folder) / "sim", "h200x8")
        node = DemoNode(
            f'{POLICY}[device.preload]\nevictable = true\n[pool]\nhost_memory_reserve = "256MiB"\n',
            environment,
        )
        yield Bench(stack.enter_context(started(node)), simulate)


def on_a_bench(name: str, simulate: bool) -> None:
    if simulate and name in NEED_TORCH:
        say(name, skipped="PyTorch does not run on the simulator")
        return
    with running(simulate) as bench:
        SCENES[name](bench)


def cards() -> int:
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout.splitlines())


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("scene", nargs="*", choices=[*SCENES, []])
    arguments = parser.parse_args(words)
    if not arguments.simulated and cards() < 2:
        print("fewer than two GPUs here: nothing was run", file=sys.stderr)
        return 0
    return play((name, partial(on_a_bench, name, arguments.simulated)) for name in arguments.scene or SCENES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
