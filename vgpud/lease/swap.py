"""Reads the swap state of a lease's processes: how far their movable memory has followed the request in the
lease (residency/swap.h in libvgpu).
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from vgpud import lease_layout as layout
from vgpud.lease.pages import BYTES_MAX
from vgpud.lease.usage import in_use, read_at, read_slots, usage_of

# In the channel table of a slot there is one word, in MiB, for each value of enum vgpu_stay (memory that
# cannot be evicted).
_STAYS = struct.Struct(f"<{layout.STAY_KINDS}I")
# the words phase, error, movable bytes and host bytes, which are adjacent in a slot
_WORDS = struct.Struct("<2I2Q")
_NOTHING = (0,) * layout.STAY_KINDS
_PHASE_MASK = (1 << layout.SWAP_KEPT_SHIFT) - 1
_KEPT_MASK = (layout.SWAP_READY >> layout.SWAP_KEPT_SHIFT) - 1


class SwapPhase(IntEnum):
    """How far a process has moved its memory (enum vgpu_swap_phase)."""

    HERE = layout.SWAP_HERE
    DRAINING = layout.SWAP_DRAINING
    GOING = layout.SWAP_GOING
    OUT = layout.SWAP_OUT
    COMING = layout.SWAP_COMING
    REFUSED = layout.SWAP_REFUSED


@dataclass(frozen=True, slots=True)
class ProcessSwap:
    """The swap state that one process reports. `error`: the CUresult that refused the swap or delays it now.
    `kept_bytes`: movable bytes that stay on the device although the phase is OUT, until a tenant needs the
    room. `parked_list`: the process's descriptor of a list of parked blocks, which waits for their copy
    (native/common/lease.h); 0: none. `blocks_behind`: the number of parked blocks that the process has not
    freed yet on the device that it has left. `is_ready`: its memory is out, and the driver may save the rest
    (LeaseSaves).
    """

    phase: SwapPhase
    error: int
    movable_bytes: int
    host_bytes: int
    kept_bytes: int = 0
    parked_list: int = 0
    blocks_behind: int = 0
    is_ready: bool = False

    @property
    def is_prepared(self) -> bool:
        """Has libvgpu made its host buffer ahead of an eviction? It leaves a small rest to the eviction."""
        lacking = self.movable_bytes - self.host_bytes
        return lacking < layout.PREPARE_STEP_BYTES and lacking <= self.movable_bytes // layout.PREPARED_PART


def read_swaps(folder: Path) -> tuple[ProcessSwap, ...]:
    """The swap states of all live processes, clamped as in `read_usage`. An unknown phase counts as refused.

    Raises VgpuError LEASE_FAILED if the lease does not exist.
    """
    with usage_of(folder) as fd:
        _, slots = read_slots(fd)
    return tuple(_read(slots, at) for at in in_use(slots))


def within(swaps: Iterable[ProcessSwap], most_bytes: int) -> tuple[ProcessSwap, ...]:
    """The swap states, with at most `most_bytes` of movable memory in all. The tenant writes these figures,
    and vgpud derives from them how long it waits and how much host memory an eviction needs.
    """
    bounded = []
    for swap in swaps:
        movable = min(swap.movable_bytes, most_bytes)
        most_bytes -= movable
        bounded.append(replace(swap, movable_bytes=movable, kept_bytes=min(swap.kept_bytes, movable)))
    return tuple(bounded)


def read_stays(folder: Path) -> tuple[int, ...]:
    """Bytes that an eviction left on the device, by kind (enum vgpu_stay), of all live processes, clamped as
    in `read_usage`. Raises VgpuError LEASE_FAILED if the lease itself is gone.
    """
    with usage_of(folder) as fd:
        _, slots = read_slots(fd)
        tables = [layout.CHANNELS_AT + at // layout.SLOT_SIZE * layout.CHANNELS_SIZE for at in in_use(slots)]
        words = [_STAYS.unpack(read_at(fd, at + layout.CHANNELS_STAYS_MIB, _STAYS.size)) for at in tables]
    return tuple(min(sum(kind) << 20, BYTES_MAX) for kind in zip(*words, strict=True)) or _NOTHING


def _read(slots: bytes, at: int) -> ProcessSwap:
    word, error, movable, host = _WORDS.unpack_from(slots, at + layout.SLOT_SWAP_PHASE)
    number, upper = word & _PHASE_MASK, word >> layout.SWAP_KEPT_SHIFT
    phase = SwapPhase(number) if number in SwapPhase.__members__.values() else SwapPhase.REFUSED
    movable = min(movable, BYTES_MAX)
    kept = min((upper & _KEPT_MASK) << 20, movable) if phase is SwapPhase.OUT else 0
    ready = phase is SwapPhase.OUT and upper > _KEPT_MASK
    parked = upper if phase is SwapPhase.COMING else 0
    behind = upper if phase is SwapPhase.HERE else 0
    return ProcessSwap(phase, error, movable, min(host, BYTES_MAX), kept, parked, behind, ready)
