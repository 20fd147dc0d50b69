"""Replay of a day of shared serving: 109 pods of GenTD26 on a few cards, with the decisions of the daemon's
planner.

`day` draws pods whose figures are those of Alibaba's cluster-trace-v2026-GenAI (alibaba/clusterdata): memory,
duty cycle in samples of 57 s, and the total that all of them compute at the same time. A pod works only while
its memory is on its card, and resident pods share the card. Times are those of an H200
(docs/pool.md). An eviction or a return takes 0.05 s and 0.02 s for each GiB, and one of each can run at once.
The driver's checkpoint takes 0.4 s for each GiB out and 0.13 s for each GiB in.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles

from tests.bench.common import Report
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Cause
from vgpud.planner.residency import Kind, Move, Rules, Tenant, Where, decide, patience_after

GPU = "GPU-0"
CARD_GIB = 139.8  # memory of an H200 that tenants can use
CONTEXT_GIB = 0.5  # memory of a context, which stays on the card
SAMPLE_SECONDS = 57.0
DAY_SECONDS = 22.8 * 3600
PODS = 109
SEED = 26
RULES = Rules(idle_seconds=60.0, turn_seconds=1.0, residence_seconds=1.0)
# quantiles of the trace: (fraction of the pods, mean duty cycle at this quantile)
_DUTY = ((0.0, 0.001), (0.1, 0.004), (0.5, 0.058), (0.9, 0.117), (1.0, 0.30))
_MEMORY_MEDIAN_GIB, _MEMORY_SIGMA, _MEMORY_MOST_GIB = 23.9, 0.17, 47.3
_BURST_SIGMA = 0.70  # standard deviation of the logarithm of the total that all pods compute at the same time
_BURST_SAMPLES = 10.0  # approximate length of a burst
_ACTIVE = 0.37  # fraction of the samples in which a pod works


@dataclass(frozen=True)
class Cost:
    """Seconds to move memory off the card and back."""

    fixed: float
    out_a_gib: float
    in_a_gib: float
    beside: bool  # whether one tenant may come in while another goes out


EVICTION = Cost(0.05, 0.02, 0.02, True)
CHECKPOINT = Cost(0.4, 0.4, 0.13, False)


@dataclass
class Pod:
    gib: float
    duty: list[float]  # duty cycle of each sample
    spells: list[tuple[float, float]]  # spells of work: (the time when it is due, its seconds)


@dataclass
class Outcome:
    """`waits` has, for each spell of work, the seconds until the pod's memory was on the card."""

    waits: list[float] = field(default_factory=list)
    switches: int = 0
    left_seconds: float = 0.0  # seconds of work that were not done at the end of the day

    @property
    def p99(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.99)]


def _between(part: float) -> float:
    for (low, at_low), (high, at_high) in pairwise(_DUTY):
        if part <= high:
            return at_low + (at_high - at_low) * (part - low) / (high - low)
    raise AssertionError(part)


def day(seed: int = SEED, pods: int = PODS, seconds: float = DAY_SECONDS) -> list[Pod]:
    draw = random.Random(seed)
    count = int(seconds / SAMPLE_SECONDS)
    keeps = math.exp(-1 / _BURST_SAMPLES)
    burst, bursts = draw.gauss(0, 1), []
    for _ in range(count):
        burst = keeps * burst + math.sqrt(1 - keeps**2) * draw.gauss(0, 1)
        bursts.append(math.exp(_BURST_SIGMA * burst - _BURST_SIGMA**2 / 2))
    made = []
    for number in range(pods):
        mean = _between((number + 0.5) / pods)
        gib = min(draw.lognormvariate(math.log(_MEMORY_MEDIAN_GIB), _MEMORY_SIGMA), _MEMORY_MOST_GIB)
        duty = []
        for factor in bursts:
            active = min(_ACTIVE * math.sqrt(factor), 0.95)
            duty.append(min(mean * factor / active, 1.0) if draw.random() < active else 0.0)
        work = [(part * SAMPLE_SECONDS, at * SAMPLE_SECONDS) for at, part in enumerate(duty) if part > 0]
        spells = [(at + draw.uniform(0, SAMPLE_SECONDS - length), length) for length, at in work]
        made.append(Pod(gib, duty, spells))
    draw.shuffle(made)
    return made


