"""Checks whether a running allocation can change its size on its device. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import WHOLE, Percent, check_limit
from vgpud.model.tenancy import Allocation, Mode, Slice
from vgpud.planner.division import given_bytes
from vgpud.planner.terms import Terms, all_terms
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.planner.words import shown_bytes, shown_share
from vgpud.policy.model import Policy


def resize_slices(
    allocation: Allocation,
    memory_bytes: int | None,
    share: Percent | None,
    node: Node,
    use: Mapping[str, DeviceUse],
    policy: Policy,
) -> tuple[Slice, ...]:
    """The slices with the new size, which is the same for each; None leaves a value unchanged.

    Raises VgpuError: BAD_REQUEST if neither value is given, BAD_QUANTITY for an invalid memory limit,
    UNSUPPORTED if the mode does not allow a resize, NO_CAPACITY if the device has no room, NO_SUCH_DEVICE if
    the device no longer exists.
    """
    if memory_bytes is None and share is None:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"no new limit is given for allocation {allocation.id}",
            "give a memory limit, a share, or both",
        )
    if memory_bytes is not None:
        check_limit(memory_bytes)
    terms = all_terms(policy, node)
    return tuple(
        _resized(allocation, part, memory_bytes, share, node, use, terms) for part in allocation.slices
    )


def _resized(
    allocation: Allocation,
    part: Slice,
    memory_bytes: int | None,
    share: Percent | None,
    node: Node,
    use: Mapping[str, DeviceUse],
    terms: Mapping[str, Terms],
) -> Slice:
    if part.mode is not Mode.PRELOAD:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} is in mode {part.mode.value}, whose slices cannot be resized",
            "allocate one of the new size and release this one",
        )
    wanted = part.memory_bytes if memory_bytes is None else memory_bytes
    device = node.device(part.device_uuid)
    if device is None:
        raise VgpuError(
            ErrorCode.NO_SUCH_DEVICE,
            f"device {part.device_uuid} of allocation {allocation.id} is no longer on this node",
            "see 'vgpuctl devices'",
        )
    usable, used, promised = _room(device, part, use.get(part.device_uuid, EMPTY))
    given = terms[device.uuid].memory_bytes(Mode.PRELOAD, usable)
    free = min(usable, given - (used - part.memory_bytes))
    if wanted > max(free, part.memory_bytes):
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"{shown_bytes(wanted)} does not fit on device {device.index}: the other allocations leave "
            f"{shown_bytes(max(free, 0))} of {shown_bytes(given)}",
            f"ask for at most {shown_bytes(max(free, part.memory_bytes))}",
        )
    limited = part.share if share is None else (None if share == WHOLE else share)
    held = 0 if part.share is None else part.share.hundredths
    left = max(WHOLE.hundredths - (promised - held), held)
    if limited is not None and limited.hundredths > left:
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"a share of {limited} is more than the {shown_share(left)} that the others leave of device "
            f"{device.index}",
            f"ask for at most {shown_share(left)}",
        )
    return replace(part, memory_bytes=wanted, share=limited)


def _room(device: Device, part: Slice, use: DeviceUse) -> tuple[int, int, int]:
    """The usable memory, the allocated memory, and the sum of the allocated shares in hundredths of a
    percent, of the slice's device or MIG instance.
    """
    if part.mig is None:
        return device.memory_usable_bytes, use.memory_bytes, use.share_hundredths
    profile = device.mig.profile(part.mig.profile_id)
    shared = use.instance(part.mig.place)
    usable = part.memory_bytes if profile is None else profile.memory_bytes
    used = part.memory_bytes
    if profile is not None and shared is not None:
        used = given_bytes(use, part.mig.key, profile)
    promised = 0 if shared is None else shared.share_hundredths
    return min(usable, device.memory_usable_bytes), used, promised
