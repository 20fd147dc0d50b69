"""Watchers get every event once and in order, whenever they connect."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests import clock
from tests.node.world import ALICE, request, world
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, Owner, Workload
from vgpud.node.store import hub as hub_module
from vgpud.node.store.hub import PAGE, Hub

Seen = tuple[Event, Allocation | None]


def event(revision: int) -> Event:
    return Event(revision, EventKind.DEVICE_CHANGED, "GPU-1", f"event {revision}", 0)


async def history_of(count: int, after: int, most: int) -> tuple[Event, ...]:
    await asyncio.sleep(0)
    return tuple(event(r) for r in range(after + 1, min(count, after + most) + 1))


async def reading(hub: Hub, after: int) -> tuple[AsyncIterator[Seen], asyncio.Task[Seen]]:
    """Starts a watch. Returns the watch and the task that waits for its first event."""
    stream = hub.subscribe(after)

    async def first() -> Seen:
        return await anext(stream)

    waiting = asyncio.ensure_future(first())
    await clock.settled()
    return stream, waiting


def test_a_watch_goes_from_old_to_live_events_without_gap_or_repeat() -> None:
    """Events published while the history is read are both in the history and in the live stream, and are sent
    once.
    """

    async def work() -> None:
        hub = Hub(partial(history_of, 7))
        stream = hub.subscribe(3)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for revision in (5, 6, 7, 8, 9):
            hub.publish(event(revision))
        seen = [(await first)[0].revision]
        while seen[-1] < 9:
            seen.append((await anext(stream))[0].revision)
        assert seen == [4, 5, 6, 7, 8, 9]

    clock.run(work())


def test_a_long_history_of_events_is_read_in_pages() -> None:
    asked: list[tuple[int, int]] = []

    async def history(after: int, most: int) -> tuple[Event, ...]:
        asked.append((after, most))
        return await history_of(3 * PAGE, after, most)

    async def work() -> None:
        stream = Hub(history).subscribe(PAGE // 2)
        first = await anext(stream)
        assert asked == [(PAGE // 2, PAGE)], "the first event costs one page"
        seen = [first, *[await anext(stream) for _ in range(2 * PAGE + PAGE // 2 - 1)]]
        assert [one.revision for one, _ in seen] == list(range(PAGE // 2 + 1, 3 * PAGE + 1))
        assert len(asked) == 3

    clock.run(work())


def test_an_event_older_than_the_kept_ones_comes_without_its_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_RECENT", 2)

    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r1"))
        hub = Hub(partial(history_of, 3))
        for revision in (1, 2, 3):
            hub.publish(event(revision), held)
        stream = hub.subscribe(0)
        assert [await anext(stream) for _ in range(3)] == [
            (event(1), None),
            (event(2), held),
            (event(3), held),
        ]

    clock.run(work())


def test_a_watcher_that_does_not_read_its_events_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_QUEUE", 4)

    async def work() -> None:
        hub = Hub(partial(history_of, 0))
        stream, first = await reading(hub, 0)
        hub.publish(event(1))
        assert (await first)[0].revision == 1
        for revision in range(2, 20):
            hub.publish(event(revision))
        with pytest.raises(VgpuError) as ended:
            while True:
                await anext(stream)
        assert ended.value.code is ErrorCode.STOPPING
        assert hub.revision == 19

    clock.run(work())


@pytest.mark.parametrize("publishes_more", [False, True])
def test_a_watch_with_a_full_queue_ends_without_a_gap(
    monkeypatch: pytest.MonkeyPatch, publishes_more: bool
) -> None:
    """The watch ends when vgpud stops, or at the next event. The watcher can resume after the last revision
    that it has seen.
    """
    monkeypatch.setattr(hub_module, "_QUEUE", 4)

    async def work() -> None:
        hub = Hub(partial(history_of, 0))
        stream, first = await reading(hub, 0)
        for revision in range(1, 5):
            hub.publish(event(revision))
        if publishes_more:
            hub.publish(event(5))
        else:
            hub.close()
        seen = []
        with pytest.raises(VgpuError) as ended:
            seen.append((await first)[0].revision)
            while True:
                seen.append((await asyncio.wait_for(anext(stream), 60))[0].revision)
        assert ended.value.code is ErrorCode.STOPPING
        assert seen == list(range(1, len(seen) + 1))

    clock.run(work())


def test_events_of_an_allocation_belong_to_its_quota_owner_and_not_to_its_owner(tmp_path: Path) -> None:
    """An attack: with a subordinate uid for each allocation, one user would count as 65 536 users in the
    history of events.
    """

    async def work() -> None:
        async with world(tmp_path) as w:
            asked = request("r1", owner=Owner(101_000, 101_000), quota_owner=Owner(1001, 1001))
            held = await w.keeper.allocate(asked)
            await w.keeper.name(held.id, Workload(pod="p"))
            await w.keeper.release(held.id, replace(ALICE, uid=101_000), force=True)
            kinds = [one.kind for one in await w.keeper.store.last_events(10, 1001)]
            assert kinds == [
                EventKind.ALLOCATION_ACTIVE,
                EventKind.ALLOCATION_NAMED,
                EventKind.ALLOCATION_RELEASED,
            ]
            assert await w.keeper.store.last_events(10, 101_000) == ()

    clock.run(work())


def test_starts_drains_and_resizes_with_their_figures_are_events(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r1", share=Percent(5000)))
            await w.keeper.resize(held.id, ALICE, GIB // 2, Percent(2500))
            for drained in (True, True, False):
                await w.keeper.operations.drain("GPU-00000001", drained)
            await w.keeper.notices.started("1.2")
            w.keeper.notices.arbiter("vgpu-arbiter runs again")
            await clock.passed(1)
            told = [(one.kind, one.subject, one.sentence) for one in await w.keeper.store.last_events(9)][1:]
            assert told == [
                (
                    EventKind.ALLOCATION_RESIZED,
                    held.id,
                    f"allocation {held.id}: resized from 4GiB and 50% to 512MiB and 25%",
                ),
                (
                    EventKind.DEVICE_CHANGED,
                    "GPU-00000001",
                    "device 1 is drained: it accepts no new allocations",
                ),
                (
                    EventKind.DEVICE_CHANGED,
                    "GPU-00000001",
                    "device 1 is no longer drained: it accepts new allocations",
                ),
                (EventKind.VGPUD_STARTED, "vgpud", "vgpud 1.2 serves, with 1 allocation"),
                (EventKind.ARBITER_CHANGED, "vgpu-arbiter", "vgpu-arbiter runs again"),
            ]

    clock.run(work())


def test_a_watcher_of_a_busy_node_gets_all_events_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            revisions: list[int] = []

            async def watch() -> None:
                async for seen, _ in w.keeper.store.subscribe(0):
                    revisions.append(seen.revision)

            watcher = asyncio.ensure_future(watch())
            await asyncio.sleep(0)

            async def tenant(number: int) -> None:
                held = await w.keeper.allocate(request(f"r{number}", gib=1))
                await w.keeper.release(held.id, ALICE, force=False)

            await asyncio.gather(*(tenant(n) for n in range(60)))
            await clock.settled()
            watcher.cancel()
            assert revisions == list(range(1, 121))

    clock.run(work())
