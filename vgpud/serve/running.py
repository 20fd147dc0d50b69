"""Runs calls that change something. Once begun they are finished, even if the caller disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from vgpud import clock
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent

log = structlog.get_logger(__name__)

Abandoned = Callable[[Any], Awaitable[None]]


class Running:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        # tasks whose results must be handled even if the caller disconnects
        self._owed: set[asyncio.Task[Any]] = set()
        self._outlasting: set[asyncio.Task[Any]] = set()  # tasks that wait for work whose caller has left

    async def finish(self, name: str, work: Coroutine[Any, Any, Any], abandoned: Abandoned | None) -> Any:  # noqa: ANN401
        """Runs `work` and returns its result. If the caller is cancelled, `work` continues, and `abandoned`
        is called with the result.
        """
        task = self._keep(work, owed=abandoned is not None)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                outlasting = self._keep(self._outlast(name, task, abandoned), owed=abandoned is not None)
                self._outlasting.add(outlasting)
            raise

    async def end(self, seconds: float) -> int:
        """Waits for running calls for `seconds`, then cancels them. Returns the number of cancelled calls.

        Calls whose `abandoned` is pending are awaited in any case, because no other code handles their
        result.
        """
        end = clock.now() + seconds
        while self._tasks and (left := end - clock.now()) > 0:
            await asyncio.wait(tuple(self._tasks), timeout=left)
        late = len(self._tasks - self._outlasting)
        while self._tasks:
            for task in self._tasks - self._owed:
                task.cancel()
            await asyncio.wait(tuple(self._tasks))
        return late

    def _keep(self, work: Coroutine[Any, Any, Any], owed: bool) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if owed:
            self._owed.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._owed.discard(task)
        self._outlasting.discard(task)

    async def _outlast(self, name: str, task: asyncio.Task[Any], abandoned: Abandoned | None) -> None:
        log.info(LogEvent.CALLER_DISCONNECTED_CALL_CONTINUES, call=name)
        try:
            answer = await task
        except VgpuError as error:
            log.info(LogEvent.CALL_OF_DISCONNECTED_CALLER_FAILED, call=name, why=str(error))
            return
        except Exception:
            log.exception(LogEvent.BUG_IN_CALL_OF_DISCONNECTED_CALLER, call=name)
            return
        if abandoned is not None:
            await abandoned(answer)
