"""Measures the event loop's time that one piece of work takes, without the time of other work between its
steps.
"""

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Metered(Generic[T]):
    """Awaits `work` once. `seconds` is the processor time that its steps took so far."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[Any], Any] = self._work.send
        given: Any = None
        while True:
            began = time.thread_time()
            try:
                awaited = step(given)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self.seconds += time.thread_time() - began
            try:
                step, given = self._work.send, (yield awaited)
            except BaseException as error:  # above all CancelledError, which the measured work must get
                step, given = self._work.throw, error
