"""Prepares claims. Each claim becomes one or several allocations, whose request ids are derived from the
claim's uid.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from weakref import WeakValueDictionary

import structlog

from vgpud import audit
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import CLAIM_PREFIX, Allocation, Lifetime, State, workload_of
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.dra.api import Api, Refusal, is_gone
from vgpud.serve.dra.cards import Target
from vgpud.serve.dra.claims import Result, parts_of
from vgpud.serve.dra.conditions import with_devices
from vgpud.serve.dra.monitors import Monitors, cdi_name
from vgpud.serve.dra.prepared import Answer, Prepared, PreparedClaims
from vgpud.serve.dra.slices import Json
from vgpud.serve.kubelet.pods import Listing

log = structlog.get_logger(__name__)

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())


class Preparer:
    """Prepares and unprepares claims. `find` returns the target of a published name, also while
    allocations keep the name from being published.
    """

    def __init__(
        self,
        keeper: NodeKeeper,
        api: Api,
        claims: PreparedClaims,
        pool: str,
        find: Callable[[str], Target | None],
        monitors: Monitors,
    ) -> None:
        self._keeper = keeper
        self._api = api
        self._claims = claims
        self._pool = pool
        self._find = find
        self._monitors = monitors
        # One lock for each claim in work. A lock is dropped when its last user has ended.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Future[tuple[Answer, ...]]] = set()
        self._suspects: set[str] = set()
        self._tells = True  # False if the cluster does not store the status of devices
        self.prepared: asyncio.Queue[str] = asyncio.Queue()  # uids of claims whose status is to be written

    async def prepare(self, namespace: str, name: str, uid: str) -> tuple[Answer, ...]:
        """Prepares a claim. Raises VgpuError. If one of its allocations cannot be made, those that the call
        made are released. Runs to its end even if the kubelet's call is cancelled, because an `unprepare`
        before that end would not find the allocations.
        """
        work = asyncio.ensure_future(self._prepare(namespace, name, uid))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await asyncio.shield(work)

    async def _prepare(self, namespace: str, name: str, uid: str) -> tuple[Answer, ...]:
        audit.asked_by(ROOT, "dra", claim=f"{namespace}/{name}")
        async with self._lock(uid):
            known = self._claims.get(uid)
            if known is not None and known.answers and all(map(self._stands, known.request_ids)):
                await self._monitors.write(uid, known.monitors)
                return known.answers
            claim = await self._api.claim(namespace, name)
            parts, watched = parts_of(claim, uid, self._pool, self._find)
            if not parts and not watched:
                return ()
            names = tuple(part.request.id for part in parts)
            await self._leave_failed(names)
            fresh = tuple(name for name in names if self._allocation(name) is None)
            # The claim is recorded before its allocations are made, so that after a crash they can be
            # attributed to the claim.
            prepared = Prepared(uid, namespace, name, names, monitors=tuple(one.monitor for one in watched))
            await self._claims.put(prepared)
            try:
                await self._monitors.write(uid, prepared.monitors)
                made = [(part, await self._keeper.allocate(part.request)) for part in parts]
            except VgpuError:
                await self._undo(uid, fresh)
                raise
            answers = [a for part, held in made for a in _answers(part.results, held.cdi_name)]
            answers += [a for one in watched for a in _answers(one.results, cdi_name(one.monitor))]
            await self._claims.put(replace(prepared, answers=tuple(answers)))
            self.prepared.put_nowait(uid)
            log.info(
                LogEvent.CLAIM_PREPARED, claim=f"{namespace}/{name}", claim_uid=uid, allocations=len(made)
            )
            return tuple(answers)

    async def unprepare(self, uid: str) -> None:
        """Releases a claim's allocations, also if the claim is not recorded. Raises VgpuError(TENANT_ALIVE)
        while processes of the allocations run.
        """
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
            await self._monitors.remove(uid)
            await self._claims.drop(uid)

    def _lock(self, uid: str) -> asyncio.Lock:
        return self._locks.setdefault(_checked(uid), asyncio.Lock())

    def ask_anew(self) -> None:
        """Makes the next check try again to write the status of devices."""
        self._tells = True

    async def check(self) -> None:
        """Releases allocations of claims that no longer exist in the cluster, because they were deleted by
        force or created again. For each other prepared claim, renews the CDI specs of its monitors, and
        writes the state of its devices into its status if it has changed.

        A claim must be missing at two checks in a row; an error of the API server releases nothing.
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
            elif claim.answers:
                await self._renew(claim)
                await self._tell(claim, there)
        audit.by_itself("its claim is gone from the cluster")
        for uid in missing & self._suspects:
            try:
                await self._unprepare(uid)
            except VgpuError as error:
                log.warning(LogEvent.DELETED_CLAIM_NOT_RELEASED, claim_uid=uid, why=str(error))
        self._suspects = missing

    async def tell(self, uid: str) -> None:
        """Writes the state of a claim's devices into the claim's status. Raises VgpuError."""
        claim = self._claims.get(uid)
        if claim is not None and claim.answers:
            there = await self._api.claim(claim.namespace, claim.name)
            if there["metadata"]["uid"] == uid:
                await self._tell(claim, there)

    async def _tell(self, claim: Prepared, there: Json) -> None:
        """Writes the state of a claim's devices, if it has changed. An error, such as a conflict with another
        writer, is logged, and the next check tries again.
        """
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = with_devices(there, claim, self._of(claim.uid), now)
        if not self._tells or told == there or self._claims.get(claim.uid) is None:
            return
        try:
            kept = await self._api.replace_claim_status(told)
        except VgpuError as error:
            self._tells = not isinstance(error, Refusal) or error.status != 403
            log.warning(
                LogEvent.CLAIM_STATUS_NOT_WRITTEN, claim_uid=claim.uid, why=str(error), hint=error.hint
            )
        else:
            # the server drops the field if its feature gate is off
            self._tells = bool((kept.get("status") or {}).get("devices"))

    async def _renew(self, claim: Prepared) -> None:
        """Renews the spec of the claim's monitors, for example after a change of the driver's files."""
        async with self._lock(claim.uid):
            try:
                if self._claims.get(claim.uid) is not None:
                    await self._monitors.write(claim.uid, claim.monitors)
            except VgpuError as error:
                log.warning(LogEvent.CDI_SPECS_NOT_REWRITTEN, why=str(error))

    async def name(self, listed: Listing) -> None:
        """Records which pods and containers use each claim's allocations, as the kubelet lists them. Raises
        VgpuError.
        """
        for allocation in tuple(self._keeper.book):
            workload = allocation.request.workload
            user = workload_of(listed.users.get(allocation.cdi_name, ""))
            if user.pod and not workload.container and allocation.request.id.startswith(CLAIM_PREFIX):
                await self._keeper.name(allocation.id, replace(user, claim=workload.claim))

    async def _undo(self, uid: str, names: tuple[str, ...]) -> None:
        try:
            for allocation in filter(None, map(self._allocation, names)):
                await self._keeper.release(allocation.id, ROOT, force=False)
            if not self._of(uid):
                await self._monitors.remove(uid)
                await self._claims.drop(uid)
        except VgpuError as error:  # the kubelet prepares the claim again, or unprepares it
            log.warning(LogEvent.FAILED_CLAIM_NOT_UNDONE, claim_uid=uid, why=str(error))

    async def _leave_failed(self, names: tuple[str, ...]) -> None:
        """Releases failed allocations of a claim (device lost, MPS daemon died), so that they are made again.
        Raises VgpuError(TENANT_ALIVE).
        """
        for allocation in filter(None, map(self._allocation, names)):
            if allocation.state is State.FAILED:
                await self._keeper.release(allocation.id, ROOT, force=False)

    def _stands(self, name: str) -> bool:
        allocation = self._allocation(name)
        return allocation is not None and allocation.state is not State.FAILED

    def _of(self, uid: str) -> list[Allocation]:
        """The allocations of a claim. They are found by their request ids, because the row of the
        claim may be unreadable.
        """
        own = f"{CLAIM_PREFIX}{uid}"
        return [a for a in self._keeper.book if a.request.id == own or a.request.id.startswith(f"{own}/")]

    def _allocation(self, name: str) -> Allocation | None:
        return next((a for a in self._keeper.book if a.request.id == name), None)


def _checked(uid: str) -> str:
    if not uid or len(uid) > 64 or "/" in uid or not uid.isprintable():
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{uid[:64]!r} is not the uid of a claim",
            "report this with the kubelet's version",
        )
    return uid


def _answers(results: Iterable[Result], cdi_device: str) -> list[Answer]:
    """The answers for the devices of one request. Only the first device has the CDI name, because a runtime
    must get it only once.
    """
    names: tuple[str, ...] = (cdi_device,)
    found = []
    for result in results:
        # A subrequest of a prioritised list has the name "main/sub", while containers refer to "main".
        request = result.request.partition("/")[0]
        found.append(Answer(request, result.pool, result.device, names, result.share))
        names = ()
    return found
