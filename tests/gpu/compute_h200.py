"""Compute shares on a real GPU: `python -m tests.gpu.compute_h200 --build DIR --out FILE [SECTION ...]`.

Every run starts its own arbiter, writes leases, and starts `vgpu-spin` processes: native ones to compare
with, and tenants with libvgpu preloaded. A figure counts only if the tenant reports that libvgpu is loaded,
and the arbiter counts time slices for it. Percentages are of the rate of the same kernels without libvgpu.
Figures go to FILE as JSON and to standard output as lines.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from tests.demo.scenes import torch_python
from vgpud import lease_layout as layout
from vgpud.lease import ArbiterClient, DeviceLimits, SharePolicy, update_limits, write_lease
from vgpud.lease.usage import in_use, read_slots

LEAD_SECONDS = 2.5  # the time in which all processes make their contexts before their common start
HARD, WORK_CONSERVING, NONE = SharePolicy.HARD, SharePolicy.WORK_CONSERVING, SharePolicy.NONE
SOME_MIB = 16  # of memory: the contexts of one program differ by less
Line = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """The work of one process: kernels of `us` microseconds, in a mode of vgpu-spin."""

    us: float
    mode: str = "eager"
    seconds: float = 3.0
    report_ms: float = 250.0
    extra: tuple[str, ...] = ()
    delay: float = 0.0  # seconds after the common start


@dataclass(frozen=True)
class Tenant:
    """A lease and its processes. A tenant without a policy has processes without libvgpu."""

    policy: SharePolicy | None
    share: float  # percent of the device
    work: Work
    processes: int = 1
    priority: int = 0


@dataclass
class Node:
    """A run directory and its arbiter on device 0."""

    build: Path
    run_dir: Path
    uuid: str
    engine: str = "gate"
    rate: float = 400.0
    arbiter: "subprocess.Popen[bytes] | None" = None
    count: int = 0
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)
    # kernel's microseconds, mode, processes -> kernels per second without libvgpu
    native: dict[tuple[float, str, int], float] = field(default_factory=dict)

    @property
    def client(self) -> ArbiterClient:
        return ArbiterClient(self.run_dir / "arbiter" / "control.sock")

    def start(self) -> None:
        (self.run_dir / "leases").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "engines").mkdir(exist_ok=True)
        (self.run_dir / "engines" / self.uuid).write_text(f"{self.engine}\n")
        command = [str(self.build / "bin" / "vgpu-arbiter"), "--run-dir", str(self.run_dir), "--foreground"]
        self.arbiter = subprocess.Popen(command)
        while not self.client.ready():
            time.sleep(0.01)

    def kill(self) -> None:
        assert self.arbiter is not None
        self.arbiter.kill()
        self.arbiter.wait()

    def lease(self, tenant: Tenant) -> Path:
        assert tenant.policy is not None
        self.count += 1
        name = f"t{self.count}"
        folder = write_lease(
            self.run_dir / "leases", name, [self.limits(tenant)], uid=os.getuid(), gid=os.getgid()
        )
        self.client.add(name)
        return folder

    def limits(self, tenant: Tenant) -> DeviceLimits:
        assert tenant.policy is not None
        return DeviceLimits(
            self.uuid,
            8 << 30,
            int(tenant.share * 100),
            tenant.policy,
            tenant.priority,
        )

    def spin(self, lease: Path | None, *words: str) -> "subprocess.Popen[str]":
        command = [str(self.build / "bin" / "vgpu-spin"), "--rate", str(self.rate), *words]
        process = subprocess.Popen(command, env=self.environment(lease), stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def environment(self, lease: Path | None) -> dict[str, str]:
        env = dict(os.environ)
        if lease is not None:
            env |= {"LD_PRELOAD": str(self.build / "lib" / "libvgpu.so"), "VGPU_LEASE": str(lease)}
        return env


def spin_words(work: Work, begin: int) -> list[str]:
    begin += int(work.delay * 1e9)
    return [
        *("--kernel-us", str(work.us), "--mode", work.mode, "--seconds", str(work.seconds)),
        *("--report-ms", str(work.report_ms), "--begin-at", str(begin), *work.extra),
    ]


def answer(process: "subprocess.Popen[str]") -> Line:
    out, _ = process.communicate(timeout=120)
    if not out.strip():
        raise RuntimeError(f"{process.args!r} ended {process.returncode} without a word")
    line: Line = json.loads(out.strip().splitlines()[-1])
    if line["state"] == "error" or process.returncode != 0 or line.get("wrong"):
        raise RuntimeError(str(line))
    return line


def compute_counters(lease: Path) -> dict[str, int]:
    raw = (lease / layout.USAGE_FILE).read_bytes()[layout.USAGE_COMPUTE :]
    names = ("granted_ns", "used_ns", "waited_ns", "overrun_ns", "turns", "bypasses")
    return dict(zip(names, struct.unpack_from("<6Q", raw), strict=True))


def run(node: Node, tenants: Sequence[Tenant], lead: float = LEAD_SECONDS) -> list[Line]:
    """Runs the tenants at the same time. Returns one line for each, summed over its processes, with `percent`
    of the native rate.
    """
    leases = [node.lease(t) if t.policy is not None else None for t in tenants]
    begin = time.monotonic_ns() + int(lead * 1e9)
    started = [
        [node.spin(lease, *spin_words(t.work, begin)) for _ in range(t.processes)]
        for t, lease in zip(tenants, leases, strict=True)
    ]
    lines = []
    for tenant, lease, processes in zip(tenants, leases, started, strict=True):
        parts = [answer(p) for p in processes]
        line = parts[0]
        # a process that begins late makes its context while the others are measured
        line["late_ms"] = max(0.0, max(p.get("start_ns", 0) for p in parts) - begin) / 1e6
        if lease is not None:
            line["counters"] = compute_counters(lease)
            if not all(p["libvgpu"] for p in parts) or line["counters"]["turns"] == 0:
                raise RuntimeError(f"the limiter was not armed: {line}")
        if "per_second" in line:
            line["per_second"] = sum(p["per_second"] for p in parts)
            native = node.native.get((tenant.work.us, tenant.work.mode, tenant.processes))
            if native is not None:
                line["percent"] = 100 * line["per_second"] / native
                line["window_percent"] = windows(parts, native)
        lines.append(line)
    for lease in leases:
        if lease is not None:
            node.client.remove(lease.name)
    return lines


def windows(parts: Sequence[Line], native: float) -> list[float]:
    """Percent of the native rate in each report window, summed over processes. The first window, the start,
    is left out.
    """
    sums: list[float] = []
    for part in parts:
        marks = part["windows"]
        rates = [100 * (b[1] - a[1]) / ((b[0] - a[0]) / 1e3) / native for a, b in itertools.pairwise(marks)]
        sums = rates if not sums else [x + y for x, y in zip(sums, rates, strict=False)]
    return [round(s, 2) for s in sums]


def means(values: Sequence[float], count: int) -> list[float]:
    """The mean of each `count` successive values. For values of windows of 250 ms, a count of 4 gives the
    means over every second.
    """
    return [statistics.mean(values[i : i + count]) for i in range(len(values) - count + 1)]


def native_rate(
    node: Node, us: float, mode: str = "eager", seconds: float = 1.5, processes: int = 1
) -> float:
    """Kernels per second of this many processes without libvgpu. The driver's switches between processes cost
    time.
    """
    key = us, mode, processes
    if key not in node.native:
        tenant = Tenant(None, 100, Work(us, mode, seconds), processes)
        node.native[key] = run(node, [tenant], lead=0.5 + 0.5 * processes)[0]["per_second"]
    return node.native[key]


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


# --- sections of the bench: each function returns its figures


def cost(node: Node) -> Line:
    """Cost of cuLaunchKernel: libvgpu's wrapper and the driver's own function in one process."""
    out: Line = {"native": answer(node.spin(None, "--cost"))}
    for name, tenant, other in (
        ("alone", Tenant(NONE, 100, Work(5)), None),
        (
            "with another there",
            Tenant(WORK_CONSERVING, 50, Work(5)),
            Work(5, extra=("--every-us", "30000000")),
        ),
        ("with another at work", Tenant(WORK_CONSERVING, 50, Work(5)), Work(1000, seconds=1e6)),
    ):
        beside = None
        if other is not None:
            begin = time.monotonic_ns() + (60_000_000_000 if other.extra else 0)
            beside = node.spin(node.lease(Tenant(WORK_CONSERVING, 50, other)), *spin_words(other, begin))
            time.sleep(2.0)
        out[name] = answer(node.spin(node.lease(tenant), "--cost"))
        if beside is not None:
            beside.kill()
            beside.wait()
    for name, line in out.items():
        print("cost", name, json.dumps(line), flush=True)
    return out


def alone(node: Node, asked: Sequence[float], cases: Sequence[tuple[float, str, int]]) -> list[Line]:
    """Rates of one tenant with policy `hard` that is alone on the device."""
    out = []
    for us, mode, processes in cases:
        native_rate(node, us, mode, seconds=1.5 if processes == 1 else 6.0, processes=processes)
        for share in asked:
            # several processes get longer rounds, because each hand-over between them takes longer
            seconds = 5.0 if us >= 20000 else 2.5 if processes == 1 else 8.0
            tenant = Tenant(HARD, share, Work(us, mode, seconds), processes)
            line = beside_native(node, tenant) if mode in DRIFTING else run(node, [tenant], lead(tenant))[0]
            got = {
                "us": us,
                "mode": mode,
                "processes": processes,
                "asked": share,
                "got": round(line["percent"], 2),
                "late_ms": round(line["late_ms"], 1),
                "native": line.get("native"),
            }
            off = [abs(w - share) for w in line["window_percent"]]
            seconds_off = [abs(w - share) for w in means(line["window_percent"], 4)]
            got |= {
                "window_p99_off": round(percentile(off, 0.99), 2),
                "second_most_off": round(max(seconds_off), 2),
                "counters": line["counters"],
            }
            print("alone", json.dumps(got), flush=True)
            out.append(got)
    errors = [abs(line["got"] - line["asked"]) for line in out]
    summary = {"cases": len(out), "mean": round(statistics.mean(errors), 2), "worst": round(max(errors), 2)}
    print("alone, errors", json.dumps(summary), flush=True)
    return out


def lead(tenant: Tenant) -> float:
    return 0.8 + 0.5 * tenant.processes


def beside_native(node: Node, tenant: Tenant) -> Line:
    """Runs a tenant between two runs of the same work without libvgpu, and takes their mean for its native
    rate.
    """
    work = tenant.work
    key = work.us, work.mode, tenant.processes
    native = replace(tenant, policy=None, work=replace(work, seconds=work.seconds / 2))
    node.native[key] = before = run(node, [native], lead(native))[0]["per_second"]
    line = run(node, [tenant], lead(tenant))[0]
    after = run(node, [native], lead(native))[0]["per_second"]
    scale = 2 * before / (before + after)
    line["percent"] *= scale
    line["window_percent"] = [round(scale * percent, 2) for percent in line["window_percent"]]
    line["native"] = [round(before, 1), round(after, 1)]
    return line


# kernel's microseconds, mode, depth, seconds: one kernel of a second, graphs of 40 kernels, host callbacks
STRETCHED = (
    (1_000_000.0, "eager", 2, 17.0),
    (50.0, "graph", 1, 3.0),
    (50.0, "graph", 8, 3.0),
    (500.0, "graph", 1, 4.0),
    (500.0, "graph", 8, 4.0),
    (50.0, "callbacks", 8, 3.0),
)


def stretched(node: Node) -> list[Line]:
    """A lone tenant with a `hard` share of 25 percent, whose kernels end rarely or wait for the host."""
    out = []
    for us, mode, depth, seconds in STRETCHED:
        extra = ("--depth", str(depth))
        native = Tenant(None, 100, Work(us, mode, seconds / 6, 10.0, extra))
        before = run(node, [native], lead=1.0)[0]
        line = run(node, [Tenant(HARD, 25, Work(us, mode, seconds, 10.0, extra))], lead=1.5)[0]
        after = run(node, [native], lead=1.0)[0]  # programs that wait for their hosts drift by some percent
        base = (rate_between_ends(before) + rate_between_ends(after)) / 2
        got = round(100 * rate_between_ends(line) / base, 2)
        out.append({"us": us, "mode": mode, "depth": depth, "asked": 25, "got": got})
        print("stretched", json.dumps(out[-1]), flush=True)
    return out


def rate_between_ends(line: Line) -> float:
    """Kernels per second between the first and the last window in which a kernel ended."""
    marks = line["windows"]
    ends = [b for a, b in itertools.pairwise(marks) if b[1] != a[1]]
    return float(1e3 * (ends[-1][1] - ends[0][1]) / (ends[-1][0] - ends[0][0]))


def jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def together(
    node: Node, us: float, weights: Sequence[float], policy: SharePolicy, mode: str = "eager"
) -> Line:
    """Several tenants with endless work. Weights of `None` mean processes without libvgpu, which the driver
    time-slices.
    """
    native_rate(node, us, mode)
    total = sum(weights)
    asked = [100 * w / total for w in weights]
    # a tenant may have one more time slice at each end of the run, which is 1 % of a share at this length
    seconds = 10.0 if len(weights) < 4 else 20.0
    tenants = [Tenant(policy, a, Work(us, mode, seconds)) for a in asked]
    before = arbiter_ns(node)
    lines = run(node, tenants, lead=2.0 + 0.2 * len(weights))
    spent = arbiter_ns(node) - before
    got = [line["percent"] for line in lines]
    off = [abs(g / sum(got) * 100 / a - 1) * 100 for g, a in zip(got, asked, strict=True)]
    out: Line = {
        "us": us,
        "mode": mode,
        "policy": policy.name,
        "asked": [round(a, 2) for a in asked],
        "got": [round(g, 2) for g in got],
        "total": round(sum(got), 2),
        "worst_off_weight_percent": round(max(off), 2),
        "jain": round(jain([g / a for g, a in zip(got, asked, strict=True)]), 5),
        "window_p99_off": round(
            percentile(
                [abs(w - a) for line, a in zip(lines, asked, strict=True) for w in line["window_percent"]],
                0.99,
            ),
            2,
        ),
        "arbiter_core_percent": round(100 * spent / 1e9 / (seconds + 2.0), 2),
        "bypasses": [line["counters"]["bypasses"] for line in lines],
        "turns": [line["counters"]["turns"] for line in lines],
    }
    print("together", json.dumps(out), flush=True)
    return out


def sliced(node: Node, us: float) -> Line:
    native_rate(node, us)
    got = [line["percent"] for line in run(node, [Tenant(None, 0, Work(us, seconds=3.0))] * 2)]
    print("sliced by the driver", us, got, flush=True)
    return {"us": us, "got": got, "total": sum(got)}


def arbiter_ns(node: Node) -> int:
    """Processor time of the arbiter so far. /proc/PID/stat is too coarse, because it counts ticks of
    10 ms.
    """
    assert node.arbiter is not None
    return int(Path(f"/proc/{node.arbiter.pid}/schedstat").read_text().split()[0])


def lone(node: Node, cases: Sequence[tuple[float, str]]) -> list[Line]:
    """Rates of a lone tenant without a limit, and of a work-conserving tenant while another tenant is
    registered and idle.
    """
    out = []
    for us, mode in cases:
        for name in ("none", "work-conserving, another idle"):
            rates: list[float] = []
            base: list[float] = []
            # native runs alternate with limited runs, because clocks and temperature drift
            for _ in range(2):
                base.append(run(node, [Tenant(None, 0, Work(us, mode, 1.0))], lead=0.8)[0]["per_second"])
                tenants = [Tenant(NONE if name == "none" else WORK_CONSERVING, 50, Work(us, mode, 1.0))]
                if name.endswith("idle"):
                    tenants.append(
                        Tenant(WORK_CONSERVING, 50, Work(us, seconds=0.01, extra=("--every-us", "1000")))
                    )
                rates.append(run(node, tenants, lead=1.2)[0]["per_second"])
            got = {
                "us": us,
                "mode": mode,
                "case": name,
                "of_native": round(100 * statistics.mean(rates) / statistics.mean(base), 2),
            }
            print("lone", json.dumps(got), flush=True)
            out.append(got)
    return out


def pytorch(node: Node) -> list[Line]:
    """PyTorch alone on the device: native, without a limit, and work-conserving beside an idle tenant; the
    runs alternate.
    """
    command = [str(torch_python()), "-m", "tests.gpu.torch_rates", "1.2"]
    idle = Work(5, seconds=0.1, extra=("--every-us", "30000000"))
    other = node.spin(
        node.lease(Tenant(WORK_CONSERVING, 50, idle)), *spin_words(idle, time.monotonic_ns() + 10**12)
    )
    got: dict[str, list[Line]] = {}
    for name, policy in [("native", None), ("none", NONE), ("work-conserving", WORK_CONSERVING)] * 2:
        lease = node.lease(Tenant(policy, 50, idle)) if policy is not None else None
        done = subprocess.run(
            command, env=node.environment(lease), capture_output=True, text=True, check=True
        )
        line: Line = json.loads(done.stdout.splitlines()[-1])
        if lease is not None and (not line["libvgpu"] or compute_counters(lease)["turns"] == 0):
            raise RuntimeError(f"the limiter was not armed: {line}")
        got.setdefault(name, []).append(line)
    other.kill()
    other.wait()
    out = []
    for name in ("none", "work-conserving"):
        for what in (key for key in got["native"][0] if key not in ("state", "libvgpu")):
            best = {n: max(line[what] for line in got[n]) for n in ("native", name)}
            figure = {"case": name, "what": what, "of_native": round(100 * best[name] / best["native"], 2)}
            print("pytorch", json.dumps(figure), flush=True)
            out.append(figure)
    return out


def lending(node: Node) -> Line:
    """Two work-conserving tenants with half of the device each. One starts 1 s later and runs for 1 s.
    Returns 10 ms windows of the other.
    """
    native_rate(node, 200)
    stays = Tenant(WORK_CONSERVING, 50, Work(200, seconds=3.2, report_ms=2))
    comes = Tenant(
        WORK_CONSERVING, 50, Work(200, seconds=1.0, report_ms=2, delay=1.0, extra=("--linger-ms", "2000"))
    )
    lines = run(node, [stays, comes])
    start = lines[0]["start_ns"]
    came = (lines[1]["start_ns"] - start) / 1e6
    left = came + 1000 * lines[1]["seconds"]
    marks = lines[0]["windows"]
    timeline = list(zip([m[0] for m in marks[1:]], lines[0]["window_percent"], strict=False))
    lent = next((t for t, w in timeline if t > left and w > 95), math.nan) - left
    first = lines[1]["windows"][0]
    computes = next((t for t, done in lines[1]["windows"] if done > 0), math.nan)
    out: Line = {
        "lent_after_ms": round(lent, 1),
        "newcomer_computes_after_ms": round(computes, 1),
        "in_windows_of_ms": round(first[0], 1),
        "while_both": round(statistics.mean(w for t, w in timeline if came + 100 < t < left - 50), 2),
        "before": round(statistics.mean(w for t, w in timeline if t < came - 20), 2),
    }
    print("lending", json.dumps(out), flush=True)
    return out


def change(node: Node) -> Line:
    """A hard tenant's share changes from 90 to 10 and back to 90 percent, beside a tenant with the rest.
    Returns 20 ms windows.
    """
    native_rate(node, 50)
    tenant = Tenant(HARD, 90, Work(50, seconds=3.0, report_ms=20))
    lease = node.lease(tenant)
    begin = time.monotonic_ns() + int(1.5e9)
    process = node.spin(lease, *spin_words(tenant.work, begin))
    moments = []
    for at, share in ((1.0, 10.0), (2.0, 90.0)):
        time.sleep(max(0.0, (begin + at * 1e9 - time.monotonic_ns()) / 1e9))
        update_limits(lease, [node.limits(replace(tenant, share=share))])
        node.client.add(lease.name)
        moments.append((time.monotonic_ns() - begin) / 1e6)
    line = answer(process)
    rates = windows([line], node.native[50, "eager", 1])
    times = [m[0] for m in line["windows"]][1:]
    offset = (line["start_ns"] - begin) / 1e6
    out: Line = {
        "timeline": [[round(t + offset), w] for t, w in zip(times, rates, strict=False)],
        "changed_at_ms": moments,
    }
    for name, moment, until, share in (
        ("to_10", moments[0], moments[1], 10.0),
        ("to_90", moments[1], 3000.0, 90.0),
    ):
        after = [w for t, w in zip(times, rates, strict=False) if moment + 60 < t + offset < until]
        out[name] = {"mean_from_40ms": round(statistics.mean(after), 2), "asked": share}
    print("change", json.dumps({k: v for k, v in out.items() if k != "timeline"}), flush=True)
    return out


def latency(node: Node) -> Line:
    """Latency of 1 ms of work every 5 ms, beside a tenant with endless kernels of 200 us."""
    native_rate(node, 200)
    client = Work(200, seconds=4.0, extra=("--every-us", "5000", "--burst", "5"))
    solo = run(node, [Tenant(None, 0, client)], lead=1.0)[0]
    out: Line = {"solo": solo}
    for name, priority in (("no priority", 0), ("priority", 1)):
        lines = run(
            node,
            [
                Tenant(WORK_CONSERVING, 30, client, 1, priority),
                Tenant(WORK_CONSERVING, 70, Work(200, seconds=4.0)),
            ],
        )
        got = {
            "p50_us": lines[0]["p50_us"],
            "p99_us": lines[0]["p99_us"],
            "p99_of_solo": round(lines[0]["p99_us"] / solo["p99_us"], 3),
            "other_percent": round(lines[1]["percent"], 2),
            "counters": [line["counters"] for line in lines],
        }
        print("latency", name, json.dumps(got), flush=True)
        out[name] = got
    return out


def orphaned(node: Node) -> Line:
    """The arbiter is killed and started again under a hard tenant. Returns windows of 100 ms."""
    native_rate(node, 50)
    tenant = Tenant(HARD, 25, Work(50, seconds=4.0, report_ms=100))
    lease = node.lease(tenant)
    begin = time.monotonic_ns() + int(1.5e9)
    process = node.spin(lease, *spin_words(tenant.work, begin))
    time.sleep(1.5 + 1.3)
    node.kill()
    time.sleep(1.3)
    node.start()
    line = answer(process)
    rates = windows([line], node.native[50, "eager", 1])
    out: Line = {
        "windows_100ms": rates,
        "worst": max(rates),
        "least": min(rates),
        "mean": round(statistics.mean(rates), 2),
    }
    print("orphaned", json.dumps(out), flush=True)
    return out


def killed(node: Node) -> Line:
    """Kills the arbiter at random moments under three tenants, for VGPU_KILLED_SECONDS. Returns for each
    tenant the longest time without the end of a kernel (aim: 1 s), exact to 10 ms.
    """
    seconds = float(os.environ.get("VGPU_KILLED_SECONDS", "20"))
    quiet_seconds = 2.0  # the time at the end in which a tenant that stays off the device is noticed
    tenant = Tenant(HARD, 30, Work(1000, seconds=seconds + quiet_seconds, report_ms=10))
    begin = time.monotonic_ns() + int(LEAD_SECONDS * 1e9)
    processes = [node.spin(node.lease(tenant), *spin_words(tenant.work, begin)) for _ in range(3)]
    kills, dice = 0, random.Random(begin)
    try:
        while time.monotonic_ns() < begin + seconds * 1e9:
            time.sleep(dice.uniform(0.01, 0.6))
            node.kill()
            kills += 1
            time.sleep(dice.choice((0.0, dice.uniform(0, 0.3))))
            node.start()
        lines = [answer(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    out = {"kills": kills, "longest_ms": [longest_gap_ms(line["windows"]) for line in lines]}
    print("killed", json.dumps(out), flush=True)
    return out


def until(holds: Callable[[], bool], what: str, seconds: float = 60.0, pause: float = 0.002) -> None:
    """Waits until a condition holds. Raises RuntimeError if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"for {seconds:g} s it is not so: {what}")
        time.sleep(pause)


