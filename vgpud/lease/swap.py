"""How far the movable memory of a lease's processes has followed its word (native/libvgpu/swap.h)."""

import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from vgpud import lease_layout as layout
from vgpud.lease.pages import open_usage
from vgpud.model.errors import ErrorCode, VgpuError

_WORDS = struct.Struct("<2I2Q")  # phase, error, movable bytes, host bytes: side by side in a slot
_BYTES_MAX = 1 << 50


class SwapPhase(IntEnum):
    """enum vgpu_swap_phase."""

    HERE = layout.SWAP_HERE
    DRAINING = layout.SWAP_DRAINING
    GOING = layout.SWAP_GOING
    OUT = layout.SWAP_OUT
    COMING = layout.SWAP_COMING
    REFUSED = layout.SWAP_REFUSED


@dataclass(frozen=True, slots=True)
class ProcessSwap:
    """Of one process, as it says. `error` is the CUresult that refused, or that is in the way now."""

    phase: SwapPhase
    error: int
    movable_bytes: int
    host_bytes: int


def read_swaps(folder: Path) -> tuple[ProcessSwap, ...]:
    """Of all live processes; clamped as in `read_usage`. A phase that there is not counts as refused.

    Raises VgpuError LEASE_FAILED if the lease itself is gone.
    """
    try:
        fd = open_usage(folder)
        try:
            head = os.pread(fd, layout.USAGE_SLOTS, 0).ljust(layout.USAGE_SLOTS, b"\0")
            (high,) = struct.unpack_from("<I", head, layout.USAGE_SLOT_HIGH)
            length = min(high, layout.MAX_SLOTS) * layout.SLOT_SIZE
            slots = os.pread(fd, length, layout.USAGE_SLOTS).ljust(length, b"\0")
        finally:
            os.close(fd)
    except OSError as error:
        raise VgpuError(
            ErrorCode.LEASE_FAILED,
            f"cannot read the use of lease {folder.name}: {os.strerror(error.errno or 0).lower()}",
            "check that the run directory is on a writable tmpfs",
        ) from error
    held = [at for at in range(0, length, layout.SLOT_SIZE) if slots[at : at + 4] != b"\0\0\0\0"]
    return tuple(_read(slots, at) for at in held)


def _read(slots: bytes, at: int) -> ProcessSwap:
    phase, error, movable, host = _WORDS.unpack_from(slots, at + layout.SLOT_SWAP_PHASE)
    known = phase in SwapPhase.__members__.values()
    return ProcessSwap(
        SwapPhase(phase) if known else SwapPhase.REFUSED,
        error,
        min(movable, _BYTES_MAX),
        min(host, _BYTES_MAX),
    )
