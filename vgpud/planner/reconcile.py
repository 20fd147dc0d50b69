"""Decides, at the start of vgpud, the actions that make ledger and node agree. Pure.

The ledger has the desired state, the observation has the actual state. The actions are carried out in order.
If a crash interrupts them, the next start decides anew. Repeated starts converge to a state that needs no
action.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.device import Device, Health, Node, PlaceKey, Placement
from vgpud.model.tenancy import Allocation, Mode, Slice, State


class ActionKind(StrEnum):
    """The kinds of actions in the order of execution (the first three by allocation id): room is freed before
    missing parts are made again.
    """

    UNDO = "undo"  # release an allocation that was never committed
    FINISH = "finish"  # finish an interrupted release
    RELEASE = "release"  # release an allocation whose tenant has ended
    REMOVE_SPEC = "remove-spec"  # REMOVE_* and STOP_*: for orphans, which no allocation owns
    REMOVE_LEASE = "remove-lease"
    REMOVE_WALL = "remove-wall"  # remove the control group of a tenant that no longer exists
    STOP_MPS = "stop-mps"
    REMOVE_INSTANCE = "remove-instance"
    MARK_FAILED = "mark-failed"  # mark an allocation as failed that cannot be repaired
    REPAIR = "repair"  # make the missing parts of an allocation (steps.repair_steps)


@dataclass(frozen=True, slots=True, order=True)
class InstancePlace:
    """A MIG instance, identified by its place, because its ids change.

    `part` is empty for a GPU instance. For a compute instance, `part` has its key.
    """

    device_uuid: str
    profile_id: int
    placement: Placement
    part: tuple[PlaceKey, ...] = ()

    @property
    def key(self) -> PlaceKey:
        return self.profile_id, self.placement

    @property
    def gpu_instance(self) -> "InstancePlace":
        return InstancePlace(self.device_uuid, self.profile_id, self.placement)


@dataclass(frozen=True)
class Observed:
    """What vgpud observes of the node at its start. Allocations are named by id, devices by UUID.

    A `node` without devices means that NVML does not answer. `dead_lifetimes` are allocations bound to a
    process that has ended. `own_instances` are the MIG instances that vgpud made according to the ledger,
    whether or not they exist; vgpud does not change other instances. `walls` are the control groups that
    vgpud made, by allocation. `mps_daemons` are the UUIDs of the devices and MIG devices that have an MPS
    daemon.
    """

    node: Node
    leases: frozenset[str] = frozenset()
    specs: frozenset[str] = frozenset()
    walls: frozenset[str] = frozenset()
    mps_daemons: frozenset[str] = frozenset()
    dead_lifetimes: frozenset[str] = frozenset()
    boot_changed: bool = False
    own_instances: frozenset[InstancePlace] = frozenset()


class _World:
    """The observed state with indexes, so that ten thousand allocations can be looked up."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.devices = {device.uuid: device for device in observed.node.devices}
        self.instances = {device.uuid: _instances(device) for device in observed.node.devices}

    @property
    def has_unread_devices(self) -> bool:
        """Is there a device that does not answer? Its UUID may be unknown, so that it may be any device that
        seems to be missing.
        """
        return any(device.health in (Health.FAILED, Health.SILENT) for device in self.devices.values())

    def has(self, place: InstancePlace) -> bool:
        return place in self.instances.get(place.device_uuid, ())

    def answers(self, uuid: str) -> bool:
        """True if the device is present and NVML reads it, also if it is sick."""
        device = self.devices.get(uuid)
        return device is not None and device.health.answers


@dataclass(frozen=True, slots=True)
class Action:
    """One action. `subject` is the id of an allocation; for REMOVE_INSTANCE the UUID of a device, for
    STOP_MPS the UUID that the daemon serves.
    """

    kind: ActionKind
    subject: str
    reason: str
    instance: InstancePlace | None = None