def states(lease: Path) -> list[tuple[bool, bool]]:
    """For each process of a lease with one device: whether its channels are disabled, and whether a call that
    disables or enables them is in progress.
    """
    with (lease / layout.USAGE_FILE).open("rb") as page:
        _, slots = read_slots(page.fileno())
        heads = [
            os.pread(
                page.fileno(), 16, layout.CHANNELS_AT + slot * layout.CHANNELS_SIZE + layout.CHANNELS_OFF
            )
            for slot in (at // layout.SLOT_SIZE for at in in_use(slots))
        ]
    words = (struct.unpack("<4I", head) for head in heads)
    return [(off & ~doubtful != 0, doubtful != 0) for off, _, _, doubtful in words]


def used_mib(node: Node) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(node.uuid)).used) >> 20


def all_off(lease: Path, processes: int) -> bool:
    return [off for off, _ in states(lease)] == [True] * processes


def at_moment(lease: Path, moment: str, processes: int) -> None:
    """Waits until the tenant is off, or a call begins that disables ("leaves") or enables ("comes") its
    channels.
    """
    if moment == "leaves":
        until(lambda: not any(off or busy for off, busy in states(lease)), "it is on the device", pause=0)
    else:
        until(lambda: all_off(lease, processes), "it is off the device", pause=0)
    if moment != "off":
        until(lambda: any(busy for _, busy in states(lease)), f"it {moment}", pause=0)


