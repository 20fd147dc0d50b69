"""A part of the daemon's time for callers beside root, whatever they send and however many they are.

They take turns, one piece of work at a time and each user with one of its own in the queue; after each piece
there is a rest of a multiple of the time that it took.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from vgpud import clock


class Pace:
    """With `rest_factor` 4 the work takes a fifth of the time at most."""

    def __init__(self, rest_factor: float) -> None:
        self._rest_factor = rest_factor
        self._rested_at = 0.0  # of the daemon's clock
        self._turn = asyncio.Lock()
        self._users: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, user: int) -> AsyncIterator[None]:
        own = self._users.setdefault(user, asyncio.Lock())
        async with own, self._turn:
            await asyncio.sleep(self._rested_at - clock.now())
            yield

    def took(self, seconds: float) -> None:
        """To be said within a turn, of the work that it was for."""
        self._rested_at = clock.now() + self._rest_factor * seconds
