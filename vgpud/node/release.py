"""Releases allocations: at once, or after their last process has ended.

A release runs to its end even if its caller disconnects. A second request to release the same allocation
waits for the release that is running.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import structlog

from vgpud import audit
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change
from vgpud.model.log_event import LogEvent
from vgpud.model.plan import StepKind
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, State
from vgpud.node.tenants.cgroups import processes_in
from vgpud.node.tenants.checkpoints import waiting
from vgpud.node.tenants.checks import check_ended
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.lifetimes import Lifetimes
from vgpud.planner.steps import release_steps
from vgpud.proc import has_ended

log = structlog.get_logger(__name__)

_REMEMBERED = 10_000
_RETRY_SECONDS = 1.0  # longest pause between attempts while children of an ended tenant still run


class AllocationReleaser:
    """Releases allocations. `lifetimes` watches the processes whose end releases an allocation."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._store = context.store
        self._book = context.book
        self._executor = context.executor
        self._changes = context.changes
        self._spawn = context.background.spawn
        self.lifetimes = Lifetimes(self._lifetime_ended)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, asyncio.Task[bool]] = {}  # attempts to release that `later` has started
        self._later: set[str] = set()  # allocations whose end `later` waits for
        # allocations whose slices are removed, but which are not yet recorded as released
        self._detached: dict[str, Allocation] = {}
        self._released: deque[str] = deque(maxlen=_REMEMBERED)  # ids of released allocations, newest last

    @property
    def running(self) -> frozenset[str]:
        """Ids of the allocations that are being released now."""
        return frozenset(self._running)

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        return {*self._running.values()}

    @property
    def attempts(self) -> set[asyncio.Task[Any]]:
        """The running releases, and the attempts of `later`. Each of them may free capacity."""
        return {*self._running.values(), *self._attempts.values()}

    def remember(self, ids: Iterable[str]) -> None:
        """At the start of vgpud: remembers released allocations, so that a repeated release of one
        succeeds.
        """
        self._released.extend(ids)

    def is_released(self, allocation_id: str) -> bool:
        return allocation_id not in self._book and allocation_id in self._released

    async def release(self, allocation: Allocation, force: bool) -> bool:
        """Releases an allocation. Returns True if a concurrent release of it ended first. Raises
        VgpuError.
        """
        if allocation.state is State.ALLOCATING:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation.id} is still being made",
                "try again in a moment",
            )
        if force:
            _check_nothing_suspended(allocation)
        elif allocation.id not in self._running:
            await self._check_tenants_gone(allocation)
        await self._changes.settle(allocation.id)
        if allocation.id not in self._book:
            return True
        await self.dismantle(allocation.id)
        return False

    async def dismantle(self, allocation_id: str) -> None:
        """Releases an allocation without a check for live tenants. It also removes what an interrupted intent
        left behind.
        """
        await asyncio.shield(self._begin(allocation_id))

    async def undo(self, allocation_id: str) -> None:
        """Removes what a failed allocation left behind. If the removal fails, it is tried again later."""
        try:
            await self._begin(allocation_id)
        except VgpuError as error:
            log.warning(LogEvent.ALLOCATION_UNDO_FAILED_WILL_RETRY, allocation=allocation_id, why=str(error))
            self.later(allocation_id, "its allocation failed half-way")

    def _begin(self, allocation_id: str) -> asyncio.Task[None]:
        """Returns the running release of this allocation. If there is none, starts one."""
        running = self._running.get(allocation_id)
        if running is not None:
            return running
        releasing = replace(self._book.get(allocation_id), state=State.RELEASING)
        self._store.reserve(releasing, Change.RELEASE)
        running = asyncio.ensure_future(self._dismantle(releasing))
        self._running[allocation_id] = running
        running.add_done_callback(lambda _: self._running.pop(allocation_id, None))
        return running

    async def _check_tenants_gone(self, allocation: Allocation) -> None:
        _check_nothing_suspended(allocation)
        for part in allocation.slices:
            check_ended(allocation.id, await self._context.effectors[part.mode].tenants(allocation, part))
        check_ended(allocation.id, processes_in(allocation.request.lifetime.cgroup))

    async def _dismantle(self, allocation: Allocation) -> None:
        plan = release_steps(allocation, self._book.use)
        await self._executor.run("release", allocation, (plan.intent, *plan.effects))
        self._detached[allocation.id] = allocation
        try:
            if not any(step.kind is StepKind.UNAPPLY_MODE for step in plan):
                await self._leave_modes(allocation)
            await self._executor.run("release", allocation, (plan.outcome,))
        finally:
            del self._detached[allocation.id]
        self._released.append(allocation.id)
        self.lifetimes.forget(allocation.id)

    async def _leave_modes(self, allocation: Allocation) -> None:
        """Takes devices without allocations out of their mode. If several allocations of a device are
        released at the same time, no plan of them contains this step, because none was the last one when its
        plan was made.
        """
        leaving = [part.device_uuid for a in self._detached.values() for part in a.slices]
        for uuid, mode in {part.device_uuid: part.device_mode for part in allocation.slices}.items():
            if self._book.use_of(uuid).count == leaving.count(uuid):
                await self._context.transitions.release(uuid, mode)

    # --- release after the last process

    def _lifetime_ended(self, allocation_id: str) -> None:
        if allocation_id in self._book:
            self.later(allocation_id, "the process that it is bound to ended")

    def later(self, allocation_id: str, reason: str) -> bool:
        """Releases the allocation once no process runs in it. Returns False if an earlier call has ordered
        the release.
        """
        if allocation_id in self._later:
            return False
        self._later.add(allocation_id)
        self._spawn(self._when_possible(allocation_id, reason))
        return True

    async def _when_possible(self, allocation_id: str, reason: str) -> None:
        """Tries to release the allocation again and again. An attempt fails while a process of the allocation
        runs.
        """
        audit.by_itself(reason)
        try:
            await self._retry(allocation_id)
        finally:
            self._later.discard(allocation_id)

    async def _retry(self, allocation_id: str) -> None:
        pause = _RETRY_SECONDS / 16
        while allocation_id in self._book:
            allocation = self._book.get(allocation_id)
            ending = self._store.account.ending(allocation)
            attempt = asyncio.ensure_future(self.release(allocation, force=False))
            self._attempts[allocation_id] = attempt
            try:
                if not await attempt:
                    audit.record("release", None, **(audit.of(allocation) | ending))
            except VgpuError as error:
                log.debug(LogEvent.RELEASE_FAILED_RETRYING, allocation=allocation_id, why=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS)
            finally:
                self._attempts.pop(allocation_id, None)


def _check_nothing_suspended(allocation: Allocation) -> None:
    """Raises VgpuError(TENANT_ALIVE) if a suspended process lives. NVML may not list these processes."""
    left = [process for process in waiting(allocation) if not has_ended(process.pid)]
    if left:
        verb = "lives" if len(left) == 1 else "live"
        raise VgpuError(
            ErrorCode.TENANT_ALIVE,
            f"{counted(len(left), 'suspended process')} of allocation {allocation.id} {verb}, and nothing "
            "can resume a process after the release",
            "resume the allocation first, or end its processes",
        )