def kill_all(node: Node, processes: "Sequence[subprocess.Popen[str]]", least_mib: int) -> float:
    """Kills processes. Returns the milliseconds until at least this much memory is free."""
    before = used_mib(node)
    began = time.monotonic()
    for process in processes:
        process.kill()
    until(lambda: used_mib(node) <= before - least_mib, f"{least_mib} MiB are free")
    freed_ms = 1e3 * (time.monotonic() - began)
    for process in processes:
        process.communicate()
    return freed_ms


def forgotten(node: Node, lease: Path) -> bool:
    return not node.client.list(lease.name) and not states(lease)


def killed_off(node: Node) -> Line:
    """Kills tenants of 5 percent beside a tenant of 75 percent, for VGPU_DEATHS_SECONDS: while they are off
    the device, and in the calls that disable and enable their channels. Every fourth has three processes.
    Returns when their memory is free, what the neighbour has, what stays, and what the next tenants have.
    """
    seconds = float(os.environ.get("VGPU_DEATHS_SECONDS", "30"))
    endless = ("--kernel-us", "1000", "--seconds", "1e6")
    native_rate(node, 1000.0)
    empty = used_mib(node)
    unlimited = node.spin(None, *endless)
    time.sleep(2.0)
    least_mib = used_mib(node) - empty - SOME_MIB
    native_ms = kill_all(node, [unlimited], least_mib)
    neighbour = Tenant(HARD, 75, Work(1000, seconds=seconds, report_ms=1000.0))
    begin = time.monotonic_ns() + int(LEAD_SECONDS * 1e9)
    lease = node.lease(neighbour)
    process = node.spin(lease, *spin_words(neighbour.work, begin))
    time.sleep(LEAD_SECONDS)
    base, files = used_mib(node), open_files(node)
    dead: list[Line] = []
    while not dead or time.monotonic_ns() < begin + (seconds - 3) * 1e9:
        leases = [node.lease(Tenant(HARD, 5, Work(1000))) for _ in range(4)]
        started = [
            [node.spin(one, *endless) for _ in range(count)]
            for one, count in zip(leases, (1, 1, 1, 3), strict=True)
        ]
        complete = base + least_mib * sum(map(len, started))
        until(lambda: used_mib(node) >= complete, "all processes have contexts")  # noqa: B023
        for one, processes in zip(leases, started, strict=True):
            moment = ("off", "leaves", "comes")[len(dead) % 3]
            at_moment(one, moment, len(processes))
            freed_ms = kill_all(node, processes, least_mib * len(processes))
            until(partial(forgotten, node, one), "the arbiter has no process of the tenant")
            node.client.remove(one.name)
            dead.append({"moment": moment, "processes": len(processes), "freed_ms": round(freed_ms, 1)})
        until(lambda: used_mib(node) < base + SOME_MIB, "all memory of dead tenants is free")
    until(lambda: open_files(node) <= files, "the arbiter has closed the files of dead tenants")
    line = answer(process)
    node.client.remove(lease.name)
    percent = windows([line], node.native[1000.0, "eager", 1])
    after = [Tenant(NONE, 100, Work(1000, seconds=2.0)), Tenant(HARD, 50, Work(1000, seconds=2.0))]
    out: Line = {
        "tenants": len(dead),
        "processes": sum(one["processes"] for one in dead),
        "freed_ms_without_libvgpu": round(native_ms, 1),
        "freed_ms": {
            f"{moment}, {count}": [len(times), round(statistics.median(times), 1), max(times)]
            for moment in ("off", "leaves", "comes")
            for count in (1, 3)
            if (times := [d["freed_ms"] for d in dead if (d["moment"], d["processes"]) == (moment, count)])
        },
        "neighbour": round(100 * line["per_second"] / node.native[1000.0, "eager", 1], 2),
        "neighbour_seconds": percent,
        "left_mib": used_mib(node) - empty,
        "next": [round(run(node, [tenant], lead=1.5)[0]["percent"], 2) for tenant in after],
    }
    print("killed off", json.dumps(out), flush=True)
    return out


