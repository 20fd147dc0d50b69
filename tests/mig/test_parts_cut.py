"""Changes of layouts that divide GPU instances, killed at every point. Instances made by others are never
changed.
"""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.mig.cutting import TABLE, Card, Cut, Disk, Node1, cut, cut_at_each_point, profile_of, run, whole_of
from vgpud.model.device import Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Owner, Request, Slice, State
from vgpud.planner.geometry import ComputeKey, SlotKey, geometry_for
from vgpud.planner.layouts import spell

STATES = sorted(TABLE.free_after)
LARGE = [state for state in STATES if any(profile_of(key).slice_count > 1 for key in TABLE.keys(state))]
PAIRS = 12
Act = Callable[[Node1, Allocation], None]
Standing = tuple[set[SlotKey], set[ComputeKey]]


def drawn(draw: random.Random) -> tuple[str, ...]:
    """A random layout that divides most GPU instances that can be divided."""
    keys = TABLE.keys(draw.choice(LARGE))
    computes: set[ComputeKey] = set()
    for key in keys:
        geometry = geometry_for(profile_of(key).compute)
        whole = geometry.state([whole_of(key)])
        states = [state for state in geometry.free_after if state and state != whole]
        if states and draw.random() < 0.8:
            computes |= {(key, part) for part in geometry.keys(draw.choice(sorted(states)))}
    return spell(TABLE, keys, computes)


def standing(card: Card) -> Standing:
    return card.keys(), card.parts()


def laid_out(words: tuple[str, ...]) -> tuple[Card, Disk]:
    card, disk = Card(), Disk()
    Node1(card, disk).apply(*words)
    card.touched.clear()
    card.touched_parts.clear()
    return card, disk


def check_records(card: Card, disk: Disk) -> None:
    records = Node1(card, disk).mig.records
    assert records.own("GPU-0") == card.keys(), "what is on record is what stands"
    assert records.own_parts("GPU-0") == card.parts()


@pytest.mark.parametrize("seed", range(PAIRS))
def test_a_change_of_compute_instances_cut_at_any_point_converges_at_the_next_start(seed: int) -> None:
    """Changes one random layout into another, cut at each point in turn. The start that follows is cut,
    too.
    """
    draw = random.Random(seed)
    before, after = drawn(draw), drawn(draw)
    card, disk = laid_out(before)
    first = standing(card)
    Node1(card, disk).apply(*after)
    last = standing(card)
    assert all(i.compute_instances for i in card.instances.values())
    at = 0
    for at, card, disk in cut_at_each_point(laid_out(before), after, draw):
        assert standing(card) in (first, last), f"half-way after a cut at point {at}"
        assert all(i.compute_instances for i in card.instances.values())
        check_records(card, disk)
    assert at > 3


def test_a_change_of_layout_touches_only_the_gpu_and_compute_instances_that_differ() -> None:
    """GPU instances that stay divided are kept, and so are compute instances that both layouts have."""
    draw = random.Random(2)
    for _ in range(60):
        before, after = drawn(draw), drawn(draw)
        card, disk = laid_out(before)
        keys, parts = standing(card)
        Node1(card, disk).apply(*after)
        now, now_parts = standing(card)
        divided, now_divided = {key for key, _ in parts}, {key for key, _ in now_parts}
        changed = {key for key in keys & now if (key in divided) != (key in now_divided)}
        assert set(card.touched) == (keys ^ now) | changed
        inside = {part for part in card.touched_parts if part[0] in keys & now - changed}
        assert inside == {part for part in parts ^ now_parts if part[0] in keys & now - changed}


def test_a_change_of_layout_keeps_as_many_compute_instances_as_possible() -> None:
    """A 4g instance is divided into 2c and 1c, and then into 1c and 1c. Only the 2c is replaced."""
    card, disk = laid_out(("2c.4g.71gb@0", "1c.4g.71gb@0"))
    Node1(card, disk).apply("1c.4g.71gb@0", "1c.4g.71gb@0")
    assert sorted(part[1].size for _, part in card.touched_parts) == [1, 2]


