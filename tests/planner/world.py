"""A small model of the node outside of vgpud's ledger. Plans and faults change it step by step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from vgpud.model.device import Device, GpuInstance, Health, Mig
from vgpud.model.plan import Step, StepKind
from vgpud.model.tenancy import Allocation, Mode, Slice, State
from vgpud.planner.reconcile import Action, ActionKind, InstancePlace, Observed, reconcile
from vgpud.planner.steps import allocate_steps, release_steps, repair_steps
from vgpud.planner.use import use_of

from .cards import h200, node_of

Change = Callable[[], None]


def place_of(piece: Slice) -> InstancePlace:
    assert piece.mig is not None
    return InstancePlace(piece.device_uuid, piece.mig.profile_id, piece.mig.placement)


@dataclass
class World:
    """The model: the ledger, the parts of allocations that exist, and the devices that are lost."""

    ledger: dict[str, Allocation] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    specs: set[str] = field(default_factory=set)
    daemons: set[str] = field(default_factory=set)
    walls: set[str] = field(default_factory=set)
    instances: set[InstancePlace] = field(default_factory=set)
    foreign: set[InstancePlace] = field(default_factory=set)
    records: set[InstancePlace] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    rebooted: bool = False

    def devices(self) -> Iterator[Device]:
        for i in range(3):
            device = h200(i)
            if device.uuid in self.absent:
                continue
            if device.uuid in self.lost:
                yield replace(device, health=Health.LOST)
                continue
            here = sorted(p for p in self.instances | self.foreign if p.device_uuid == device.uuid)
            instances = tuple(
                GpuInstance(n, p.profile_id, p.placement, ()) for n, p in enumerate(here, start=1)
            )
            on = bool(instances)
            yield replace(device, mig=Mig(True, on, on, device.mig.profiles, instances))

    def observed(self) -> Observed:
        return Observed(
            node=node_of(*self.devices()),
            leases=frozenset(self.leases),
            specs=frozenset(self.specs),
            mps_daemons=frozenset(self.daemons),
            walls=frozenset(self.walls),
            dead_lifetimes=frozenset(self.dead & set(self.ledger)),
            boot_changed=self.rebooted,
            own_instances=frozenset(self.records),
        )

    def reconcile(self) -> tuple[Action, ...]:
        return reconcile(self.ledger.values(), self.observed())

    def allocating(self, allocation: Allocation) -> list[Change]:
        """Returns the single changes of an Allocate, in order."""
        steps = allocate_steps(allocation.slices, use_of(self.ledger.values()))
        return [change for step in steps for change in self._changes(step, allocation, State.ALLOCATING)]

    def releasing(self, allocation: Allocation) -> list[Change]:
        steps = release_steps(allocation, use_of(self.ledger.values()))
        return [change for step in steps for change in self._changes(step, allocation, State.RELEASING)]

    def changes(self, action: Action) -> list[Change]:
        """Returns the single changes of an action. They are computed when the action begins."""
        name, place = action.subject, action.instance
        match action.kind:
            case ActionKind.UNDO | ActionKind.FINISH | ActionKind.RELEASE:
                return self.releasing(self.ledger[name])
            case ActionKind.REPAIR:
                allocation = self.ledger[name]
                steps = repair_steps(allocation)
                return [c for step in steps for c in self._changes(step, allocation, State.ACTIVE)]
            case ActionKind.MARK_FAILED:
                return [lambda: self._record(self.ledger[name], State.FAILED)]
            case ActionKind.REMOVE_SPEC:
                return [lambda: self.specs.remove(name)]
            case ActionKind.REMOVE_LEASE:
                return [lambda: self.leases.remove(name)]
            case ActionKind.REMOVE_WALL:
                return [lambda: self.walls.remove(name)]
            case ActionKind.STOP_MPS:
                return [lambda: self.daemons.remove(name)]
            case ActionKind.REMOVE_INSTANCE:
                assert place is not None
                return [lambda: self.instances.discard(place), lambda: self.records.remove(place)]

    def _changes(self, step: Step, allocation: Allocation, intent: State) -> list[Change]:
        name = allocation.id
        piece = None if step.slice_ordinal is None else allocation.slices[step.slice_ordinal]
        match step.kind:
            case StepKind.RECORD_INTENT:
                return [lambda: self._record(allocation, intent)]
            case StepKind.APPLY_MODE if step.mode is Mode.MPS:
                return [lambda: self.daemons.add(step.device_uuid)]
            case StepKind.UNAPPLY_MODE if step.mode is Mode.MPS:
                return [lambda: self.daemons.discard(step.device_uuid)]
            case StepKind.ATTACH if piece is not None:
                return self._attach(name, piece)
            case StepKind.DETACH if piece is not None:
                return self._detach(name, piece)
            case StepKind.WRITE_SPEC:
                return [lambda: self.specs.add(name)]
            case StepKind.REMOVE_SPEC:
                return [lambda: self.specs.discard(name)]
            case StepKind.COMMIT:
                return [lambda: self._record(allocation, State.ACTIVE)]
            case StepKind.FORGET:
                return [lambda: self._forget(name)]
        return []

    def _attach(self, name: str, piece: Slice) -> list[Change]:
        if piece.mode is Mode.PRELOAD:
            return [lambda: self.leases.add(name)]
        if piece.mode is Mode.MIG:
            place = place_of(piece)
            return [lambda: self.records.add(place), lambda: self.instances.add(place)]
        return []

    def _detach(self, name: str, piece: Slice) -> list[Change]:
        if piece.mode is Mode.PRELOAD:
            return [lambda: self.leases.discard(name)]
        if piece.mode is Mode.MIG:
            place = place_of(piece)
            return [lambda: self.instances.discard(place), lambda: self.records.discard(place)]
        return []

    def _record(self, allocation: Allocation, state: State) -> None:
        self.ledger[allocation.id] = replace(allocation, state=state)

    def _forget(self, name: str) -> None:
        del self.ledger[name]

    def reboot(self) -> None:
        """Removes what a reboot removes: leases, specs, MPS daemons and MIG instances."""
        self.rebooted = True
        self.leases.clear()
        self.specs.clear()
        self.daemons.clear()
        self.instances.clear()
        self.foreign.clear()

    def check_agreement(self) -> None:
        """Asserts that each active allocation has its parts, and that no other lease, spec, MPS daemon or MIG
        instance is left.
        """
        usable = {device.uuid for device in self.devices() if device.health is Health.OK}
        for allocation in self.ledger.values():
            assert allocation.state in (State.ACTIVE, State.FAILED)
            assert allocation.id not in self.dead
            if allocation.state is State.ACTIVE:
                self._check_real(allocation, usable)
        pieces = [piece for allocation in self.ledger.values() for piece in allocation.slices]
        places = {place_of(piece) for piece in pieces if piece.mig is not None}
        assert self.specs <= set(self.ledger)
        assert self.leases <= {a.id for a in self.ledger.values() if a.has_lease}
        assert self.daemons <= {piece.device_uuid for piece in pieces if piece.mode is Mode.MPS}
        assert {p for p in self.instances if p.device_uuid in usable} <= places
        assert {p for p in self.records if p.device_uuid in usable} <= places

    def _check_real(self, allocation: Allocation, usable: set[str]) -> None:
        assert allocation.id in self.specs
        assert not allocation.has_lease or allocation.id in self.leases
        for piece in allocation.slices:
            assert piece.device_uuid in usable
            assert piece.mode is not Mode.MPS or piece.device_uuid in self.daemons
            assert piece.mig is None or place_of(piece) in self.instances
