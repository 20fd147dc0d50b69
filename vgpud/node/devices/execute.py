"""Runs the steps of a plan, one after the other. Each step is idempotent.

`fault(point)` is called after each step. Tests crash the daemon there; its next start must converge,
whichever step was the last.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vgpud.inject.specs import Specs
from vgpud.model.device import Device, PlaceKey
from vgpud.model.lifecycle import Change
from vgpud.model.plan import Step, StepKind
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice, State
from vgpud.modes.base import Effector
from vgpud.modes.mig import MigMode
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.transitions import Transitions, lost_is_left
from vgpud.node.store.allocations import AllocationStore, slices_sentence
from vgpud.planner.use import is_open_to_others

FaultHook = Callable[[str], None]


class Executor:
    def __init__(
        self,
        store: AllocationStore,
        inventory: Inventory,
        transitions: Transitions,
        effectors: Mapping[Mode, Effector],
        mig: MigMode | None,
        specs: Specs,
        engines: Engines,
        fault: FaultHook,
    ) -> None:
        self._store = store
        self._inventory = inventory
        self._transitions = transitions
        self._effectors = effectors
        self._mig = mig
        self._stack = Stack(store, effectors)
        self._specs = specs
        self._engines = engines
        self._fault = fault
        # called when a slice or a mode has left a device; the bool: was it a MIG slice?
        self.left: Callable[[str, bool], None] = lambda device_uuid, was_mig: None

    async def run(self, verb: str, allocation: Allocation, steps: Sequence[Step]) -> Allocation:
        """Runs all steps in order; returns the resulting allocation."""
        for step in steps:
            allocation = await self._step(allocation, step)
            self._fault(f"{verb}.{step.fault_point}")
        return allocation

    async def _step(self, allocation: Allocation, step: Step) -> Allocation:
        match step.kind:
            case StepKind.RECORD_INTENT:
                made = allocation.state is State.ALLOCATING
                await self._store.begin(allocation, Change.ALLOCATE if made else Change.RELEASE)
            case StepKind.APPLY_MODE | StepKind.UNAPPLY_MODE:
                await self._change_mode(step)
            case StepKind.CLEAR_INSTANCE:
                await self._clear_instance(step)
            case StepKind.ATTACH:
                return await self._attach(allocation, _part(allocation, step))
            case StepKind.DETACH:
                await self._detach(allocation, _part(allocation, step))
            case StepKind.CHOOSE_ENGINE:
                await self._engines.settle(step.device_uuid)
            case StepKind.WRITE_SPEC:
                await self._specs.write(allocation)
            case StepKind.REMOVE_SPEC:
                await self._specs.remove(allocation.id)
            case StepKind.COMMIT | StepKind.COMMIT_SUSPENDED:
                return await self._commit(allocation)
            case StepKind.FORGET:
                await self._store.forget(allocation)
                for uuid, was_mig in {(part.device_uuid, part.mig is not None) for part in allocation.slices}:
                    self.left(uuid, was_mig)
        return allocation

    async def _change_mode(self, step: Step) -> None:
        assert step.mode is not None
        if step.kind is StepKind.APPLY_MODE:
            await self._transitions.ensure(step.device_uuid, step.mode)
        else:
            await self._transitions.release(step.device_uuid, step.mode)
            self.left(step.device_uuid, False)

    async def _clear_instance(self, step: Step) -> None:
        assert self._mig is not None
        assert step.move is not None
        await self._mig.unmake(step.device_uuid, (step.move.profile_id, step.move.source))
        await self._inventory.refresh()

    async def _attach(self, allocation: Allocation, part: Slice) -> Allocation:
        if not is_open_to_others(allocation, part):
            await self._transitions.ensure(part.device_uuid, part.device_mode)
        device = self._inventory.device(part.device_uuid)
        attach = self._stack.attach if part.is_on_top else self._effectors[part.mode].attach
        done, edits = await attach(allocation, part, device)
        attached = replace(
            allocation,
            slices=tuple(done if s is part else s for s in allocation.slices),
            edits=allocation.edits.merged(edits),
        )
        self._store.amend(attached)
        if part.mig is not None:
            await self._inventory.refresh()
        return attached

    async def _detach(self, allocation: Allocation, part: Slice) -> None:
        with lost_is_left():
            detach = self._stack.detach if part.is_on_top else self._effectors[part.mode].detach
            await detach(allocation, part)
        if part.mig is not None:
            await self._inventory.refresh()

    async def _commit(self, allocation: Allocation) -> Allocation:
        """Records the outcome of a plan: a new allocation becomes active or suspended, a repaired one keeps
        its state.
        """
        workload = str(allocation.request.workload)
        sentence = f"{slices_sentence(allocation)} for uid {allocation.request.owner.uid}"
        sentence += f", of {workload}" if workload else ""
        if allocation.starts_suspended:
            outcome = replace(allocation, state=State.SUSPENDED)
            sentence += "; it starts suspended, because the device has no room for all of its tenants"
            return await self._store.commit(outcome, Change.ALLOCATED_SUSPENDED, sentence)
        if allocation.state is State.ALLOCATING:
            return await self._store.commit(
                replace(allocation, state=State.ACTIVE), Change.ALLOCATED, sentence
            )
        return await self._store.commit(allocation, Change.REPAIRED, sentence)


def _part(allocation: Allocation, step: Step) -> Slice:
    assert step.slice_ordinal is not None
    return allocation.slices[step.slice_ordinal]


_Place = tuple[str, PlaceKey, PlaceKey | None]


class Stack:
    """Makes and removes slices that share a MIG instance: attach makes the instance and then the slice,
    detach reverses that.

    The instance is made for the first slice and destroyed with the last. For this reason attach and detach on
    one instance never run concurrently.
    """

    def __init__(self, store: AllocationStore, effectors: Mapping[Mode, Effector]) -> None:
        self._store = store
        self._effectors = effectors
        self._locks: dict[_Place, asyncio.Lock] = {}

    def _lock(self, part: Slice) -> asyncio.Lock:
        return self._locks.setdefault(_place(part), asyncio.Lock())

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        """Makes the MIG instance and the slice in it: see Effector.attach. The book gets the ids of the
        instance before the slice's own mode (preload or mps) makes the slice.
        """
        async with self._lock(part):
            on, _ = await self._effectors[Mode.MIG].attach(allocation, part, device)
            known = replace(allocation, slices=tuple(on if s is part else s for s in allocation.slices))
            self._store.amend(known)
            return await self._effectors[part.mode].attach(known, on, device)

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        async with self._lock(part):
            await self._effectors[part.mode].detach(allocation, part)
            staying = self._store.book.slices_on(part.device_uuid)
            if not any(_place(other) == _place(part) for other in staying):
                await self._effectors[Mode.MIG].detach(allocation, part)


def _place(part: Slice) -> _Place:
    """The place of the slice's MIG instance. Instance ids are not used, because they change when the instance
    is made anew.
    """
    assert part.mig is not None
    return part.device_uuid, *part.mig.place
