"""Jobs whose kernels wait for each other or for their host, and work that can wait, on a real GPU: `python -m
tests.gpu.compute_ranks --build DIR --out FILE [SECTION ...]`.

As compute_h200.py, with `vgpu-pair` (native/probe/pair.c) and, where the machine has PyTorch and two GPUs,
NCCL. Sections that the machine cannot run are recorded as skipped, with the reason. Runs on the simulated
node too.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.demo.scenes import torch_python
from tests.gpu.compute_h200 import (
    Line,
    Node,
    Tenant,
    Work,
    answer,
    compute_counters,
    gpu_uuids,
    native_rate,
    run,
)
from tests.gpu.compute_programs import SETTLE_S, Program, window
from vgpud.lease import DeviceLimits, SharePolicy, read_limits, update_limits, write_lease

HARD, CONSERVING, NONE = SharePolicy.HARD, SharePolicy.WORK_CONSERVING, SharePolicy.NONE


@dataclass(frozen=True)
class Bench:
    """A node whose arbiter serves leases on any of the machine's GPUs."""

    node: Node
    uuids: tuple[str, ...]
    pages: Path  # a folder in /dev/shm
    seconds: float  # duration of each run

    def lease(self, name: str, policy: SharePolicy, share: float, uuids: Sequence[str]) -> Path:
        limits = [DeviceLimits(uuid, 8 << 30, int(share * 100), policy) for uuid in uuids]
        folder = write_lease(self.node.run_dir / "leases", name, limits, uid=os.getuid(), gid=os.getgid())
        self.node.client.add(name)
        return folder

    def share(self, lease: Path, policy: SharePolicy, share: float) -> None:
        limits = [
            replace(device, share_hundredths=int(share * 100), share_policy=policy)
            for device in read_limits(lease).devices
        ]
        update_limits(lease, limits)
        self.node.client.add(lease.name)

    def program(self, lease: Path | None, visible: Sequence[str], *command: str) -> "subprocess.Popen[str]":
        env = {**self.node.environment(lease), "CUDA_VISIBLE_DEVICES": ",".join(visible)}
        return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def pair(
        self, job: str, leases: Sequence[Path], devices: Sequence[str], think_us: int
    ) -> "list[subprocess.Popen[str]]":
        page = self.pages / job
        page.write_bytes(bytes(4096))
        words = ("--file", str(page), "--seconds", str(self.seconds), "--think-us", str(think_us), "--rank")
        program = str(self.node.build / "bin" / "vgpu-pair")
        return [
            self.program(lease, (device,), program, *words, str(rank))
            for rank, (lease, device) in enumerate(zip(leases, devices, strict=True))
        ]


def skipped(what: str, why: str) -> Line:
    print(what, "skipped:", why, flush=True)
    return {"skipped": why}


def ranks(bench: Bench) -> Line:
    """Two jobs of two ranks each, on two devices or, with one GPU, on the same device. Time slices must not
    block them.
    """
    devices = (bench.uuids * 2)[:2]
    own = tuple(dict.fromkeys(devices))
    out: Line = {"devices": len(own)}
    for policy in (HARD, CONSERVING, NONE):
        for jobs in (1, 2):
            leases = [bench.lease(f"ranks-{policy.name}-{jobs}-{i}", policy, 50, own) for i in range(jobs)]
            started = [bench.pair(lease.name, (lease, lease), devices, 500) for lease in leases]
            said = [[answer(process) for process in job] for job in started]
            figure = {
                "steps": [job[0]["steps"] for job in said],
                "longest_ms": [max(rank["longest_ms"] for rank in job) for job in said],
                "counters": [compute_counters(lease) for lease in leases],
            }
            if not all(rank["libvgpu"] for job in said for rank in job):
                raise RuntimeError(f"the limiter was not armed: {said}")
            print("ranks", policy.name, jobs, json.dumps(figure), flush=True)
            out[f"{policy.name}, {jobs} jobs"] = figure
    return out


