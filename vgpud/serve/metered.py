"""Measures the event loop's time that one piece of work takes, without the time of other work between its
steps.

The time is that of the clock, not of the processor: if other programs take the processors, the loop loses
that time, too, and the part of the loop's time that is left to others would shrink.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from vgpud import clock

T = TypeVar("T")


class Metered(Generic[T]):
    """Awaits `work` once. `seconds` is the time that its steps took so far."""

    def __init__(self, work: Coroutine[Any, Any, T], now: Callable[[], float] = clock.now) -> None:
        self._work = work
        self._now = now
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[Any], Any] = self._work.send
        given: Any = None
        while True:
            began = self._now()
            try:
                awaited = step(given)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self.seconds += self._now() - began
            try:
                step, given = self._work.send, (yield awaited)
            except BaseException as error:  # passed on to the measured work: above all CancelledError
                step, given = self._work.throw, error
