"""The tenants whose memory is on the device at each moment, tested by tables and over random lives of many
tenants.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench import pool_replay
from tests.bench.idle_replay import DAY, metronomes, notebooks, replay
from tests.examples import examples
from vgpud.model.tenancy import Cause
from vgpud.planner.residency import (
    PATIENCE_MOST,
    Kind,
    Move,
    Plan,
    Rules,
    Tenant,
    Where,
    decide,
    idle_seconds,
    patience_after,
)

GPU, OTHER = "GPU-0", "GPU-1"
CARD = {GPU: 100, OTHER: 100}
IDLE = Rules(idle_seconds=600, residence_seconds=60)
TURNS = Rules(turn_seconds=5)


def here(name: str, size: int, since: float = 0, **changes: Any) -> Tenant:
    base = Tenant(name, ((GPU, size),), Where.HERE, since, TURNS, active_at=since)
    return replace(base, **changes)


def away(name: str, size: int, wants: float | None = 0, **changes: Any) -> Tenant:
    return here(name, size, where=Where.AWAY, wants_since=wants, **changes)


def told(plan: Plan) -> list[str]:
    return [f"{move.kind.value} {move.id}" + (f" {move.place}" if move.place else "") for move in plan.moves]


def test_an_idle_tenant_is_suspended_when_its_idle_time_is_over_and_not_before() -> None:
    lazy = here("a", 50, rules=IDLE, active_at=100)
    assert decide(699, [lazy], CARD) == Plan((), 700)
    assert told(decide(700, [lazy], CARD)) == ["suspend a"]
    assert decide(700, [lazy], CARD).moves[0].cause is Cause.IDLE
    # no suspension, because the tenant's minimum residence is not over
    assert told(decide(700, [replace(lazy, since=650)], CARD)) == []
    assert told(decide(700, [replace(lazy, rules=TURNS)], CARD)) == []  # no move: no other tenant waits
    assert told(decide(700, [replace(lazy, patience=1)], CARD)) == []


def test_a_suspended_tenant_that_asks_is_resumed_if_there_is_room() -> None:
    assert told(decide(9, [here("a", 40), away("b", 60)], CARD)) == ["resume b"]
    assert told(decide(9, [here("a", 40), away("b", 60, None)], CARD)) == []
    assert told(decide(9, [here("a", 40), away("b", 60, cause=Cause.HAND)], CARD)) == []


def test_the_tenant_that_is_resident_longest_makes_room_when_its_turn_is_over() -> None:
    tenants = [here("a", 75, since=10), away("b", 75, wants=11)]
    early = decide(14, tenants, CARD)
    assert (told(early), early.again) == (["wait b 1"], 15)
    assert told(decide(15, tenants, CARD)) == ["suspend a", "wait b 1"]
    going = [here("a", 75, where=Where.GOING), tenants[1]]
    assert told(decide(15, going, CARD)) == ["wait b 1"]
    three = [here("a", 30, since=3), here("b", 30, since=2), here("c", 30, since=1), away("d", 70)]
    assert told(decide(9, three, CARD)) == ["suspend c", "suspend b", "wait d 1"]


def test_without_turns_a_suspended_tenant_waits_until_another_goes_idle() -> None:
    tenants = [here("a", 75, rules=IDLE), away("b", 75, rules=IDLE)]
    waits = decide(599, tenants, CARD)
    assert told(waits) == ["wait b 1"]
    assert waits.moves[0].sentence == "others hold the room"
    assert told(decide(600, tenants, CARD)) == ["suspend a", "wait b 1"]
    patient = [replace(tenants[0], patience=2), tenants[1]]
    assert told(decide(600, patient, CARD)) == ["suspend a", "wait b 1"], "patience is for when nobody waits"
    assert told(decide(600, patient[:1], CARD)) == []


def test_tenants_are_resumed_first_come_first_served_and_each_rank_counts_as_one_turn() -> None:
    queue = [here("a", 90), away("c", 50, 2), away("b", 50, 1), away("small", 10, 3)]
    assert told(decide(4, queue, CARD)) == ["wait b 1", "wait c 2", "wait small 3"]
    queue[1] = replace(queue[1], rank=1)
    assert told(decide(4, queue, CARD)) == ["wait c 1", "wait b 2", "wait small 3"]
    elsewhere = replace(away("x", 50, 9), parts=((OTHER, 50),))
    assert told(decide(9, [here("a", 90, since=8), away("b", 50), elsewhere], CARD)) == [
        "wait b 1",
        "resume x",
    ]


def test_a_tenant_of_two_devices_is_resumed_when_both_have_room() -> None:
    both = replace(away("a", 0), parts=((GPU, 60), (OTHER, 60)))
    on_one = replace(here("b", 0), parts=((OTHER, 60),))
    assert told(decide(9, [both, on_one], CARD)) == ["suspend b", "wait a 1"]
    assert told(decide(4, [both, on_one, away("c", 10, 1)], CARD)) == ["wait a 1", "wait c 2"]
    assert told(decide(9, [both], CARD)) == ["resume a"]


def test_a_tenant_that_cannot_be_resumed_delays_no_other() -> None:
    stuck = away("a", 50, 0, not_before=20, why_not="the card is full")
    assert told(decide(9, [stuck, away("b", 100, 1)], CARD)) == ["wait a 1", "resume b"]
    huge = away("a", 101, 0)
    assert told(decide(9, [huge, away("b", 100, 1)], CARD)) == ["wait a 1", "resume b"]


def test_the_tenants_resumed_last_are_suspended_if_not_all_residents_fit() -> None:
    """Of the tenants that take turns, the one that was resumed last is suspended."""
    crowd = [here("a", 75), here("b", 75, since=1), here("c", 20, since=2, rules=IDLE)]
    assert told(decide(2, crowd, CARD)) == ["suspend b"]
    assert told(decide(2, [*crowd[:1], replace(crowd[1], where=Where.GOING)], CARD)) == []


def test_a_tenant_that_is_being_allocated_takes_room_and_suspends_no_other() -> None:
    new = here("b", 75, where=Where.NEW, rules=Rules())
    assert told(decide(2, [here("a", 75), new], CARD)) == []
    assert told(decide(2, [new, away("c", 50)], CARD)) == ["wait c 1"]


def test_memory_that_suspended_tenants_keep_is_evicted_for_a_tenant_that_needs_the_room() -> None:
    """Swapped-out tenants keep memory on the device while there is room for it."""
    turning = {"rules": TURNS, "cause": Cause.TURN, "swaps": True}
    idle = away("a", 60, None, **turning, stays=((GPU, 2),))
    more = away("m", 60, None, **turning, stays=((GPU, 1),))
    big = away("b", 99, 1)
    assert told(decide(9, [idle, more, big], CARD)) == ["resume a", "wait b 1"]
    assert told(decide(9, [replace(idle, where=Where.COMING), more, big], CARD)) == ["wait b 1"]
    back = replace(idle, where=Where.HERE, since=9)
    assert told(decide(13, [back, more, big], CARD)) == ["wait b 1"]
    goes = decide(14, [back, more, big], CARD)
    assert told(goes) == ["suspend a", "wait b 1"] and goes.moves[0].deep
    assert told(decide(15, [replace(idle, stays=(), swaps=False), more, big], CARD)) == ["resume b"]
    hand = replace(idle, cause=Cause.HAND)
    assert told(decide(9, [hand, big], CARD)) == ["wait b 1"]
    comes = [away("c", 50, 0), big]
    assert told(decide(9, [idle, *comes], CARD)) == ["resume c", "wait b 1"], "c may leave nothing behind"


def test_the_idle_time_before_a_suspension_grows_after_short_suspensions() -> None:
    patience = 0
    for _ in range(5):
        patience = patience_after(patience, 10, IDLE)
    assert patience == PATIENCE_MOST
    assert patience_after(patience, 600, IDLE) == PATIENCE_MOST - 1
    assert idle_seconds(here("a", 1, rules=IDLE, patience=2)) == 2400


# --- random lives


@dataclass
class Life:
    """A tenant that alternates between pauses and work. Each spell is (pause, work) in seconds. The tenant
    works only while its memory is on the device.
    """

    size: int
    spells: list[tuple[float, float]]
    rules: Rules
    rank: int = 0
    at: float = 0.0
    left: float = 0.0
    pauses_until: float = 0.0
    # for each suspension: (when, why, resident since)
    suspensions: list[tuple[float, Cause, float]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


STEP, SWITCH = 0.5, 1.0


def lives_of(turns: bool) -> st.SearchStrategy[list[Life]]:
    rules = (
        st.just(TURNS) if turns else st.builds(Rules, st.floats(5, 40), residence_seconds=st.floats(1, 20))
    )
    pause = st.floats(0, 3) if turns else st.floats(0, 60)
    spells = st.lists(st.tuples(pause, st.floats(0.5, 30)), min_size=1, max_size=6)
    return st.lists(st.builds(Life, st.integers(5, 100), spells, rules), min_size=1, max_size=6)


def live(lives: list[Life], seconds: float, begin_away: bool, stays: int = 0) -> None:
    """Simulates the time step by step, and asserts that resident tenants fit. A switch in either direction
    takes SWITCH. With `stays`, swapped-out tenants leave that much memory on the device if the plan allows
    it.
    """
    left = ((GPU, stays),) if stays else ()
    where = Where.AWAY if begin_away else Where.HERE
    tenants = {
        str(i): Tenant(str(i), ((GPU, life.size),), where, 0.0, life.rules, cause=Cause.TURN)
        for i, life in enumerate(lives)
    }
    done: dict[str, float] = {}
    now = 0.0
    while now < seconds:
        for number, life in enumerate(lives):
            tenants[str(number)] = _work(life, tenants[str(number)], now)
        for name in [name for name, at in done.items() if at <= now]:
            tenants[name] = _arrived(tenants[name], now, left)
            del done[name]
        for move in decide(now, tuple(tenants.values()), CARD).moves:
            if move.kind in (Kind.SUSPEND, Kind.RESUME):
                tenants[move.id] = _moved(lives[int(move.id)], tenants, move, now, left)
                done[move.id] = now + SWITCH
        if begin_away:
            assert _taken(tenants, count_switches=not stays) <= CARD[GPU]
        now += STEP
    # a tenant that still waits at the end has waited at least until now
    for number, life in enumerate(lives):
        wants = tenants[str(number)].wants_since
        if wants is not None and tenants[str(number)].where is Where.AWAY:
            life.waits.append(now - wants)


def _arrived(one: Tenant, now: float, left: tuple[tuple[str, int], ...]) -> Tenant:
    """Returns the tenant at the end of its switch."""
    if one.where is Where.GOING:
        return replace(one, where=Where.AWAY, since=now, active_at=now)
    return replace(one, where=Where.HERE, since=now, active_at=now, stays=left, swaps=bool(left))


def _moved(
    life: Life, tenants: dict[str, Tenant], move: Move, now: float, left: tuple[tuple[str, int], ...]
) -> Tenant:
    """Returns the tenant at the start of a switch, and records the switch in its life."""
    one = tenants[move.id]
    if move.kind is Kind.SUSPEND:
        life.suspensions.append((now, move.cause, one.since))
        swaps = bool(left) and not move.deep
        stays = left if swaps else ()
        return replace(one, where=Where.GOING, since=now, cause=move.cause, stays=stays, swaps=swaps)
    assert one.wants_since is not None
    assert not move.beside or (one.swaps and tenants[move.beside].where is Where.GOING)
    life.waits.append(now - one.wants_since)
    patience = patience_after(one.patience, now - one.since, one.rules)
    return replace(one, where=Where.COMING, since=now, wants_since=None, patience=patience)


def _taken(tenants: dict[str, Tenant], count_switches: bool) -> int:
    """Returns the bytes in use on the device. An outgoing tenant frees its memory step by step for an
    incoming one.
    """
    held = {Where.HERE, Where.GOING, Where.COMING} if count_switches else {Where.HERE}
    there = sum(size for t in tenants.values() if t.where in held for _, size in t.parts)
    kept = sum(size for t in tenants.values() if t.where is Where.AWAY for _, size in t.stays)
    return there + kept


def _work(life: Life, tenant: Tenant, now: float) -> Tenant:
    if life.left <= 0 and life.spells and now >= life.pauses_until:
        pause, work = life.spells.pop(0)
        life.pauses_until = now + pause
        life.left = work
    wants = life.left > 0 and now >= life.pauses_until
    if wants and tenant.where is Where.HERE:
        life.left -= STEP
        if life.left <= 0:
            life.pauses_until = now
        return replace(tenant, active_at=now)
    if wants and tenant.where is Where.AWAY and tenant.wants_since is None:
        return replace(tenant, wants_since=now)
    return tenant


@settings(max_examples=examples(40))
@given(lives_of(turns=True))
def test_no_tenant_waits_longer_than_the_turns_and_switches_of_all_tenants(lives: list[Life]) -> None:
    live(lives, 300, begin_away=True)
    bound = len(lives) * (5 + 2 * SWITCH + 2 * STEP)
    for life in lives:
        assert all(waited <= bound for waited in life.waits), (life.waits, bound)
        for when, _, since in life.suspensions:
            assert when - since >= 5, "nobody is sent away in its turn"


@settings(max_examples=examples(30))
@given(lives_of(turns=True), st.integers(1, 12))
def test_memory_that_suspended_tenants_keep_delays_no_other(lives: list[Life], stays: int) -> None:
    for life in lives:
        life.size = max(life.size, stays)
    live(lives, 200, begin_away=True, stays=stays)
    bound = len(lives) * (5 + 2 * SWITCH + 2 * STEP)
    for life in lives:
        assert all(waited <= bound for waited in life.waits), (life.waits, bound)


def test_one_plan_suspends_a_tenant_and_resumes_another_in_its_place() -> None:
    turning: dict[str, Any] = {"rules": TURNS, "swaps": True}
    first = here("a", 60, **turning, stays=((GPU, 1),))
    second = away("b", 60, 50, **turning, cause=Cause.TURN, stays=((GPU, 1),))
    plan = decide(100, [first, second], CARD)
    assert [(move.kind, move.id, move.deep, move.beside) for move in plan.moves] == [
        (Kind.SUSPEND, "a", False, ""),
        (Kind.RESUME, "b", False, "a"),
    ]
    full = away("c", 100, None, cause=Cause.TURN)
    sent, waits = decide(100, [first, second, full], CARD).moves
    # the suspension is deep: no memory may stay beside a tenant that needs all of the device
    assert (sent.deep, waits.kind) == (True, Kind.WAIT)


@settings(max_examples=examples(40))
@given(lives_of(turns=False))
def test_suspensions_of_one_tenant_are_at_least_its_idle_and_residence_time_apart(lives: list[Life]) -> None:
    """Tenants do not thrash, whatever their pattern of work."""
    for life in lives:
        life.size = 100 // len(lives)
    live(lives, 400, begin_away=False)
    for life in lives:
        times = [when for when, _, _ in life.suspensions]
        least = max(life.rules.idle_seconds or 0, life.rules.residence_seconds)
        assert all(b - a >= least for a, b in pairwise(times))
        assert len(times) <= 1 + 400 / least
        assert all(waited <= 2 * (SWITCH + STEP) for waited in life.waits), "there is room for all"


@settings(max_examples=examples(30))
@given(lives_of(turns=True))
def test_every_tenant_completes_its_work_under_any_pattern_of_work(lives: list[Life]) -> None:
    todo = sum(work for life in lives for _, work in life.spells)
    switches = (todo / 5 + 6 * len(lives)) * (2 * SWITCH + 2 * STEP) * 2
    live(lives, todo + switches + 60, begin_away=True)
    assert all(life.left <= 0 and not life.spells for life in lives)


@given(
    st.lists(
        st.builds(
            Tenant,
            st.uuids().map(str),
            st.sampled_from([((GPU, 30),), ((GPU, 60),), ((GPU, 40), (OTHER, 90))]),
            st.sampled_from(Where),
            st.floats(0, 100),
            st.sampled_from([IDLE, TURNS, Rules(), Rules(3, 4, 2)]),
            st.floats(0, 100),
            st.sampled_from(Cause),
            st.none() | st.floats(0, 100),
            st.integers(-1, 1),
        ),
        max_size=12,
        unique_by=lambda t: t.id,
    )
)
def test_every_residency_plan_is_consistent(tenants: list[Tenant]) -> None:
    plan = decide(100, tenants, CARD)
    by_id = {tenant.id: tenant for tenant in tenants}
    free = dict(CARD)
    for tenant in tenants:
        if tenant.where is not Where.AWAY:
            for uuid, size in tenant.parts:
                free[uuid] -= size
    assert len({move.id for move in plan.moves}) == len(plan.moves)
    for move in plan.moves:
        tenant = by_id[move.id]
        assert tenant.where is (Where.HERE if move.kind is Kind.SUSPEND else Where.AWAY)
        if move.kind is Kind.RESUME:
            for uuid, size in tenant.parts:
                free[uuid] -= size
                assert free[uuid] >= 0
        if move.kind is not Kind.SUSPEND:
            assert tenant.wants_since is not None
            assert tenant.cause is not Cause.HAND


# --- replays


def test_notebooks_with_twice_the_memory_of_their_card_have_a_short_median_wait() -> None:
    """24 tenants of 12 GiB share a device of 141 GiB. More than half of their memory is on the host on
    average, and the median wait is short.
    """
    traces = notebooks(24, 0.3, 7)
    found = replay(traces, Rules(idle_seconds=600), 0.3)
    assert found.given_back > 0.5 * 24 * 12 * 0.3 * DAY
    assert found.most_suspensions <= 0.3 * DAY / 600
    assert sorted(found.waits)[len(found.waits) // 2] <= 10


def test_a_tenant_that_works_just_after_each_idle_suspension_is_suspended_less_and_less() -> None:
    traces = metronomes(2, 605, 0.3)
    patient = replay(traces, Rules(idle_seconds=600), 0.3)
    hasty = replay(traces, Rules(idle_seconds=600), 0.3, patient=False)
    assert patient.most_suspensions <= 4 < hasty.most_suspensions / 2


def test_the_simulated_serving_load_has_the_figures_of_its_trace_and_short_waits() -> None:
    pods = pool_replay.day(seconds=4 * 3600)
    drawn = pool_replay.figures(pods)
    for (what, value), real in zip(drawn.items(), pool_replay.TRACE, strict=True):
        assert value == pytest.approx(real, rel=0.35), what
    found = pool_replay.replay(pods[:20], 5, None, pool_replay.EVICTION, until=1800)
    assert len(found.waits) > 100 and found.p99 < 2
