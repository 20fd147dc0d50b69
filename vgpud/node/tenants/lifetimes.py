"""Watches by pidfd the processes whose end releases an allocation. A pidfd needs no polling, and never refers
to a later process with the same pid.
"""

import asyncio
from collections.abc import Callable

import structlog

from vgpud import proc
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Lifetime

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0


def is_alive(lifetime: Lifetime) -> bool:
    """True if the process is alive, or if the kernel gives no answer about it. False for pid 0, which stands
    for no process.
    """
    return lifetime.pid != 0 and proc.is_alive(lifetime.pid, lifetime.start_ticks)


class Lifetimes:
    """Calls `ended(allocation_id)` once, on the event loop, when the process to which the allocation is bound
    has ended.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._pidfds: dict[str, proc.PidFd] = {}
        # timers for another attempt, set when no descriptor was free
        self._later: dict[str, asyncio.TimerHandle] = {}

    def watch(self, allocation_id: str, lifetime: Lifetime) -> None:
        """Starts to watch a process. If it has ended already, `ended` is called soon after."""
        if lifetime.pid == 0 or allocation_id in self._pidfds:
            return
        self._cancel_later(allocation_id)
        loop = asyncio.get_running_loop()
        try:
            pidfd = proc.pin(lifetime.pid, lifetime.start_ticks)
        except OSError as error:
            log.error(LogEvent.PROCESS_WATCH_FAILED_RETRYING, allocation=allocation_id, why=error.strerror)
            self._later[allocation_id] = loop.call_later(_RETRY_SECONDS, self.watch, allocation_id, lifetime)
            return
        if pidfd is None:
            loop.call_soon(self._ended, allocation_id)
            return
        self._pidfds[allocation_id] = pidfd
        loop.add_reader(pidfd, self._fire, allocation_id)

    def _fire(self, allocation_id: str) -> None:
        self.forget(allocation_id)
        self._ended(allocation_id)

    def forget(self, allocation_id: str) -> None:
        self._cancel_later(allocation_id)
        pidfd = self._pidfds.pop(allocation_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            pidfd.close()

    def close(self) -> None:
        for allocation_id in (*self._pidfds, *self._later):
            self.forget(allocation_id)

    def _cancel_later(self, allocation_id: str) -> None:
        if (later := self._later.pop(allocation_id, None)) is not None:
            later.cancel()