def open_files(node: Node) -> int:
    assert node.arbiter is not None
    return len(list(Path(f"/proc/{node.arbiter.pid}/fd").iterdir()))


def meetings(node: Node) -> list[Line]:
    """Tenants of 25 percent whose blocks meet at barriers of the whole grid, beside one of 75. A block that
    passes a barrier too early fails the section.
    """
    out = []
    native_rate(node, 1000.0)
    for mode, us in itertools.product(("cooperative", "cluster"), (1000.0, 20000.0)):
        native_rate(node, us, mode)
        lines = run(node, [Tenant(HARD, 25, Work(us, mode, 6.0)), Tenant(HARD, 75, Work(1000, seconds=6.0))])
        got = [round(line["percent"], 2) for line in lines]
        out.append({"mode": mode, "us": us, "asked": [25, 75], "got": got, "kernels": lines[0]["kernels"]})
        print("meetings", json.dumps(out[-1]), flush=True)
    return out


def longest_gap_ms(marks: Sequence[Sequence[float]]) -> float:
    """The longest time in ms between two windows in which a kernel ended, or between one and an end of the
    run.
    """
    ends = [marks[0][0], *(b[0] for a, b in itertools.pairwise(marks) if b[1] != a[1]), marks[-1][0]]
    return round(max(b - a for a, b in itertools.pairwise(ends)), 1)


