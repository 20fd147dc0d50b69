"""Delivers events to watchers in the order of revisions. A watch can resume after the last revision that it
saw.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event
from vgpud.model.tenancy import Allocation

Item = tuple[Event, Allocation | None]
_QUEUE = 1024  # length of a watcher's queue
# Number of recent events that are kept with their allocations. An allocation is some 16 objects, and a full
# garbage collection stops the event loop for 0.7 us an object.
_RECENT = 512
# number of past events that the thread which writes the ledger reads at once
PAGE = 128


def _end(queue: asyncio.Queue[Item | None]) -> None:
    """Puts the end mark into a watcher's queue. A full queue is emptied first: without one of its events the
    watcher would see a gap, and without all of them it can resume after the last revision that it saw.
    """
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
    queue.put_nowait(None)


class Hub:
    """Delivers events. `history(after, most)` returns the first `most` kept events after a revision, oldest
    first, or raises BAD_REVISION.
    """

    def __init__(self, history: Callable[[int, int], Awaitable[tuple[Event, ...]]]) -> None:
        self._history = history
        self._watchers: set[asyncio.Queue[Item | None]] = set()
        self._recent: dict[int, Item] = {}  # recent events, by revision, oldest first
        self.revision = 0  # revision of the last known event

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def latest(self, count: int) -> tuple[Event, ...]:
        """The last `count` events since the daemon started, oldest first."""
        return tuple(event for event, _ in islice(reversed(self._recent.values()), count))[::-1]

    def publish(self, event: Event, allocation: Allocation | None = None) -> None:
        item = (event, allocation)
        self.revision = max(self.revision, event.revision)
        self._recent[event.revision] = item
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]
        for queue in tuple(self._watchers):
            if queue.full():  # the watcher does not read its events
                self._watchers.discard(queue)
                _end(queue)
            else:
                queue.put_nowait(item)

    def close(self) -> None:
        """Ends all watches."""
        for queue in self._watchers:
            _end(queue)
        self._watchers.clear()

    async def subscribe(self, after_revision: int | None) -> AsyncIterator[Item]:
        """Yields the events above `after_revision` (None: only later ones), then live ones, without gap or
        repeat. An event older than the last `_RECENT` ones is yielded without its allocation.

        Raises VgpuError(BAD_REVISION) if that revision is no longer kept or not yet reached. Raises
        VgpuError(STOPPING) when the daemon stops or this watcher is too slow.
        """
        queue: asyncio.Queue[Item | None] = asyncio.Queue(_QUEUE)
        self._watchers.add(queue)
        seen = -1
        try:
            while after_revision is not None:
                missed = await self._history(after_revision, PAGE)
                for event in missed:
                    seen = after_revision = event.revision
                    yield self._recent.get(event.revision, (event, None))
                if len(missed) < PAGE:
                    break
            while True:
                item = await queue.get()
                if item is None:
                    raise VgpuError(
                        ErrorCode.STOPPING,
                        "the watch has ended: vgpud is stopping or the watcher fell behind",
                        "watch again from the last revision seen",
                    )
                if item[0].revision > seen:
                    seen = item[0].revision
                    yield item
        finally:
            self._watchers.discard(queue)
