"""Replay of idle suspension: notebook-like tenants over days, with the decisions of the daemon's planner.

A tenant works in sessions: spells of work with short pauses, then nothing for long (exponential and
log-normal lengths, seeded). It works only while its memory is on the card; other work waits. Suspending and
resuming take as long as on an H200 (docs/pool.md): 0.4 s and 0.4 s a GiB out, 0.3 s and 0.13 s a GiB in; one
tenant at a time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.bench.common import Report
from vgpud.model.tenancy import Cause
from vgpud.planner.residency import Kind, Move, Rules, Tenant, Where, decide, patience_after

GPU = "GPU-0"
CARD_GIB = 141
STEP_SECONDS = 2.0
DAY = 86400.0


@dataclass
class Trace:
    """A tenant's memory, and the spells in which it has work: (from, until) in seconds, disjoint and in
    order.
    """

    gib: int
    spells: list[tuple[float, float]]


@dataclass
class Outcome:
    """Totals over all tenants: seconds, and GiB times seconds during which memory was on the host."""

    suspensions: int = 0
    waits: list[float] = field(default_factory=list)
    given_back: float = 0.0
    most_suspensions: int = 0  # the largest number for one tenant
    worked: float = 0.0


def notebooks(count: int, days: float, seed: int, gib: int = 12) -> list[Trace]:
    draw = random.Random(seed)
    traces = []
    for _ in range(count):
        now, spells = draw.uniform(0, 3600), []
        while now < days * DAY:
            for _ in range(draw.randint(3, 25)):
                length = draw.lognormvariate(3.0, 1.2)
                spells.append((now, now + length))
                now += length + draw.expovariate(1 / 90)
            now += draw.lognormvariate(8.2, 1.0)  # a pause of an hour, or a night
        traces.append(Trace(gib, spells))
    return traces


def metronomes(count: int, every: float, days: float, gib: int = 12) -> list[Trace]:
    """The worst case for a rule by idle time: each tenant works again just after its suspension."""
    times = [every * i for i in range(int(days * DAY / every))]
    return [Trace(gib, [(at + n, at + n + 5) for at in times]) for n in range(count)]


def replay(traces: Sequence[Trace], rules: Rules, days: float, patient: bool = True) -> Outcome:
    """Replays the traces. With `patient`, the idle time of a tenant doubles when the tenant works again soon
    after its suspension, as in vgpud; without it, the idle time stays the same.
    """
    tenants = [
        Tenant(str(n), ((GPU, trace.gib),), Where.AWAY, -DAY, rules, cause=Cause.IDLE)
        for n, trace in enumerate(traces)
    ]
    left = [sum(until - since for since, until in trace.spells) for trace in traces]
    due = [0.0] * len(traces)  # for each tenant, seconds of work that are due and not done yet
    upcoming = [list(reversed(trace.spells)) for trace in traces]
    counts = [0] * len(traces)
    found, moving, until, now = Outcome(), -1, 0.0, 0.0
    total = sum(left)
    while now < days * DAY:
        if moving >= 0 and now >= until:
            place = Where.AWAY if tenants[moving].where is Where.GOING else Where.HERE
            tenants[moving] = replace(tenants[moving], where=place, since=now, active_at=now)
            moving = -1
        for n, tenant in enumerate(tenants):
            while upcoming[n] and upcoming[n][-1][0] <= now:
                since, end = upcoming[n].pop()
                due[n] += end - since
            if due[n] > 0 and tenant.where is Where.HERE:
                due[n] -= STEP_SECONDS
                tenants[n] = replace(tenant, active_at=now)
            elif due[n] > 0 and tenant.where is Where.AWAY and tenant.wants_since is None:
                tenants[n] = replace(tenant, wants_since=now)
            found.given_back += traces[n].gib * STEP_SECONDS * (tenant.where is Where.AWAY)
        if moving < 0:
            for move in decide(now, tenants, {GPU: CARD_GIB}).moves:
                if move.kind is not Kind.WAIT:
                    moving = int(move.id)
                    tenants[moving] = _moved(tenants[moving], move, now, found, patient)
                    counts[moving] += move.kind is Kind.SUSPEND
                    gib = traces[moving].gib
                    out = move.kind is Kind.SUSPEND
                    until = now + (0.4 + 0.4 * gib if out else 0.3 + 0.13 * gib)
                    break
        now += STEP_SECONDS
    found.suspensions, found.most_suspensions = sum(counts), max(counts)
    found.worked = total - sum(max(rest, 0.0) for rest in due)
    return found


def _moved(tenant: Tenant, move: Move, now: float, found: Outcome, patient: bool) -> Tenant:
    if move.kind is Kind.SUSPEND:
        return replace(tenant, where=Where.GOING, since=now, cause=move.cause)
    assert tenant.wants_since is not None
    found.waits.append(now - tenant.wants_since)
    patience = patience_after(tenant.patience, now - tenant.since, tenant.rules) if patient else 0
    return replace(tenant, where=Where.COMING, since=now, wants_since=None, patience=patience)


def run(days: float = 2.0) -> Report:
    report = Report("idle-replay")
    for minutes in (2, 10, 30):
        rules = Rules(idle_seconds=60 * minutes)
        for name, traces in (
            ("24 notebooks", notebooks(24, days, 7)),
            (f"8 that work every {minutes * 60 + 5} s", metronomes(8, minutes * 60 + 5, days)),
        ):
            for patient in (True, False):
                found = replay(traces, rules, days, patient)
                _tell(report, f"{name}, idle {minutes}min", found, traces, days, patient)
    return report


def _tell(
    report: Report, what: str, found: Outcome, traces: Sequence[Trace], days: float, patient: bool
) -> None:
    waits = sorted(found.waits) or [0.0]
    held = sum(trace.gib for trace in traces) * days * DAY
    note = (
        f"{found.given_back / held:.0%} of the memory given back; waited p50 {waits[len(waits) // 2]:.0f} s, "
        f"p99 {waits[int(len(waits) * 0.99)]:.0f} s{'' if patient else '; idle times never doubled'}"
    )
    report.value(what, round(found.suspensions / len(traces) / days, 1), "suspensions a tenant-day", note)
