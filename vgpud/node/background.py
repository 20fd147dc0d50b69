"""The keeper's background tasks, for which no caller waits."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from vgpud.model.log_event import LogEvent

log = structlog.get_logger(__name__)


class Background:
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