def reconcile(ledgered: Iterable[Allocation], observed: Observed) -> tuple[Action, ...]:
    """The actions in order. No action is needed if ledger and node agree. No action is returned while NVML
    does not answer.

    UNDO, FINISH and RELEASE run steps.release_steps, which also stop a device's daemon and destroy the
    instances of the allocation. So these daemons and instances are not reported as orphans.
    """
    if not observed.node.devices:
        return ()
    world = _World(observed)
    going: list[Action] = []
    gone: list[Allocation] = []
    kept: list[Allocation] = []
    for allocation in sorted(ledgered, key=lambda allocation: allocation.id):
        action = _going(allocation, world)
        if action is None:
            kept.append(allocation)
        else:
            going.append(action)
            gone.append(allocation)
    ours = observed.own_instances | _places(kept) | _places(gone)
    keeping = [action for a in kept if (action := _keeping(a, world, ours)) is not None]
    keeping.sort(key=lambda action: action.kind is ActionKind.REPAIR)
    return (*going, *_orphans(kept, gone, world), *keeping)


def _going(allocation: Allocation, world: _World) -> Action | None:
    """The action that removes an allocation; None if the allocation stays."""
    if allocation.state is State.ALLOCATING:
        return _of(allocation, ActionKind.UNDO, "it was never committed")
    if allocation.state is State.RELEASING:
        return _of(allocation, ActionKind.FINISH, "its release was begun")
    why = _tenant_gone(allocation, world)
    return _of(allocation, ActionKind.RELEASE, why) if why else None


def _tenant_gone(allocation: Allocation, world: _World) -> str:
    """A sentence that says why the allocation's tenant has certainly ended; empty if the tenant may still
    run.
    """
    pid = allocation.request.lifetime.pid
    if allocation.id in world.observed.dead_lifetimes:
        return f"process {pid} that it was bound to is gone"
    if not world.observed.boot_changed:
        return ""
    if pid:
        return f"process {pid} that it was bound to did not outlive the reboot"
    if allocation.request.by_kubelet:
        return ""
    missing = _missing(allocation, world)
    return f"the reboot took its {' and '.join(missing)}" if missing else ""


def _keeping(allocation: Allocation, world: _World, ours: Set[InstancePlace]) -> Action | None:
    """The action for an allocation that stays; None if it needs none. An allocation that is being resized
    counts as active; a failed one needs no action.
    """
    if allocation.state is State.FAILED:
        return None
    for piece in allocation.slices:
        why = _unusable(piece, world, ours)
        if why:
            return _of(allocation, ActionKind.MARK_FAILED, why)
    if not all(world.answers(piece.device_uuid) for piece in allocation.slices):
        return None  # the state of the allocation's devices is unknown, and its tenants may run
    missing = _missing(allocation, world)
    if missing:
        return _of(allocation, ActionKind.REPAIR, f"missing: {' and '.join(missing)}")
    return None


def _unusable(piece: Slice, world: _World, ours: Set[InstancePlace]) -> str:
    """Returns why a slice cannot be repaired; empty if it can be."""
    device = world.devices.get(piece.device_uuid)
    if device is None:
        return "" if world.has_unread_devices else f"device {piece.device_uuid} is gone"
    if device.health is Health.LOST:
        why = f": {device.health_reason}" if device.health_reason else ""
        return f"device {device.index} is {device.health}{why}"
    place = _place(piece)
    if place is None or world.has(place):
        return ""
    inside = bool(place.part) and world.has(place.gpu_instance)
    for other in sorted(world.instances[device.uuid] - ours):
        if (
            _overlap_in(other, place)
            if inside
            else not other.part and _overlap(other.placement, place.placement)
        ):
            return (
                f"a MIG instance of others at memory slice {other.placement.start} of device "
                f"{device.index} lies where its own was"
            )
    return ""


def _overlap_in(other: InstancePlace, place: InstancePlace) -> bool:
    """True if two compute instances of one GPU instance overlap."""
    if not other.part or other.gpu_instance != place.gpu_instance:
        return False
    return _overlap(other.part[0][1], place.part[0][1])


