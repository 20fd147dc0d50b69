"""The keeper: connects the rooms of the node, checks who may change an allocation, and audits the changes.

vgpud's servers call the keeper for changes of an allocation, and the rooms, which are its attributes, for
all else. All errors are VgpuError. A change continues to its end even if its caller disconnects.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from vgpud import audit
from vgpud.model.caller import Caller
from vgpud.model.device import Device, Health
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Workload
from vgpud.node.allocate import AllocationMaker
from vgpud.node.devices.notices import Notices
from vgpud.node.devices.operations import Operations
from vgpud.node.parts import Parts
from vgpud.node.policies import Policies
from vgpud.node.release import AllocationReleaser
from vgpud.node.tenants.accounts import Accounts
from vgpud.node.tenants.ancestry import owners_of
from vgpud.node.tenants.bypasses import Bypasses
from vgpud.node.tenants.changes import Changes
from vgpud.node.tenants.checks import check_owner
from vgpud.node.tenants.failures import Failures
from vgpud.node.tenants.lifetimes import Lifetimes
from vgpud.node.tenants.moves import Moves
from vgpud.node.tenants.pauses import Pauses
from vgpud.node.tenants.relocate import Relocations
from vgpud.node.tenants.residency import Residency
from vgpud.node.tenants.resizes import Resizes
from vgpud.node.tenants.sickness import Sickness
from vgpud.node.tenants.suspends import Suspends
from vgpud.node.view.listings import Listings
from vgpud.node.view.meters import Meters
from vgpud.node.view.processes import Processes
from vgpud.policy.load import LoadedPolicy
from vgpud.policy.model import Policy

log = structlog.get_logger(__name__)


class Background:
    """The keeper's background tasks, for which no caller waits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` as a task. If the daemon stops, the task is cancelled, and the next start finishes
        its work.
        """
        if self._closed:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(LogEvent.BACKGROUND_TASK_FAILED, why=str(error), exc_info=error)

    async def close(self) -> None:
        """Cancels all background tasks and accepts no new ones."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class NodeKeeper:
    def __init__(self, parts: Parts, policy: LoadedPolicy) -> None:
        self.book, self.store, self.preload = parts.book, parts.store, parts.preload
        book, inventory, effectors, engines = parts.book, parts.inventory, parts.effectors, parts.engines
        executor, tally = parts.executor, parts.store.account.tally
        self._background = Background()
        spawn = self.spawn = self._background.spawn
        self.policies = Policies(policy, parts.load_policy, parts.store, inventory)
        self.policies.changed.append(lambda old, new: self._policy_changed())
        self.notices = Notices(parts.store, inventory, spawn)
        notice = self.notices.notice
        operations = self.operations = Operations(
            book, inventory, parts.mig, parts.mps, parts.drains, notice, self.notices.drained
        )
        self.mig = parts.mig_layouts(self.policies)
        self.changes = Changes(book)
        self.releases = AllocationReleaser(parts, executor, self.changes, spawn, self._released)
        self.lifetimes = Lifetimes(self._lifetime_ended)
        self.meters = Meters(book, inventory, effectors)
        shared = parts.tenant_services(self.policies, self.changes)
        self.activities = shared.activities
        self.failures = Failures(shared, spawn)
        accounts = Accounts()
        self.resizes = Resizes(shared, self._policy, accounts)
        self.pauses = Pauses(shared, engines)
        self.suspends = Suspends(shared)
        self.residency = Residency(shared, self.suspends, self._policy, tally, spawn)
        self.bypasses = Bypasses(shared, self._policy, tally, self.releases.later)
        self.processes = Processes(book, inventory, effectors, owners_of, self.bypasses.is_bypassed)
        self.moves = Moves(shared, executor, self._policy, operations.closed, tally, self.suspends)
        self.relocations = Relocations(self.moves, book, inventory, self._policy, operations.is_drained)
        self.sickness = Sickness(inventory, self.relocations, self._on_sick, notice)
        inventory.health_changed = self._health_changed
        inventory.closes = lambda device: self._on_sick(device) != "report"
        engines.setting = lambda device: self._policy().rule_for(device).settings_preload().engine
        engines.notice = notice
        self.allocates = AllocationMaker(
            parts, executor, self.releases, self.mig, self._policy, operations.closed, self._made, accounts
        )
        self.allocate = self.allocates.allocate
        self.listings = Listings(
            parts.store,
            inventory,
            effectors,
            engines,
            lambda: self.policies.current,
            operations.is_drained,
            parts.preload,
        )

    def _policy(self) -> Policy:
        return self.policies.policy

    def busy(self) -> frozenset[str]:
        """Ids of allocations that are being made, changed or released now."""
        return self.allocates.running | self.releases.running | self.changes.running

    async def close(self) -> None:
        """Waits for the allocations, changes and releases that are in progress. Tenants stay as they are."""
        await self._background.close()
        # a task may have started another task, so the set is built again after each wait
        while under_way := self.allocates.tasks | self.releases.tasks | set(self.changes.tasks):
            await asyncio.gather(*under_way, return_exceptions=True)
        self.lifetimes.close()
        self.store.close()

    # --- changes that a caller asks for

    async def _change(
        self,
        name: str,
        allocation_id: str,
        caller: Caller,
        work: Callable[[Allocation], Awaitable[Allocation]],
        **words: object,
    ) -> Allocation:
        """Runs and audits a requested change. Raises VgpuError(NOT_OWNER) if the caller may not make it."""
        before = self.book.get(allocation_id)
        with audit.change(name, **audit.of(before), **words) as told:
            check_owner(before, caller)
            after = await work(before)
            told.made = after is not before
        return after

    async def release(self, allocation_id: str, caller: Caller, force: bool) -> bool:
        """Releases an allocation. Returns True if it was released before. Raises VgpuError: NOT_OWNER,
        TENANT_ALIVE, NO_SUCH_ALLOCATION.
        """
        if self.releases.is_released(allocation_id):
            return True
        held = self.book.get(allocation_id)
        ending = self.store.account.ending(held)
        with audit.change("release", **audit.of(held), force=force or None) as told:
            check_owner(held, caller)
            told.made = not await self.releases.release(held, force)
            told.words |= ending
        return not told.made

    async def resize(
        self, allocation_id: str, caller: Caller, memory_bytes: int | None, share: Percent | None
    ) -> Allocation:
        """Changes the limits of a running tenant. All slices get the same limits."""
        wanted = {"memory_bytes": memory_bytes, "share": None if share is None else str(share)}

        def resize(held: Allocation) -> Awaitable[Allocation]:
            return self.resizes.resize(held, memory_bytes, share)

        return await self._change("resize", allocation_id, caller, resize, **wanted)

    async def pause(self, allocation_id: str, caller: Caller) -> Allocation:
        """Takes the tenant off its devices. Its memory stays there."""
        return await self._change("pause", allocation_id, caller, self.pauses.pause)

    async def unpause(self, allocation_id: str, caller: Caller) -> Allocation:
        return await self._change("unpause", allocation_id, caller, self.pauses.unpause)

    async def suspend(self, allocation_id: str, caller: Caller, deep: bool = False) -> Allocation:
        """Suspends a tenant: its device memory moves to the host, and its processes wait until the tenant is
        resumed. With `deep`, no memory stays on the device.
        """

        def suspend(held: Allocation) -> Awaitable[Allocation]:
            return self.suspends.suspend(held, deep=deep)

        return await self._change("suspend", allocation_id, caller, suspend, deep=deep or None)

    async def resume(self, allocation_id: str, caller: Caller) -> Allocation:
        async def resume(held: Allocation) -> Allocation:
            if held.moves and held.id not in self.changes:  # the move was interrupted
                await self.moves.recover(held)
            return await self.suspends.resume(self.book.get(held.id))

        return await self._change("resume", allocation_id, caller, resume)

    async def name(self, allocation_id: str, workload: Workload) -> None:
        """Records the names that Kubernetes has for the program in an allocation. Does nothing if they are
        recorded already.
        """

        async def record() -> None:
            if self.book.get(allocation_id).request.workload != workload:
                await self.store.name(allocation_id, workload)

        if self.book.get(allocation_id).request.workload != workload:
            await self.changes.run(allocation_id, record)

    # --- what one room tells another

    async def _made(self, allocation: Allocation) -> None:
        self.lifetimes.watch(allocation.id, allocation.request.lifetime)
        await self.residency.admit(allocation)

    def _released(self, allocation: Allocation) -> None:
        self.lifetimes.forget(allocation.id)
        if self.mig is not None:
            for uuid in {part.device_uuid for part in allocation.slices if part.mig is not None}:
                # starts a change of the layout that may have waited for this release
                self.spawn(self.mig.converge_device(uuid))

    def _lifetime_ended(self, allocation_id: str) -> None:
        if allocation_id in self.book:
            self.releases.later(allocation_id, "the process that it is bound to ended")

    def _policy_changed(self) -> None:
        self.residency.nudge()
        if self.mig is not None:
            self.spawn(self.mig.converge())

    def _on_sick(self, device: Device) -> str:
        return self._policy().rule_for(device).on_sick

    def _health_changed(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            self.spawn(self._tell_health(device))

    async def _tell_health(self, device: Device) -> None:
        """Reports the health of a device to watchers. If the device is lost, marks its allocations as
        failed.
        """
        if await self.notices.health(device):
            # Allocations that are being made may be on this device, so they are waited for.
            await asyncio.gather(*self.allocates.tasks, return_exceptions=True)
            await self.failures.mark_on(device.uuid, f"device {device.index} is lost")
        if device.health is Health.SICK:
            await self.sickness.tend(device.uuid)
