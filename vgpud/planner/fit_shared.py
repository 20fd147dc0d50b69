"""Checks whether a quota (mode preload) or a spatial share (mode mps) of the requested size fits on a
device.
"""

from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import MIB, Percent, counted
from vgpud.model.tenancy import Mode, Slice
from vgpud.planner.verdict import Fit, Room, Seat, Unfit, Verdict, busy, never, occupied
from vgpud.planner.wanted import Wanted
from vgpud.planner.words import shown_apart, shown_bytes, shown_share

# Granularity of cuMemCreate on every card that was tried, and the memory that the driver reserves per small
# allocation.
GRAIN_BYTES = 2 * MIB


def fit_shared(seat: Seat, mode: Mode, want: Wanted, spread: bool) -> Verdict:
    """The verdict for `mode` (preload or mps) on a device. Memory and shares are overcommitted only as the
    policy allows.
    """
    memory = _memory_bytes(seat, want)
    unfit = _never(seat, mode, want, memory) or _busy(seat, mode, want, memory)
    if unfit is not None:
        return unfit
    left = seat.memory_free_bytes(mode) - memory
    share = None if mode is Mode.PRELOAD and not want.limits_compute else want.share
    return Fit(
        device=seat.device,
        mode=mode,
        piece=Slice(seat.device.uuid, mode, memory, share),
        rank=_rank(seat, left, spread),
        sentence=_sentence(seat, mode, want, memory, share),
    )


def _memory_bytes(seat: Seat, want: Wanted) -> int:
    """The requested memory. If the request gives no amount, the memory is in proportion to the compute share,
    or all of the device's.
    """
    if want.memory_bytes is not None:
        return want.memory_bytes
    if want.share is None:
        return seat.device.memory_usable_bytes // MIB * MIB
    part = seat.device.memory_usable_bytes * want.share.hundredths // 10000
    return max(part // GRAIN_BYTES * GRAIN_BYTES, GRAIN_BYTES)


def _never(seat: Seat, mode: Mode, want: Wanted, memory: int) -> Unfit | None:
    if mode is Mode.MPS and not seat.device.mps_capable:
        return never(seat, mode, ErrorCode.UNSUPPORTED, "the device has no MPS")
    if mode is Mode.MPS and want.count > 1:
        sentence = f"a process reaches one MPS control daemon, which serves one device, not {want.count}"
        return never(seat, mode, ErrorCode.UNSUPPORTED, sentence)
    if mode is Mode.MPS and memory % MIB:
        sentence = f"MPS takes memory limits in whole MiB, and {memory} bytes is not"
        return never(seat, mode, ErrorCode.UNSUPPORTED, sentence)
    usable = seat.device.memory_usable_bytes
    if memory > usable:
        asked, has = shown_apart(memory, usable)
        return never(
            seat,
            mode,
            ErrorCode.IMPOSSIBLE,
            f"{asked} is more than the {has} that it has to share",
            Room(memory_bytes=usable),
        )
    return None


def _busy(seat: Seat, mode: Mode, want: Wanted, memory: int) -> Unfit | None:
    device, use = seat.device, seat.use
    tenants = seat.terms.tenants(mode)
    if use.count >= tenants:
        held = counted(use.count, "allocation")
        return busy(seat, mode, f"it holds {held} in mode {mode} and the policy allows {tenants}")
    if mode is Mode.MPS and use.count == 0:
        others = tuple(process for process in device.processes if process.kind != "graphics")
        if others:
            return occupied(seat, mode, others, ", which MPS would shut out")
    share_left = seat.terms.share_hundredths(mode) - use.share_hundredths
    memory_left = max(seat.memory_free_bytes(mode), 0)
    room = Room(min(memory_left, device.memory_usable_bytes), min(share_left, 10000))
    if memory > memory_left:
        asked, free = shown_apart(memory, memory_left)
        return busy(seat, mode, f"{asked} does not fit in the {free} free{_of_all(seat, mode)}", room)
    if want.limits_compute or mode is Mode.MPS:
        asked_hundredths = 0 if want.share is None else want.share.hundredths
        if asked_hundredths > share_left:
            asked, free = shown_share(asked_hundredths), shown_share(share_left)
            return busy(seat, mode, f"a share of {asked} is more than the {free} that is free", room)
    return None


def _rank(seat: Seat, left_bytes: int, spread: bool) -> tuple[int, ...]:
    """The rank of a device. Strategy pack prefers a device that has allocations or whose mode the policy
    fixes, then the least free memory. Strategy spread prefers the device of whose memory the largest part
    stays free, then the one with fewer allocations.
    """
    if spread:
        emptiness = left_bytes * 10000 // max(seat.device.memory_usable_bytes, 1)
        return (-emptiness, seat.use.count)
    return (int(seat.claims_free_card), left_bytes)


def _sentence(seat: Seat, mode: Mode, want: Wanted, memory: int, share: Percent | None) -> str:
    free = f"{shown_bytes(seat.memory_free_bytes(mode))} free{_overcommit(seat, mode)}"
    amount = shown_bytes(memory)
    if want.memory_bytes is None:
        amount += " (in proportion to the share)"
    limit = "" if share is None else f" and a share of {share}"
    return f"mode {mode} with {amount} of {free}{limit}"


def _of_all(seat: Seat, mode: Mode) -> str:
    given = seat.terms.memory_bytes(mode, seat.device.memory_usable_bytes)
    return f" of {shown_bytes(given)}{_overcommit(seat, mode)}"


def _overcommit(seat: Seat, mode: Mode) -> str:
    """Text for an amount of memory that may be more than the device has."""
    return ", overcommit included" if seat.terms.memory_bytes(mode, 100) > 100 else ""