def _missing(allocation: Allocation, world: _World) -> tuple[str, ...]:
    """The parts of an allocation that are missing on the node."""
    observed = world.observed
    missing = []
    if allocation.id not in observed.specs:
        missing.append("CDI file")
    if allocation.has_lease and allocation.id not in observed.leases:
        missing.append("lease")
    for piece in allocation.slices:
        if piece.mode is Mode.MPS and piece.target not in observed.mps_daemons:
            missing.append(f"MPS daemon on {_where(piece)}")
        place = _place(piece)
        if place is not None and not world.has(place):
            missing.append(f"MIG instance on device {piece.device_uuid}")
    return tuple(missing)


def _orphans(kept: list[Allocation], gone: list[Allocation], world: _World) -> Iterable[Action]:
    """Actions that remove orphans: instances, leases, specs and daemons of vgpud that no allocation owns."""
    observed = world.observed
    gone_ids = {allocation.id for allocation in gone}
    kept_ids = {allocation.id for allocation in kept}
    for name in sorted(observed.specs - kept_ids - gone_ids):
        yield Action(ActionKind.REMOVE_SPEC, name, "no allocation has this id")
    leased = {allocation.id for allocation in kept if allocation.has_lease}
    for name in sorted(observed.leases - leased - gone_ids):
        why = "its allocation has no preload slice" if name in kept_ids else "no allocation has this id"
        yield Action(ActionKind.REMOVE_LEASE, name, why)
    for name in sorted(observed.walls - kept_ids - gone_ids):
        yield Action(ActionKind.REMOVE_WALL, name, "no allocation has this id")
    served = _mps_targets(kept) | _mps_targets(gone)
    for uuid in sorted(observed.mps_daemons - served):
        yield Action(ActionKind.STOP_MPS, uuid, "no allocation is in mode mps there")
    for place in sorted(observed.own_instances - _places(kept) - _places(gone)):
        if world.answers(place.device_uuid):
            why = "no allocation holds it" if world.has(place) else "it is on record and does not exist"
            yield Action(ActionKind.REMOVE_INSTANCE, place.device_uuid, why, place)


def _of(allocation: Allocation, kind: ActionKind, reason: str) -> Action:
    return Action(kind, allocation.id, reason)


def _where(piece: Slice) -> str:
    if piece.mig is None:
        return f"device {piece.device_uuid}"
    return f"the MIG instance at memory slice {piece.mig.placement.start} of device {piece.device_uuid}"


def _mps_targets(allocations: Iterable[Allocation]) -> set[str]:
    return {
        piece.target for allocation in allocations for piece in allocation.slices if piece.mode is Mode.MPS
    }


def _places(allocations: Iterable[Allocation]) -> set[InstancePlace]:
    """The places of all MIG instances of the allocations: for a compute instance, its place and the place of
    its GPU instance.
    """
    places = [_place(piece) for allocation in allocations for piece in allocation.slices]
    return {one for place in places if place is not None for one in (place, place.gpu_instance)}


def _place(piece: Slice) -> InstancePlace | None:
    if piece.mig is None:
        return None
    part = () if piece.mig.compute_key is None else (piece.mig.compute_key,)
    return InstancePlace(piece.device_uuid, *piece.mig.key, part)


def _instances(device: Device) -> set[InstancePlace]:
    """The places of a device's GPU instances, and of the compute instances in divided ones."""
    found = {InstancePlace(device.uuid, *instance.key) for instance in device.mig.instances}
    for instance in device.mig.instances:
        parts = instance.compute_instances if instance.is_divided else ()
        found |= {
            InstancePlace(device.uuid, *instance.key, (one.key,)) for one in parts if one.key is not None
        }
    return found


def _overlap(a: Placement, b: Placement) -> bool:
    return a.start < b.start + b.size and b.start < a.start + a.size
