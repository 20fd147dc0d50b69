"""Runs loops that are restarted after a bug, and waits for changes of the node."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from vgpud import clock
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.node.keeper import NodeKeeper

log = structlog.get_logger(__name__)

Work = Callable[[], Awaitable[None]]  # the work of a loop: a function or a method
_MOST_SECONDS = 60.0  # maximum wait before a failed loop is started again


async def run_all(works: Sequence[Work], retry_seconds: float) -> None:
    """Runs all loops until it is cancelled. If a loop fails, the error is logged and the loop is restarted
    after a back-off of `retry_seconds` up to one minute; other loops, calls and tenants continue. If the
    event loop or the ledger hangs, systemd's watchdog ends vgpud.
    """
    tasks = [asyncio.ensure_future(_run_always(work, retry_seconds)) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_always(work: Work, retry_seconds: float) -> None:
    pause = retry_seconds
    while True:
        began = clock.now()
        try:
            await work()
            log.error(LogEvent.BACKGROUND_LOOP_ENDED_BY_BUG, loop=work.__qualname__)
        except Exception:
            log.exception(LogEvent.BACKGROUND_LOOP_FAILED_BY_BUG, loop=work.__qualname__)
        if clock.now() - began > _MOST_SECONDS:
            pause = retry_seconds
        await asyncio.sleep(pause)
        pause = max(retry_seconds, min(2 * pause, _MOST_SECONDS))


async def set_at_changes(keeper: NodeKeeper, changed: asyncio.Event, pause_seconds: float) -> None:
    """Sets `changed` at every event of the node, and also if events were lost."""
    while True:
        try:
            async for _ in keeper.store.subscribe(None):
                changed.set()
        except VgpuError as error:
            log.debug(LogEvent.INTERNAL_EVENT_WATCH_RESTARTED, why=str(error))
        changed.set()
        await asyncio.sleep(pause_seconds)


async def until_changed(changed: asyncio.Event, most_seconds: float, settle_seconds: float) -> None:
    """Waits for a change, for at most `most_seconds`. After a change it waits `settle_seconds` more, because
    further changes may follow.
    """
    try:
        async with asyncio.timeout(most_seconds):
            await changed.wait()
    except TimeoutError:
        return
    await asyncio.sleep(settle_seconds)