def apart(bench: Bench) -> Line:
    """Ranks in separate leases, which the arbiter cannot treat as a gang. They make progress because the
    arbiter waits only a bounded time for kernels that do not end.
    """
    if len(bench.uuids) < 2:
        return skipped(
            "apart", "needs two GPUs: on one, ranks of one device cannot wait for turns on another"
        )
    devices = bench.uuids[:2]
    jobs = [
        [bench.lease(f"apart-{job}-{rank}", CONSERVING, 50, (uuid,)) for rank, uuid in enumerate(devices)]
        for job in range(2)
    ]
    started = [bench.pair(f"apart{i}", leases, devices, 0) for i, leases in enumerate(jobs)]
    said = [answer(process) for job in started for process in job]
    out: Line = {
        "steps": [line["steps"] for line in said],
        "longest_ms": max(line["longest_ms"] for line in said),
        "bypasses": [compute_counters(lease)["bypasses"] for job in jobs for lease in job],
    }
    print("apart", json.dumps(out), flush=True)
    return out


def host_flag(bench: Bench) -> Line:
    """A tenant whose kernels wait 400 ms for the host, beside a tenant with endless work."""
    native_rate(bench.node, 1000)
    waiting = bench.lease("flag", CONSERVING, 50, bench.uuids[:1])
    words = ("--rank", "0", "--host-ms", "400", "--seconds", str(bench.seconds + 3))
    program = str(bench.node.build / "bin" / "vgpu-pair")
    spinner = bench.program(waiting, bench.uuids[:1], program, *words)
    other = run(bench.node, [Tenant(CONSERVING, 50, Work(1000, seconds=bench.seconds))])[0]
    out: Line = {
        "steps": answer(spinner)["steps"],
        "counters": compute_counters(waiting),
        "other_percent": round(other["percent"], 2),
    }
    print("host flag", json.dumps(out), flush=True)
    return out


def starving(bench: Bench) -> Line:
    """A below-normal tenant beside a normal one, both with endless work: the first gets about one time slice
    a second.
    """
    native_rate(bench.node, 50)
    low = Tenant(CONSERVING, 50, Work(50, seconds=2 * bench.seconds), priority=-1)
    lines = run(bench.node, [low, Tenant(CONSERVING, 50, Work(50, seconds=2 * bench.seconds))])
    out: Line = {
        "below_normal_percent": round(lines[0]["percent"], 2),
        "normal_percent": round(lines[1]["percent"], 2),
        "turns": lines[0]["counters"]["turns"],
    }
    print("starving", json.dumps(out), flush=True)
    return out


def ways(bench: Bench) -> Line:
    """Measures whether a `hard` share of 25 percent holds for two kinds of work: kernels with host functions
    behind them, and one cooperative launch on two devices.
    """
    node = bench.node
    native_rate(node, 50, "callbacks")
    line = run(node, [Tenant(HARD, 25, Work(50, "callbacks", bench.seconds))])[0]
    out: Line = {"callbacks": round(line["percent"], 2), "counters": line["counters"]}
    print("callbacks", json.dumps(out), flush=True)
    if len(bench.uuids) < 2:
        out["multi"] = skipped("multi", "needs two GPUs: one launch on both")
        return out
    both = bench.lease("multi", HARD, 25, bench.uuids[:2])
    program = str(node.build / "bin" / "vgpu-spin")
    words = (
        "--rate",
        str(node.rate),
        "--kernel-us",
        "1000",
        "--mode",
        "multi",
        "--seconds",
        str(bench.seconds),
    )
    said = answer(bench.program(both, bench.uuids[:2], program, *words))
    out["multi"] = round(100 * said["per_second"] / native_rate(node, 1000), 2)
    print("multi", out["multi"], flush=True)
    return out


