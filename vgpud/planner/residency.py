"""Decides which tenants have their memory on the device, and which wait in the queue for room. Pure.

A tenant that is idle for long is suspended. A suspended tenant that has work is resumed when there is room,
first come, first served. On devices with turns, a tenant whose turn is over makes room for waiting ones.
Unless its device is too full, no tenant is suspended before its minimum residence or the end of its turn, so
that memory is not copied often for little work.

Times are in seconds of one monotonic clock.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from vgpud.model.tenancy import Cause

PATIENCE_MOST = 3  # maximum of doublings of a tenant's idle time
_PREPARED_PART = 0.25  # the part of the idle time, at its end, in which host buffers are made


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for one tenant. The tenant is suspended after `idle_seconds` without work (None: never), and
    makes room for waiting tenants after `turn_seconds` (None: never). The tenant stays on the device for at
    least `residence_seconds`, or for its turn.
    """

    idle_seconds: float | None = None
    turn_seconds: float | None = None
    residence_seconds: float = 60.0

    @property
    def any(self) -> bool:
        return self.idle_seconds is not None or self.turn_seconds is not None


class Where(StrEnum):
    NEW = "new"  # the tenant is being allocated: its room is booked, and none of its programs runs
    HERE = "here"
    GOING = "going"
    AWAY = "away"
    COMING = "coming"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the devices. Times are in seconds of one clock.

    `parts`: its memory limit by device UUID. `since`: when it came to its present place (`where`).
    `active_at`, the time of its last work, is valid while the tenant is on the device. `wants_since`, the
    time since which it has work (None: it has none), and `cause` are valid while the tenant is suspended.
    `patience`: how often its idle time is doubled. After a failure, nothing is tried before `not_before`;
    `why_not` is the reason. If it `swaps`, libvgpu can move its memory except for `stays`, which remains
    booked while it is suspended.
    """

    id: str
    parts: tuple[tuple[str, int], ...]
    where: Where
    since: float
    rules: Rules = field(default_factory=Rules)
    active_at: float = 0.0
    cause: Cause = Cause.IDLE
    wants_since: float | None = None
    rank: int = 0  # computed from the tenant's priority; in the queue a higher rank comes first
    patience: int = 0
    not_before: float = -inf
    why_not: str = ""
    stays: tuple[tuple[str, int], ...] = ()
    swaps: bool = False

    @property
    def residence(self) -> float:
        turn = self.rules.turn_seconds
        return self.rules.residence_seconds if turn is None else turn


class Kind(StrEnum):
    SUSPEND = "suspend"
    RESUME = "resume"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Move:
    """A decision on one tenant. SUSPEND has `cause`, `deep` (no memory may stay on the device, not even
    memory that libvgpu cannot evict) and `room_for`, the tenant that gets the room (empty: none yet). WAIT
    has the `place` in the queue, counted from 1. A RESUME `beside` another tenant's suspension takes the room
    as it becomes free.
    """

    kind: Kind
    id: str
    sentence: str
    cause: Cause = Cause.IDLE
    place: int = 0
    deep: bool = False
    room_for: str = ""
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions of one round. `again` is the latest time of the next round, if no event comes before."""

    moves: tuple[Move, ...]
    again: float = inf


def decide(now: float, tenants: Sequence[Tenant], capacity: Mapping[str, int]) -> Plan:
    """Decides which tenants are suspended, resumed or wait now. `tenants` are all that hold slices of the
    devices in `capacity` (bytes by UUID), including those that no rule moves. A device that is not in
    `capacity` has no room.
    """
    return _Round(now, tenants, capacity).plan()


def patience_after(patience: int, away_seconds: float, rules: Rules) -> int:
    """The patience of a tenant that resumes because it has work. The patience increases after a short
    suspension, and decreases after a long one.
    """
    worth = rules.idle_seconds is None or away_seconds >= rules.idle_seconds
    return max(patience - 1, 0) if worth else min(patience + 1, PATIENCE_MOST)


def idle_seconds(tenant: Tenant) -> float:
    """The time without work after which the tenant is suspended; infinite without a rule."""
    return inf if tenant.rules.idle_seconds is None else tenant.rules.idle_seconds * 2**tenant.patience


def goes_idle_at(tenant: Tenant) -> float:
    """The time at which the tenant may be suspended as idle, if it does no work until then."""
    idle_at = tenant.active_at + idle_seconds(tenant)
    return max(idle_at, tenant.since + tenant.rules.residence_seconds, tenant.not_before)


def prepares_at(tenant: Tenant) -> float:
    """The time from which the tenant's host buffers are made, if it does no work until then, so that its
    suspension as idle does not wait for them. Infinite without a rule.
    """
    at = goes_idle_at(tenant)
    return at if at == inf else at - _PREPARED_PART * idle_seconds(tenant)


