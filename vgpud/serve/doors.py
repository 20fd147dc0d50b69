"""What the doors for the kubelet share: work that a bug does not end, and waits for changes of the node."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from vgpud.model.errors import VgpuError
from vgpud.serve.keeper import Keeper

log = structlog.get_logger(__name__)

Work = Callable[[], Awaitable[None]]


async def run_all(door: str, works: Sequence[Work], retry_seconds: float) -> None:
    """Runs all works until it is cancelled. A bug in one of them ends neither the others nor the daemon."""
    tasks = [asyncio.ensure_future(_run_always(door, work, retry_seconds)) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_always(door: str, work: Work, retry_seconds: float) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("door failed, this is a bug", door=door, work=work.__name__)
        await asyncio.sleep(retry_seconds)


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
