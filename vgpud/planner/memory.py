"""Caches verdicts on devices: between two requests, usually only one device of a node has changed.

A verdict depends on the request, and on the device's snapshot, terms, use, pool and closed MIG devices.
Snapshot, terms, use and pool are immutable, and are compared by identity, which is cheap. The cache holds
references to them, so that no identity is used again.
"""

from collections.abc import Callable

from vgpud.model.device import Device
from vgpud.planner.pool import Pool
from vgpud.planner.terms import Terms
from vgpud.planner.use import DeviceUse
from vgpud.planner.verdict import Seat, Verdict
from vgpud.planner.wanted import Wanted

_WANTS = 128  # maximum of kinds of requests in the cache; a node gets few kinds

Judge = Callable[[Seat, Wanted, bool], Verdict]
# A function that judges a device; its arguments are the fields of a Seat.
Judged = Callable[[Device, Terms, DeviceUse, Pool, frozenset[str]], Verdict]


class Memory:
    """Caches the verdicts of `judge`, which must be pure."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._known: dict[tuple[Wanted, bool], dict[str, tuple[Seat, Verdict]]] = {}

    def of(self, want: Wanted, spread: bool) -> Judged:
        """The caching judge for one kind of request."""
        found = self._known.get((want, spread))
        if found is None:
            if len(self._known) >= _WANTS:
                self._known.clear()
            found = self._known[want, spread] = {}
        known = found
        judge = self._judge

        def verdict(
            device: Device, terms: Terms, use: DeviceUse, pool: Pool, shut: frozenset[str]
        ) -> Verdict:
            last = known.get(device.uuid)
            if last is not None:
                seat = last[0]
                same = seat[0] is device and seat[1] is terms and seat[2] is use and seat[3] is pool
                if same and seat[4] == shut:
                    return last[1]
            seat = Seat(device, terms, use, pool, shut)
            fresh = judge(seat, want, spread)
            known[device.uuid] = seat, fresh
            return fresh

        return verdict
