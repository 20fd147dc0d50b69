"""Runs changes of existing allocations (resizes, repairs, moves, suspensions), one at a time for each
allocation.
"""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    def __init__(self) -> None:
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
        """Starts a change of an allocation. The change continues if its caller is cancelled, and a release
        waits for it.
        """
        task = asyncio.ensure_future(work)
        self._tasks[allocation_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(allocation_id, None))
        return task

    async def settle(self, allocation_id: str) -> None:
        """Waits until no change of the allocation is running."""
        while (task := self._tasks.get(allocation_id)) is not None:
            await asyncio.wait((task,))
