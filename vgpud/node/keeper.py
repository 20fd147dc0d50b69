"""The keeper: the one writer behind every door.

Allocate decides and books without an await in between, writes the intent durably, runs the plan, and
commits. A failed allocation is undone; an allocation that a crash interrupted converges at the next start
(recover.py). Errors are VgpuError throughout.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from vgpud import audit, clock
from vgpud.hardware.events import DeviceEvent
from vgpud.model.caller import Caller
from vgpud.model.device import Device
from vgpud.model.engine import EngineChoice
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event
from vgpud.model.journal import Message
from vgpud.model.lifecycle import Change
from vgpud.model.marks import Mark
from vgpud.model.plan import Plan, Step, StepKind
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Decision, Mode, Request, Slice, State
from vgpud.model.view import DeviceView, Metered, NodeDescription, NodeProcess, ReloadReport, SliceUse
from vgpud.modes.mig import MigMode
from vgpud.node.background import Background
from vgpud.node.devices.execute import Executor
from vgpud.node.devices.mig_layouts import MigLayouts, Surroundings
from vgpud.node.devices.notices import Notices
from vgpud.node.devices.operations import Operations
from vgpud.node.parts import Parts
from vgpud.node.policies import Policies, reload_report
from vgpud.node.store.account import asked, held
from vgpud.node.store.book import RequestKey, check_same_request, request_key
from vgpud.node.tenants import checkpoints
from vgpud.node.tenants.activities import Activities
from vgpud.node.tenants.blocked import Blocked
from vgpud.node.tenants.bypasses import Bypasses
from vgpud.node.tenants.cgroups import processes_in
from vgpud.node.tenants.changes import Changes
from vgpud.node.tenants.checkpoints import waiting
from vgpud.node.tenants.checks import check_ended, check_owner, settled
from vgpud.node.tenants.failures import Failures
from vgpud.node.tenants.host import host_memory
from vgpud.node.tenants.kept import Kept
from vgpud.node.tenants.lifetimes import Lifetimes
from vgpud.node.tenants.moves import Moves
from vgpud.node.tenants.relocate import Relocations
from vgpud.node.tenants.residency import Residency
from vgpud.node.tenants.resizes import Resizes
from vgpud.node.tenants.suspends import Suspends
from vgpud.node.view.meters import Meters
from vgpud.node.view.processes import Processes
from vgpud.planner.choose import choose
from vgpud.planner.misfits import misfits
from vgpud.planner.quota import over_quota
from vgpud.planner.steps import allocate_steps, release_steps
from vgpud.policy.load import LoadedPolicy, bad_policy

T = TypeVar("T")
log = structlog.get_logger(__name__)

_RELEASED_REMEMBERED = 10_000
_SNAPSHOT_SECONDS = 1.0  # greatest age of the snapshot behind listings and decisions
_LOOK_SECONDS = 0.5  # longest wait of a status for NVML
_PROCESSES_SECONDS = 0.1  # greatest age of a listing of processes
_SETTLE_SECONDS = 2.0  # before it refuses, a request waits this long for releases that are running
_RETRY_SECONDS = 1.0  # while a dead tenant's children still run


class NodeKeeper:
    def __init__(self, parts: Parts, policy: LoadedPolicy) -> None:
        self._parts = parts
        self._book = parts.book
        self.store = parts.store
        self._inventory = parts.inventory
        self._executor = self._executor_of(parts)
        self.operations = Operations(parts.book, parts.inventory, parts.effectors, parts.drains)
        self.mig = self._mig_layouts()
        self.lifetimes = Lifetimes(self._lifetime_ended)
        self._notices = Notices(parts.store, parts.inventory)
        self.policies = Policies(policy, self._load_policy, self._reload_report, self.store.account)
        self.policies.changed.append(lambda old, new: self._policy_changed())
        self.meters = Meters(parts.book, parts.inventory, parts.effectors)
        self._processes = Processes(parts.book, parts.inventory, parts.effectors)
        self._changes = Changes()
        self._background = Background()
        self.spawn = self._background.spawn
        around = self._surroundings()
        self.activities = around.activities
        self.failures = Failures(around)
        self.resizes = Resizes(around, lambda: self.policies.current.policy)
        self.resizes.check = self._check_quota
        self.suspends = Suspends(around)
        tally = self.store.account.tally
        self.residency = Residency(around, self.suspends, lambda: self.policy().policy, tally, self.spawn)
        self.bypasses = Bypasses(around, lambda: self.policy().policy, tally, self.release_later)
        self.moves = Moves(
            around,
            self._executor,
            lambda: self.policies.current.policy,
            self.operations.closed,
            tally,
        )
        self.relocations = Relocations(
            self.moves, parts.book, parts.inventory, lambda: self.policy().policy, self.operations.is_drained
        )
        parts.inventory.health_changed = self._health_changed
        parts.engines.setting = lambda device: self.policy().policy.rule_for(device).settings_preload().engine
        parts.engines.notice = self.device_notice
        self._allocating: dict[RequestKey, tuple[Request, asyncio.Task[Allocation]]] = {}
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[bool]] = {}  # releases after the end of a bound process
        self._leaving: set[str] = set()  # allocations that `release_later` waits for
        self._detached: dict[str, Allocation] = {}  # released, but not yet recorded as released
        self._released: deque[str] = deque(maxlen=_RELEASED_REMEMBERED)  # newest last
        self._started = clock.now()

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

    def _surroundings(self) -> checkpoints.Surroundings:
        parts = self._parts
        activities = Activities(parts.effectors, Blocked(parts.book))
        return checkpoints.Surroundings(
            parts.store,
            parts.inventory,
            parts.effectors,
            self._changes,
            parts.transitions,
            parts.suspender,
            lambda: host_memory(self.policy().policy.pool),
            parts.fault,
            activities,
            Kept(parts.book, parts.inventory, parts.effectors, activities),
            parts.host_root,
        )

    def _mig_layouts(self) -> MigLayouts | None:
        """None if the effector of mode mig is a test's stand-in."""
        mig, parts = self._parts.effectors[Mode.MIG], self._parts
        if not isinstance(mig, MigMode):
            return None
        return MigLayouts(
            Surroundings(mig, parts.inventory, parts.store, parts.transitions, self.policy, parts.fault)
        )

    # --- allocate

    async def allocate(self, request: Request) -> Allocation:
        """Allocates, idempotent by request id. Runs to its end even if the caller disconnects."""
        key = request_key(request)
        under_way = self._allocating.get(key)
        if under_way is not None:
            first, task = under_way
            check_same_request(first, request)
            self.store.account.repeated(request)
            return await asyncio.shield(task)
        existing = self._book.by_request(request)
        if existing is not None:
            self.store.account.repeated(request)
            return settled(existing)
        task = asyncio.ensure_future(self._audited(request))
        self._allocating[key] = request, task
        task.add_done_callback(lambda _: self._allocating.pop(key, None))
        return await asyncio.shield(task)

    async def _audited(self, request: Request) -> Allocation:
        with audit.change("allocate", owner=request.owner.uid, **asked(request)) as told:
            allocation = await self._allocate(request)
            told.words |= held(allocation)
        return allocation

    async def _allocate(self, request: Request) -> Allocation:
        decision, plan = await self._plan(request)
        if decision.refusal is not None:
            self.store.account.refused(request, decision.refusal)
            if self.mig is not None:
                raise self.mig.explained(decision.refusal, decision.reasons)
            raise decision.refusal
        assert plan is not None
        allocation = Allocation(
            id=secrets.token_hex(6),
            request=request,
            state=State.ALLOCATING,
            slices=decision.slices,
            reasons=decision.reasons,
            created_unix_ns=time.time_ns(),
        )
        self.store.reserve(allocation, Change.ALLOCATE)
        try:
            await self._executor.run("allocate", allocation, (plan.intent,))
        except BaseException:  # the intent is not on record, so nothing was changed
            for uuid, mode in {part.device_uuid: part.device_mode for part in allocation.slices}.items():
                await self._parts.transitions.abandon(uuid, mode)
            raise
        try:
            allocation = await self._executor.run("allocate", allocation, (*plan.effects, plan.outcome))
        except BaseException:
            await asyncio.shield(self._undo(allocation.id))
            raise
        self.lifetimes.watch(allocation.id, request.lifetime)
        return await self.residency.admit(allocation)

    async def _undo(self, allocation_id: str) -> None:
        """Removes what a failed allocation left behind. Retries later if that fails now."""
        try:
            await self._begin_release(allocation_id)
        except VgpuError as error:
            log.warning("undo failed, will retry", allocation=allocation_id, why=str(error))
            self.release_later(allocation_id, "its allocation failed half-way")

    async def plan(self, request: Request) -> tuple[Decision, tuple[Step, ...]]:
        """The decision and steps that Allocate would make now. Changes nothing."""
        decision, plan = await self._plan(request)
        return decision, tuple(plan or ())

    async def _plan(self, request: Request) -> tuple[Decision, Plan | None]:
        """Awaits nothing after the decision, so that the room is free when the caller books it."""
        await self._inventory.refresh(_SNAPSHOT_SECONDS)
        decision = self._decide(request)
        if decision[0].refusal is None:
            return decision
        leaving: set[asyncio.Task[Any]] = {*self._releasing.values(), *self._ending.values()}
        if leaving:  # a release that is running may make the room
            await asyncio.wait(leaving, timeout=_SETTLE_SECONDS)
        await self._inventory.refresh()
        return self._decide(request)

    def _decide(self, request: Request) -> tuple[Decision, Plan | None]:
        if self._inventory.error is not None and not self._inventory.node.devices:
            return Decision(refusal=self._inventory.error), None
        decision = choose(
            request,
            self._inventory.node,
            self.policies.current.policy,
            self._book.use,
            closed=self.operations.closed(request),
            pools={} if self.mig is None else self.mig.pools.pools(),
        )
        if decision.refusal is None:
            refusal = over_quota(
                self.policy().policy,
                self._inventory.node,
                request.counts_for,
                self._book,
                decision.slices,
            )
            decision = decision if refusal is None else Decision(reasons=decision.reasons, refusal=refusal)
        if decision.refusal is not None:
            return decision, None
        return decision, allocate_steps(decision.slices, self._book.use, decision.moves)

    # --- release

    async def release(self, allocation_id: str, caller: Caller, force: bool) -> bool:
        """True if it was released already. Raises VgpuError: NOT_OWNER, TENANT_ALIVE, NO_SUCH_ALLOCATION."""
        if allocation_id not in self._book and allocation_id in self._released:
            return True
        with self._change("release", allocation_id, caller, force=force or None) as told:
            told.made = not await self._release(self._book.get(allocation_id), force)
        return not told.made

    @contextmanager
    def _change(
        self, name: str, allocation_id: str, caller: Caller, **words: object
    ) -> Iterator[audit.Change]:
        """Audits a requested change. Raises VgpuError(NOT_OWNER) if the caller may not make it."""
        allocation = self._book.get(allocation_id)
        with audit.change(
            name, allocation=allocation_id, owner=allocation.request.owner.uid, **words
        ) as told:
            check_owner(allocation, caller)
            yield told

    def remember_released(self, ids: Iterable[str]) -> None:
        """At start: lets a repeated release of these allocations succeed."""
        self._released.extend(ids)

    async def _release(self, allocation: Allocation, force: bool) -> bool:
        """True if a concurrent release ended first."""
        if allocation.state is State.ALLOCATING:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation.id} is still being made",
                "try again in a moment",
            )
        if waiting(allocation) and force:
            raise VgpuError(
                ErrorCode.TENANT_ALIVE,
                f"allocation {allocation.id} is suspended with {len(waiting(allocation))} processes, which "
                "nothing could wake any more",
                "resume it first, or end its processes",
            )
        if allocation.id not in self._releasing and not force:
            await self._check_tenants_gone(allocation)
        await self._changes.settle(allocation.id)
        if allocation.id not in self._book:
            return True
        await asyncio.shield(self._begin_release(allocation.id))
        return False

    def _begin_release(self, allocation_id: str) -> asyncio.Task[None]:
        """The running release of this allocation; starts it if there is none."""
        running = self._releasing.get(allocation_id)
        if running is not None:
            return running
        releasing = replace(self._book.get(allocation_id), state=State.RELEASING)
        self.store.reserve(releasing, Change.RELEASE)
        running = asyncio.ensure_future(self._dismantle(releasing))
        self._releasing[allocation_id] = running
        running.add_done_callback(lambda _: self._releasing.pop(allocation_id, None))
        return running

    async def _check_tenants_gone(self, allocation: Allocation) -> None:
        for part in allocation.slices:
            check_ended(allocation.id, await self._parts.effectors[part.mode].tenants(allocation, part))
        check_ended(allocation.id, processes_in(allocation.request.lifetime.cgroup))
        check_ended(allocation.id, [process.pid for process in waiting(allocation)])  # NVML does not see them

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
        self.lifetimes.forget(allocation.id)
        self._released.append(allocation.id)
        if self.mig is not None:
            for uuid in {part.device_uuid for part in allocation.slices if part.mig is not None}:
                self.spawn(self.mig.converge_device(uuid))  # a layout may have waited for it

    async def _leave_modes(self, allocation: Allocation) -> None:
        """Takes devices without allocations out of their mode. When several allocations of a device are
        released at the same time, no plan of theirs does it, because none was the last when it was made."""
        leaving = [part.device_uuid for a in self._detached.values() for part in a.slices]
        for uuid, mode in {part.device_uuid: part.device_mode for part in allocation.slices}.items():
            if self._book.use_of(uuid).count == leaving.count(uuid):
                await self._parts.transitions.release(uuid, mode)

    async def dismantle(self, allocation_id: str) -> None:
        """At start: removes what an interrupted intent left behind, without a check for tenants."""
        await asyncio.shield(self._begin_release(allocation_id))

    def release_later(self, allocation_id: str, reason: str) -> bool:
        """Releases the allocation once no process runs in it. False if that was ordered before."""
        if allocation_id in self._leaving:
            return False
        self._leaving.add(allocation_id)
        self.spawn(self._release_when_possible(allocation_id, reason))
        return True

    async def run_steps(self, verb: str, allocation_id: str, steps: Sequence[Step]) -> None:
        """Runs a plan on a held allocation."""

        async def run() -> None:
            await self._executor.run(verb, self._book.get(allocation_id), steps)

        await self.change(allocation_id, run)

    async def change(self, allocation_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` while no other change of the allocation runs. Skips an allocation under release."""
        await self._changes.settle(allocation_id)
        if self._book.get(allocation_id).state is not State.RELEASING:
            await asyncio.shield(self._changes.begin(allocation_id, work()))

    def busy(self) -> frozenset[str]:
        """Allocations that are being made, changed or released right now."""
        making = {a.id for a in self._book if request_key(a.request) in self._allocating}
        return frozenset(making | set(self._releasing) | self._changes.running)

    def _under_way(self) -> set[asyncio.Task[Any]]:
        making = [task for _, task in self._allocating.values()]
        return {*making, *self._releasing.values(), *self._changes.tasks}

    def _lifetime_ended(self, allocation_id: str) -> None:
        if allocation_id in self._book:
            self.release_later(allocation_id, "the process that it is bound to ended")

    async def _release_when_possible(self, allocation_id: str, reason: str) -> None:
        """Retries the release until the last process of the allocation has ended."""
        audit.by_itself(reason)
        try:
            await self._try_release(allocation_id)
        finally:
            self._leaving.discard(allocation_id)

    async def _try_release(self, allocation_id: str) -> None:
        pause = _RETRY_SECONDS / 16
        while allocation_id in self._book:
            owner = self._book.get(allocation_id).request.owner.uid
            attempt = asyncio.ensure_future(self._release(self._book.get(allocation_id), force=False))
            self._ending[allocation_id] = attempt
            try:
                if not await attempt:
                    audit.record("release", None, allocation=allocation_id, owner=owner)
            except VgpuError as error:
                log.debug("release must wait", allocation=allocation_id, why=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS)
            finally:
                self._ending.pop(allocation_id, None)

    # --- resize

    async def resize(
        self, allocation_id: str, caller: Caller, memory_bytes: int | None, share: Percent | None
    ) -> Allocation:
        """Changes the limits of a running tenant; all slices get the same."""
        wanted = {"memory_bytes": memory_bytes, "share": None if share is None else str(share)}
        with self._change("resize", allocation_id, caller, **wanted) as told:
            before = self._book.get(allocation_id)
            after = await self.resizes.resize(before, memory_bytes, share)
            told.made = after is not before
        return after

    def _check_quota(self, changed: Allocation, slices: tuple[Slice, ...]) -> None:
        policy, node = self.policy().policy, self._inventory.node
        over = over_quota(policy, node, changed.request.counts_for, self._book, slices, changed.id)
        if over is not None:
            raise over

    # --- suspend

    async def suspend(self, allocation_id: str, caller: Caller) -> Allocation:
        """Suspends: device memory moves to the host, and the processes wait until the tenant is resumed."""
        with self._change("suspend", allocation_id, caller) as told:
            before = self._book.get(allocation_id)
            after = await self.suspends.suspend(before)
            told.made = after is not before
        return after

    async def resume(self, allocation_id: str, caller: Caller) -> Allocation:
        with self._change("resume", allocation_id, caller) as told:
            before = self._book.get(allocation_id)
            if before.moves and before.id not in self._changes:  # an interrupted move
                await self.moves.recover(before)
            after = await self.suspends.resume(self._book.get(allocation_id))
            told.made = after is not before
        return after

    # --- reading

    def get(self, allocation_id: str) -> Allocation:
        return self._book.get(allocation_id)

    def list(self) -> tuple[tuple[Allocation, ...], int]:
        return tuple(self._book), self.store.revision

    def standing(self, allocation: Allocation) -> str:
        """What a suspended tenant waits for."""
        return self.residency.standing(allocation)

    def marks(self, allocation: Allocation) -> tuple[Mark, ...]:
        """The marks of the allocation: findings of use that its limits do not cover."""
        return self.bypasses.marks_of(allocation.id)

    async def slice_use(self, allocation: Allocation) -> tuple[SliceUse, ...]:
        """The use of each slice, with empty entries for slices on devices that cannot be read."""
        found = []
        for part in allocation.slices:
            try:
                device = self._inventory.device(part.device_uuid)
                found.append(await self._parts.effectors[part.mode].use(allocation, part, device))
            except VgpuError as error:
                log.debug("no usage", allocation=allocation.id, why=str(error))
                found.append(SliceUse(part.device_uuid, 0, 0, 0, 0, 0, ()))
        return tuple(found)

    async def devices(self) -> tuple[tuple[DeviceView, ...], int]:
        await self._inventory.refresh(_SNAPSHOT_SECONDS)
        if self._inventory.error is not None and not self._inventory.node.devices:
            raise self._inventory.error
        views = []
        for device in self._inventory.node.devices:
            use = self._book.use_of(device.uuid)
            views.append(
                DeviceView(
                    device=device,
                    policy_mode=self.policies.current.policy.rule_for(device).mode,
                    mode=use.mode,
                    memory_allocated_bytes=use.memory_bytes,
                    share_allocated_hundredths=use.share_hundredths,
                    allocation_count=use.count,
                    drained=self.operations.is_drained(device.uuid),
                    engine=self._engine(device, use.mode),
                )
            )
        return tuple(views), self.store.revision

    def _engine(self, device: Device, mode: Mode | None) -> EngineChoice | None:
        """The engine of a device that is in mode preload, or idle and allowed to be; None for others."""
        allowed = self.policy().policy.rule_for(device).allows(Mode.PRELOAD)
        shared = mode is Mode.PRELOAD if mode is not None else allowed
        return self._parts.engines.view(device) if shared else None

    async def metered(self) -> Metered:
        return await self.meters.read()

    async def processes(self) -> tuple[NodeProcess, ...]:
        return await self._processes.listed(await self.meters.read(_PROCESSES_SECONDS), self.standing)

    async def last_events(self, count: int) -> tuple[Event, ...]:
        return await self.store.last_events(count)

    async def look(self) -> None:
        """Refreshes the snapshot behind `describe` and `plan`; gives up after a bounded wait for NVML."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._inventory.refresh(_SNAPSHOT_SECONDS)

    def describe(self) -> NodeDescription:
        error = self._inventory.error
        devices = self._inventory.node.devices
        simulated = ", simulated" if self._inventory.node.simulated else ""
        return NodeDescription(
            node=self._inventory.node,
            allocation_count=len(self._book),
            revision=self.store.revision,
            policy_digest=self.policies.current.digest,
            status=f"{len(devices)} devices{simulated}, {len(self._book)} allocations, "
            f"policy {self.policies.current.digest[:8]}",
            uptime_seconds=clock.now() - self._started,
            hardware_error=str(error) if error is not None else "",
        )

    def subscribe(self, after_revision: int | None) -> AsyncIterator[tuple[Event, Allocation | None]]:
        return self.store.subscribe(after_revision)

    # --- policy

    def policy(self) -> LoadedPolicy:
        return self.policies.current

    async def reload_policy(self, dry_run: bool) -> ReloadReport:
        """All or nothing: raises VgpuError(BAD_POLICY) and keeps the old policy if the files are wrong."""
        if dry_run:
            return await self.policies.reload(dry_run, self.store)
        with audit.change("reload policy") as told:
            report = await self.policies.reload(dry_run, self.store)
            told.words["digest"] = report.digest
        return report

    def _load_policy(self) -> LoadedPolicy:
        loaded = self._parts.load_policy()
        problems = misfits(loaded, self._inventory.node)
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
        """Handles an Xid, or a device that fell off the bus."""
        self.spawn(self._notices.event(event))

    def _health_changed(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            self.spawn(self._tell_health(device))

    async def _tell_health(self, device: Device) -> None:
        """Tells watchers, and marks the allocations on a lost device as failed."""
        if await self._notices.health(device):
            making = [task for _, task in self._allocating.values()]  # may be on this device
            await asyncio.gather(*making, return_exceptions=True)
            await self.failures.mark_on(device.uuid, f"device {device.index} is lost")

    def helper_died(self, device_uuid: str, sentence: str) -> None:
        """A helper died whose tenants die with it: marks their allocations as failed."""
        log.error("helper died", message_id=Message.HELPER_DIED, device=device_uuid, why=sentence)
        self._parts.transitions.lost(device_uuid)
        self.spawn(self.failures.mark_on(device_uuid, sentence))

    def device_notice(self, device_uuid: str, sentence: str) -> None:
        """Sends watchers a notice about a device."""
        self.spawn(self._notices.notice(device_uuid, sentence))

    # --- the end

    async def close(self) -> None:
        """Waits for allocations, changes and releases under way; tenants stay as they are."""
        await self._background.close()
        while under_way := self._under_way():  # a task may have started another
            await asyncio.gather(*under_way, return_exceptions=True)
        self.lifetimes.close()
        self.store.close()
