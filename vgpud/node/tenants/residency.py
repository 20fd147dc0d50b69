"""Observes the activity of tenants in mode preload, and suspends and resumes tenants as planner.residency
decides.

An observation reads the lease pages of the tenants that a rule of the policy covers. Without rules, and
without tenants that a rule has suspended, nothing is read. At most one tenant is being suspended and one is
being resumed at a time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from vgpud import audit, clock
from vgpud.lease import LeaseActivity
from vgpud.model.device import Node
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import format_bytes
from vgpud.model.tenancy import Allocation, Cause, Mode, State
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.suspends import Suspends
from vgpud.planner.residency import (
    Kind,
    Move,
    Plan,
    Rules,
    Tenant,
    Where,
    decide,
    patience_after,
    prepares_at,
)
from vgpud.policy.model import Policy, PreloadSettings

log = structlog.get_logger(__name__)

_REST_SECONDS = 2.0  # pause between observations while no decision is due soon
_NO_RULES_SECONDS = 300.0  # pause while the policy has no rule; a reload ends it by nudge()
_WAKE_SECONDS = 0.2  # pause while a suspended tenant may have work at any time
_LEAST_SECONDS = 0.02
_LOOKS = 10  # number of observations within the time after which a tenant counts as idle
_ASK_SECONDS = 5.0
# Shortest pause after a failed suspension or resumption of a tenant. The pause is at least as long as the
# failed attempt, so that a tenant that delays its suspensions takes at most half of the time from the
# device's other tenants.
_BACK_OFF_SECONDS = 30.0
_RANKS = {"above-normal": 1, "below-normal": -1}
_NO_RULES = Rules()
_WHERE = {
    State.ALLOCATING: Where.NEW,
    State.SUSPENDING: Where.GOING,
    State.SUSPENDED: Where.AWAY,
    State.RESUMING: Where.COMING,
}


@dataclass
class _Seen:
    """What earlier observations found out about one allocation. Times are in seconds of the monotonic
    clock.
    """

    where: Where
    since: float
    active_at: float
    activity: LeaseActivity | None = None
    asked_at: float = float("-inf")
    wants_since: float | None = None
    patience: int = 0
    not_before: float = float("-inf")
    why_not: str = ""


@dataclass
class Residency:
    context: NodeContext
    suspends: Suspends
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _waiting: dict[str, Move] = field(default_factory=dict)
    # ids of tenants that prepare host buffers for an eviction
    _expected: set[str] = field(default_factory=set)
    _moving: set[str] = field(default_factory=set)  # ids of tenants that are being suspended or resumed
    _kept: tuple[Policy, Node, Mapping[str, PreloadSettings] | None] | None = None
    _nudged: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Observes and acts until the daemon stops."""
        while True:
            self._nudged.clear()
            pause = await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._nudged.wait()

    def nudge(self) -> None:
        """Ends the pause before the next observation."""
        self._nudged.set()

    async def admit(self, made: Allocation) -> None:
        """Evicts memory that suspended tenants kept on the devices of a new tenant, as far as it needs the
        room. Does nothing for a tenant that takes no turns on the device, or that starts suspended.
        """
        if made.state is State.ACTIVE and self._rules(made).turn_seconds is not None:
            await self.context.kept.make_way(made)

    def standing(self, allocation: Allocation) -> str:
        """A sentence on what a suspended tenant waits for, and whether libvgpu swapped it out; empty for
        other tenants.
        """
        if allocation.state is not State.SUSPENDED:
            return ""
        if allocation.is_swapped:
            stays = self.suspends.swaps.told_stays(allocation)
            kept = self.context.kept.bytes_of(allocation)
            more = f", and {format_bytes(kept)} until others need the room" if kept else ""
            return f"{self._waits_for(allocation)}; swapped out by libvgpu, {stays} of it on the device{more}"
        return self._waits_for(allocation)

    def _waits_for(self, allocation: Allocation) -> str:
        if allocation.cause is Cause.HAND:
            wants = self.context.activities.wants(allocation)
            return "by hand, wants to work" if wants else "by hand"
        move = self._waiting.get(allocation.id)
        if move is not None:
            return f"waits to resume, {_ordinal(move.place)} in the queue: {move.sentence}"
        return "idle" if allocation.cause is Cause.IDLE else "has no work, and left its room to others"

    @property
    def waiting(self) -> int:
        """The number of suspended tenants in the queue to be resumed."""
        return len(self._waiting)

    # --- one observation

    async def _look(self) -> float:
        """Makes one observation. Returns the seconds until the next one."""
        now = clock.now()
        ruled = [(a, rules) for a in self.context.book if (rules := self._rules(a)).any or _is_sent(a)]
        for gone in self._seen.keys() - {allocation.id for allocation, _ in ruled}:
            del self._seen[gone]
        self.context.activities.keep({allocation.id for allocation in self.context.book})
        self._waiting = {}
        if not ruled:
            return _REST_SECONDS if _has_rules(self.context.policy()) else _NO_RULES_SECONDS
        for allocation, rules in ruled:
            await self._see(allocation, rules, now)
        # Some tenants may have been released while the arbiter was asked, so they are left out.
        plan = self._decide(now, {a.id: rules for a, rules in ruled if a.id in self.context.book})
        self._waiting = {move.id: move for move in plan.moves if move.kind is Kind.WAIT}
        self._expect(ruled, now)
        for move in plan.moves:
            if move.kind is not Kind.WAIT and self._moving <= {move.beside}:
                self._moving.add(move.id)
                self.context.background.spawn(self._make(move))
        return self._pause(now, plan, ruled)

    def _expect(self, ruled: Sequence[tuple[Allocation, Rules]], now: float) -> None:
        """Lets tenants prepare host buffers for their eviction, as far as the host has memory: first those on
        a device for which another tenant waits, then those that will soon be suspended as idle.
        """
        here = [(a, rules) for a, rules in ruled if a.state is State.ACTIVE]
        first: dict[str, str] = {}  # device UUID -> id of the first tenant in the device's queue
        for name in self._waiting:
            for part in self.context.book.get(name).slices:
                first.setdefault(part.device_uuid, name)
        awaited = {a.id: first[p.device_uuid] for a, _ in here for p in a.slices if p.device_uuid in first}
        turns = {a.id: awaited[a.id] for a, r in here if a.id in awaited and r.turn_seconds is not None}
        soon = [a for a, _ in here if a.id in awaited]
        soon += [a for a, r in here if a not in soon and prepares_at(self._tenant(a, r, now)) <= now]
        before, self._expected = self._expected, {allocation.id for allocation in soon}
        no_longer = [a for a, _ in ruled if a.id in before - self._expected]
        if soon or no_longer:
            self.suspends.swaps.expect(soon, no_longer, turns)

    def _pause(self, now: float, plan: Plan, ruled: list[tuple[Allocation, Rules]]) -> float:
        pause = min(plan.again - now, _REST_SECONDS)
        for allocation, rules in ruled:
            if _is_sent(allocation) and allocation.state is State.SUSPENDED:
                pause = min(pause, _WAKE_SECONDS)
            if rules.idle_seconds is not None and allocation.state is State.ACTIVE:
                pause = min(pause, rules.idle_seconds / _LOOKS)
        return max(pause, _LEAST_SECONDS)

    async def _see(self, allocation: Allocation, rules: Rules, now: float) -> None:
        where = _where(allocation, self._seen.get(allocation.id))
        seen = self._seen.setdefault(allocation.id, _Seen(where, now, now))
        if where is not seen.where:
            seen.where, seen.since, seen.active_at, seen.asked_at = where, now, now, float("-inf")
            seen.activity, seen.wants_since = None, None if where is Where.HERE else seen.wants_since
        if where is Where.HERE and allocation.state is State.ACTIVE:
            await self._see_work(allocation, rules, seen, now)
        elif where is Where.AWAY and _is_sent(allocation):
            if self.context.activities.wants(allocation):
                seen.wants_since = seen.wants_since or now
            elif now - seen.asked_at > _ASK_SECONDS:
                # asks libvgpu for a new report, because a call may have bypassed libvgpu during the
                # suspension
                seen.asked_at = now
                await self.context.activities.ask(allocation.id)

    async def _see_work(self, allocation: Allocation, rules: Rules, seen: _Seen, now: float) -> None:
        """Records when a running tenant last worked. A tenant whose activity is unknown counts as working."""
        if now - seen.asked_at < (rules.idle_seconds or rules.turn_seconds or 0) / _LOOKS:
            return
        activity = self.context.activities.read(allocation)
        if activity is None or _has_worked(seen.activity, activity):
            seen.active_at = now
        seen.activity, seen.asked_at = activity, now
        await self.context.activities.ask(allocation.id)

    def _decide(self, now: float, rules: dict[str, Rules]) -> Plan:
        devices = {part.device_uuid for name in rules for part in self.context.book.get(name).slices}
        tenants = [
            self._tenant(allocation, rules.get(allocation.id, Rules()), now)
            for allocation in self.context.book
            if any(part.device_uuid in devices for part in allocation.slices)
        ]
        node = self.context.inventory.node
        there = [device for device in node.devices if device.uuid in devices]
        return decide(now, tenants, {device.uuid: device.memory_usable_bytes for device in there})

    def _tenant(self, allocation: Allocation, rules: Rules, now: float) -> Tenant:
        seen = self._seen.get(allocation.id) or _Seen(_where(allocation, None), now, now)
        settled = allocation.state in (State.ACTIVE, State.SUSPENDED) and allocation.id not in self._moving
        where = seen.where
        # the tenant is being suspended or resumed, so its state may still be the earlier one
        if allocation.id in self._moving:
            where = {Where.AWAY: Where.COMING, Where.HERE: Where.GOING}.get(where, where)
        stays = self._stays(allocation, where, rules)
        return Tenant(
            id=allocation.id,
            parts=tuple((part.device_uuid, part.memory_bytes) for part in allocation.slices),
            where=where,
            since=seen.since,
            rules=rules if settled else Rules(),
            active_at=seen.active_at,
            cause=allocation.cause,
            # a tenant that is being moved is in no queue of its old device: it waits on its new one
            wants_since=None if allocation.moves else seen.wants_since,
            rank=_RANKS.get(allocation.request.priority, 0),
            patience=seen.patience,
            not_before=seen.not_before,
            why_not=seen.why_not,
            stays=() if stays is None else tuple((p.device_uuid, stays) for p in allocation.slices),
            swaps=stays is not None,
        )

    def _stays(self, allocation: Allocation, where: Where, rules: Rules) -> int | None:
        """Bytes that would remain on the device after libvgpu swaps the tenant out; None if libvgpu cannot
        swap it out.
        """
        if where is Where.HERE and rules.any:
            return self.suspends.swaps.stays_bytes(allocation)
        return allocation.stays_bytes if allocation.is_swapped else None

    # --- suspending and resuming

    async def _make(self, move: Move) -> None:
        seen, began = self._seen.get(move.id), clock.now()
        try:
            allocation = self.context.book.get(move.id)
            if move.kind is Kind.SUSPEND:
                await self._suspend(allocation, move, seen)
            else:
                await self._resume(allocation, move, seen)
        except VgpuError as error:
            if seen is not None:
                now = clock.now()
                seen.not_before = now + max(_BACK_OFF_SECONDS, now - began)
                seen.why_not = error.sentence
        finally:
            self._moving.discard(move.id)
            self.nudge()

    async def _suspend(self, allocation: Allocation, move: Move, seen: _Seen | None) -> None:
        idle = seen.activity if seen is not None and move.cause is Cause.IDLE else None
        worked = seen is not None and seen.active_at > seen.since
        audit.by_itself(f"residency: {move.sentence}")
        with audit.change("suspend", **audit.of(allocation)):
            await self.suspends.suspend(allocation, move.cause, idle, move.deep, move.room_for)
        if seen is not None and move.cause is Cause.TURN and worked:
            # the tenant's turn ended while it had work, so it waits for its next turn
            seen.wants_since = clock.now()
        self.context.tally.suspended[move.cause.value] += 1

    async def _resume(self, allocation: Allocation, move: Move, seen: _Seen | None) -> None:
        began, cause = clock.now(), allocation.cause
        wanted = None if seen is None else seen.wants_since
        if seen is not None and cause is Cause.IDLE:
            seen.patience = patience_after(seen.patience, began - seen.since, self._rules(allocation))
        audit.by_itself(f"residency: {move.sentence}")
        with audit.change("resume", **audit.of(allocation)):
            resumed = await self.suspends.resume(allocation, bool(move.beside), by_rule=True)
        if resumed.state is State.SUSPENDED:
            return
        self.context.tally.resumed[cause.value] += 1
        self.context.tally.resume_waited_seconds += clock.now() - (began if wanted is None else wanted)

    # --- rules

    def _rules(self, allocation: Allocation) -> Rules:
        """The most lenient rules of the allocation's devices. Only tenants of mode preload on whole devices
        have rules.
        """
        parts, known = allocation.slices, self._settings()
        if known is None:
            return _NO_RULES
        if not parts or any(part.mode is not Mode.PRELOAD or part.mig is not None for part in parts):
            return _NO_RULES
        settings = [known[part.device_uuid] for part in parts if part.device_uuid in known]
        return Rules(
            _longest([one.idle_suspend for one in settings]),
            _longest([one.turn for one in settings]),
            max((one.min_residence for one in settings), default=0.0),
        )

    def _settings(self) -> Mapping[str, PreloadSettings] | None:
        """The settings of mode preload by device UUID, cached until the policy or the devices change; None if
        no device has a rule.
        """
        policy, node = self.context.policy(), self.context.inventory.node
        if self._kept is None or self._kept[0] is not policy or self._kept[1] is not node:
            found = {device.uuid: policy.rule_for(device).settings_preload() for device in node.devices}
            ruled = any(one.idle_suspend is not None or one.turn is not None for one in found.values())
            self._kept = policy, node, found if ruled else None
        return self._kept[2]


