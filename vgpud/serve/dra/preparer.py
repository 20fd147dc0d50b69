"""Claims made real: each is one or a few allocations, whose request ids are made of its uid."""

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

import structlog

from vgpud import audit
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import CLAIM_PREFIX, Allocation, Lifetime, State
from vgpud.serve.dra.api import Api, is_gone
from vgpud.serve.dra.cards import Target
from vgpud.serve.dra.claims import Part, parts_of
from vgpud.serve.dra.prepared import Answer, Prepared, PreparedClaims
from vgpud.serve.keeper import Keeper

log = structlog.get_logger(__name__)

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())


class Preparer:
    """`find` knows what a published name stands for, or stood for."""

    def __init__(
        self,
        keeper: Keeper,
        api: Api,
        claims: PreparedClaims,
        pool: str,
        find: Callable[[str], Target | None],
    ) -> None:
        self._keeper = keeper
        self._api = api
        self._claims = claims
        self._pool = pool
        self._find = find
        # one for each claim that somebody is at work on, and gone with the last of them
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._suspects: set[str] = set()

    async def prepare(self, namespace: str, name: str, uid: str) -> tuple[Answer, ...]:
        """Raises VgpuError; what was newly made of a claim that fails is undone."""
        audit.asked_by(ROOT, "dra", claim=f"{namespace}/{name}")
        async with self._lock(uid):
            known = self._claims.get(uid)
            if known is not None and known.answers and all(map(self._stands, known.request_ids)):
                return known.answers
            claim = await self._api.claim(namespace, name)
            parts = parts_of(claim, uid, self._pool, self._find)
            if not parts:
                return ()
            names = tuple(part.request.id for part in parts)
            await self._leave_failed(names)
            fresh = tuple(name for name in names if self._allocation(name) is None)
            # before anything is made: what is found of a claim later is known to be a claim's
            await self._claims.put(Prepared(uid, namespace, name, names))
            try:
                made = [(part, await self._keeper.allocate(part.request)) for part in parts]
            except VgpuError:
                await self._undo(uid, fresh)
                raise
            answers = tuple(answer for part, allocation in made for answer in _answers(part, allocation))
            await self._claims.put(Prepared(uid, namespace, name, names, answers))
            log.info("claim prepared", claim=f"{namespace}/{name}", uid=uid, allocations=len(made))
            return answers

    async def unprepare(self, uid: str) -> None:
        """Also of a claim that is not known. Raises VgpuError(TENANT_ALIVE) while its processes run."""
        audit.asked_by(ROOT, "dra", claim=uid)
        await self._unprepare(uid)

    async def _unprepare(self, uid: str) -> None:
        async with self._lock(uid):
            for allocation in self._of(uid):
                try:
                    await self._keeper.release(allocation.id, ROOT, force=False)
                except VgpuError as error:
                    if error.code is not ErrorCode.NO_SUCH_ALLOCATION:
                        raise
            await self._claims.drop(uid)

    def _lock(self, uid: str) -> asyncio.Lock:
        return self._locks.setdefault(_checked(uid), asyncio.Lock())

    async def check(self) -> None:
        """Releases what claims held that the cluster has no more: deleted by force, or made anew.

        Only at the second time that a claim is missing, and never on an error.
        """
        missing = set()
        for claim in self._claims:
            try:
                there = await self._api.claim(claim.namespace, claim.name)
            except VgpuError as error:
                if not is_gone(error):
                    return
                there = {}
            if (there.get("metadata") or {}).get("uid") != claim.uid:
                missing.add(claim.uid)
        audit.by_itself("its claim is gone from the cluster")
        for uid in missing & self._suspects:
            try:
                await self._unprepare(uid)
            except VgpuError as error:
                log.warning("its claim is gone, but it cannot go yet", uid=uid, why=str(error))
            else:
                log.info("released, its claim is gone", uid=uid)
        self._suspects = missing

    async def _undo(self, uid: str, names: tuple[str, ...]) -> None:
        try:
            for allocation in filter(None, map(self._allocation, names)):
                await self._keeper.release(allocation.id, ROOT, force=False)
            if not self._of(uid):
                await self._claims.drop(uid)
        except VgpuError as error:  # it is tried again, or unprepared, by the kubelet
            log.warning("a claim that failed is not all undone", uid=uid, why=str(error))

    async def _leave_failed(self, names: tuple[str, ...]) -> None:
        """What a lost device or a dead helper took is made anew. Raises VgpuError(TENANT_ALIVE)."""
        for allocation in filter(None, map(self._allocation, names)):
            if allocation.state is State.FAILED:
                await self._keeper.release(allocation.id, ROOT, force=False)

    def _stands(self, name: str) -> bool:
        allocation = self._allocation(name)
        return allocation is not None and allocation.state is not State.FAILED

    def _of(self, uid: str) -> list[Allocation]:
        """By their ids alone: the file may be lost."""
        own = f"{CLAIM_PREFIX}{uid}"
        return [
            a for a in self._keeper.list()[0] if a.request.id == own or a.request.id.startswith(f"{own}/")
        ]

    def _allocation(self, name: str) -> Allocation | None:
        return next((a for a in self._keeper.list()[0] if a.request.id == name), None)


def _checked(uid: str) -> str:
    if not uid or len(uid) > 64 or "/" in uid or not uid.isprintable():
        raise VgpuError(
            ErrorCode.BAD_REQUEST, f"{uid[:64]!r} is no uid of a claim", "see the kubelet's version"
        )
    return uid


def _answers(part: Part, allocation: Allocation) -> list[Answer]:
    """A runtime must meet the CDI name once, so the first device of the allocation has it."""
    names: tuple[str, ...] = (allocation.cdi_name,)
    found = []
    for result in part.results:
        # a subrequest of a prioritised list is "main/sub", and containers name the main one
        request = result.request.partition("/")[0]
        found.append(Answer(request, result.pool, result.device, names, result.share))
        names = ()
    return found
