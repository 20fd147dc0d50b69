"""Processes whose end releases an allocation, watched by pidfd: no polling, no reused pid."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from vgpud.model.tenancy import Lifetime

_START_TICKS_FIELD = 22 - 3  # counted after the command's closing bracket, proc(5)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None when there is no such process (or it is a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[_START_TICKS_FIELD])


def has_ended(pid: int) -> bool:
    """A zombie: it runs no more, though NVML may list it until its parent has collected it.

    A pid that cannot be seen is not called ended: it may be of another pid namespace.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] in "ZX"


def is_alive(lifetime: Lifetime) -> bool:
    return lifetime.pid != 0 and start_ticks(lifetime.pid) == lifetime.start_ticks


class Lifetimes:
    """Calls `ended(allocation_id)` once, on the loop, when the process bound to it is gone."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._pidfds: dict[str, int] = {}

    def watch(self, allocation_id: str, lifetime: Lifetime) -> None:
        """Also for a process that is gone already: `ended` then comes with the loop's next turn."""
        if lifetime.pid == 0 or allocation_id in self._pidfds:
            return
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(lifetime.pid)
        except OSError:
            loop.call_soon(self._ended, allocation_id)
            return
        if not is_alive(lifetime):  # the pid was reused before we opened it
            os.close(pidfd)
            loop.call_soon(self._ended, allocation_id)
            return
        self._pidfds[allocation_id] = pidfd
        loop.add_reader(pidfd, self._fire, allocation_id)

    def _fire(self, allocation_id: str) -> None:
        self.forget(allocation_id)
        self._ended(allocation_id)

    def forget(self, allocation_id: str) -> None:
        pidfd = self._pidfds.pop(allocation_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for allocation_id in tuple(self._pidfds):
            self.forget(allocation_id)
