"""Each call of the ledger, and the rows that a second start reads after it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ledger.samples import active, allocation, event, ledger_path
from vgpud.ledger import Ledger, LedgerState, RowTable
from vgpud.ledger.tables import EVENTS_KEPT, UNSYNCED_REVISIONS
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind
from vgpud.model.marks import Mark, MarkKind
from vgpud.model.tenancy import State
from vgpud.modes.base import remember


def after(folder: Path, work: Callable[[Ledger], Awaitable[object]]) -> LedgerState:
    """Runs `work` on a ledger. Returns what the next start reads."""

    async def both() -> LedgerState:
        async with await Ledger.open(ledger_path(folder)) as ledger:
            await work(ledger)
        async with await Ledger.open(ledger_path(folder)) as ledger:
            return await ledger.load()

    return asyncio.run(both())


def code_of(folder: Path, work: Callable[[Ledger], Awaitable[object]]) -> ErrorCode:
    with pytest.raises(VgpuError) as caught:
        after(folder, work)
    return caught.value.code


def test_the_ledger_rows_of_an_allocation_follow_its_life(tmp_path: Path) -> None:
    wanted = allocation(1)

    async def begin(ledger: Ledger) -> None:
        await ledger.intent(wanted)

    assert after(tmp_path, begin).allocations == (wanted,)

    async def finish(ledger: Ledger) -> None:
        done = await ledger.commit(active(wanted), event("a1"))
        assert done == replace(active(wanted), revision=1)

    assert after(tmp_path, finish).allocations == (replace(active(wanted), revision=1),)

    async def resize(ledger: Ledger) -> None:
        smaller = replace(wanted.slices[0], memory_bytes=1 << 30)
        await ledger.intent(replace(active(wanted), state=State.RESIZING, slices=(smaller,)))

    (resizing,) = after(tmp_path, resize).allocations
    assert (resizing.state, resizing.slices[0].memory_bytes, resizing.revision) == (
        State.RESIZING,
        1 << 30,
        1,
    )

    async def leave(ledger: Ledger) -> None:
        await ledger.intent(replace(resizing, state=State.RELEASING))

    assert after(tmp_path, leave).allocations == (replace(resizing, state=State.RELEASING),)

    async def forget(ledger: Ledger) -> None:
        told = await ledger.forget("a1", event("a1", EventKind.ALLOCATION_RELEASED))
        assert told is not None and told.revision == 2
        assert await ledger.forget("a1", event("a1")) is None
        assert (await ledger.load()).released == ("a1",)

    state = after(tmp_path, forget)
    assert (state.allocations, state.revision) == ((), 2)


def test_a_failure_of_an_allocation_is_kept_with_its_reason(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        await ledger.intent(allocation(1))
        await ledger.commit(allocation(1, State.FAILED, failure="GPU is lost"), event("a1"))

    (failed,) = after(tmp_path, work).allocations
    assert (failed.state, failed.failure) == (State.FAILED, "GPU is lost")


def test_a_request_id_names_one_allocation(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        await ledger.intent(allocation(1))
        await ledger.intent(replace(allocation(1), id="a2"))

    assert code_of(tmp_path, work) is ErrorCode.REQUEST_ID_REUSED

    async def again(ledger: Ledger) -> None:
        await ledger.forget("a1", None)
        await ledger.intent(replace(allocation(1), id="a2"))

    assert [a.id for a in after(tmp_path, again).allocations] == ["a2"]


def test_an_intent_with_the_id_of_another_allocation_is_refused_as_a_bug(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        await ledger.intent(allocation(1))
        await ledger.intent(replace(allocation(2), id="a1"))

    assert code_of(tmp_path, work) is ErrorCode.BUG


@pytest.mark.parametrize("state", [State.RELEASING, State.RESIZING])
def test_an_allocation_without_a_row_cannot_change(tmp_path: Path, state: State) -> None:
    assert code_of(tmp_path, lambda x: x.intent(allocation(1, state))) is ErrorCode.NO_SUCH_ALLOCATION
    assert code_of(tmp_path, lambda x: x.commit(allocation(1), event("a1"))) is ErrorCode.NO_SUCH_ALLOCATION
    assert after(tmp_path, lambda x: x.forget("a1", event("a1"))).revision == 0


@pytest.mark.parametrize("state", [State.ACTIVE, State.FAILED])
def test_an_allocation_in_a_state_that_is_no_intent_is_refused_as_an_intent(
    tmp_path: Path, state: State
) -> None:
    assert code_of(tmp_path, lambda ledger: ledger.intent(allocation(1, state))) is ErrorCode.BUG


def test_rows_are_kept_in_the_order_of_their_last_change(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        rows = ledger.rows[RowTable.KUBELET_HOLDS]
        for row in (("a", "1"), ("b", "2"), ("c", "3"), ("a", "4")):
            await rows.put(row)
        await rows.drop("c")
        await rows.drop("never there")
        assert list(rows) == [("b", "2"), ("a", "4")]
        assert rows.get("a") == ("a", "4")
        assert rows.get("c") is None

    after(tmp_path, work)

    async def again(ledger: Ledger) -> None:
        assert list(ledger.rows[RowTable.KUBELET_HOLDS]) == [("b", "2"), ("a", "4")]

    after(tmp_path, again)


def test_the_recorded_original_of_a_device_setting_keeps_its_first_value(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        originals = ledger.rows[RowTable.ORIGINALS]
        await remember(originals, "GPU-1", "compute_mode", "default")
        await remember(originals, "GPU-1", "compute_mode", "exclusive_process")
        assert list(originals) == [("GPU-1", "compute_mode", "default")]

    after(tmp_path, work)


def test_events_after_a_revision_are_read_in_order(tmp_path: Path) -> None:
    async def write(ledger: Ledger) -> None:
        for number in range(5):
            told = await ledger.event(EventKind.DEVICE_CHANGED, f"GPU-{number}", "it changed")
            assert told.revision == number + 1
            assert told.unix_ns > 0

    async def read(ledger: Ledger) -> None:
        assert [e.subject for e in await ledger.events_after(3, 2)] == ["GPU-3", "GPU-4"]
        assert await ledger.events_after(5, 2) == ()
        for wrong in (6, -1):
            with pytest.raises(VgpuError) as caught:
                await ledger.events_after(wrong, 2)
            assert caught.value.code is ErrorCode.BAD_REVISION

    after(tmp_path, write)
    assert after(tmp_path, read).revision == 5


def test_a_user_with_ten_thousand_events_leaves_the_history_of_others_whole(tmp_path: Path) -> None:
    others = (0, 1000)

    async def work(ledger: Ledger) -> None:
        first = [
            ledger.event(EventKind.ALLOCATION_FAILED, f"of {user}", "it failed", user) for user in others
        ]
        await asyncio.gather(*first)
        many = [
            ledger.event(EventKind.ALLOCATION_ACTIVE, "a1", "again", 1001) for _ in range(EVENTS_KEPT + 1200)
        ]
        await asyncio.gather(*many)

    async def look(ledger: Ledger) -> None:
        for user in others:
            assert [one.subject for one in await ledger.last_events(10, user)] == [f"of {user}"]
        assert len(await ledger.last_events(2 * EVENTS_KEPT)) == EVENTS_KEPT
        last = len(others) + EVENTS_KEPT + 1200
        with pytest.raises(VgpuError) as caught:
            await ledger.events_after(100, 2)
        assert caught.value.code is ErrorCode.BAD_REVISION
        kept = await ledger.events_after(last - EVENTS_KEPT + len(others), 2 * EVENTS_KEPT)
        assert [kept[0].revision, kept[-1].revision] == [last - EVENTS_KEPT + len(others) + 1, last]

    after(tmp_path, work)
    after(tmp_path, look)


def test_after_a_reboot_revisions_that_a_power_cut_may_have_lost_are_skipped(tmp_path: Path) -> None:
    async def first(ledger: Ledger) -> None:
        assert await ledger.set_boot_id("one") == 0
        await ledger.event(EventKind.DEVICE_CHANGED, "GPU-0", "it changed")
        assert await ledger.set_boot_id("one") == 1

    async def second(ledger: Ledger) -> None:
        assert await ledger.set_boot_id("two") == 1 + UNSYNCED_REVISIONS
        assert [e.revision for e in await ledger.events_after(0, 2)] == [1]

    assert after(tmp_path, first).boot_id == "one"
    state = after(tmp_path, second)
    assert (state.boot_id, state.revision) == ("two", 1 + UNSYNCED_REVISIONS)


def test_a_call_on_a_closed_ledger_is_an_error(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = await Ledger.open(ledger_path(tmp_path))
        pending = asyncio.ensure_future(ledger.intent(allocation(1)))
        await asyncio.sleep(0)
        await ledger.close()
        await pending  # close() has waited for the write that was requested before
        await ledger.close()
        with pytest.raises(VgpuError) as caught:
            await ledger.load()
        assert caught.value.code is ErrorCode.STOPPING

    asyncio.run(work())


def test_an_allocation_keeps_one_mark_of_each_kind_until_its_end(tmp_path: Path) -> None:
    first = Mark("a1", MarkKind.BYPASSED, "GPU-1", 600 << 20, "it holds 600MiB", 5)
    later = replace(first, amount=700 << 20, since_unix_ns=9)
    other = Mark("a1", MarkKind.TAMPERED, "", 1, "it was cut", 6)

    async def mark(ledger: Ledger) -> None:
        await ledger.intent(replace(allocation(1), id="a1"))
        for one in (first, other, later):
            told = await ledger.mark(one, event("a1"))
        assert told.revision == 3

    assert after(tmp_path, mark).marks == (later, other)

    async def unmark(ledger: Ledger) -> None:
        await ledger.unmark(later, event("a1"))

    assert after(tmp_path, unmark).marks == (other,)

    async def forget(ledger: Ledger) -> None:
        await ledger.forget("a1", None)

    assert after(tmp_path, forget).marks == ()


def test_a_removed_allocation_gets_no_mark(tmp_path: Path) -> None:
    async def mark(ledger: Ledger) -> None:
        await ledger.mark(Mark("gone", MarkKind.TAMPERED, "", 1, "it was cut", 6), event("gone"))

    assert code_of(tmp_path, mark) is ErrorCode.NO_SUCH_ALLOCATION
