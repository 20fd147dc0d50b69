"""The keeper: the interface of the node for all of vgpud's servers.

It connects the rooms of the node, checks who owns an allocation, and audits changes. allocate.py, release.py
and the other rooms do the work. All errors are VgpuError.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from vgpud import audit
from vgpud.hardware.events import DeviceEvent
from vgpud.model.caller import Caller
from vgpud.model.device import Device, Health
from vgpud.model.event import Event
from vgpud.model.journal import Message
from vgpud.model.log_event import LogEvent
from vgpud.model.marks import Mark
from vgpud.model.plan import Step
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Decision, Mode, Request, State, Workload
from vgpud.model.view import DeviceView, Metered, NodeDescription, NodeProcess, ReloadReport, SliceUse
from vgpud.modes.mig import MigMode
from vgpud.modes.preload import Preload
from vgpud.node.allocate import AllocationMaker
from vgpud.node.background import Background
from vgpud.node.devices.execute import Executor
from vgpud.node.devices.mig_layouts import LayoutParts, MigLayouts
from vgpud.node.devices.notices import Notices
from vgpud.node.devices.operations import Operations
from vgpud.node.parts import Parts
from vgpud.node.policies import Policies, reload_report
from vgpud.node.release import AllocationReleaser
from vgpud.node.tenants import checkpoints
from vgpud.node.tenants.accounts import Accounts
from vgpud.node.tenants.activities import Activities
from vgpud.node.tenants.ancestry import owners_of
from vgpud.node.tenants.blocked import Blocked
from vgpud.node.tenants.bypasses import Bypasses
from vgpud.node.tenants.changes import Changes
from vgpud.node.tenants.checks import check_owner
from vgpud.node.tenants.failures import Failures
from vgpud.node.tenants.host import host_memory
from vgpud.node.tenants.kept import Kept
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
from vgpud.planner.misfits import misfits
from vgpud.policy.load import LoadedPolicy, bad_policy

T = TypeVar("T")
log = structlog.get_logger(__name__)

_PROCESSES_SECONDS = 0.1  # maximum age of a listing of processes


class NodeKeeper:
    def __init__(self, parts: Parts, policy: LoadedPolicy) -> None:
        self._parts = parts
        self._book = parts.book
        self.store = parts.store
        self._inventory = parts.inventory
        self._executor = self._executor_of(parts)
        inventory, effectors = parts.inventory, parts.effectors
        self.operations = Operations(parts.book, inventory, effectors, parts.drains, self.device_notice)
        self.mig = self._mig_layouts()
        self._changes = Changes()
        self._background = Background()
        self.spawn = self._background.spawn
        self.releases = AllocationReleaser(parts, self._executor, self._changes, self.spawn, self._released)
        self.lifetimes = Lifetimes(self._lifetime_ended)
        self._notices = Notices(parts.store, parts.inventory)
        self.policies = Policies(policy, self._load_policy, self._reload_report, self.store.account)
        self.policies.changed.append(lambda old, new: self._policy_changed())
        self.meters = Meters(parts.book, parts.inventory, parts.effectors)
        shared = self._tenant_services()
        self.activities = shared.activities
        self.failures = Failures(shared)
        accounts = Accounts()
        self.resizes = Resizes(shared, lambda: self.policies.current.policy, accounts)
        self.pauses = Pauses(shared, parts.engines)
        self.suspends = Suspends(shared)
        tally = self.store.account.tally
        self.residency = Residency(shared, self.suspends, lambda: self.policy().policy, tally, self.spawn)
        self.bypasses = Bypasses(shared, lambda: self.policy().policy, tally, self.releases.later)
        self._processes = Processes(parts.book, inventory, effectors, owners_of, self.bypasses.is_bypassed)
        self.moves = Moves(
            shared, self._executor, lambda: self.policy().policy, self.operations.closed, tally, self.suspends
        )
        self.relocations = Relocations(
            self.moves, parts.book, parts.inventory, lambda: self.policy().policy, self.operations.is_drained
        )
        parts.inventory.health_changed = self._health_changed
        parts.inventory.closes = lambda device: self._on_sick(device) != "report"
        self.sickness = Sickness(parts.inventory, self.relocations, self._on_sick, self.device_notice)
        parts.engines.setting = lambda device: self.policy().policy.rule_for(device).settings_preload().engine
        parts.engines.notice = self.device_notice
        self.allocates = AllocationMaker(
            parts,
            self._executor,
            self.releases,
            self.mig,
            lambda: self.policy().policy,
            self.operations.closed,
            self._made,
            accounts,
        )
        self.listings = self._listings()

    def _listings(self) -> Listings:
        parts = self._parts
        return Listings(
            parts.store,
            parts.inventory,
            parts.effectors,
            parts.engines,
            self.policy,
            self.operations.is_drained,
            lambda: "" if self._preload is None else self._preload.trouble(),
        )

    @staticmethod
    def _executor_of(parts: Parts) -> Executor:
        return Executor(
            parts.store,
            parts.inventory,
            parts.transitions,
            parts.effectors,
            parts.specs,
            parts.engines,
            parts.fault,
        )

    def _tenant_services(self) -> checkpoints.TenantServices:
        parts = self._parts
        effector = parts.effectors[Mode.PRELOAD]
        preload = self._preload = effector if isinstance(effector, Preload) else None
        activities = Activities(preload, Blocked(parts.book))
        return checkpoints.TenantServices(
            parts.store,
            parts.inventory,
            parts.effectors,
            preload,
            self._changes,
            parts.transitions,
            parts.suspender,
            lambda: host_memory(self.policy().policy.pool),
            parts.fault,
            activities,
            Kept(parts.book, parts.inventory, preload, activities),
            lambda: self.policy().policy.pool.unevictable,
            parts.host_root,
        )

    def _mig_layouts(self) -> MigLayouts | None:
        """The layouts of MIG devices; None if a test replaces the effector of mode mig."""
        mig, parts = self._parts.effectors[Mode.MIG], self._parts
        if not isinstance(mig, MigMode):
            return None
        return MigLayouts(
            LayoutParts(mig, parts.inventory, parts.store, parts.transitions, self.policy, parts.fault)
        )

    # --- allocate and release

    async def allocate(self, request: Request, allocation_id: str | None = None) -> Allocation:
        """Makes an allocation. Raises VgpuError if it is refused: see AllocationMaker.allocate."""
        return await self.allocates.allocate(request, allocation_id)

    async def _made(self, allocation: Allocation) -> Allocation:
        self.lifetimes.watch(allocation.id, allocation.request.lifetime)
        return await self.residency.admit(allocation)

    async def plan(self, request: Request) -> tuple[Decision, tuple[Step, ...]]:
        """The decision on a request and the steps that it would need. Changes nothing: see
        AllocationMaker.plan.
        """
        return await self.allocates.plan(request)

    async def release(self, allocation_id: str, caller: Caller, force: bool) -> bool:
        """Releases an allocation. Returns True if it was released before. Raises VgpuError: NOT_OWNER,
        TENANT_ALIVE, NO_SUCH_ALLOCATION.
        """
        if self.releases.is_released(allocation_id):
            return True
        with self._change("release", allocation_id, caller, force=force or None) as told:
            told.made = not await self.releases.release(self._book.get(allocation_id), force)
        return not told.made

    def release_later(self, allocation_id: str, reason: str) -> bool:
        """Releases the allocation after its last process has ended: see AllocationReleaser.later."""
        return self.releases.later(allocation_id, reason)

    def _released(self, allocation: Allocation) -> None:
        self.lifetimes.forget(allocation.id)
        if self.mig is not None:
            for uuid in {part.device_uuid for part in allocation.slices if part.mig is not None}:
                # starts a change of the layout that may have waited for this release
                self.spawn(self.mig.converge_device(uuid))

    @contextmanager
    def _change(
        self, name: str, allocation_id: str, caller: Caller, **words: object
    ) -> Iterator[audit.Change]:
        """Checks and audits a requested change. Raises VgpuError(NOT_OWNER) if the caller may not make the
        change.
        """
        allocation = self._book.get(allocation_id)
        with audit.change(name, **audit.of(allocation), **words) as told:
            check_owner(allocation, caller)
            yield told

    async def run_steps(self, verb: str, allocation_id: str, steps: Sequence[Step]) -> None:
        """Runs a plan on an existing allocation."""

        async def run() -> None:
            await self._executor.run(verb, self._book.get(allocation_id), steps)

        await self.change(allocation_id, run)

    async def change(self, allocation_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` while no other change of the allocation runs. Skips an allocation that is being
        released.
        """
        await self._changes.settle(allocation_id)
        if self._book.get(allocation_id).state is not State.RELEASING:
            await asyncio.shield(self._changes.begin(allocation_id, work()))

    async def name(self, allocation_id: str, workload: Workload) -> None:
        """Records the names that Kubernetes has for the program in an allocation. Does nothing if they are
        recorded already.
        """

        async def record() -> None:
            if self._book.get(allocation_id).request.workload != workload:
                await self.store.name(allocation_id, workload)

        if self._book.get(allocation_id).request.workload != workload:
            await self.change(allocation_id, record)

    def busy(self) -> frozenset[str]:
        """Ids of allocations that are being made, changed or released now."""
        return self.allocates.running | self.releases.running | self._changes.running

    def _lifetime_ended(self, allocation_id: str) -> None:
        if allocation_id in self._book:
            self.releases.later(allocation_id, "the process that it is bound to ended")

    # --- resize

    async def resize(
        self, allocation_id: str, caller: Caller, memory_bytes: int | None, share: Percent | None
    ) -> Allocation:
        """Changes the limits of a running tenant. All slices get the same limits."""
        wanted = {"memory_bytes": memory_bytes, "share": None if share is None else str(share)}
        with self._change("resize", allocation_id, caller, **wanted) as told:
            before = self._book.get(allocation_id)
            after = await self.resizes.resize(before, memory_bytes, share)
            told.made = after is not before
        return after

    # --- pause and suspend

    async def pause(self, allocation_id: str, caller: Caller) -> Allocation:
        """Takes the tenant off its devices. Its memory stays there."""
        with self._change("pause", allocation_id, caller) as told:
            before = self._book.get(allocation_id)
            after = await self.pauses.pause(before)
            told.made = after is not before
        return after

    async def unpause(self, allocation_id: str, caller: Caller) -> Allocation:
        with self._change("unpause", allocation_id, caller) as told:
            before = self._book.get(allocation_id)
            after = await self.pauses.unpause(before)
            told.made = after is not before
        return after

    async def suspend(self, allocation_id: str, caller: Caller, deep: bool = False) -> Allocation:
        """Suspends a tenant: its device memory moves to the host, and its processes wait until the tenant is
        resumed. With `deep`, no memory stays on the device.
        """
        with self._change("suspend", allocation_id, caller, deep=deep or None) as told:
            before = self._book.get(allocation_id)
            after = await self.suspends.suspend(before, deep=deep)
            told.made = after is not before
        return after

    async def resume(self, allocation_id: str, caller: Caller) -> Allocation:
        with self._change("resume", allocation_id, caller) as told:
            before = self._book.get(allocation_id)
            if before.moves and before.id not in self._changes:  # the move was interrupted
                await self.moves.recover(before)
            after = await self.suspends.resume(self._book.get(allocation_id))
            told.made = after is not before
        return after

    # --- queries

    def get(self, allocation_id: str) -> Allocation:
        return self._book.get(allocation_id)

    def list(self) -> tuple[tuple[Allocation, ...], int]:
        return tuple(self._book), self.store.revision

    def standing(self, allocation: Allocation) -> str:
        """Returns a sentence on what a suspended tenant waits for."""
        return self.residency.standing(allocation)

    def stays(self, allocation: Allocation) -> tuple[tuple[str, int], ...]:
        """Bytes that an eviction left on the tenant's device, by kind."""
        return self.suspends.swaps.stays(allocation)

    def marks(self, allocation: Allocation) -> tuple[Mark, ...]:
        """The marks of the allocation: use of a device that its limits do not cover."""
        refusal = None if self._preload is None else self._preload.walls.refusal(allocation)
        return (*self.bypasses.marks_of(allocation.id), *([refusal] if refusal else []))

    def memory_limit(self, allocation: Allocation) -> str:
        """What enforces the memory limit of an allocation in mode preload: "driver" or "libvgpu"; empty for
        other modes.
        """
        if not any(part.mode is Mode.PRELOAD for part in allocation.slices):
            return ""
        return (
            "driver" if self._preload is not None and self._preload.walls.stands(allocation.id) else "libvgpu"
        )

    async def slice_use(self, allocation: Allocation) -> tuple[SliceUse, ...]:
        return await self.listings.slice_use(allocation)

    async def devices(self) -> tuple[tuple[DeviceView, ...], int]:
        return await self.listings.devices()

    async def look(self) -> None:
        await self.listings.look()

    def describe(self) -> NodeDescription:
        return self.listings.describe()

    async def watch_arbiter(self) -> None:
        assert self._preload is not None
        await self._preload.watch()

    async def metered(self) -> Metered:
        return await self.meters.read()

    async def processes(self) -> tuple[NodeProcess, ...]:
        return await self._processes.listed(await self.meters.read(_PROCESSES_SECONDS), self.standing)

    async def last_events(self, count: int, user: int | None = None) -> tuple[Event, ...]:
        return await self.store.last_events(count, user)

    def subscribe(self, after_revision: int | None) -> AsyncIterator[tuple[Event, Allocation | None]]:
        return self.store.subscribe(after_revision)

    # --- policy

    def policy(self) -> LoadedPolicy:
        return self.policies.current

    async def reload_policy(self, dry_run: bool) -> ReloadReport:
        """Reloads the policy files, all or nothing: if they have a mistake, raises VgpuError(BAD_POLICY) and
        keeps the old policy.
        """
        if dry_run:
            return await self.policies.reload(dry_run, self.store)
        with audit.change("reload policy") as told:
            report = await self.policies.reload(dry_run, self.store)
            told.words["digest"] = report.digest
        return report

    def _load_policy(self) -> LoadedPolicy:
        loaded = self._parts.load_policy()
        problems = tuple(misfits(loaded, self._inventory.node))
        if problems:
            raise bad_policy(problems)
        return loaded

    def _reload_report(self, old: LoadedPolicy, new: LoadedPolicy) -> ReloadReport:
        return reload_report(old, new, self._inventory.node, self._book.use)

    def _policy_changed(self) -> None:
        self.residency.nudge()
        if self.mig is not None:
            self.spawn(self.mig.converge())

    # --- device events

    def device_event(self, event: DeviceEvent) -> None:
        """Handles an Xid error or a device that fell off the bus."""
        self.spawn(self._notices.event(event))

    def _on_sick(self, device: Device) -> str:
        return self.policy().policy.rule_for(device).on_sick

    def tend_sick(self) -> None:
        """At the start of vgpud: continues the care for devices that were sick before."""
        for device in self._parts.inventory.node.devices:
            if device.health is Health.SICK:
                self.spawn(self.sickness.tend(device.uuid))

    def _health_changed(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            self.spawn(self._tell_health(device))

    async def _tell_health(self, device: Device) -> None:
        """Reports the health of a device to watchers. If the device is lost, marks its allocations as
        failed.
        """
        if await self._notices.health(device):
            # Allocations that are being made may be on this device, so they are waited for.
            await asyncio.gather(*self.allocates.tasks, return_exceptions=True)
            await self.failures.mark_on(device.uuid, f"device {device.index} is lost")
        if device.health is Health.SICK:
            await self.sickness.tend(device.uuid)

    def helper_died(self, device_uuid: str, sentence: str) -> None:
        """Called when a helper died whose tenants die with it: marks their allocations as failed."""
        why = f"{sentence}; their allocations are marked as failed"
        log.error(LogEvent.HELPER_DIED, message_id=Message.HELPER_DIED, device=device_uuid, why=why)
        self._parts.transitions.lost(device_uuid)
        self.spawn(self.failures.mark_on(device_uuid, sentence))

    def device_notice(self, device_uuid: str, sentence: str) -> None:
        """Sends watchers a notice about a device."""
        self.spawn(self._notices.notice(device_uuid, sentence))

    # --- stop

    async def close(self) -> None:
        """Waits for the allocations, changes and releases that are in progress. Tenants stay as they are."""
        await self._background.close()
        # a task may have started another task, so the set is built again after each wait
        while under_way := self.allocates.tasks | self.releases.tasks | set(self._changes.tasks):
            await asyncio.gather(*under_way, return_exceptions=True)
        self.lifetimes.close()
        self.store.close()