@given(st.randoms(use_true_random=False), st.data())
@settings(max_examples=examples(20))
def test_a_failed_step_of_a_layout_change_brings_the_old_compute_instances_back(
    draw: random.Random, data: st.DataObject
) -> None:
    before, after = drawn(draw), drawn(draw)
    card, disk = laid_out(before)
    first = standing(card)
    Node1(card, disk).apply(*after)
    new = sorted(card.parts() - first[1])
    if not new:
        return
    card, disk = laid_out(before)
    card.refuse_parts = {data.draw(st.sampled_from(new))}
    with pytest.raises(VgpuError) as failed:
        Node1(card, disk).apply(*after)
    assert failed.value.code is ErrorCode.NVML_FAILED
    assert standing(card) == first
    check_records(card, disk)


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(30))
def test_compute_instances_in_use_or_made_by_others_stay(draw: random.Random) -> None:
    """The device has GPU instances of vgpud and of others, with compute instances of both."""
    card, disk = laid_out(drawn(draw))
    keys, parts = standing(card)
    for key in sorted(keys):
        if draw.random() < 0.2:
            disk.instances.kept.pop(("GPU-0", f"{key[0]}@{key[1].start}:{key[1].size}", ""))
    for key, (number, at) in sorted(parts):
        name = (f"{key[0]}@{key[1].start}:{key[1].size}", f"{number}@{at.start}:{at.size}")
        if draw.random() < 0.2 or key not in Node1(card, disk).mig.records.own("GPU-0"):
            disk.instances.kept.pop(("GPU-0", *name))
    records = Node1(card, disk).mig.records
    busy = {part for part in sorted(parts) if draw.random() < 0.3}
    card.processes_in = {part: 100 + n for n, part in enumerate(sorted(busy))}
    kept = busy | parts - records.own_parts("GPU-0")
    others = keys - records.own("GPU-0")
    try:
        Node1(card, disk).apply(*drawn(draw))
    except VgpuError as refused:
        assert refused.code is ErrorCode.DEVICE_IN_USE
        assert standing(card) == (keys, parts), "a refusal changes nothing"
        assert kept or others
        return
    assert kept <= card.parts()
    assert others <= card.keys()
    own = Node1(card, disk).mig.records
    assert others.isdisjoint(own.own("GPU-0")), "nothing is made inside what others made"
    assert {part for part in card.parts() if part[0] in others} == {p for p in parts if p[0] in others}


def test_compute_instances_are_made_again_after_a_reboot_and_layout_auto_removes_all() -> None:
    card, disk = laid_out(("1c.3g.71gb*3", "2c.4g.71gb"))
    before = standing(card)
    assert len(before[1]) == 4
    card.instances.clear()
    card.mode = False
    Node1(card, disk).start()
    assert standing(card) == before
    Node1(card, disk).apply("auto")
    assert (card.keys(), card.mode) == (set(), False)
    assert not disk.originals, "nothing of vgpud is left on record"


def test_the_start_of_vgpud_drops_records_of_compute_instances_that_are_gone() -> None:
    disk = Disk().note(("GPU-0", "9@4:4", ""), ("GPU-0", "9@4:4", "0@1:1"))
    Node1(Card(mode=True), disk).start()
    assert not disk.originals


# --- tenants

HALF: SlotKey = (9, Placement(4, 4))


def tenant(name: str, start: int) -> Allocation:
    place = MigSlice(9, "1c.3g.71gb", HALF[1], compute_profile_id=0, compute_placement=Placement(start, 1))
    part = Slice("GPU-0", Mode.MIG, 1, mig=place)
    return Allocation(name, Request(name, Owner(1, 1)), State.ALLOCATING, (part,))


def daemon(card: Card, disk: Disk, *held: Allocation) -> Node1:
    node = Node1(card, disk)
    for allocation in held:
        node.book.add(allocation)
    return node


def attach(node: Node1, allocation: Allocation) -> None:
    device = node.card.snapshot().devices[0]
    run(node.mig.attach(allocation, allocation.slices[0], device))


def detach(node: Node1, allocation: Allocation) -> None:
    run(node.mig.detach(allocation, allocation.slices[0]))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("act", [attach, detach], ids=["come", "go"])
def test_an_attach_or_detach_of_a_compute_instance_that_is_cut_anywhere_leaves_nothing_behind(
    act: Act, beside: bool
) -> None:
    """The attach or the detach of a tenant is cut at each point. The next start undoes the attach, or
    completes the detach, so nothing is left. The other tenant keeps running.
    """
    one, other = tenant("one", 0), tenant("other", 2)
    kept = (other,) if beside else ()
    at = 0
    while True:
        at += 1
        card, disk = Card(mode=True), Disk()
        for allocation in (*kept, *([one] if act is detach else [])):
            attach(daemon(card, disk), allocation)
        cut(card, disk, at)
        try:
            act(daemon(card, disk, one, *kept), one)
        except Cut:
            pass
        else:
            break
        cut(card, disk, at % 5 + 1)
        try:
            detach(daemon(card, disk, one, *kept), one)
        except Cut:
            cut(card, disk, None)
            detach(daemon(card, disk, one, *kept), one)
        cut(card, disk, None)
        left = ({HALF}, {(HALF, (0, Placement(2, 1)))}) if beside else (set(), set())
        assert standing(card) == left, "nothing is left to the start's tidying"
        daemon(card, disk, *kept).start()
        assert standing(card) == left
        check_records(card, disk)
    assert at > 4