# A rank of an NCCL job. Reads lines `BEGIN END WAY`, as tests.gpu.programs does. The first rank reads the
# clock and decides for both ranks when they end.
_NCCL = """
import json, os, sys, time, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NCCL_NVLS_ENABLE="0")
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=rank, world_size=2)
x, y = torch.ones(1 << 22, device="cuda"), torch.randn(4096, 4096, device="cuda")
go = torch.ones(1, device="cuda")
def work():
    y.copy_(torch.nn.functional.normalize(y @ y))
    dist.all_reduce(x)
work()
torch.cuda.synchronize()
captured = torch.cuda.CUDAGraph()
with torch.cuda.graph(captured, capture_error_mode="thread_local"):
    work()
def pause_and_work():
    time.sleep(0.0018)
    work()
ways = {"eager": work, "graphs": captured.replay, "pauses": pause_and_work}
loaded = "/libvgpu.so" in open("/proc/self/maps").read()
print(json.dumps({"state": "ready", "libvgpu": loaded}), flush=True)
for line in sys.stdin:
    begin, end, way = line.split()
    time.sleep(max(0.0, int(begin) / 1e9 - time.monotonic()))
    go.fill_(1.0)
    steps, longest, began = 0, 0.0, time.monotonic()
    while go.item() > 0:
        before = time.monotonic()
        ways[way]()
        go.fill_(1.0 if before < int(end) / 1e9 else 0.0)
        dist.broadcast(go, 0)
        torch.cuda.synchronize()
        longest, steps = max(longest, time.monotonic() - before), steps + 1
    rate = steps / (time.monotonic() - began)
    print(json.dumps({"per_second": rate, "longest_ms": longest * 1e3}), flush=True)
"""
SINGLE = "kernels:1000"  # endless work on the first device


class Jobs:
    """Jobs of two NCCL ranks each on the same two GPUs, and a program on the first GPU: each of them native
    and as a tenant.
    """

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self.bench, self.stack, self.ports = bench, stack, itertools.count(29600)
        self.solo: dict[str, float] = {}
        self.native = [self.job(None), self.job(None)]
        self.tenants = [self.job(bench.lease(f"job{i}", CONSERVING, 50, bench.uuids[:2])) for i in range(2)]
        words = sys.executable, "-m", "tests.gpu.programs", SINGLE
        self.single_native = [self.program(None, bench.uuids[0], *words)]
        lease = bench.lease("single", CONSERVING, 50, bench.uuids[:1])
        self.single = [self.program(lease, bench.uuids[0], *words)]
        for programs in (*self.native, *self.tenants, self.single_native, self.single):
            for program in programs:
                if program.line()["libvgpu"] != (program.lease is not None):
                    raise RuntimeError(f"libvgpu is where it should not be: {program}")

    def program(self, lease: Path | None, uuid: str, *command: str) -> Program:
        process = self.bench.program(lease, (uuid,), *command)
        program = Program(self.bench.node, command[-1], lease, process)
        self.stack.callback(program.end)
        return program

    def job(self, lease: Path | None) -> list[Program]:
        port = str(next(self.ports))
        words = str(torch_python()), "-c", _NCCL
        uuids = self.bench.uuids[:2]
        return [self.program(lease, uuid, *words, str(rank), port) for rank, uuid in enumerate(uuids)]

    def measure(
        self,
        way: str,
        case: str,
        jobs: Sequence[Sequence[Program]],
        policy: SharePolicy = NONE,
        share: float = 50,
    ) -> Line:
        """Steps per second of each job, and their percentage of the first rate that was measured for a single
        job alone.
        """
        firsts = [job[0] for job in jobs]
        leases = [program.lease for program in firsts if program.lease is not None]
        for lease in leases:
            self.bench.share(lease, policy, share)
        # beside others, the verdict on a tenant's gaps holds for 4 s
        settle_s = 1.0 if len(jobs) == 1 else SETTLE_S
        before = [compute_counters(lease) for lease in leases]
        programs = [program for job in jobs for program in job]
        said = window(programs, self.bench.seconds, settle_s, way)
        lines = [line for p, line in zip(programs, said, strict=True) if any(p is first for first in firsts)]
        # processes of SINGLE have unequal kernels, because each measures at its start what 1 ms is
        kinds = [way if p.kind != SINGLE else "tenant" if p.lease is not None else "native" for p in firsts]
        if len(jobs) == 1:
            self.solo.setdefault(kinds[0], lines[0]["per_second"])
        percents = [100 * line["per_second"] / self.solo[k] for k, line in zip(kinds, lines, strict=True)]
        figure = {
            "case": case,
            "way": way,
            "asked": share,
            "per_second": [round(line["per_second"], 1) for line in lines],
            "percent": [round(percent, 2) for percent in percents],
            "charged": [line["charged"] for line in lines],
            "longest_ms": round(max(line.get("longest_ms", 0) for line in lines), 1),
            "counters": [
                {key: value - was[key] for key, value in compute_counters(lease).items()}
                for lease, was in zip(leases, before, strict=True)
            ],
        }
        print("nccl", json.dumps(figure), flush=True)
        return figure


