"""Time slices of the simulated device, on a simulated clock, compared with a simple model."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.native.harness import TEST_BUILD

SLICE_US, SWITCH_US = 200, 13
SLICE, SWITCH = SLICE_US * 1000, SWITCH_US * 1000
END = 10**12
# the allowed difference in nanoseconds, because times are rounded to whole ones
NEAR_NS = 2


PROGRAM = str(TEST_BUILD / "rotation")


@dataclass(frozen=True)
class Submit:
    at: int
    queue: int
    work: int


Finished = dict[tuple[int, int], int]  # (queue, position) -> ns


def run(lines: Sequence[str], slice_us: float = SLICE_US, switch_us: float = SWITCH_US) -> Finished:
    done = subprocess.run(
        [PROGRAM, str(slice_us), str(switch_us)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return {(queue, position): at for queue, position, at in rows}


def lines_of(submits: Sequence[Submit], fractions: dict[int, float], looks: Sequence[int] = ()) -> list[str]:
    events = [(s.at, f"submit {s.at} {s.queue} {s.work}") for s in submits]
    events += [(at, f"look {at}") for at in looks]
    # each submission is preceded by a look, because a process advances the clock before it submits
    events += [(s.at, f"look {s.at}") for s in submits]
    clients = [f"client {queue} {fraction}" for queue, fraction in fractions.items()]
    return [*clients, *(line for _, line in sorted(events, key=lambda e: e[0])), f"look {END}"]


@dataclass
class Model:
    """Computes every time slice one by one. All MPS clients form one group, named None."""

    fractions: dict[int, float]
    clock: float = 0
    ring: list[int | None] = field(default_factory=list)
    holder: int | None = -1
    slice_end: float = 0
    ready: float = 0
    left: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, list[float]] = field(default_factory=dict)
    finished: dict[tuple[int, int], float] = field(default_factory=dict)

    def group(self, queue: int) -> int | None:
        return None if queue in self.fractions else queue

    def members(self, group: int | None) -> dict[int, float]:
        """The queues of the group that have work, and the rate of each."""
        busy = [q for q in self.left if self.group(q) == group and self.left[q] > 0]
        total = max(1.0, sum(self.fractions.get(q, 1) for q in busy))
        return {q: self.fractions.get(q, 1) / total for q in busy}

    def submit(self, queue: int, work: int) -> None:
        self.left[queue] = self.left.get(queue, 0) + work
        self.done.setdefault(queue, 0)
        self.waiting.setdefault(queue, []).append(self.done[queue] + self.left[queue])
        if self.group(queue) not in self.ring:
            self.ring.append(self.group(queue))

    def step(self, until: float) -> None:
        group = self.ring[0]
        if group != self.holder or self.clock >= self.slice_end:
            free = group == self.holder or self.holder == -1
            self.ready = self.clock + (0 if free else SWITCH)
            self.slice_end, self.holder = self.ready + SLICE, group
        if self.clock < self.ready:
            self.clock = min(self.ready, until)
            return
        rates = self.members(group)
        steps = (max(1, math.ceil(self.left[q] / r)) for q, r in rates.items())
        end = min(until, self.slice_end, *(self.clock + step for step in steps))
        for queue, rate in rates.items():
            work = min((end - self.clock) * rate, self.left[queue])
            for position in [p for p in self.waiting[queue] if p <= self.done[queue] + work + 0.01]:
                self.finished[queue, round(position)] = self.clock + (position - self.done[queue]) / rate
                self.waiting[queue].remove(position)
            self.done[queue] += work
            self.left[queue] = 0 if self.left[queue] - work < 0.01 else self.left[queue] - work
        self.clock = end
        if not self.members(group):
            self.ring.pop(0)
        elif end == self.slice_end:
            if len(self.ring) == 1:
                self.slice_end += SLICE
            self.ring.append(self.ring.pop(0))

    def go(self, until: float) -> None:
        while self.ring and self.clock < until:
            self.step(until)
        self.clock = max(self.clock, until)


def expected(submits: Sequence[Submit], fractions: dict[int, float]) -> dict[tuple[int, int], float]:
    model = Model(fractions)
    for submit in submits:
        model.go(submit.at)
        model.submit(submit.queue, submit.work)
    model.go(END)
    return model.finished


works = st.one_of(st.integers(1, 3 * SLICE), st.integers(1, 40).map(lambda n: n * SLICE))
gaps = st.one_of(st.just(0), st.integers(0, 3 * SLICE), st.integers(0, 30 * SLICE))


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[Submit], dict[int, float], list[int]]:
    at, submits = 0, []
    for _ in range(draw(st.integers(1, 14))):
        at += draw(gaps)
        submits.append(Submit(at, draw(st.integers(0, 4)), draw(works)))
    # fractions that are exact in binary
    clients = draw(st.sampled_from([{}, {}, {3: 0.5, 4: 0.25}, {2: 1.0, 3: 1.0}]))
    return submits, clients, draw(st.lists(st.integers(0, at + 20 * SLICE), max_size=6))


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scenarios())
@example(([Submit(0, 1, 3 * SLICE), Submit(3 * SLICE + 1, 1, SLICE), Submit(3 * SLICE + 1, 0, 1)], {}, []))
def test_the_model_of_time_slicing_reaches_each_position_of_a_queue_at_the_expected_time(
    scenario: tuple[list[Submit], dict[int, float], list[int]],
) -> None:
    submits, fractions, looks = scenario
    wanted = expected(submits, fractions)
    for lines in (lines_of(submits, fractions), lines_of(submits, fractions, looks)):
        got = run(lines)
        assert got.keys() == wanted.keys()
        far = {k: (got[k], at) for k, at in wanted.items() if abs(got[k] - at) > NEAR_NS}
        assert far == {}


def test_two_queues_of_endless_work_get_the_throughput_measured_on_a_card() -> None:
    """The two queues reach 94.3 % of the rate of one alone, by the time slice and the switch time in the
    H200's profile.
    """
    second = 10**9
    lines = ["submit 0 0 1000000000", "submit 0 1 1000000000", f"look {END}"]
    got = run(lines, 2000, 120.9)
    last = max(got.values())
    assert 2 * second / last == pytest.approx(0.943, abs=0.0005)
    # the ends of the queues are at most one slice and one switch apart
    assert last - min(got.values()) < 2.2e6


def test_a_new_queue_waits_for_the_end_of_the_running_time_slice() -> None:
    lines = [f"submit 0 0 {10 * SLICE}", f"submit {SLICE // 2 + 3 * SLICE} 1 1000", f"look {END}"]
    got = run(lines)
    assert got[1, 1000] == 4 * SLICE + SWITCH + 1000
    assert got[0, 10 * SLICE] == 10 * SLICE + 2 * SWITCH + 1000


def test_days_of_time_slices_are_computed_in_one_step() -> None:
    """Eleven days of time slices for eight queues: slice by slice the computation would never end."""
    days = 10**15
    lines = [f"submit 0 {q} {days}" for q in range(8)] + [f"look {9 * days}"]
    got = run(lines)
    assert len(got) == 8
    assert max(got.values()) == pytest.approx(8 * days * (SLICE + SWITCH) / SLICE, rel=1e-6)


def test_a_run_list_that_a_process_left_half_changed_at_its_death_is_rebuilt() -> None:
    lines = [f"submit 0 {q} {50 * SLICE}" for q in (0, 1)]
    got = run([*lines, f"torn {5 * SLICE}", f"leave {9 * SLICE} 0", f"look {END}"])
    assert list(got) == [(1, 50 * SLICE)]
    assert got[1, 50 * SLICE] < 60 * SLICE
