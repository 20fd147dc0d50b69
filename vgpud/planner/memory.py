"""Verdicts remembered: of the devices of a node, a request finds all but one as the last one did.

A verdict depends on a device's snapshot, terms, use and pool, all of them immutable. They are
compared by identity, which is cheap and never wrongly true while they are held here.
"""

from collections.abc import Callable
from typing import NamedTuple

from vgpud.model.tenancy import Reason
from vgpud.planner.verdict import Seat, Verdict
from vgpud.planner.wanted import Wanted

_WANTS = 128  # kinds of requests; a node sees few
_REASONS = 4096

Judge = Callable[[Seat, Wanted, bool], Verdict]


class _Remembered(NamedTuple):
    seat: Seat
    verdict: Verdict


class Memory:
    """`judge` must be pure."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._known: dict[tuple[Wanted, bool], dict[str, _Remembered]] = {}

    def of(self, want: Wanted, spread: bool) -> Callable[[Seat], Verdict]:
        """Judges for one request."""
        found = self._known.get((want, spread))
        if found is None:
            if len(self._known) >= _WANTS:
                self._known.clear()
            found = self._known[want, spread] = {}
        known = found
        judge = self._judge

        def verdict(seat: Seat) -> Verdict:
            uuid = seat.device.uuid
            last = known.get(uuid)
            if last is not None and _same(last.seat, seat):
                return last.verdict
            fresh = judge(seat, want, spread)
            known[uuid] = _Remembered(seat, fresh)
            return fresh

        return verdict


class Reasons:
    """Reasons remembered by the verdict that they are of, compared by identity too."""

    def __init__(self, make: Callable[[str, Verdict, bool, str], Reason]) -> None:
        self._make = make
        self._known: dict[tuple[int, bool, str], tuple[Verdict, Reason]] = {}

    def of(self, uuid: str, verdict: Verdict, taken: bool, outdone: str) -> Reason:
        key = (id(verdict), taken, outdone)
        known = self._known.get(key)
        if known is not None and known[0] is verdict:
            return known[1]
        if len(self._known) >= _REASONS:
            self._known.clear()
        reason = self._make(uuid, verdict, taken, outdone)
        self._known[key] = verdict, reason
        return reason


def _same(a: Seat, b: Seat) -> bool:
    return (
        a.device is b.device
        and a.use is b.use
        and a.pool is b.pool
        and a.terms is b.terms
        and a.shut == b.shut
    )
