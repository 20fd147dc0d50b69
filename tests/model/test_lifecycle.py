"""The table of allowed changes of an allocation, and the refusal of every other change."""

from dataclasses import replace
from itertools import product

import pytest

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import (
    EVENT_OF,
    TABLE,
    Change,
    Phase,
    check_change,
    phase_of,
    problems,
    suspension_outcome,
)
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Mode, Owner, Request, Slice, State, SuspendedProcess, Way

PART = Slice("GPU-0", Mode.PRELOAD, GIB)
SAVED, SWAPPED = SuspendedProcess(7, 1, GIB), SuspendedProcess(7, 1, GIB, Way.SWAP)
INTENTS = set(list(Change)[:6])


def record_in(phase: Phase, allocation: Allocation | None = None) -> Allocation | None:
    """Returns the allocation as the ledger has it in this phase."""
    if phase is Phase.ABSENT:
        return None
    one = allocation or Allocation("a", Request("r", Owner(1, 1)), State.ACTIVE, (PART,), revision=1)
    states = {Phase.EVICTED: State.SUSPENDED, Phase.MOVING: State.SUSPENDING}
    suspended = {
        Phase.SUSPENDING: (SAVED,),
        Phase.SUSPENDED: (SAVED,),
        Phase.EVICTED: (SWAPPED,),
        Phase.RESUMING: (SAVED,),
        Phase.MOVING: (SAVED,),
    }
    there = "GPU-1" if phase is Phase.MOVING else ""
    return replace(
        one,
        state=states.get(phase) or State(phase.value),
        suspended=suspended.get(phase, ()),
        slices=tuple(replace(part, other_uuid=there) for part in one.slices),
        failure="its device is lost" if phase is Phase.FAILED else "",
    )


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.ABSENT])
def test_the_phase_of_an_allocation_follows_from_its_record(phase: Phase) -> None:
    record = record_in(phase)
    assert record is not None
    assert phase_of(record) is phase
    assert list(problems(record)) == []


def test_each_phase_can_be_reached_from_no_allocation_and_leads_back_to_none() -> None:
    assert _reached(Phase.ABSENT, {(a, b) for (a, _), b in TABLE.items()}) == set(Phase)
    assert _reached(Phase.ABSENT, {(b, a) for (a, _), b in TABLE.items()}) == set(Phase)


def _reached(start: Phase, arrows: set[tuple[Phase, Phase]]) -> set[Phase]:
    found = {start}
    while more := {b for a, b in arrows if a in found} - found:
        found |= more
    return found


def test_each_change_of_an_allocation_is_in_the_table_of_transitions() -> None:
    assert {change for _, change in TABLE} == set(Change)


def test_each_outcome_except_a_new_binding_has_an_event_for_watchers() -> None:
    assert set(EVENT_OF) == set(Change) - INTENTS - {Change.BOUND}


def test_a_release_can_begin_in_every_phase_of_an_allocation_on_record() -> None:
    """The release may also be forced, or may be a repair at a start."""
    assert {start for start, change in TABLE if change is Change.RELEASE} == set(Phase) - {Phase.ABSENT}


@pytest.mark.parametrize("start", Phase)
def test_a_change_that_the_table_of_transitions_lacks_is_refused(start: Phase) -> None:
    for change, end in product(Change, Phase):
        if TABLE.get((start, change)) is end:
            check_change(record_in(start), change, record_in(end))
            continue
        with pytest.raises(VgpuError, match="does not lead to") as refused:
            check_change(record_in(start), change, record_in(end))
        assert refused.value.code is ErrorCode.BUG


def test_an_active_record_with_suspended_processes_is_valid_and_in_phase_resuming() -> None:
    active = record_in(Phase.ACTIVE)
    assert active is not None
    half = replace(active, suspended=(SAVED,))
    assert phase_of(half) is Phase.RESUMING
    assert list(problems(half)) == []


def test_an_amendment_of_a_record_keeps_the_phase_of_the_allocation() -> None:
    active = record_in(Phase.ACTIVE)
    check_change(active, None, active)
    with pytest.raises(VgpuError, match="an amendment does not lead to failed"):
        check_change(active, None, record_in(Phase.FAILED))


def test_a_suspension_by_libvgpu_is_recorded_as_an_eviction() -> None:
    ends = {phase: suspension_outcome(record) for phase in Phase if (record := record_in(phase)) is not None}
    assert ends[Phase.EVICTED] is Change.EVICTED
    assert ends[Phase.SUSPENDED] is Change.SUSPENDED


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"slices": ()}, "it has no slice"),
        ({"suspended": (SAVED, SWAPPED), "state": State.SUSPENDED}, "in different ways"),
        ({"slices": (replace(PART, other_uuid="GPU-1"),)}, "names other devices"),
        ({"failure": "lost"}, "it has failed"),
        ({"revision": 0}, "never committed"),
    ],
)
def test_a_contradictory_record_is_reported(changes: dict[str, object], problem: str) -> None:
    active = record_in(Phase.ACTIVE)
    assert active is not None
    (found,) = problems(replace(active, **changes))  # type: ignore[arg-type]
    assert problem in found
