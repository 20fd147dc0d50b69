"""Makes allocations. The decision and the booking of the capacity happen without an await in between; then
the plan is run.

A failed allocation is undone. If a crash interrupts an allocation before its commit, the next start undoes it
(recover.py). If several calls repeat a request (same user, same request id), the first does the work, and the
others get its answer.
"""

import asyncio
import secrets
import time
from typing import Any

from vgpud import audit
from vgpud.model.caller import Account
from vgpud.model.lifecycle import Change
from vgpud.model.plan import Plan, Step
from vgpud.model.tenancy import Allocation, Cause, Decision, Request, State
from vgpud.node.release import AllocationReleaser
from vgpud.node.store.account import asked, held
from vgpud.node.store.book import RequestKey, check_same_request, request_key
from vgpud.node.tenants.checks import settled
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.residency import Residency
from vgpud.planner.choose import choose
from vgpud.planner.quota import over_quota
from vgpud.planner.steps import allocate_steps

_SNAPSHOT_SECONDS = 1.0  # maximum age of the snapshot on which a decision is based
_SETTLE_SECONDS = 2.0  # how long a request waits for releases that are running, before it is refused


class AllocationMaker:
    """Makes allocations, and evicts memory that suspended tenants kept on the device if a new allocation
    needs the room.
    """

    def __init__(self, context: NodeContext, releases: AllocationReleaser, residency: Residency) -> None:
        self._transitions = context.transitions
        self._store = context.store
        self._book = context.book
        self._inventory = context.inventory
        self._executor = context.executor
        self._mig = context.mig_layouts
        self._policy = context.policy
        self._closed = context.operations.closed
        self._accounts = context.accounts
        self._suspender = context.suspender
        self._releases = releases
        self._residency = residency
        self._running: dict[RequestKey, tuple[Request, asyncio.Task[Allocation]]] = {}

    @property
    def running(self) -> frozenset[str]:
        """Ids of the allocations that are being made now."""
        return frozenset(a.id for a in self._book if request_key(a.request) in self._running)

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        return {task for _, task in self._running.values()}

    async def allocate(self, request: Request, allocation_id: str | None = None) -> Allocation:
        """Makes an allocation. Idempotent by request id. Runs to its end even if the caller disconnects. With
        `allocation_id`, the new allocation gets this id, which a released allocation had.
        """
        key = request_key(request)
        under_way = self._running.get(key)
        if under_way is not None:
            first, task = under_way
            check_same_request(first, request)
            self._store.account.repeated(request)
            return await asyncio.shield(task)
        existing = self._book.by_request(request)
        if existing is not None:
            self._store.account.repeated(request)
            return settled(existing)
        task = asyncio.ensure_future(self._audited(request, allocation_id))
        self._running[key] = request, task
        task.add_done_callback(lambda _: self._ended(request))
        return await asyncio.shield(task)

    def _ended(self, request: Request) -> None:
        self._running.pop(request_key(request), None)
        if self._book.by_request(request) is None:
            self._store.account.forget_repeats(request)

    async def _audited(self, request: Request, allocation_id: str | None) -> Allocation:
        with audit.change("allocate", owner=request.owner.uid, **asked(request)) as told:
            allocation = await self._allocate(request, allocation_id)
            told.words |= held(allocation)
        return allocation

    async def _allocate(self, request: Request, allocation_id: str | None) -> Allocation:
        decision, plan = await self._plan(request)
        if decision.refusal is not None:
            self._store.account.refused(decision.refusal)
            if self._mig is not None:
                raise self._mig.explained(decision.refusal, decision.reasons)
            raise decision.refusal
        assert plan is not None
        allocation = Allocation(
            id=allocation_id or secrets.token_hex(6),
            request=request,
            state=State.ALLOCATING,
            slices=decision.slices,
            reasons=decision.reasons,
            created_unix_ns=time.time_ns(),
            cause=Cause.TURN if decision.starts_suspended else Cause.HAND,
        )
        self._store.reserve(allocation, Change.ALLOCATE)
        try:
            await self._executor.run("allocate", allocation, (plan.intent,))
        except BaseException:  # the intent was not recorded, so nothing has changed
            for uuid, mode in {part.device_uuid: part.device_mode for part in allocation.slices}.items():
                await self._transitions.abandon(uuid, mode)
            raise
        try:
            allocation = await self._executor.run("allocate", allocation, (*plan.effects, plan.outcome))
        except BaseException:
            await asyncio.shield(self._releases.undo(allocation.id))
            raise
        self._releases.lifetimes.watch(allocation.id, request.lifetime)
        await self._residency.admit(allocation)
        return allocation

    async def plan(self, request: Request) -> tuple[Decision, tuple[Step, ...]]:
        """The decision on a request and the steps that Allocate would make now. Changes nothing."""
        decision, plan = await self._plan(request)
        return decision, tuple(plan or ())

    async def _plan(self, request: Request) -> tuple[Decision, Plan | None]:
        """Decides on a request and makes the plan. It does not await after the decision, so that the capacity
        is still free when the caller books it.
        """
        account = await self._accounts.of(request.counts_for, self._policy())
        await self._inventory.refresh(_SNAPSHOT_SECONDS)
        decision = self._decide(request, account)
        if decision[0].refusal is None:
            return decision
        # Until vgpu-suspend has ended, NVML may list it on a device that a tenant has left.
        await self._suspender.settle()
        leaving = self._releases.attempts
        if leaving:  # a release that is running may free the capacity
            await asyncio.wait(leaving, timeout=_SETTLE_SECONDS)
        # vgpud looks the account up again, because after a reload the policy may depend on it
        account = await self._accounts.of(request.counts_for, self._policy())
        await self._inventory.refresh()
        return self._decide(request, account)

    def _decide(self, request: Request, account: Account) -> tuple[Decision, Plan | None]:
        node, policy = self._inventory.node, self._policy()
        if self._inventory.error is not None and not node.devices:
            return Decision(refusal=self._inventory.error), None
        pools = {} if self._mig is None else self._mig.pools.pools()
        decision = choose(request, node, policy, self._book.use, closed=self._closed(request), pools=pools)
        if decision.refusal is None:
            refusal = over_quota(
                policy,
                node,
                request.counts_for,
                self._book,
                decision.slices,
                account=account,
                priority=request.priority,
            )
            decision = decision if refusal is None else decision.refused(refusal)
        if decision.refusal is not None:
            return decision, None
        return decision, allocate_steps(
            decision.slices, self._book.use, decision.moves, decision.starts_suspended
        )
