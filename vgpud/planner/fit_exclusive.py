"""Checks whether a whole device can be allocated."""

from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode, Slice
from vgpud.planner.verdict import Fit, Seat, Verdict, busy
from vgpud.planner.words import listed, shown_bytes


def fit_exclusive(seat: Seat) -> Verdict:
    """A whole device fits if neither the ledger nor NVML shows another user on it."""
    device = seat.device
    if seat.use.count:
        held = counted(seat.use.count, "allocation")
        return busy(seat, Mode.EXCLUSIVE, f"it holds {held} in mode {seat.use.mode}")
    if device.processes:
        pids = listed(tuple(str(process.pid) for process in device.processes))
        who = counted(len(device.processes), "process")
        return busy(seat, Mode.EXCLUSIVE, f"it has {who} that vgpud did not start (pid {pids})")
    usable = device.memory_usable_bytes
    return Fit(
        device=device,
        mode=Mode.EXCLUSIVE,
        piece=Slice(device.uuid, Mode.EXCLUSIVE, usable),
        # Cards that can serve nothing else come first, then smaller cards.
        rank=(int(seat.terms.fixed is None), device.memory_total_bytes),
        sentence=f"mode exclusive, the whole card with {shown_bytes(usable)}",
    )
