"""Limits the share of the daemon's time that callers other than root can use. The limit does not depend on
the number of callers or of their messages.

One piece of work runs at a time, and each user has at most one piece in the queue. After each piece there is
a pause of a multiple of its duration.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from vgpud import clock


class Pace:
    """Limits the time for work. With `rest_factor` 4, work takes at most a fifth of the time."""

    def __init__(self, rest_factor: float) -> None:
        self._rest_factor = rest_factor
        self._rested_at = 0.0  # time of the daemon's clock at which the pause ends
        self._turn = asyncio.Lock()
        self._users: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, user: int) -> AsyncIterator[None]:
        own = self._users.setdefault(user, asyncio.Lock())
        async with own, self._turn:
            await asyncio.sleep(self._rested_at - clock.now())
            yield

    def took(self, seconds: float) -> None:
        """Reports the duration of a piece of work. It may be called after the work's turn, if the work
        continued beside other pieces.
        """
        self._rested_at = max(self._rested_at, clock.now()) + self._rest_factor * seconds
