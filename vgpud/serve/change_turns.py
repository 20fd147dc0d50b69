"""Lets each user's changes begin one at a time, so that a user with many of them leaves room for others."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar
from weakref import WeakValueDictionary

from vgpud import clock

# When a change of a user ends, another user counts as active too if it began a change within this time
# before.
_BESIDE_SECONDS = 1.0
_NO_USER = -1
T = TypeVar("T")


class _Queue:
    """The changes of one user: one runs, and `waiting` ones wait for it."""

    def __init__(self) -> None:
        self.waiting = 0
        self._turn = asyncio.Lock()

    async def join(self) -> None:
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        self._turn.release()


class ChangeTurns:
    """The turns of all users. The next change of a user begins when the one before has ended, or after
    `most_seconds`, because a suspension can take a minute.

    While another user makes changes too, a user whose changes queue up pauses after each for as long as it
    took. Otherwise it would always have a change under way, and a user that sends one change after the
    other would get less than half of vgpud's time.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._queues: WeakValueDictionary[int, _Queue] = WeakValueDictionary()
        # The latest change, and the latest change of any other user. Each is a pair: the user, and the time
        # at which the change began.
        self._latest = self._other = (_NO_USER, float("-inf"))

    async def run(self, user: int, change: Callable[[], Awaitable[T]]) -> T:
        """Runs `change` in its turn; root's at once. A change that its caller cancels goes on in vgpud, and
        keeps its turn for `most_seconds`.
        """
        if user == 0:
            self._begin(user)
            return await change()
        queue = self._queues.setdefault(user, _Queue())
        await queue.join()
        began, later = self._begin(user), asyncio.get_running_loop().call_later
        # the turn ends once, although both the timer and the end of the change may close the stack
        turn, is_cancelled = ExitStack(), False
        turn.callback(queue.leave)
        timer = later(self._most_seconds, turn.close)
        try:
            return await change()
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            if not is_cancelled:
                timer.cancel()
                later(self._pause_seconds(user, queue, clock.now() - began), turn.close)

    def _begin(self, user: int) -> float:
        now = clock.now()
        if self._latest[0] != user:
            self._other = self._latest
        self._latest = (user, now)
        return now

    def _pause_seconds(self, user: int, queue: _Queue, took_seconds: float) -> float:
        _, at = self._other if self._latest[0] == user else self._latest
        if not queue.waiting or clock.now() - at > _BESIDE_SECONDS:
            return 0.0
        return min(took_seconds, self._most_seconds)
