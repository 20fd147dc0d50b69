"""Compute shares of ordinary programs: `python -m tests.gpu.compute_programs --build D --out F`.

Each program of tests/gpu/programs.py is started three times, native, as a client of NVIDIA's MPS daemon
(where it is installed; without thread percentages) and as a tenant, and keeps running: a measurement is a
window in which all programs of a case work at the same time. For each pair it measures the driver's own time
slicing, MPS, and every requested weight under `hard` and `work-conserving`, in the same run, in percent of
the program's rate alone without libvgpu. The figures name the device's engine (vgpu-engine-probe).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.demo.scenes import torch_python
from tests.gpu.compute_h200 import Node, Tenant, Work, compute_counters, gpu_uuids, made, means
from vgpud.lease import DeviceLimits, SharePolicy, update_limits

Line = dict[str, Any]
PROGRAMS = ("decoder", "training", "compiled", "inference", "batches")
WEIGHTS = ((50, 50), (25, 75))
HARD, SHARED = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
MEMORY_BYTES = 60 << 30
# the arbiter's verdict on a tenant's gaps holds for 4 s
SETTLE_S = 4.0
SETTLE_ALONE_S = 1.0  # without time slices beside others


@dataclass
class Program:
    """One running process. With a lease it is a tenant whose share changes between the windows."""

    node: Node
    kind: str
    lease: Path | None
    process: subprocess.Popen[str]

    def line(self) -> Line:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.kind} ended {self.process.wait()}")
        said: Line = json.loads(text)
        return said

    def say(self, begin: int, end: int, words: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{begin} {end} {words}\n")
        self.process.stdin.flush()

    def used_ns(self) -> int:
        return compute_counters(self.lease)["used_ns"] if self.lease is not None else 0

    def share(self, policy: SharePolicy, percent: float, priority: int = 0) -> None:
        assert self.lease is not None
        update_limits(self.lease, [limits(self.node, policy, percent, priority)])
        self.node.client.add(self.lease.name)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def limits(node: Node, policy: SharePolicy, percent: float, priority: int = 0) -> DeviceLimits:
    return DeviceLimits(node.uuid, MEMORY_BYTES, round(percent * 100), policy, priority)


@contextmanager
def mps_environment() -> Iterator[dict[str, str]]:
    """Yields the environment variables for clients of an MPS daemon that it starts; an empty dictionary if
    MPS is not installed.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("MPS is not installed: no case `mps`", flush=True)
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        clients = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **clients}
        daemon = subprocess.Popen([control, "-f"], env=env)
        try:
            yield clients
        finally:
            subprocess.run([control], env=env, input="quit -t 5\n", text=True, check=False)
            daemon.kill()
            daemon.wait()


