"""The keeper connects the parts of the package vgpud.node, checks that a caller may change an allocation, and
audits the changes.

vgpud's servers call the keeper for changes of an allocation. For all else they call its parts, which are the
attributes of the keeper. All errors are VgpuError. A change continues to its end even if its caller
disconnects.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from vgpud import audit
from vgpud.model.caller import Caller
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, State, Workload
from vgpud.node.allocate import AllocationMaker
from vgpud.node.release import AllocationReleaser
from vgpud.node.tenants.ancestry import owners_of
from vgpud.node.tenants.bypasses import Bypasses
from vgpud.node.tenants.checks import check_owner
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.failures import Failures
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

_CLOSE_SECONDS = 30.0


class NodeKeeper:
    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.book, self.store, self.policies = context.book, context.store, context.policies
        self.changes, self.notices, self.operations = context.changes, context.notices, context.operations
        self.mig, self.preload, self.spawn = context.mig_layouts, context.preload, context.background.spawn
        inventory, effectors, engines = context.inventory, context.effectors, context.engines
        self.releases = AllocationReleaser(context)
        self.failures = Failures(context)
        self.resizes = Resizes(context)
        self.pauses = Pauses(context)
        self.suspends = Suspends(context)
        self.residency = Residency(context, self.suspends)
        self.bypasses = Bypasses(context, self.releases.later)
        self.moves = Moves(context, self.suspends)
        self.relocations = Relocations(context, self.moves)
        self.allocates = AllocationMaker(context, self.releases, self.residency)
        self.allocate = self.allocates.allocate
        self.sickness = Sickness(context, self.relocations, self.failures, lambda: self.allocates.tasks)
        self.meters = Meters(self.book, inventory, effectors)
        self.processes = Processes(self.book, inventory, effectors, owners_of, self.bypasses.is_bypassed)
        self.listings = Listings(
            self.store, inventory, effectors, engines, self.policies, self.operations.is_drained, self.preload
        )
        self.policies.changed.append(lambda old, new: self._policy_changed())
        context.executor.left = self._left
        inventory.health_changed = self.sickness.health_changed
        self.sickness.repaired = self.operations.undrained = self._back_in_service
        inventory.closes = lambda device: self.sickness.on_sick(device) != "report"
        engines.setting = lambda device: context.policy().rule_for(device).settings_preload().engine
        engines.notice = self.notices.notice

    def _policy_changed(self) -> None:
        self.residency.nudge()
        if self.mig is not None:
            self.spawn(self.mig.converge())

    def _back_in_service(self, device_uuid: str) -> None:
        """Called when a device is well again or is undrained: a reset may have removed the instances of its
        MIG layout.
        """
        if self.mig is not None:
            self.spawn(self.mig.converge_device(device_uuid))

    def _left(self, device_uuid: str, was_mig: bool) -> None:
        """Called when a slice has left a device: starts the changes of the device's MIG layout that may have
        waited for this.
        """
        if self.mig is not None and (was_mig or self.mig.waits(device_uuid)):
            self.spawn(self.mig.converge_device(device_uuid))

    def busy(self) -> frozenset[str]:
        """Ids of allocations that are being made, changed or released now."""
        return self.allocates.running | self.releases.running | self.changes.running

    async def close(self) -> None:
        """Waits for the allocations, changes and releases that are in progress. Tenants stay as they are.

        Changes that last are cancelled, because a tenant determines how long its memory takes to move. The
        next start finishes or undoes them.
        """
        await self.context.background.close()
        # a task may have started another task, so the set is built again after each wait
        while under_way := self.allocates.tasks | self.releases.tasks | set(self.changes.tasks):
            ended = asyncio.gather(*under_way, return_exceptions=True)
            await asyncio.wait((ended,), timeout=_CLOSE_SECONDS)
            if not ended.done():
                for task in under_way & set(self.changes.tasks):
                    task.cancel()
        self.releases.lifetimes.close()
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
        TENANT_ALIVE, ALLOCATION_BUSY, NO_SUCH_ALLOCATION.
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

        async def resize(held: Allocation) -> Allocation:
            self.bypasses.resizing(held)
            return await self.resizes.resize(held, memory_bytes, share)

        return await self._change("resize", allocation_id, caller, resize, **wanted)

    async def pause(self, allocation_id: str, caller: Caller) -> Allocation:
        """Pauses a tenant: its processes get no compute time. Its memory stays on the devices."""
        return await self._change("pause", allocation_id, caller, self.pauses.pause)

    async def unpause(self, allocation_id: str, caller: Caller) -> Allocation:
        return await self._change("unpause", allocation_id, caller, self.pauses.unpause)

    async def suspend(self, allocation_id: str, caller: Caller, deep: bool = False) -> Allocation:
        """Suspends a tenant: its device memory moves to the host, and its processes wait until the tenant is
        resumed. With `deep`, no memory stays on the device.
        """
        work = partial(self.suspends.suspend, deep=deep)
        return await self._change("suspend", allocation_id, caller, work, deep=deep or None)

    async def resume(self, allocation_id: str, caller: Caller) -> Allocation:
        async def resume(held: Allocation) -> Allocation:
            if held.id not in self.changes:  # its change could be neither finished nor undone
                if held.moves:
                    await self.moves.recover(held)
                elif held.state is State.SUSPENDING:
                    await self.suspends.recover(held)
            return await self.suspends.resume(self.book.get(held.id))

        return await self._change("resume", allocation_id, caller, resume)

    async def name(self, allocation_id: str, workload: Workload) -> None:
        """Records the names of the pod, container and claim that use an allocation. Does nothing if they are
        recorded already.
        """
        if self.book.get(allocation_id).request.workload != workload:
            await self.changes.run(allocation_id, partial(self.store.name, allocation_id, workload))
