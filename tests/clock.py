"""An event loop with a simulated clock: `run(main)` instead of `asyncio.run(main)`.

The clock stands still while anything can run, and while work outside of the loop is under way (a thread of
the executor, a job of the ledger, any work between `begins` and `ends`). When nothing is left to do, the
clock jumps to the next timer. So `await passed(3600)` takes no real time, and returns after everything that
happens within that hour.
"""

import asyncio
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_START = 1000.0  # seconds; not 0, so start-up at time 0 gets no special treatment
_LIMIT = 30 * 86400.0  # simulated seconds after which a waiting test fails
_PATIENCE_SECONDS = 300.0  # seconds of real time for processes and threads that the loop does not know


class _Selector(selectors.DefaultSelector):
    """Advances the loop's time instead of waiting."""

    loop: "TurnedLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and not self.loop.outside and len(self.get_map()) == 1:
            # Only threads can wake the loop. Their callbacks are in `_ready` before its socket is written to.
            if timeout > 0 and not self.loop._ready:
                self.loop.turn(timeout)
            return []
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.loop.outside:
            return super().select(None)
        if events := super().select(0):
            return events
        self.loop.turn(timeout)
        return []


class TurnedLoop(asyncio.SelectorEventLoop):
    _ready: "deque[asyncio.Handle]"  # of asyncio's BaseEventLoop

    def __init__(self) -> None:
        self._now = _START
        self.outside = 0  # number of operations that need real time
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def turn(self, seconds: float) -> None:
        """Advances the simulated time. Raises TimeoutError once it is _LIMIT seconds after the start."""
        self._now += seconds
        if self._now > _START + _LIMIT:
            raise TimeoutError(f"the test has not ended after {_LIMIT:g} s of its own time")

    def begins(self) -> None:
        self.outside += 1

    def ends(self, *_: object) -> None:
        self.outside -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        self.begins()
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self.ends)
        return future

    async def shutdown_default_executor(self, *_: object) -> None:
        with outside():  # the threads' end takes real time
            await super().shutdown_default_executor()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end with a simulated clock."""
    with asyncio.Runner(loop_factory=TurnedLoop) as runner:
        return runner.run(main)


@contextmanager
def outside() -> Iterator[None]:
    """Stops the simulated clock for the block, whose awaits complete outside of the loop. Other loops are not
    affected.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, TurnedLoop):
        yield
        return
    loop.begins()
    try:
        yield
    finally:
        loop.ends()


class Gate:
    """A gate at which a thread of the executor waits until the test opens it. The simulated clock goes on
    meanwhile.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TurnedLoop)
        self._loop = loop
        self._open = threading.Event()
        self._waiting = 0

    def wait(self) -> None:
        """Called in the waiting thread."""
        self._loop.call_soon_threadsafe(self._arrived)
        assert self._open.wait(_PATIENCE_SECONDS)

    def _arrived(self) -> None:
        if not self._open.is_set():
            self._waiting += 1
            self._loop.ends()

    def open(self) -> None:
        """Called in the event loop."""
        self._open.set()
        while self._waiting:
            self._waiting -= 1
            self._loop.begins()


async def passed(seconds: float) -> None:
    """Returns after this much simulated time and everything that happens in it."""
    await asyncio.sleep(seconds)


async def settled() -> None:
    """Returns when everything has happened that needs no time."""
    await passed(1e-6)


async def until(holds: Callable[[], object], what: str = "it") -> None:
    """Waits until `holds` is true, in simulated time and by work outside of the loop."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.to_thread(time.sleep, 0.002)
        await passed(0.01)
