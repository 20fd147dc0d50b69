"""Limits the share of the daemon's time that callers other than root can use, independent of their number and
their messages.

One piece of work runs at a time, and each user has at most one in the queue. After each piece there is a
pause of a multiple of its duration.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from vgpud import clock


class Pace:
    """With `rest_factor` 4 the work takes at most a fifth of the time."""

    def __init__(self, rest_factor: float) -> None:
        self._rest_factor = rest_factor
        self._rested_at = 0.0  # time of the daemon's clock
        self._turn = asyncio.Lock()
        self._users: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, user: int) -> AsyncIterator[None]:
        own = self._users.setdefault(user, asyncio.Lock())
        async with own, self._turn:
            await asyncio.sleep(self._rested_at - clock.now())
            yield

    def took(self, seconds: float) -> None:
        """Reports the duration of work: in its turn, or later for work that goes on beside other turns."""
        self._rested_at = max(self._rested_at, clock.now()) + self._rest_factor * seconds
