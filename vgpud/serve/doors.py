"""Loops that a bug does not end, and waits for changes of the node."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from vgpud import clock
from vgpud.model.errors import VgpuError
from vgpud.serve.keeper import Keeper

log = structlog.get_logger(__name__)

Work = Callable[[], Awaitable[None]]  # a function or a method
_MOST_SECONDS = 60.0  # between two starts of a loop that fails


async def run_all(works: Sequence[Work], retry_seconds: float) -> None:
    """Runs all loops until it is cancelled. A loop that a bug ends is logged and started again, after
    `retry_seconds` at first and a minute at most: the other loops, the calls and the tenants go on. An event
    loop or a ledger that hangs ends vgpud, by systemd's watchdog."""
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
            log.error("loop ended, this is a bug", loop=work.__qualname__)
        except Exception:
            log.exception("loop failed, this is a bug", loop=work.__qualname__)
        if clock.now() - began > _MOST_SECONDS:
            pause = retry_seconds
        await asyncio.sleep(pause)
        pause = max(retry_seconds, min(2 * pause, _MOST_SECONDS))


async def set_at_changes(keeper: Keeper, changed: asyncio.Event, pause_seconds: float) -> None:
    """Sets `changed` at every event of the node, and each time the events were lost."""
    while True:
        try:
            async for _ in keeper.subscribe(None):
                changed.set()
        except VgpuError as error:
            log.debug("events of the node are lost", why=str(error))
        changed.set()
        await asyncio.sleep(pause_seconds)


async def until_changed(changed: asyncio.Event, most_seconds: float, settle_seconds: float) -> None:
    """Waits for a change, and then a moment longer, because more may follow; at most `most_seconds`."""
    try:
        async with asyncio.timeout(most_seconds):
            await changed.wait()
    except TimeoutError:
        return
    await asyncio.sleep(settle_seconds)
