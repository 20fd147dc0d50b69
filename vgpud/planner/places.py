"""Where suspended processes were saved, and where a restore is to put what lay on each device: pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vgpud.model.tenancy import Allocation, SuspendedProcess


def devices_of(allocation: Allocation) -> tuple[str, ...]:
    """The UUID of each slice's device."""
    return tuple(part.device_uuid for part in allocation.slices)


def saved_on(process: SuspendedProcess, allocation: Allocation) -> tuple[str, ...]:
    """Where each slice was when the process was saved."""
    return tuple(process.saved_on.split(",")) if process.saved_on else devices_of(allocation)


def on_record(process: SuspendedProcess, before: Allocation, now: Allocation) -> SuspendedProcess:
    """A saved process of `before`, whose slices are on the devices of `now` from here on."""
    was = saved_on(process, before)
    return replace(process, saved_on="" if was == devices_of(now) else ",".join(was))


def device_map(saved: Sequence[str], now: Sequence[str], visible: Iterable[str]) -> dict[str, str]:
    """Where a restore shall put what lay on each device: each of `saved` to that of `now`, and others where
    they are or, if one of `now` comes there, to one that is left by that. Every device that the process can
    see is named, each once on either side: the driver takes no less, and CUDA_VISIBLE_DEVICES makes it no
    fewer (NVIDIA/cuda-checkpoint issue 35; cuda.core's checkpoint module)."""
    moved = dict(zip(saved, now, strict=True))
    came = {new: old for old, new in moved.items()}

    def left(uuid: str) -> str:
        """Back along those who came, which keeps to one kind of device."""
        while uuid in came:
            uuid = came[uuid]
        return uuid

    return {uuid: moved.get(uuid) or left(uuid) for uuid in sorted({*visible, *saved, *now})}
