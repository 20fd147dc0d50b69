"""Calls that change things: begun, they are finished, whether or not the caller stays."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from vgpud.model.errors import VgpuError

log = structlog.get_logger(__name__)

Abandoned = Callable[[Any], Awaitable[None]]


class Running:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self, name: str, work: Coroutine[Any, Any, Any], abandoned: Abandoned | None) -> Any:  # noqa: ANN401
        """What `work` answers. If this call is cancelled, `work` goes on and `abandoned` gets its answer."""
        task = self._keep(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                self._keep(self._outlast(name, task, abandoned))
            raise

    async def wait(self, seconds: float) -> int:
        """Waits for what runs; how many calls were still running at the end of that time."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=seconds)
        return len(self._tasks)

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _outlast(self, name: str, task: asyncio.Task[Any], abandoned: Abandoned | None) -> None:
        log.info("the caller went away, its call goes on", call=name)
        try:
            answer = await task
        except VgpuError as error:
            log.info("a call whose caller went away failed", call=name, why=str(error))
            return
        except Exception:
            log.exception("a call whose caller went away failed, this is a bug", call=name)
            return
        if abandoned is not None:
            await abandoned(answer)
