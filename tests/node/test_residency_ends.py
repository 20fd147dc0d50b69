"""The residency loop ends when it is cancelled, whatever happens at the same moment."""

import asyncio

import pytest

from tests import clock
from vgpud.node.tenants.residency import Residency


class Restless(Residency):
    """A residency loop without tenants."""

    def __init__(self) -> None:
        self._nudged = asyncio.Event()

    async def _look(self) -> float:
        return 60.0


async def ends(ticks: int) -> bool:
    """Returns whether the loop ends if it is cancelled this many iterations of the event loop after it is
    woken.
    """
    watch = Restless()
    task = asyncio.ensure_future(watch.run())
    await clock.settled()
    watch.nudge()
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=5)
    if not done:  # ends a loop that has missed the cancellation
        task.cancel()
        await asyncio.wait((task,))
    return bool(done)


@pytest.mark.parametrize("ticks", range(5))
def test_a_cancelled_residency_loop_ends_even_if_it_is_woken_at_that_moment(ticks: int) -> None:
    """asyncio.wait_for would lose a cancellation at this moment."""
    assert clock.run(ends(ticks))
