"""Processes whose end releases an allocation, watched by pidfd: no polling, no reused pid."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from vgpud.model.tenancy import Lifetime

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0
# no descriptor is free, which says nothing of the process
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_START_TICKS_FIELD = 22 - 3  # counted after the command's closing bracket, proc(5)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None where it cannot be seen. OSError where one cannot look now.

    The command in brackets is the process's own choice: any bytes (PR_SET_NAME of prctl(2)).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[_START_TICKS_FIELD])


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None when there is no such process (or it is a zombie)."""
    found = _stat(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def is_alive(lifetime: Lifetime) -> bool:
    return lifetime.pid != 0 and start_ticks(lifetime.pid) == lifetime.start_ticks


class Lifetimes:
    """Calls `ended(allocation_id)` once, on the loop, when the process bound to it is gone."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._pidfds: dict[str, int] = {}
        self._later: dict[str, asyncio.TimerHandle] = {}  # not watched yet, for want of descriptors

    def watch(self, allocation_id: str, lifetime: Lifetime) -> None:
        """Also for a process that is gone already: `ended` then comes with the loop's next turn."""
        if lifetime.pid == 0 or allocation_id in self._pidfds:
            return
        self._cancel_later(allocation_id)
        loop = asyncio.get_running_loop()
        try:
            pidfd = _open(lifetime)
        except OSError as error:
            log.error("process not watched yet", allocation=allocation_id, why=error.strerror)
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
            os.close(pidfd)

    def close(self) -> None:
        for allocation_id in (*self._pidfds, *self._later):
            self.forget(allocation_id)

    def _cancel_later(self, allocation_id: str) -> None:
        if (later := self._later.pop(allocation_id, None)) is not None:
            later.cancel()


def _open(lifetime: Lifetime) -> int | None:
    """A pidfd of that very process, None if it is gone. OSError where one cannot look now."""
    try:
        pidfd = os.pidfd_open(lifetime.pid)
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None
    try:
        alive = is_alive(lifetime)  # else the pid was reused before we opened it
    except OSError:
        os.close(pidfd)
        raise
    if alive:
        return pidfd
    os.close(pidfd)
    return None
