"""Runs changes of existing allocations (resizes, repairs, moves, suspensions), one at a time for each
allocation, and tasks in the background.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

import structlog

from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import State
from vgpud.node.store.book import Book

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Changes:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def __contains__(self, allocation_id: str) -> bool:
        return allocation_id in self._tasks

    @property
    def running(self) -> frozenset[str]:
        """Ids of the allocations that are being changed now."""
        return frozenset(self._tasks)

    @property
    def tasks(self) -> Collection[asyncio.Task[Any]]:
        return self._tasks.values()

    def begin(self, allocation_id: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a change of an allocation, of which no change is running (`settle`). The change continues if
        its caller is cancelled, and a release waits for it.
        """
        assert allocation_id not in self._tasks, f"another change of {allocation_id} is running"
        task = asyncio.ensure_future(work)
        self._tasks[allocation_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(allocation_id, None))
        return task

    async def run(self, allocation_id: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Runs `work` while no other change of the allocation runs. Skips an allocation that is being
        released.
        """
        await self.settle(allocation_id)
        if self._book.get(allocation_id).state is not State.RELEASING:
            await asyncio.shield(self.begin(allocation_id, work()))

    async def settle(self, allocation_id: str) -> None:
        """Waits until no change of the allocation is running."""
        while (task := self._tasks.get(allocation_id)) is not None:
            await asyncio.wait((task,))


class Background:
    """The node's background tasks, for which no caller waits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` as a task. If the daemon stops, the task is cancelled, and the next start finishes
        its work.
        """
        if self._closed:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(LogEvent.BACKGROUND_TASK_FAILED, why=str(error), exc_info=error)

    async def close(self) -> None:
        """Cancels all background tasks and accepts no new ones."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
