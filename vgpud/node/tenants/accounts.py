"""Accounts of users for quotas: looked up on a thread, and kept for a minute."""

import asyncio
from collections.abc import Callable

import structlog

from vgpud import clock
from vgpud.model.caller import BARE, Account
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Owner
from vgpud.policy.accounts import account_of, needs_accounts
from vgpud.policy.model import Policy

log = structlog.get_logger(__name__)

_KEPT_SECONDS = 60.0
_LOOKUP_SECONDS = 2.0  # a directory service can be away
_MOST = 1024


class Accounts:
    def __init__(
        self, look_up: Callable[[Owner], Account] = account_of, patience_seconds: float = _LOOKUP_SECONDS
    ) -> None:
        self._look_up = look_up
        self._patience_seconds = patience_seconds
        self._known: dict[Owner, tuple[float, Account]] = {}
        self._running: dict[Owner, asyncio.Task[Account]] = {}

    async def of(self, owner: Owner, policy: Policy) -> Account:
        """The account, if a quota of the policy needs it. After a lookup that gives no answer in time: the
        last one known, or the primary group alone."""
        if not needs_accounts(policy):
            return BARE
        since, known = self._known.get(owner, (float("-inf"), BARE))
        if clock.now() - since <= _KEPT_SECONDS:
            return known
        if owner not in self._running:
            if len(self._running) >= _MOST:
                return known
            task = asyncio.ensure_future(asyncio.to_thread(self._look_up, owner))
            self._running[owner] = task
            task.add_done_callback(lambda done: self._ended(owner, done))
        done, _ = await asyncio.wait((self._running[owner],), timeout=self._patience_seconds)
        if not done:
            log.warning(LogEvent.ACCOUNT_LOOKUP_TIMEOUT, uid=owner.uid, seconds=self._patience_seconds)
        return self._known.get(owner, (0.0, known))[1]

    def _ended(self, owner: Owner, done: asyncio.Task[Account]) -> None:
        del self._running[owner]
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning(LogEvent.ACCOUNT_LOOKUP_FAILED, uid=owner.uid, why=str(error))
            return
        self._known.pop(owner, None)
        self._known[owner] = clock.now(), done.result()
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
