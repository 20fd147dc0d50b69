"""Looks up the accounts of users for quotas, in separate threads, and caches them for a minute."""

import asyncio
from collections.abc import Callable

import structlog

from vgpud import clock
from vgpud.directory import account_of
from vgpud.model.caller import BARE, UNKNOWN, Account
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import ANYONE, Owner
from vgpud.policy.accounts import needs_accounts
from vgpud.policy.model import Policy
from vgpud.threads import DaemonThreads

log = structlog.get_logger(__name__)

_KEPT_SECONDS = 60.0
# how long the answer "unknown user" is cached: the directory service may only have been unreachable
_UNKNOWN_KEPT_SECONDS = 5.0
_LOOKUP_SECONDS = 2.0
_THREADS = 2
_MOST_LOOKUPS = 64  # maximum of lookups that run or wait for a thread
_MOST_KEPT = 1024

LookUp = Callable[[int], Account]


class Accounts:
    """Caches accounts of users. A lookup hangs while a directory service hangs, so lookups do not use the
    threads of the event loop's executor.
    """

    def __init__(self, look_up: LookUp = account_of, patience_seconds: float = _LOOKUP_SECONDS) -> None:
        self._look_up = look_up
        self._patience_seconds = patience_seconds
        self._threads = asyncio.Semaphore(_THREADS)
        self._known: dict[int, tuple[float, Account]] = {}
        self._running: dict[int, asyncio.Task[Account]] = {}

    async def of(self, owner: Owner, policy: Policy) -> Account:
        """The user's account; BARE for the uid ANYONE, or if no quota of the policy needs accounts. If a
        lookup fails or is late, or if too many lookups run: the last known account, or UNKNOWN.
        """
        uid = owner.uid
        if uid == ANYONE or not needs_accounts(policy):
            return BARE
        since, known = self._known.get(uid, (float("-inf"), UNKNOWN))
        if clock.now() - since <= (_KEPT_SECONDS if known.is_known else _UNKNOWN_KEPT_SECONDS):
            return known
        if uid not in self._running:
            if len(self._running) >= _MOST_LOOKUPS:
                return known
            self._running[uid] = task = asyncio.ensure_future(self._ask(uid))
            task.add_done_callback(lambda done: self._ended(uid, done))
        done, _ = await asyncio.wait((self._running[uid],), timeout=self._patience_seconds)
        if not done:
            log.warning(LogEvent.USER_ACCOUNT_LOOKUP_TIMEOUT, uid=uid, seconds=self._patience_seconds)
        return self._known.get(uid, (0.0, known))[1]

    async def _ask(self, uid: int) -> Account:
        async with self._threads:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(DaemonThreads("vgpud-account"), self._look_up, uid)

    def _ended(self, uid: int, done: asyncio.Task[Account]) -> None:
        del self._running[uid]
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning(LogEvent.USER_ACCOUNT_LOOKUP_FAILED, uid=uid, why=str(error))
            return
        self._known.pop(uid, None)
        self._known[uid] = clock.now(), done.result()
        if len(self._known) > _MOST_KEPT:
            del self._known[next(iter(self._known))]