def _longest(times: list[float | None]) -> float | None:
    """Returns the longest of the times; None (unlimited) if one of them is None."""
    known = [one for one in times if one is not None]
    return max(known) if known and len(known) == len(times) else None


def _has_rules(policy: Policy) -> bool:
    """True if the policy has a rule for any device, present or not."""
    settings = [rule.settings_preload() for rule in policy.device]
    return any(one.idle_suspend is not None or one.turn is not None for one in settings)


def _where(allocation: Allocation, seen: _Seen | None) -> Where:
    """Where the tenant's memory is. A tenant that is being released stays where it was: a suspended one has
    no memory on its devices.
    """
    if allocation.state is State.RELEASING and seen is not None:
        return seen.where
    return _WHERE.get(allocation.state, Where.HERE)


def _is_sent(allocation: Allocation) -> bool:
    """True if a rule of the policy has suspended the tenant, or is suspending or resuming it."""
    suspended = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)
    return allocation.state in suspended and allocation.cause is not Cause.HAND


def _has_worked(before: LeaseActivity | None, now: LeaseActivity) -> bool:
    """Has the tenant worked since `before`? Also True if one of its processes has not reported since then."""
    if before is None or now.busy or now.calls != before.calls or len(now.answers) != len(before.answers):
        return True
    answered = dict(now.answers)
    return any(answered.get(process, 0) <= times for process, times in before.answers)


def _ordinal(place: int) -> str:
    tens, ones = divmod(place % 100, 10)
    return f"{place}{'th' if tens == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(ones, 'th')}"