def idle(node: Node) -> Line:
    """Wake-ups of the arbiter in 2 s with two registered tenants that do nothing."""
    lazy = Work(50, seconds=1, extra=("--every-us", "30000000"))
    begin = time.monotonic_ns() + 60_000_000_000
    processes = [node.spin(node.lease(Tenant(HARD, 40, lazy)), *spin_words(lazy, begin)) for _ in range(2)]
    time.sleep(3)
    before = switches(node)
    time.sleep(2)
    woken = switches(node) - before
    for process in processes:
        process.kill()
        process.wait()
    print("idle wake-ups", woken, flush=True)
    return {"wake_ups_in_2s": woken}


def switches(node: Node) -> int:
    assert node.arbiter is not None
    for line in Path(f"/proc/{node.arbiter.pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise RuntimeError("no such line")


def gpu_uuids() -> tuple[str, ...]:
    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return tuple(pynvml.nvmlDeviceGetUUID(handle) for handle in handles)


@contextmanager
def made(build: Path, engine: str) -> Iterator[Node]:
    pynvml.nvmlInit()
    uuid = os.environ.get("VGPU_BENCH_UUID") or gpu_uuids()[0]
    with tempfile.TemporaryDirectory() as folder:
        node = Node(build, Path(folder), uuid, engine)
        node.start()
        try:
            if "VGPU_BENCH_RATE" not in os.environ:
                rates = [answer(node.spin(None, "--calibrate"))["rate"] for _ in range(2)]
                node.rate = max(rates)
            yield node
        finally:
            for process in node.processes:
                process.kill()
                process.wait()
            node.kill()


EAGER = tuple((us, "eager", 1) for us in (5.0, 50.0, 1000.0, 20000.0))
# the native rate of work that waits for threads of its host differs from second to second
DRIFTING = ("callbacks",)
OTHERS = (
    (50.0, "graph", 1),
    (50.0, "callbacks", 1),
    (50.0, "streams", 1),
    (50.0, "eager", 4),
)
MEETING = tuple((us, mode, 1) for mode in ("cooperative", "cluster") for us in (50.0, 1000.0, 20000.0))
PARTS = ("quick", "callbacks", "pairs", "weights")  # of other sections
SECTIONS = {
    "cost": cost,
    "quick": lambda node: [alone(node, (25.0,), EAGER), together(node, 50.0, (25, 75), HARD)],
    "pairs": lambda node: [
        together(node, 50.0, (25, 75), HARD),
        together(node, 1000.0, (25, 75), WORK_CONSERVING),
        together(node, 50.0, (1,) * 8, WORK_CONSERVING),
    ],
    "alone": lambda node: alone(node, (5.0, 25.0, 50.0, 75.0, 90.0), (*EAGER, *OTHERS)),
    "callbacks": lambda node: alone(node, (5.0, 25.0, 50.0, 75.0, 90.0), ((50.0, "callbacks", 1),)),
    "stretched": stretched,
    "meetings": lambda node: [*alone(node, (25.0,), MEETING), *meetings(node)],
    "together": lambda node: [
        together(node, us, weights, policy)
        for us, weights, policy in (
            (50.0, (10, 90), HARD),
            (50.0, (25, 75), HARD),
            (50.0, (25, 75), WORK_CONSERVING),
            (50.0, (1, 2, 5), WORK_CONSERVING),
            (50.0, (1,) * 8, WORK_CONSERVING),
            (5.0, (25, 75), WORK_CONSERVING),
            (1000.0, (25, 75), HARD),
            (1000.0, (10, 90), WORK_CONSERVING),
            (1000.0, (1,) * 8, WORK_CONSERVING),
        )
    ],
    "weights": lambda node: [
        together(node, 50.0, weights, WORK_CONSERVING) for weights in ((10, 90), (1, 2, 5), (1,) * 8)
    ],
    "long": lambda node: [together(node, 20000.0, (25, 75), WORK_CONSERVING)],
    "sliced": lambda node: [sliced(node, us) for us in (50.0, 1000.0)],
    "lone": lambda node: lone(node, ((5.0, "eager"),)),
    "pytorch": pytorch,
    "lending": lending,
    "change": change,
    "latency": latency,
    "orphaned": orphaned,
    "killed": killed,
    "killed_off": killed_off,
    "idle": idle,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="folder of the native build")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--engine", choices=("cut", "gate"), default="gate", help="that keeps the turns")
    parser.add_argument(
        "sections",
        nargs="*",
        choices=[*SECTIONS, []],
        help="all but 'quick', 'callbacks', 'pairs' and 'weights', if none",
    )
    options = parser.parse_args()
    figures: dict[str, object] = {"engine": options.engine}
    with made(options.build, options.engine) as node:
        for name in options.sections or [s for s in SECTIONS if s not in PARTS]:
            began = time.monotonic()
            try:
                figures[name] = SECTIONS[name](node)
            except (RuntimeError, subprocess.SubprocessError) as error:
                figures[name] = {"failed": str(error)}
                print(name, "FAILED", error, flush=True)
            print(f"-- {name}: {time.monotonic() - began:.1f} s", flush=True)
            figures["rate"] = node.rate
            figures["native"] = {
                f"{us} us {mode}, {count}": rate for (us, mode, count), rate in node.native.items()
            }
            options.out.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
