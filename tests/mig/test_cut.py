"""Changes of MIG layouts are cut by kill -9 at every point. The next start completes the new layout or
restores the old one.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.mig.cutting import TABLE, Card, Disk, Node1, cut_at_each_point, run, words_of
from tests.planner.cards import h200
from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.rows import Row
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Owner, Request, Slice, State
from vgpud.planner.geometry import SlotKey
from vgpud.planner.reconcile import InstancePlace

STATES = sorted(TABLE.free_after)
PAIRS = 20


def keys(state: int) -> set[SlotKey]:
    return set(TABLE.keys(state))


def laid_out(state: int) -> tuple[Card, Disk]:
    """Returns a device to which this layout has been applied, and its records."""
    card, disk = Card(), Disk()
    Node1(card, disk).apply(*words_of(state))
    assert card.keys() == keys(state)
    card.touched.clear()
    return card, disk


@pytest.mark.parametrize("seed", range(PAIRS))
def test_a_layout_change_cut_at_any_point_converges_at_the_next_start(seed: int) -> None:
    """Changes one random layout into another, cut at each point in turn. The start that follows is cut,
    too.
    """
    draw = random.Random(seed)
    before, after = draw.choice(STATES), draw.choice(STATES)
    card, disk = laid_out(before)
    Node1(card, disk).apply(*words_of(after))
    assert card.keys() == keys(after)
    at = 0
    for at, card, disk in cut_at_each_point(laid_out(before), words_of(after), draw):
        ended = card.keys()
        assert ended in (keys(before), keys(after)), f"half-way after a cut at point {at}"
        assert all(i.compute_instances for i in card.instances.values())
        own = Node1(card, disk).mig.records.own("GPU-0")
        assert own == ended, "what is on record is what stands"
    assert at > 3


def test_a_change_of_layout_touches_only_the_mig_instances_that_differ() -> None:
    draw = random.Random(1)
    for _ in range(60):
        before, after = draw.choice(STATES), draw.choice(STATES)
        card, disk = laid_out(before)
        Node1(card, disk).apply(*words_of(after))
        assert sorted(card.touched) == sorted(keys(before) ^ keys(after))


@given(st.sampled_from(STATES), st.sampled_from(STATES), st.data())
@settings(max_examples=examples(30))
def test_a_failed_step_of_a_layout_change_brings_the_old_layout_back(
    before: int, after: int, data: st.DataObject
) -> None:
    new = sorted(keys(after) - keys(before))
    if not new:
        return
    card, disk = laid_out(before)
    card.refuse = {data.draw(st.sampled_from(new))}
    node = Node1(card, disk)
    with pytest.raises(VgpuError) as failed:
        node.apply(*words_of(after))
    assert failed.value.code is ErrorCode.NVML_FAILED
    assert card.keys() == keys(before)
    assert node.mig.records.own("GPU-0") == keys(before)
    Node1(card, disk).start()
    assert card.keys() == keys(before)


class Cards:
    """Two fake devices."""

    def __init__(self) -> None:
        self.cards: tuple[Card, ...] = Card(), Card()
        self.scissors = self.cards[0].scissors

    def __getattr__(self, name: str) -> Any:
        return lambda uuid, *args: getattr(self.cards[int(uuid[-1])], name)(uuid, *args)

    def snapshot(self) -> Node:
        migs = (card.snapshot().devices[0].mig for card in self.cards)
        return Node(devices=tuple(replace(h200(index), mig=mig) for index, mig in enumerate(migs)))

    def keys(self) -> list[set[SlotKey]]:
        return [card.keys() for card in self.cards]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_step_brings_back_the_old_layouts_of_its_device_and_of_those_after_it(failing: int) -> None:
    old, new = keys(STATES[1]), keys(STATES[-1])
    cards, disk = Cards(), Disk()
    node = Node1(cards, disk)  # type: ignore[arg-type]
    node.apply(*words_of(STATES[1]))
    cards.cards[failing].refuse = new
    with pytest.raises(VgpuError):
        node.apply(*words_of(STATES[-1]))
    cards.cards[failing].refuse = set()
    wanted = [new] * failing + [old] * (2 - failing)
    assert cards.keys() == wanted
    Node1(cards, disk).start()  # type: ignore[arg-type]
    assert cards.keys() == wanted


def test_a_layout_that_cannot_be_recorded_for_each_device_is_recorded_and_made_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards, disk = Cards(), Disk()
    node = Node1(cards, disk)  # type: ignore[arg-type]
    node.apply(*words_of(STATES[1]))
    before, rows, put = cards.keys(), sorted(disk.originals), disk.layouts.put
    failures = [VgpuError(ErrorCode.LEDGER_FAILED, "the disk is full", "")]

    async def fails_once_for_the_second(row: Row) -> None:
        if row[0] == rows[-1][0] and failures:
            raise failures.pop()
        await put(row)

    monkeypatch.setattr(disk.layouts, "put", fails_once_for_the_second)
    with pytest.raises(VgpuError, match="the disk is full"):
        node.apply(*words_of(STATES[-1]))
    assert (cards.keys(), sorted(disk.originals)) == (before, rows)


def test_a_device_that_has_left_the_node_ends_no_reconciliation() -> None:
    cards = Cards()
    node = Node1(cards, Disk())  # type: ignore[arg-type]
    node.apply(*words_of(STATES[1]))
    cards.cards = cards.cards[:1]
    cards.cards[0].instances.clear()
    run(node.layouts.converge())
    assert cards.keys() == [keys(STATES[1])]


@given(st.sampled_from(STATES), st.sampled_from(STATES), st.data())
@settings(max_examples=examples(50))
def test_mig_instances_in_use_or_made_by_others_stay(before: int, after: int, data: st.DataObject) -> None:
    card, disk = Card(), Disk()
    card.place(keys(before))
    busy = data.draw(st.sets(st.sampled_from(sorted(keys(before))))) if before else set()
    card.processes_on = {key: 100 + n for n, key in enumerate(sorted(busy))}
    for key in sorted(keys(before)):
        if data.draw(st.booleans()):
            disk.note(("GPU-0", f"{key[0]}@{key[1].start}:{key[1].size}", ""))
    own = Node1(card, disk).mig.records.own("GPU-0")
    try:
        Node1(card, disk).apply(*words_of(after))
    except VgpuError as refused:
        assert refused.code is ErrorCode.DEVICE_IN_USE
        assert card.keys() == keys(before), "a refusal changes nothing"
        assert (keys(before) - own | busy) - keys(after), "another instance was in the way"
        return
    assert card.keys() == keys(after)
    assert keys(before) - own | busy <= keys(after)


def test_after_a_reboot_vgpud_makes_the_mig_layout_again_and_no_other_instances() -> None:
    card, disk = laid_out(TABLE.state(key for key in keys(STATES[-1])))
    wanted = card.keys()
    card.instances.clear()
    card.mode = False
    Node1(card, disk).start()
    assert card.keys() == wanted
    Node1(card, disk).apply("auto")
    assert (card.keys(), card.mode) == (set(), False)
    assert not disk.originals, "nothing of vgpud is left on record"


def test_the_start_of_vgpud_drops_the_record_of_a_mig_instance_that_is_gone() -> None:
    card, disk = Card(mode=True), Disk().note(("GPU-0", "19@6:1", ""))
    Node1(card, disk).start()
    assert not disk.originals


def test_reconciliation_with_an_older_snapshot_keeps_an_instance_that_was_just_allocated() -> None:
    """vgpud also reconciles while it serves requests, so the snapshot may be older than an allocation."""
    card, disk = Card(mode=True), Disk()
    node = Node1(card, disk)
    key = next(key for key in TABLE.number if key[0] == 19)
    run(node.mig.make("GPU-0", key))
    run(node.inventory.refresh())
    orphans = node.layouts.own_instances()
    assert orphans == {InstancePlace("GPU-0", *key)}
    place = MigSlice(key[0], "1g.18gb", key[1])
    request = Request(id="r", owner=Owner(1, 1))
    part = Slice("GPU-0", Mode.MIG, 1 << 30, mig=place)
    node.book.add(Allocation("a", request, State.ALLOCATING, (part,)))
    for orphan in orphans:
        run(node.layouts.remove(orphan))
    assert card.keys() == {key}
    node.book.remove("a")
    for orphan in orphans:
        run(node.layouts.remove(orphan))
    assert not card.keys()
