"""Caches verdicts on devices: between two requests, usually only one device of a node has changed.

A verdict depends on a device's snapshot, terms, use and pool, all of them immutable. They are compared by
identity, which is cheap. It is safe, because the cache refers to them.
"""

from collections.abc import Callable, Sequence
from operator import is_

from vgpud.model.device import Device, Node
from vgpud.model.tenancy import Decision, Reason
from vgpud.planner.pool import Pool
from vgpud.planner.terms import Terms
from vgpud.planner.use import DeviceUse
from vgpud.planner.verdict import Seat, Verdict
from vgpud.planner.wanted import Wanted

_WANTS = 128  # maximum of kinds of requests in the cache; a node gets few kinds
_REASONS = 4096

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


class Decisions:
    """Caches the last decision on each kind of request, as long as no device's verdict changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Wanted, bool], tuple[Node, tuple[Verdict, ...], Decision]] = {}

    def get(self, key: tuple[Wanted, bool], node: Node, verdicts: tuple[Verdict, ...]) -> Decision | None:
        last = self._known.get(key)
        if last is None or last[0] is not node or len(last[1]) != len(verdicts):
            return None
        return last[2] if all(map(is_, last[1], verdicts)) else None

    def keep(
        self, key: tuple[Wanted, bool], node: Node, verdicts: tuple[Verdict, ...], decision: Decision
    ) -> None:
        if len(self._known) >= _WANTS:
            self._known.clear()
        self._known[key] = node, verdicts, decision


class Reasons:
    """Caches reasons by their verdict. Verdicts are compared by identity."""

    def __init__(self, make: Callable[[Verdict, bool, str], Reason]) -> None:
        self._make = make
        self._known: dict[tuple[int, bool, str], tuple[Verdict, Reason]] = {}

    def of(self, verdicts: tuple[Verdict, ...], taken: Sequence[Verdict], outdone: str) -> tuple[Reason, ...]:
        """One reason for each verdict, in order. `outdone` is the reason for devices that fit but are not
        `taken`.
        """
        if len(self._known) >= _REASONS:
            self._known.clear()
        known, chosen, found = self._known, {id(verdict) for verdict in taken}, []
        for verdict in verdicts:
            number = id(verdict)
            key = (number, number in chosen, outdone)
            last = known.get(key)
            if last is None or last[0] is not verdict:
                last = known[key] = verdict, self._make(verdict, number in chosen, outdone)
            found.append(last[1])
        return tuple(found)
