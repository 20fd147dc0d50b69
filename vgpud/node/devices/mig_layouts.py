"""Shows, plans and applies layouts of MIG devices, and reconciles devices with their layouts at every start.

The desired layouts are recorded before the first change. If a change of a device fails, its record and those
of the devices after it return to the earlier layouts, and vgpud reconciles these devices with them. An
interrupted change is finished at the next start.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from vgpud import audit
from vgpud.model.device import Device, Health
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind
from vgpud.model.log_event import LogEvent
from vgpud.model.mig_view import MigChange, MigDevice, MigPlan, MigTarget
from vgpud.model.tenancy import Allocation, Mode, Reason, Selector, State
from vgpud.modes.mig import MigMode
from vgpud.modes.mig_records import Applied, Key
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.mig_holders import Holders
from vgpud.node.devices.mig_pools import Pools
from vgpud.node.devices.transitions import Transitions
from vgpud.node.store.allocations import AllocationStore
from vgpud.planner.mig_converge import towards
from vgpud.planner.mig_plan import DevicePlan, Do, MigStep, plan_defrag, plan_device
from vgpud.planner.reconcile import InstancePlace
from vgpud.planner.select import selector_error, selects
from vgpud.policy.load import LoadedPolicy

log = structlog.get_logger(__name__)

FaultHook = Callable[[str], None]


class MigLayouts:
    def __init__(
        self,
        mig: MigMode,
        inventory: Inventory,
        store: AllocationStore,
        transitions: Transitions,
        policy: Callable[[], LoadedPolicy],
        fault: FaultHook,
    ) -> None:
        self._mig = mig
        self._inventory = inventory
        self._store = store
        self._book = store.book
        self._transitions = transitions
        self._fault = fault
        self.pools = Pools(mig.records, inventory, self._book, policy)
        self.holders = Holders(self._book, self.pools)
        self._one_at_a_time = asyncio.Lock()
        self._converging: dict[str, asyncio.Lock] = {}

    # --- queries

    async def devices(self) -> tuple[MigDevice, ...]:
        await self._inventory.refresh()
        return tuple(self.holders.device(d) for d in self._inventory.node.devices if d.mig.capable)

    def explained(self, refusal: VgpuError, reasons: Sequence[Reason]) -> VgpuError:
        """A refusal for lack of capacity, with what uses the instances as added details. Other refusals are
        returned unchanged.
        """
        if refusal.code is not ErrorCode.NO_CAPACITY:
            return refusal
        asked = {reason.device_uuid for reason in reasons if reason.mode is Mode.MIG}
        held = tuple(
            self.holders.sentence_of(device, instance)
            for device in self._inventory.node.devices
            if device.uuid in asked
            for instance in self.holders.instances(device)
            if instance.allocation_id or instance.processes or not instance.own
        )
        return replace(refusal, details=refusal.details + held) if held else refusal

    def own_instances(self) -> frozenset[InstancePlace]:
        """Instances that vgpud made and that belong to no layout. Without an allocation such an instance is
        an orphan.
        """
        found: set[InstancePlace] = set()
        for device in self._inventory.node.devices:
            keys = self._mig.records.own(device.uuid) - (self.pools.layout(device) or frozenset())
            parts = self._mig.records.own_parts(device.uuid) - self.pools.computes(device)
            found |= {InstancePlace(device.uuid, *key) for key in keys}
            found |= {InstancePlace(device.uuid, *key, (part,)) for key, part in parts}
        return frozenset(found)

    async def remove(self, place: InstancePlace) -> None:
        """Removes an orphaned instance that vgpud made, or the record of an instance that no longer exists.

        Does nothing if the instance was allocated or became part of a layout since it was observed.
        """
        async with self._one_at_a_time:
            if self._is_held(place) or place not in self.own_instances():
                return
            if place.part:
                await self._mig.unmake_part(place.device_uuid, (place.key, place.part[0]))
            else:
                await self._mig.unmake(place.device_uuid, place.key)

    def _is_held(self, place: InstancePlace) -> bool:
        """True if an allocation holds the instance, or a compute instance in it."""
        held = self._book.use_of(place.device_uuid).mig
        if place.part:
            return any(mig.place in ((place.key, place.part[0]), (place.key, None)) for mig in held)
        return any(mig.key == place.key for mig in held)

    # --- plan

    def plans(self, targets: Sequence[MigTarget]) -> tuple[DevicePlan, ...]:
        """A plan for each device, from its present state to the requested layout. Raises VgpuError for an
        impossible layout, a selector that matches no device, or a plan that the policy forbids.
        """
        found: dict[str, DevicePlan] = {}
        for target in targets:
            for device in self._selected(target.selector):
                use = self._book.use_of(device.uuid)
                plan = plan_device(device, use, self.pools.pool(device), target.layout)
                self._check_policy(plan)
                found[device.uuid] = plan
        return tuple(sorted(found.values(), key=lambda plan: plan.device.index))

    def _selected(self, selector: Selector) -> list[Device]:
        node = self._inventory.node
        chosen = tuple(device for device in node.devices if selects(selector, device))
        error = selector_error(selector, node, chosen)
        if error is not None:
            raise error
        if selector.uuids or selector.indices:
            return list(chosen)
        mine = (d for d in chosen if self.pools.rule(d).allows(Mode.MIG))
        return [d for d in mine if d.mig.capable and d.mig.profiles]

    def _check_policy(self, plan: DevicePlan) -> None:
        """Raises VgpuError(DENIED_BY_POLICY) for a plan that the policy forbids."""
        rule, index = self.pools.rule(plan.device), plan.device.index
        if not rule.allows(Mode.MIG):
            why = f"the policy gives device {index} the mode {rule.mode}"
        elif not self.pools.settings(plan.device).change_mode and any(
            step.do in (Do.ENABLE, Do.DISABLE) for step in plan.steps
        ):
            why = f"the policy does not let MIG mode of device {index} be switched (mig.change_mode)"
        else:
            return
        raise VgpuError(ErrorCode.DENIED_BY_POLICY, why, "change the policy, or name another device")

    def defrag_plans(self, selector: Selector) -> tuple[DevicePlan, ...]:
        devices = [d for d in self._selected(selector) if d.mig.current]
        return tuple(plan_defrag(d, self._book.use_of(d.uuid), self.pools.pool(d)) for d in devices)

    def refusal(self, plans: Sequence[DevicePlan]) -> VgpuError | None:
        """The error that names the allocations and processes which block the plans; None if nothing blocks
        them.
        """
        stuck = [plan for plan in plans if not plan.possible]
        if not stuck:
            return None
        lines = tuple(line for plan in stuck for line in self._in_the_way(plan))
        devices = ", ".join(str(plan.device.index) for plan in stuck)
        return VgpuError(
            ErrorCode.DEVICE_IN_USE,
            f"device {devices} cannot have this layout now: {lines[0]}",
            "release what is named, or take a layout that leaves it where it is",
            lines,
        )

    def _in_the_way(self, plan: DevicePlan) -> list[str]:
        if plan.obstacle:
            return [plan.obstacle]
        return [self.holders.sentence(plan.device, key) for key in plan.blockers]

    def shown(self, plans: Sequence[DevicePlan]) -> MigPlan:
        refusal = self.refusal(plans)
        if refusal is not None:
            return MigPlan(refusal=refusal)
        return MigPlan(tuple(_change(plan.device, step) for plan in plans for step in plan.steps))

    async def preview(self, targets: Sequence[MigTarget]) -> MigPlan:
        """The plan that `apply` would carry out now."""
        await self._inventory.refresh()
        return self.shown(self.plans(targets))

    async def preview_defrag(self, selector: Selector) -> MigPlan:
        await self._inventory.refresh()
        return self.shown(self.defrag_plans(selector))

    # --- apply

    async def apply(self, targets: Sequence[MigTarget]) -> MigPlan:
        """Applies layouts. Raises VgpuError(DEVICE_IN_USE), which names what uses the instances; nothing is
        changed then. If a step fails, raises the error of the step. The device and those whose turn has not
        come return to their earlier layouts; those before it keep the new ones.
        """
        async with self._one_at_a_time:
            await self._inventory.refresh()
            return await self._carry_out(self.plans(targets))

    async def defrag(self, selector: Selector) -> MigPlan:
        async with self._one_at_a_time:
            await self._inventory.refresh()
            return await self._carry_out(tuple(p for p in self.defrag_plans(selector) if p.steps))

    async def _carry_out(self, plans: tuple[DevicePlan, ...]) -> MigPlan:
        with audit.change("MIG layout", device=",".join(plan.device.uuid for plan in plans)):
            return await self._checked(plans)

    async def _checked(self, plans: tuple[DevicePlan, ...]) -> MigPlan:
        refusal = self.refusal(plans)
        if refusal is not None:
            raise refusal
        before = {plan.device.uuid: self.pools.applied(plan.device.uuid) for plan in plans}
        # From here on, requests are decided by the new layouts.
        wanted = {plan.device.uuid: _applied(plan) for plan in plans}
        self.pools.intended.update(wanted)
        try:
            await self._record(wanted)
        except VgpuError:
            self.pools.intended.update(before)
            await self._record(before)
            raise
        finally:
            for uuid in wanted:
                self.pools.intended.pop(uuid, None)
        for number, plan in enumerate(plans):
            try:
                await self._run(plan)
            except VgpuError as error:
                await self._take_back(tuple(p.device for p in plans[number:]), before, error)
                raise
        return self.shown(plans)

    async def _record(self, layouts: Mapping[str, Applied | None]) -> None:
        for uuid, layout in layouts.items():
            await self._mig.records.apply(uuid, layout)
            self._fault("mig-apply.record-intent")

    async def _run(self, plan: DevicePlan) -> None:
        for number, step in enumerate(plan.steps, 1):
            await self._do(step)
            self._fault(f"mig-apply.{step.fault_point}")
            where = f"MIG step {number} of {len(plan.steps)}"
            await self._tell(plan.device, f"{where}: {step.words}")
        if plan.steps:
            await self._inventory.refresh()

    async def _take_back(
        self, devices: Sequence[Device], before: Mapping[str, Applied | None], why: VgpuError
    ) -> None:
        for device in devices:
            await self._mig.records.apply(device.uuid, before[device.uuid])
        for device in devices:
            await self.converge_device(device.uuid)
            await self._tell(device, f"MIG layout not applied, {why.sentence}")

    async def _do(self, step: MigStep) -> None:
        uuid = step.device_uuid
        if step.do is Do.ENABLE:
            self._transitions.lost(uuid)  # another program may have switched MIG mode off
            await self._transitions.ensure(uuid, Mode.MIG)
        elif step.do in (Do.DISABLE, Do.RELEASE):
            await self._leave_mig(uuid, off=step.do is Do.DISABLE)
        elif step.do is Do.CREATE:
            assert step.key is not None
            if step.part is not None:
                await self._mig.make_part(uuid, (step.key, step.part))
            else:
                await self._mig.make(uuid, step.key)
        else:
            assert step.key is not None
            await self._destroy(uuid, step.key, step.part)

    async def _leave_mig(self, device_uuid: str, off: bool) -> None:
        if off:
            await self._mig.switch_off(device_uuid)
        await self._transitions.release(device_uuid, Mode.MIG)

    async def _destroy(self, device_uuid: str, key: Key, part: Key | None) -> None:
        """Destroys an instance. Raises VgpuError(DEVICE_IN_USE) if the instance is in use now, for example
        because it was allocated since the plan was made.
        """
        device = self._inventory.device(device_uuid)
        held = self._is_held(InstancePlace(device_uuid, key[0], key[1], () if part is None else (part,)))
        if part is None:
            gone = not held and await self._mig.unmake(device_uuid, key)
            there = not gone and await self._mig.is_there(device_uuid, key)
        else:
            gone = not held and await self._mig.unmake_part(device_uuid, (key, part))
            there = not gone and await self._mig.is_part_there(device_uuid, (key, part))
        if there:
            raise VgpuError(
                ErrorCode.DEVICE_IN_USE,
                self.holders.sentence(device, key),
                "plan again: see 'vgpuctl mig plan'",
            )

    async def _tell(self, device: Device, sentence: str) -> None:
        words = f"device {device.index}: {sentence}"
        await self._store.notice(EventKind.DEVICE_CHANGED, device.uuid, words)
        audit.did(sentence)

    # --- reconcile

    async def stale(self) -> tuple[str, ...]:
        """Ids of active allocations whose CDI edits are out of date, because the MIG instance was made anew
        or the driver changed.
        """
        found = []
        for allocation in tuple(self._book):
            if allocation.state is State.ACTIVE and await self._is_stale(allocation):
                found.append(allocation.id)
        return tuple(found)

    async def _is_stale(self, allocation: Allocation) -> bool:
        for part in allocation.slices:
            device = self._inventory.node.device(part.device_uuid)
            if part.mig is None or device is None:
                continue
            try:
                if await self._mig.is_stale(allocation, part, device):
                    return True
            except VgpuError as error:
                log.warning(
                    LogEvent.MIG_CONTAINER_EDITS_NOT_CHECKED, allocation=allocation.id, why=str(error)
                )
        return False

    def waits(self, device_uuid: str) -> bool:
        """True if the device is idle, and has a desired MIG layout or is unmanaged. A slice that has left may
        have blocked a change to the desired state.
        """
        device = self._inventory.node.device(device_uuid)
        if device is None or not device.mig.capable or self._book.use_of(device.uuid).count:
            return False
        is_desired = self.pools.is_off(device) or self.pools.layout(device) is not None
        return is_desired or self.pools.rule(device).mode == Mode.UNMANAGED.value

    async def converge(self) -> None:
        """Reconciles healthy devices with their desired layouts. Changes that tenants block are left out."""
        for device in self._inventory.node.devices:
            if device.mig.capable and device.health is Health.OK:
                await self.converge_device(device.uuid)

    async def converge_device(self, device_uuid: str) -> None:
        """Reconciles one device with its desired layout. A failed step is logged, and tried again at the next
        reconciliation, for example when a slice leaves the device. Does nothing if the device has left the
        node.
        """
        async with self._converging.setdefault(device_uuid, asyncio.Lock()):
            await self._inventory.refresh()
            device = self._inventory.node.device(device_uuid)
            if device is not None:
                await self._converge(device)

    async def _converge(self, device: Device) -> None:
        plan = self._missing(device)
        for step in plan:
            try:
                await self._do(step)
            except VgpuError as error:
                log.error(
                    LogEvent.MIG_LAYOUT_STEP_FAILED, device=device.uuid, step=step.words, why=str(error)
                )
                if step.do is Do.ENABLE:
                    break
            else:
                audit.automatic("MIG layout", step.reason, device=device.uuid, step=step.words)
            self._fault(f"mig-converge.{step.fault_point}")
        if plan:
            await self._inventory.refresh()

    def _missing(self, device: Device) -> tuple[MigStep, ...]:
        """The steps to the desired layout, without those that a tenant blocks."""
        use = self._book.use_of(device.uuid)
        rule = self.pools.rule(device)
        if rule.mode == Mode.UNMANAGED.value:
            return self._hand_back(device) if not use.count else ()
        if use.mode not in (None, Mode.MIG) or not device.mig.profiles:
            return ()
        if self.pools.is_off(device):
            plan = plan_device(device, use, self.pools.pool(device), ("off",))
            return plan.steps if plan.possible else ()
        layout = self.pools.layout(device)
        if layout is None:
            return self._spare(device)
        return towards(device, use, self.pools.pool(device), layout)

    def _spare(self, device: Device) -> tuple[MigStep, ...]:
        """The steps for a device without a desired layout: they remove idle instances that vgpud made, and
        then release MIG mode.
        """
        plan = plan_device(device, self._book.use_of(device.uuid), self.pools.pool(device), ("auto",))
        own = self.pools.pool(device).own
        return tuple(step for step in plan.steps if step.do is Do.DESTROY or (own and step.do is Do.RELEASE))

    def _hand_back(self, device: Device) -> tuple[MigStep, ...]:
        if not self._mig.changed(device.uuid):
            return ()
        return (MigStep(Do.RELEASE, device.uuid, "the policy leaves the device unmanaged"),)


def _applied(plan: DevicePlan) -> Applied | None:
    if plan.off:
        return Applied(off=True)
    return None if plan.layout is None else Applied(instances=plan.layout, computes=plan.computes)


def _change(device: Device, step: MigStep) -> MigChange:
    place = None if step.key is None else step.key[1]
    part = None if step.part is None else step.part[1]
    return MigChange(device.uuid, device.index, step.do.value, step.profile_name, place, step.reason, part)