def start(
    node: Node, kind: str, tenant: bool, stack: ExitStack, besides: Mapping[str, str] | None = None
) -> Program:
    lease = node.lease(Tenant(SHARED, 50, Work(1))) if tenant else None
    if lease is not None:
        update_limits(lease, [limits(node, SHARED, 50)])
        node.client.add(lease.name)
    python = sys.executable if ":" in kind else torch_python() or sys.executable
    process = subprocess.Popen(
        [python, "-m", "tests.gpu.programs", kind],
        env={**node.environment(lease), **(besides or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    program = Program(node, kind, lease, process)
    stack.callback(program.end)
    return program


def window(
    programs: Sequence[Program], seconds: float, settle_s: float = SETTLE_S, words: str = ""
) -> list[Line]:
    """Returns each program's rate in a window of this length, after a window that lets the clocks settle.
    `charged` is the percentage of the time that the arbiter charged.
    """
    begin = time.monotonic_ns() + 50_000_000
    middle = begin + int(settle_s * 1e9)
    for program in programs:
        program.say(begin, middle, words)
        program.say(middle, middle + int(seconds * 1e9), words)
    for program in programs:
        program.line()
    began, before = time.monotonic(), [program.used_ns() for program in programs]
    lines = [program.line() for program in programs]
    spent = time.monotonic() - began
    for program, line, used in zip(programs, lines, before, strict=True):
        line["charged"] = round((program.used_ns() - used) / 1e7 / spent, 2)
    return lines


class Bench:
    def __init__(self, node: Node, kinds: Sequence[str], seconds: float, stack: ExitStack) -> None:
        self.node, self.kinds, self.seconds = node, kinds, seconds
        mps = stack.enter_context(mps_environment())
        self.native = {kind: start(node, kind, False, stack) for kind in kinds}
        self.tenant = {kind: start(node, kind, True, stack) for kind in kinds}
        self.mps = {kind: start(node, kind, False, stack, mps) for kind in (kinds if mps else ())}
        self.wait_for_clients()
        for kind in kinds:
            if self.native[kind].line()["libvgpu"] or not self.tenant[kind].line()["libvgpu"]:
                raise RuntimeError(f"{kind}: libvgpu is where it should not be, or not where it should")
        self.solo = {kind: window([self.native[kind]], seconds, SETTLE_ALONE_S)[0] for kind in kinds}

    def wait_for_clients(self) -> None:
        try:
            for program in self.mps.values():
                program.line()
        except RuntimeError as error:
            print(f"no case `mps`: {error}", flush=True)
            self.mps = {}

    def figure(self, case: str, kinds: Sequence[str], lines: Sequence[Line], **more: Any) -> Line:
        of_kinds = list(zip(kinds, lines, strict=True))
        got = [round(100 * line["per_second"] / self.solo[kind]["per_second"], 2) for kind, line in of_kinds]
        out = {
            "case": case,
            "programs": list(kinds),
            **more,
            "percent": got,
            "total": round(sum(got), 2),
            "p50_ms": [round(line["p50_ms"], 2) for line in lines],
            "p99_ms": [round(line["p99_ms"], 2) for line in lines],
            "charged": [line["charged"] for line in lines],
            "windows": {f"{s} s": [self.extremes(k, v, s) for k, v in of_kinds] for s in (1, 3)},
        }
        print(json.dumps(out), flush=True)
        return out

    def extremes(self, kind: str, line: Line, seconds: int) -> list[float]:
        """The lowest and the highest rate of a program over any `seconds` seconds, in percent of its rate
        alone.
        """
        rates = means(line["each_second"], seconds)
        solo = self.solo[kind]["per_second"]
        return [round(100 * rate / solo, 1) for rate in (min(rates), max(rates))] if rates else []

    def alone(self, asked: Sequence[float], part: slice) -> list[Line]:
        out = []
        for kind in self.kinds[part]:
            out.append(self.figure("native", [kind], [self.solo[kind]]))
            for percent in asked:
                self.tenant[kind].share(HARD, percent)
                line = window([self.tenant[kind]], self.seconds, SETTLE_ALONE_S)
                out.append(self.figure("hard", [kind], line, asked=[percent]))
            self.tenant[kind].share(SHARED, 50)
        return out

    def pairs(self, part: slice) -> list[Line]:
        out = []
        for pair in list(itertools.combinations(self.kinds, 2))[part]:
            natives = [self.native[kind] for kind in pair]
            out.append(self.figure("sliced", pair, window(natives, self.seconds, SETTLE_ALONE_S)))
            if self.mps:
                clients = [self.mps[kind] for kind in pair]
                out.append(self.figure("mps", pair, window(clients, self.seconds, SETTLE_ALONE_S)))
            tenants = [self.tenant[kind] for kind in pair]
            for policy, weights in itertools.product((HARD, SHARED), WEIGHTS):
                for tenant, percent in zip(tenants, weights, strict=True):
                    tenant.share(policy, percent)
                lines = window(tenants, self.seconds)
                out.append(self.figure(policy.name.lower(), pair, lines, asked=list(weights)))
            for tenant in tenants:
                tenant.share(SHARED, 50)
        return out


def engine(build: Path) -> Line:
    """The result of vgpu-engine-probe for the bench's device."""
    uuid = os.environ.get("VGPU_BENCH_UUID") or gpu_uuids()[0]
    probe = [str(build / "bin" / "vgpu-engine-probe"), uuid]
    done = subprocess.run(probe, capture_output=True, text=True, check=True)
    said: Line = json.loads(done.stdout)
    print("engine", json.dumps(said), flush=True)
    return said


def priority(node: Node, seconds: float, besides: Sequence[float], stack: ExitStack) -> list[Line]:
    """A request of 1 ms every 5 ms, with a share of 30 percent and priority, beside kernels of several
    lengths.
    """
    native = start(node, "request:1000", False, stack)
    client = start(node, "request:1000", True, stack)
    native.line(), client.line()
    client.share(SHARED, 30, priority=1)
    solo = window([native], seconds, SETTLE_ALONE_S)[0]
    out: list[Line] = [{"case": "solo", "p50_ms": solo["p50_ms"], "p99_ms": solo["p99_ms"]}]
    for us in besides:
        free, other = start(node, f"kernels:{us}", False, stack), start(node, f"kernels:{us}", True, stack)
        free.line(), other.line()
        other.share(SHARED, 70)
        for case, pair, settle_s in (
            ("sliced", (native, free), SETTLE_ALONE_S),
            ("priority", (client, other), SETTLE_S),
        ):
            alone = window([pair[1]], seconds, SETTLE_ALONE_S)[0]
            lines = window(pair, seconds, settle_s)
            out.append(
                {
                    "case": case,
                    "beside_us": us,
                    "p50_ms": round(lines[0]["p50_ms"], 2),
                    "p99_ms": round(lines[0]["p99_ms"], 2),
                    "requests_percent": round(100 * lines[0]["per_second"] / solo["per_second"], 2),
                    "other_percent": round(100 * lines[1]["per_second"] / alone["per_second"], 2),
                }
            )
        free.end()
        other.end()
    for line in out:
        print("priority", json.dumps(line), flush=True)
    return out


def beside_gaps(
    node: Node, seconds: float, gaps: str, all_weights: Sequence[Sequence[float]], stack: ExitStack
) -> list[Line]:
    """Endless kernels of 200 us beside kernels with a pause after each (`gaps:` of tests/gpu/programs.py).
    The rates are in percent of each program's rate alone; under a share, of that as the only tenant with
    work.
    """
    kinds = ("kernels:200", f"gaps:{gaps}")
    out: list[Line] = []

    def both(tenant: bool) -> tuple[list[Program], list[float]]:
        programs = [start(node, kind, tenant, stack) for kind in kinds]
        for program in programs:
            program.line()
        return programs, [window([p], seconds, SETTLE_ALONE_S)[0]["per_second"] for p in programs]

    def figure(case: str, lines: Sequence[Line], alone: Sequence[float], **more: Any) -> None:
        got = [round(100 * line["per_second"] / a, 2) for line, a in zip(lines, alone, strict=True)]
        charged = [line["charged"] for line in lines]
        out.append({"case": case, "gaps_us": gaps, **more, "percent": got, "charged": charged})
        print("gaps", json.dumps(out[-1]), flush=True)

    natives, alone = both(tenant=False)
    figure("sliced", window(natives, seconds, SETTLE_ALONE_S), alone)
    tenants, alone = both(tenant=True)
    for policy, weights in itertools.product((HARD, SHARED), all_weights):
        for tenant, percent in zip(tenants, weights, strict=True):
            tenant.share(policy, percent)
        figure(policy.name.lower(), window(tenants, seconds), alone, asked=weights)
    for program in (*natives, *tenants):
        program.end()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="folder of the native build")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--programs", nargs="*", default=PROGRAMS, help="kinds of tests/gpu/programs.py")
    parser.add_argument("--asked", nargs="*", type=float, default=[25, 50, 75], help="alone, percent")
    parser.add_argument("--besides", nargs="*", type=float, default=[200, 20000, 500000], help="microseconds")
    parser.add_argument(
        "--gaps", nargs="*", default=["500", "2000"], help="microseconds, or KERNEL:PAUSE in microseconds"
    )
    parser.add_argument(
        "--gap-weights", nargs="*", default=["50:50", "30:70"], help="of the busy tenant and of the other"
    )
    parser.add_argument(
        "--part",
        default="1/1",
        help="N/M: only the N-th of M parts of the programs alone and of the pairs, for a machine of M GPUs",
    )
    options = parser.parse_args()
    number, parts = map(int, options.part.split("/"))
    part = slice(number - 1, None, parts)
    figures: dict[str, Any] = {}
    figures["engine"] = engine(options.build)
    with made(options.build, figures["engine"]["engine"]) as node, ExitStack() as stack:
        if options.besides:
            figures["priority"] = priority(node, options.seconds, options.besides, stack)
        weights = [tuple(map(float, pair.split(":"))) for pair in options.gap_weights]
        figures["gaps"] = [beside_gaps(node, options.seconds, us, weights, stack) for us in options.gaps]
        options.out.write_text(json.dumps(figures, indent=1))
        bench = Bench(node, options.programs, options.seconds, stack)
        figures["solo"] = bench.solo
        figures["alone"] = bench.alone(options.asked, part)
        options.out.write_text(json.dumps(figures, indent=1))
        figures["pairs"] = bench.pairs(part)
        figures["counters"] = {
            kind: compute_counters(program.lease)
            for kind, program in bench.tenant.items()
            if program.lease is not None
        }
        options.out.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
