"""Checks moves of tenants to other devices, and plans the steps of a move and of the way back. Pure.

A moving slice names both devices and holds room on both. Until the step RECORD_MOVE, `device_uuid` is the old
device, and the next start of vgpud undoes an interrupted move. From RECORD_MOVE on, `device_uuid` is the new
device, and the next start finishes the move. In both cases the same steps bring the tenant to `device_uuid`.

A suspended tenant has no memory to move. Its record keeps the device from which each process was saved. A
suspended tenant holds no room on its devices except for memory that libvgpu could not evict, and must find
room when it is resumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vgpud.model.device import Device, Health, Link, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.plan import Step, StepKind
from vgpud.model.quantity import GIB, counted
from vgpud.model.tenancy import Allocation, Mode, Slice
from vgpud.planner.locality import DISTANCE
from vgpud.planner.places import on_record
from vgpud.planner.steps import choose_engines
from vgpud.planner.suspend import check_mode, is_away
from vgpud.planner.terms import Terms
from vgpud.planner.use import EMPTY, DeviceUse, is_open_to_others
from vgpud.planner.words import shown_bytes, shown_share

# First driver branch in which a restore accepts GPU pairs: CUDA driver API, "CUDA checkpointing".
MOVE_BRANCH = 580


def check_movable(allocation: Allocation, node: Node) -> None:
    """Checks that the driver and the allocation support a move. Raises VgpuError(UNSUPPORTED)."""
    check_mode(allocation, "moved")
    branch = node.driver_version.split(".")[0]
    if not branch.isdigit() or int(branch) < MOVE_BRANCH:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"driver {node.driver_version or 'of unknown version'} cannot restore a process on other devices",
            f"branch {MOVE_BRANCH} is the first that can do it",
        )
    if allocation.request.by_kubelet:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} is a pod's: the kubelet records its device itself",
            "delete the pod, and let it be scheduled anew",
        )


def ends_of(allocation: Allocation, to: Sequence[str], source: str = "") -> tuple[str, ...]:
    """The target device of each slice: the devices of `to` in order; or, with `source`, the only device of
    `to` for the slice on `source`.

    Raises VgpuError(BAD_REQUEST).
    """
    now = tuple(part.device_uuid for part in allocation.slices)
    if source and source not in now:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"allocation {allocation.id} has no slice on device {source}",
            f"see 'vgpuctl show {allocation.id}'",
        )
    if source and len(to) == 1:
        to = [to[0] if uuid == source else uuid for uuid in now]
    if len(to) != len(now):
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{counted(len(to), 'device')} named for the {counted(len(now), 'slice')} of {allocation.id}",
            "name as many devices as it has slices, or one with --from the device that it is to leave",
        )
    going = [(old, new) for old, new in zip(now, to, strict=True) if old != new]
    if len(set(to)) < len(to) or any(new in now for _, new in going):
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"two slices of allocation {allocation.id} would be on one device, during the move or after it",
            "name distinct devices; to exchange two slices, move one to a third device first",
        )
    return tuple(to)


def going(
    allocation: Allocation,
    to: Sequence[str],
    node: Node,
    use: Mapping[str, DeviceUse],
    terms: Mapping[str, Terms],
    closed: Mapping[str, str],
) -> tuple[Slice, ...]:
    """The slices of the allocation with the target device of each. `use` counts present allocations; `closed`
    maps devices that accept no tenant to the reason. Raises VgpuError: NO_SUCH_DEVICE, GPU_LOST, UNSUPPORTED,
    DENIED_BY_POLICY, DEVICE_IN_USE, NO_CAPACITY.
    """
    return tuple(
        part
        if part.device_uuid == uuid
        else _going(allocation, part, uuid, node, use.get(uuid, EMPTY), terms, closed)
        for part, uuid in zip(allocation.slices, to, strict=True)
    )


def _going(
    allocation: Allocation,
    part: Slice,
    uuid: str,
    node: Node,
    use: DeviceUse,
    terms: Mapping[str, Terms],
    closed: Mapping[str, str],
) -> Slice:
    there = node.device(uuid)
    if there is None:
        raise VgpuError(ErrorCode.NO_SUCH_DEVICE, f"this node has no device {uuid}", "see 'vgpuctl devices'")
    _check_device(allocation, part, node.device(part.device_uuid), there)
    if uuid in closed:
        sentence = f"device {there.index} accepts no tenant: {closed[uuid]}"
        raise VgpuError(ErrorCode.NO_CAPACITY, sentence, _OTHER)
    if terms[uuid].fixed not in (None, part.mode):
        raise VgpuError(
            ErrorCode.DENIED_BY_POLICY,
            f"the policy keeps device {there.index} in mode {terms[uuid].fixed}, and {allocation.id} needs "
            f"mode {part.mode}",
            _OTHER,
        )
    conflict = use.conflict(part, there.index, allocation.id)
    if conflict and not is_open_to_others(allocation, part):
        raise VgpuError(ErrorCode.DEVICE_IN_USE, conflict, _OTHER)
    if is_away(allocation):  # memory and share of a suspended tenant are checked when it is resumed
        _check_room(part, there, replace(use, memory_bytes=0, share_hundredths=0), terms[uuid])
        _check_size(part, there)
    else:
        _check_room(part, there, use, terms[uuid])
    return replace(part, other_uuid=uuid)


_OTHER = "name another device, see 'vgpuctl devices'"


def _check_device(allocation: Allocation, part: Slice, here: Device | None, there: Device) -> None:
    if here is None or not here.health.answers:
        raise VgpuError(
            ErrorCode.GPU_LOST,
            f"device {part.device_uuid} is missing or does not answer",
            "see 'vgpuctl devices'",
        )
    if there.health is not Health.OK:
        raise VgpuError(
            ErrorCode.GPU_LOST, f"device {there.index} is {there.health}: no tenant can move to it", _OTHER
        )
    if there.mig.current or there.mig.pending:
        raise VgpuError(
            ErrorCode.UNSUPPORTED, f"device {there.index} is in MIG mode, where no tenant can move", _OTHER
        )
    if kind_of(here) != kind_of(there):
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} cannot move from {here.name} of "
            f"{shown_bytes(here.memory_total_bytes)} to device {there.index}, which is {there.name} of "
            f"{shown_bytes(there.memory_total_bytes)}",
            "name a device of the same kind, see 'vgpuctl devices'",
        )


def kind_of(device: Device) -> tuple[str, int | None, int]:
    """The kind of a device: tenants can move between devices of the same kind."""
    return device.name, device.pci_device_id, device.memory_total_bytes


def _check_room(part: Slice, there: Device, use: DeviceUse, terms: Terms) -> None:
    if part.mode is not Mode.PRELOAD:
        return
    room = terms.memory_bytes(part.mode, there.memory_usable_bytes) - use.memory_bytes
    share = 0 if part.share is None else part.share.hundredths
    share_left = terms.share_hundredths(part.mode) - use.share_hundredths
    if use.count >= terms.tenants(part.mode):
        why = f"it has {counted(use.count, 'allocation')}, and the policy allows {terms.tenants(part.mode)}"
    elif part.memory_bytes > room:
        why = f"{shown_bytes(part.memory_bytes)} do not fit in the {shown_bytes(max(room, 0))} that are free"
    elif share > share_left:
        why = f"a share of {shown_share(share)} is more than the {shown_share(share_left)} not yet given"
    else:
        return
    raise VgpuError(ErrorCode.NO_CAPACITY, f"no room on device {there.index}: {why}", _OTHER)


def _check_size(part: Slice, there: Device) -> None:
    if part.memory_bytes > there.memory_usable_bytes:
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"{shown_bytes(part.memory_bytes)} do not fit on device {there.index}, even idle: it has "
            f"{shown_bytes(there.memory_usable_bytes)}",
            _OTHER,
        )


def check_card(allocation: Allocation, node: Node, arriving_bytes: int = 0) -> None:
    """Checks that the target cards have free memory for the tenant's processes, according to NVML, beside
    `arriving_bytes` of other moves. (If a restore fails for lack of memory, the process can never be
    restored: NVIDIA/cuda-checkpoint issue 44.) Raises VgpuError(NO_CAPACITY).
    """
    wanted = sum(process.memory_bytes for process in allocation.suspended)
    devices = [node.device(part.other_uuid) for part in allocation.slices if part.other_uuid]
    free = sum(d.memory_usable_bytes - d.memory_used_bytes for d in devices if d is not None)
    free -= arriving_bytes
    if wanted > free and len(devices) == len(allocation.slices):
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"{shown_bytes(wanted)} of allocation {allocation.id} do not fit on its target "
            f"{'device' if len(devices) == 1 else 'devices'}: {shown_bytes(max(0, free))} are free",
            "see 'vgpuctl devices' for the processes that use them",
        )


def is_near(allocation: Allocation, node: Node) -> bool:
    """Can the allocation's memory probably go to its target without the host? The link must be shorter than
    the way through the host. The target card must have room for the memory, for a block of it (parked.h), and
    for the context and the buffer of the program that copies it.
    """
    if len(allocation.slices) != 1:
        return False
    part = allocation.slices[0]
    there = node.device(part.other_uuid)
    if there is None or node.links.get((part.device_uuid, part.other_uuid)) not in _NEAR:
        return False
    wanted = sum(process.memory_bytes for process in allocation.suspended)
    return wanted + _COPIER_BYTES <= there.memory_usable_bytes - there.memory_used_bytes


_NEAR = (Link.NVLINK, Link.INTERNAL, Link.SINGLE, Link.MULTIPLE)
_COPIER_BYTES = 3 * GIB


def ends_by_nearness(
    allocation: Allocation, source: str, node: Node, use: Mapping[str, DeviceUse], spread: bool
) -> tuple[str, ...]:
    """Target devices for the slice on `source`, the best first: by nearness to the allocation's other slices,
    then by the strategy. Does not check whether the slice fits.
    """
    others = [part.device_uuid for part in allocation.slices if part.device_uuid != source]

    def key(device: Device) -> tuple[int, int, int]:
        far = sum(DISTANCE[node.links.get((device.uuid, other), Link.UNKNOWN)] for other in others)
        held = use.get(device.uuid, EMPTY).memory_bytes
        return far, held if spread else -held, device.index

    there = [device for device in node.devices if device.uuid not in (source, *others)]
    return tuple(device.uuid for device in sorted(there, key=key))


# --- source and target of a move


def turned(allocation: Allocation) -> Allocation:
    """Returns the allocation with source and target device exchanged in each moving slice."""
    there = replace(
        allocation,
        slices=tuple(
            replace(part, device_uuid=part.other_uuid, other_uuid=part.device_uuid)
            if part.other_uuid
            else part
            for part in allocation.slices
        ),
    )
    if not is_away(allocation):
        return there
    return replace(there, suspended=tuple(on_record(p, allocation, there) for p in allocation.suspended))


def arrived(allocation: Allocation) -> Allocation:
    """Returns the allocation after its move: no slice names a second device any more."""
    return replace(allocation, slices=tuple(replace(part, other_uuid="") for part in allocation.slices))


# --- the steps of a move


def move_steps(allocation: Allocation) -> tuple[Step, ...]:
    """Returns the steps of a move. Precondition: `other_uuid` of each slice that moves is its target device,
    and is empty for a slice that stays.
    """
    lock = Step(StepKind.LOCK, "its processes wait at their next CUDA call")
    return (
        Step(StepKind.RECORD_INTENT, "both ends are held; a crash from here on is undone at the next start"),
        *(
            Step(StepKind.APPLY_MODE, "it is to come here", device_uuid=part.other_uuid, mode=part.mode)
            for part in _ends(allocation)
        ),
        *choose_engines([part for part in turned(allocation).slices if part.other_uuid]),
        *(() if is_away(allocation) else (lock,)),
        Step(StepKind.SAVE, "its memory goes to the host"),
        Step(StepKind.RECORD_MOVE, "a crash from here on is finished at the next start"),
        *end_steps(turned(allocation)),
    )


def end_steps(allocation: Allocation) -> tuple[Step, ...]:
    """Returns the steps that bring the tenant to the `device_uuid` of each slice, from any state of
    the move.
    """
    memory = (
        Step(StepKind.RESTORE, "its memory comes here"),
        Step(StepKind.UNLOCK, "its processes go on"),
    )
    return (
        *(
            Step(
                StepKind.ATTACH,
                f"slice {ordinal} is held here",
                device_uuid=part.device_uuid,
                mode=part.mode,
                slice_ordinal=ordinal,
            )
            for ordinal, part in enumerate(allocation.slices)
        ),
        Step(StepKind.WRITE_SPEC, "containers get the slices through it"),
        *(() if is_away(allocation) else memory),
        Step(StepKind.COMMIT, "the other ends are free from here on"),
        *(
            Step(
                StepKind.UNAPPLY_MODE,
                "it may have been the last here",
                device_uuid=part.other_uuid,
                mode=part.mode,
            )
            for part in _ends(allocation)
        ),
    )


def _ends(allocation: Allocation) -> tuple[Slice, ...]:
    """The moving slices whose target device must be put into their mode."""
    return tuple(p for p in allocation.slices if p.other_uuid and not is_open_to_others(allocation, p))


def back_steps(allocation: Allocation) -> tuple[Step, ...]:
    """The steps back for a tenant that cannot be restored on its target. In `allocation`, each slice has its
    old device as `device_uuid` again.
    """
    return (
        Step(StepKind.RECORD_BACK, "it stays where it was; a crash from here on is ended likewise"),
        *end_steps(allocation),
    )