class Card:
    """Simulates the pods of one card, from event to event."""

    def __init__(self, pods: Sequence[Pod], limit_gib: float | None, cost: Cost, found: Outcome) -> None:
        self._pods = pods
        self._cost = cost
        self._found = found
        self._coming = [list(reversed(pod.spells)) for pod in pods]
        self._due = [0.0] * len(pods)
        # for each pod, the times at which work became due that waits for memory
        self._asked: list[list[float]] = [[] for _ in pods]
        # for each pod, the time at which its move between host and card ends
        self._done_at: dict[int, float] = {}
        stays = ((GPU, int(CONTEXT_GIB * GIB)),) if cost.beside else ()
        limits = [int((limit_gib or pod.gib + CONTEXT_GIB) * GIB) for pod in pods]
        self._tenants = [
            Tenant(str(n), ((GPU, size),), Where.AWAY, -1e6, RULES, cause=Cause.TURN, stays=stays)
            for n, size in enumerate(limits)
        ]
        self._tenants = [replace(tenant, swaps=cost.beside) for tenant in self._tenants]

    def run(self, until: float) -> None:
        now = 0.0
        while now < until:
            again = self._decide(now)
            events = [spells[-1][0] for spells in self._coming if spells]
            events += [*self._done_at.values(), again, until]
            working = self._working()
            if working:
                events.append(now + min(self._due[n] for n in working) * len(working))
            then = max(min(events), now + 1e-3)
            for n in working:
                self._due[n] = max(self._due[n] - (then - now) / len(working), 0.0)
                self._tenants[n] = replace(self._tenants[n], active_at=then)
            now = then
            self._arrive(now)
            self._come_up(now)
        self._found.left_seconds += sum(self._due)

    def _working(self) -> list[int]:
        here = [n for n, tenant in enumerate(self._tenants) if tenant.where is Where.HERE]
        return [n for n in here if self._due[n] > 1e-9]

    def _come_up(self, now: float) -> None:
        for n, spells in enumerate(self._coming):
            while spells and spells[-1][0] <= now:
                at, seconds = spells.pop()
                self._due[n] += seconds
                if self._tenants[n].where is Where.HERE:
                    self._found.waits.append(0.0)
                else:
                    self._asked[n].append(at)
            away = self._tenants[n].where is Where.AWAY
            if self._due[n] > 1e-9 and away and self._tenants[n].wants_since is None:
                self._tenants[n] = replace(self._tenants[n], wants_since=now)

    def _arrive(self, now: float) -> None:
        for n in [n for n, at in self._done_at.items() if at <= now]:
            del self._done_at[n]
            place = Where.AWAY if self._tenants[n].where is Where.GOING else Where.HERE
            self._tenants[n] = replace(self._tenants[n], where=place, since=now, active_at=now)
            if place is Where.HERE:
                self._found.waits += [now - at for at in self._asked[n]]
                self._asked[n] = []

    def _decide(self, now: float) -> float:
        plan = decide(now, self._tenants, {GPU: int(CARD_GIB * GIB)})
        moving = {int(n) for n in self._done_at}
        for move in plan.moves:
            beside = {int(move.beside)} if move.beside else set()
            if move.kind is not Kind.WAIT and moving <= beside:  # the daemon also makes one move at a time
                moving.add(int(move.id))
                self._move(move, now)
        return max(plan.again, now + 1e-3)

    def _move(self, move: Move, now: float) -> None:
        n, cost = int(move.id), self._cost
        tenant, gib = self._tenants[n], self._pods[n].gib
        if move.kind is Kind.SUSPEND:
            self._found.switches += 1
            self._done_at[n] = now + cost.fixed + cost.out_a_gib * gib
            self._tenants[n] = replace(tenant, where=Where.GOING, since=now, cause=move.cause)
            return
        ready = now + cost.fixed + cost.in_a_gib * gib
        if move.beside:  # the incoming tenant takes the room as it becomes free
            ready = max(ready, self._done_at[int(move.beside)] + cost.fixed)
        self._done_at[n] = ready
        patience = patience_after(tenant.patience, now - tenant.since, tenant.rules)
        self._tenants[n] = replace(tenant, where=Where.COMING, since=now, wants_since=None, patience=patience)


def replay(
    pods: Sequence[Pod], cards: int, limit_gib: float | None, cost: Cost, until: float = DAY_SECONDS
) -> Outcome:
    """`limit_gib` is the limit of each pod. None: the memory that it holds."""
    found = Outcome()
    for index in range(cards):
        Card(pods[index::cards], limit_gib, cost, found).run(until)
    return found


def figures(pods: Sequence[Pod]) -> dict[str, float]:
    """The figures that characterise the trace."""
    at_once = [sum(parts) for parts in zip(*(pod.duty for pod in pods), strict=True)]
    samples = [part for pod in pods for part in pod.duty]
    return {
        "mean duty cycle": sum(samples) / len(samples),
        "samples at 0 %": samples.count(0.0) / len(samples),
        "computing at once, median": median(at_once),
        "computing at once, p99": quantiles(at_once, n=100)[98],
        "GiB held by all": sum(pod.gib for pod in pods),
        "GiB of a pod, median": median(pod.gib for pod in pods),
    }


TRACE = (0.070, 0.668, 4.9, 25.0, 2634, 23.1)


def run() -> Report:
    report = Report("pool-replay")
    pods = day()
    for (what, drawn), real in zip(figures(pods).items(), TRACE, strict=True):
        report.value(f"drawn day, seed {SEED}: {what}", round(drawn, 3), "", f"the trace: {real:g}")
    for cards, limit, cost, name in (
        (30, None, EVICTION, "limits of what each holds"),
        (30, 47.3, EVICTION, "limits of 47.3 GiB"),
        (30, 70.0, EVICTION, "limits of half a card"),
        (20, None, EVICTION, "limits of what each holds"),
        (15, None, EVICTION, "limits of what each holds"),
        (12, None, EVICTION, "limits of what each holds"),
        (15, None, CHECKPOINT, "limits of what each holds, by the driver's checkpoint"),
    ):
        found = replay(pods, cards, limit, cost)
        waited = sum(wait > 0 for wait in found.waits) / len(found.waits)
        note = (
            f"waited for its memory, p99; longest {max(found.waits):.1f} s, {waited:.1%} of work waited; "
            f"{found.switches} evictions, {found.left_seconds:.0f} s of work left"
        )
        report.value(f"{PODS} pods on {cards} cards, {name}", round(found.p99, 2), "s", note)
    return report
