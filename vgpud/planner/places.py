"""The devices on which suspended processes were saved, and the device map for a restore. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vgpud.model.tenancy import Allocation, SuspendedProcess


def devices_of(allocation: Allocation) -> tuple[str, ...]:
    """The UUID of each slice's device."""
    return tuple(part.device_uuid for part in allocation.slices)


def saved_on(process: SuspendedProcess, allocation: Allocation) -> tuple[str, ...]:
    """The device of each slice at the time when the process was saved."""
    return tuple(process.saved_on.split(",")) if process.saved_on else devices_of(allocation)


def on_record(process: SuspendedProcess, before: Allocation, now: Allocation) -> SuspendedProcess:
    """The record of a saved process after the slices of its allocation changed from the devices of `before`
    to those of `now`.
    """
    was = saved_on(process, before)
    return replace(process, saved_on="" if was == devices_of(now) else ",".join(was))


def device_map(saved: Sequence[str], now: Sequence[str], visible: Iterable[str]) -> dict[str, str]:
    """Maps the device of each saved context to the device on which it is restored.

    Each device of `saved` maps to the device at the same position in `now`. A device of `now` that is not in
    `saved` maps to a device that the tenant leaves, and any other device to itself. The driver requires that
    each device that the process can see is a key once and a value once, regardless of CUDA_VISIBLE_DEVICES
    (NVIDIA/cuda-checkpoint issue 35; cuda.core's checkpoint module).
    """
    moved = dict(zip(saved, now, strict=True))
    came = {new: old for old, new in moved.items()}

    def left(uuid: str) -> str:
        """Follows the chain of moves back to a device that becomes free. All devices of the chain are of the
        same model.
        """
        while uuid in came:
            uuid = came[uuid]
        return uuid

    return {uuid: moved.get(uuid) or left(uuid) for uuid in sorted({*visible, *saved, *now})}