def makes_room_at(tenant: Tenant) -> float:
    """The time at which the tenant may be suspended for a waiting tenant: its turn is over, or it is idle
    (its patience does not count here). Infinite without a rule.
    """
    idle = tenant.rules.idle_seconds
    settled = tenant.since + tenant.rules.residence_seconds
    idle_at = inf if idle is None else max(tenant.active_at + idle, settled)
    return max(min(_turn_over_at(tenant), idle_at), tenant.not_before)


def _turn_over_at(tenant: Tenant) -> float:
    turn = tenant.rules.turn_seconds
    return inf if turn is None else tenant.since + turn


class _Round:
    """One round of decisions. The free room shrinks as it is assigned."""

    def __init__(self, now: float, tenants: Sequence[Tenant], capacity: Mapping[str, int]) -> None:
        self._now = now
        self._capacity = capacity
        self._free = dict(capacity)
        self._making: dict[str, int] = {}  # device UUID -> bytes that running suspensions will free
        # device UUID -> bytes of tenants that are being allocated; they start suspended if they do not fit
        self._new: dict[str, int] = {}
        self._blocked: dict[str, int] = {}  # number of waiting tenants by device
        self._again = inf
        self._coming: set[str] = set()  # tenants that this round resumes
        self._tenants = tenants
        self._leaving: list[Tenant] = []  # tenants that this round suspends, and whose memory partly stays
        self._here = [t for t in tenants if t.where is Where.HERE]
        self._queue = sorted((t for t in tenants if _waits(t)), key=_order)
        for tenant in tenants:
            self._take(tenant.stays if tenant.where is Where.AWAY else tenant.parts, -1)
            if tenant.where is Where.GOING:
                self._leaves(tenant)
            for uuid, size in tenant.parts if tenant.where is Where.NEW else ():
                self._new[uuid] = self._new.get(uuid, 0) + size

    def plan(self) -> Plan:
        moves = [*self._idle(), *self._too_many()]
        for tenant in self._queue:
            moves += self._serve(tenant)
        return Plan(tuple(moves), self._again)

    def _idle(self) -> Iterator[Move]:
        for tenant in tuple(self._here):
            at = goes_idle_at(tenant)
            if at <= self._now:
                idle = self._now - tenant.active_at
                yield self._send(tenant, Cause.IDLE, f"it has done nothing for {idle:.0f} s")
            else:
                self._again = min(self._again, at)

    def _too_many(self) -> Iterator[Move]:
        """Suspends tenants of a device on which more tenants are resident than fit, for example after a
        reload. Idle tenants come first, then the latest to arrive.
        """
        for uuid, free in tuple(self._free.items()):
            short = -free - self._making.get(uuid, 0) - self._new.get(uuid, 0)
            turning = [t for t in self._here if _takes_turns(t, uuid) and t.not_before <= self._now]
            for tenant in sorted(turning, key=lambda t: (t.active_at <= t.since, t.since), reverse=True):
                if short <= 0:
                    break
                short -= dict(tenant.parts)[uuid]
                yield self._send(tenant, Cause.TURN, "the device has no room for all of its tenants")

    def _serve(self, tenant: Tenant) -> list[Move]:
        """Decides on the next tenant in the queue. This tenant waits if an earlier tenant in the queue waits
        for the same device.
        """
        if tenant.not_before > self._now:
            self._again = min(self._again, tenant.not_before)
            return [self._wait(tenant, f"it could not be resumed: {tenant.why_not}")]
        if self._never_fits(tenant):
            return [self._wait(tenant, "its device has not so much memory now")]
        if any(self._blocked.get(uuid) for uuid, _ in tenant.parts):
            return [self._wait(tenant, "others wait for longer")]
        left = dict(tenant.stays)
        if all(self._free.get(uuid, 0) + left.get(uuid, 0) >= size for uuid, size in tenant.parts):
            self._come(tenant)
            waited = self._now - (self._now if tenant.wants_since is None else tenant.wants_since)
            return [Move(Kind.RESUME, tenant.id, f"there is room, after {waited:.1f} s")]
        return self._make_room(tenant)

    def _make_room(self, tenant: Tenant) -> list[Move]:
        chosen: list[Tenant] = []
        lacking = ""
        for uuid, size in tenant.parts:
            short = (
                size - self._free.get(uuid, 0) - self._making.get(uuid, 0) - dict(tenant.stays).get(uuid, 0)
            )
            short -= sum(dict(one.parts).get(uuid, 0) for one in chosen)
            beside = [t for t in self._here if uuid in dict(t.parts) and t not in chosen]
            for other in sorted(beside, key=lambda t: (t.since, t.id)):
                at = makes_room_at(other)
                if short > 0 and at <= self._now:
                    chosen.append(other)
                    short -= dict(other.parts)[uuid]
                elif short > 0:
                    self._again = min(self._again, at)
            if short > 0:
                turning = any(t.rules.turn_seconds is not None for t in beside)
                lacking = "the turns of others are not over" if turning else "others hold the room"
        if lacking:
            return self._clear(tenant) or [self._wait(tenant, lacking)]
        idle_before = not self._making
        sent = [self._make_way(one, tenant) for one in chosen]
        if tenant.swaps and idle_before and len(sent) == 1 and chosen[0].swaps and not sent[0].deep:
            self._come(tenant)
            sentence = f"{sent[0].id} makes room for it"
            return [*sent, Move(Kind.RESUME, tenant.id, sentence, beside=sent[0].id)]
        return [*sent, self._wait(tenant, "room is being made for it")]

    def _clear(self, tenant: Tenant) -> list[Move]:
        """Handles a device without resident tenants on which `tenant` does not fit, because swapped-out
        tenants left memory there. The tenant that left most is resumed. At the end of its turn the driver
        suspends it, and then none of its memory stays on the device (`_may_leave_some`).
        """
        uuids = {uuid for uuid, _ in tenant.parts}
        near = [t for t in self._tenants if t is not tenant and uuids & {uuid for uuid, _ in t.parts}]
        if any(t.where is not Where.AWAY or t.id in self._coming for t in near):
            return []
        left = [t for t in near if t.stays and t.cause is not Cause.HAND and t.not_before <= self._now]
        for other in sorted(left, key=lambda t: (-sum(size for _, size in t.stays), t.id)):
            stays = dict(other.stays)
            if all(self._free.get(uuid, 0) + stays.get(uuid, 0) >= size for uuid, size in other.parts):
                self._come(other)
                sentence = f"memory that it left on the device blocks {tenant.id}"
                waits = self._wait(tenant, f"{other.id} has to take what it left on the device")
                return [Move(Kind.RESUME, other.id, sentence), waits]
        return []

    def _come(self, tenant: Tenant) -> None:
        self._coming.add(tenant.id)
        self._take(tenant.stays, 1)
        self._take(tenant.parts, -1)

    def _make_way(self, one: Tenant, waiting: Tenant) -> Move:
        if _turn_over_at(one) <= self._now:
            return self._send(one, Cause.TURN, f"its turn is over, {waiting.id} waits", waiting.id)
        return self._send(one, Cause.IDLE, f"it has done nothing for long, {waiting.id} waits", waiting.id)

    def _wait(self, tenant: Tenant, sentence: str) -> Move:
        place = 1 + max((self._blocked.get(uuid, 0) for uuid, _ in tenant.parts), default=0)
        # a tenant that waits for its back-off, or never fits, does not block the tenants behind it in the
        # queue
        if tenant.not_before <= self._now and not self._never_fits(tenant):
            for uuid, _ in tenant.parts:
                self._blocked[uuid] = place
        return Move(Kind.WAIT, tenant.id, sentence, place=place)

    def _never_fits(self, tenant: Tenant) -> bool:
        return any(size > self._capacity.get(uuid, 0) for uuid, size in tenant.parts)

    def _send(self, tenant: Tenant, cause: Cause, sentence: str, room_for: str = "") -> Move:
        self._here.remove(tenant)
        self._leaves(tenant)
        deep = tenant.swaps and not self._may_leave_some(tenant)
        if tenant.swaps and not deep:
            self._leaving.append(tenant)
        return Move(Kind.SUSPEND, tenant.id, sentence, cause, deep=deep, room_for=room_for)

    def _may_leave_some(self, tenant: Tenant) -> bool:
        """True if each other tenant, alone, would fit on the device beside the memory that this tenant and
        those off the device leave there.
        """
        gone = (Where.AWAY, Where.GOING)
        away = [*(t for t in self._tenants if t.where in gone), *self._leaving, tenant]
        for uuid, _ in tenant.parts:
            left = sum(dict(t.stays).get(uuid, 0) for t in away)
            for other in self._tenants:
                own = dict(other.stays).get(uuid, 0) if other in away else 0
                if dict(other.parts).get(uuid, 0) + left - own > self._capacity.get(uuid, 0):
                    return False
        return True

    def _leaves(self, tenant: Tenant) -> None:
        for uuid, size in tenant.parts:
            self._making[uuid] = self._making.get(uuid, 0) + size

    def _take(self, parts: Iterable[tuple[str, int]], sign: int) -> None:
        for uuid, size in parts:
            self._free[uuid] = self._free.get(uuid, 0) + sign * size


def _waits(tenant: Tenant) -> bool:
    return tenant.where is Where.AWAY and tenant.cause is not Cause.HAND and tenant.wants_since is not None


def _order(tenant: Tenant) -> tuple[float, str]:
    """The order of the queue: first come, first served. Each rank of priority counts as one residence of
    waiting, so that no tenant starves.
    """
    assert tenant.wants_since is not None
    return tenant.wants_since - tenant.rank * tenant.residence, tenant.id


def _takes_turns(tenant: Tenant, uuid: str) -> bool:
    return tenant.rules.turn_seconds is not None and any(uuid == one for one, _ in tenant.parts)
