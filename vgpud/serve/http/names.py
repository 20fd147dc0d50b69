"""Names of users for the status page, looked up on a thread: a directory service can be slow."""

import asyncio
import pwd
from collections.abc import Iterable, Mapping

from vgpud import clock

_KEPT_SECONDS = 300.0
_PATIENCE_SECONDS = 0.5


class UserNames:
    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._since = float("-inf")
        self._running: asyncio.Task[dict[int, str]] | None = None

    async def of(self, uids: Iterable[int]) -> Mapping[int, str]:
        """The names of the users that are known by now. A user that is unknown, or not looked up in time, is
        missing.
        """
        wanted = set(uids)
        is_old = clock.now() - self._since > _KEPT_SECONDS
        if self._running is None and (is_old or wanted - self._names.keys()):
            self._running = asyncio.ensure_future(asyncio.to_thread(_look_up, wanted))
        task = self._running
        if task is not None:
            await asyncio.wait((task,), timeout=_PATIENCE_SECONDS)
            if task.done() and self._running is task:
                self._running = None
                self._names, self._since = task.result(), clock.now()
        return self._names


def _look_up(uids: set[int]) -> dict[int, str]:
    found = {}
    for uid in uids:
        try:
            # a directory may have names that are not UTF-8, which no page can contain
            found[uid] = pwd.getpwuid(uid).pw_name.encode(errors="replace").decode()
        except (KeyError, OverflowError):
            found[uid] = ""
    return found