def nccl(bench: Bench) -> Line | list[Line]:
    """NCCL jobs alone, beside each other and beside a program on one of their GPUs, native and as tenants.

    A step is a matrix product and an all-reduce, eager, in a CUDA graph or after a pause of 1.8 ms of the
    host, and a broadcast.
    """
    if len(bench.uuids) < 2:
        return skipped("nccl", "needs two GPUs: NCCL refuses two ranks of one job on one")
    if torch_python() is None:
        return skipped("nccl", "PyTorch is not installed")
    with ExitStack() as stack:
        jobs = Jobs(bench, stack)
        one, two = jobs.tenants
        out = [jobs.measure("", "native", [jobs.single_native]), jobs.measure("", "alone", [jobs.single])]
        for way in ("eager", "graphs", "pauses"):
            out.append(jobs.measure(way, "native", jobs.native[:1]))
            out.append(jobs.measure(way, "native, two jobs", jobs.native))
            beside = [jobs.native[0], jobs.single_native]
            out.append(jobs.measure(way, "native, beside the program", beside))
            for share in (10.0, 25.0, 50.0):
                out.append(jobs.measure(way, "hard", [one], HARD, share))
            out.append(jobs.measure(way, "work-conserving", [one], CONSERVING))
            for policy in (HARD, CONSERVING):
                name = policy.name.lower()
                out.append(jobs.measure(way, f"{name}, two jobs", [one, two], policy))
                out.append(jobs.measure(way, f"{name}, beside the program", [one, jobs.single], policy))
    return out


SECTIONS: dict[str, Callable[[Bench], Line | list[Line]]] = {
    "ranks": ranks,
    "apart": apart,
    "host-flag": host_flag,
    "starving": starving,
    "ways": ways,
    "nccl": nccl,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="folder of the native build")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--engine", choices=("cut", "gate"), default="gate", help="that keeps the turns")
    parser.add_argument("--rate", type=float, help="loop iterations in a microsecond; measured if not given")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run; 3 if not given")
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all, if none is named")
    options = parser.parse_args()
    figures: dict[str, object] = {"engine": options.engine}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pages = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        uuids = gpu_uuids()
        node = Node(options.build, folder, uuids[0], options.engine)
        node.start()
        for uuid in uuids[1:]:
            (folder / "engines" / uuid).write_text(f"{options.engine}\n")
        stack.callback(node.kill)
        node.rate = options.rate or max(answer(node.spin(None, "--calibrate"))["rate"] for _ in range(2))
        for name in options.sections or SECTIONS:
            began = time.monotonic()
            figures[name] = SECTIONS[name](Bench(node, uuids, pages, options.seconds))
            print(f"# {name}: {time.monotonic() - began:.0f} s", flush=True)
            options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
