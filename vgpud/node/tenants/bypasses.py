"""Watches tenants in mode preload for device memory that their ledgers do not count, and for tampering.

A survey asks the arbiter for the processes of each tenant, and NVML for the processes of each device. If a
tenant holds more than its ledger counts, its processes have to measure what the driver has taken, and the
figures are read several times more. Only the excess that all readings show counts. planner.bypass decides.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from vgpud import audit, clock
from vgpud.lease import Registered, UnknownCalls
from vgpud.model.errors import VgpuError
from vgpud.model.event import EventKind
from vgpud.model.log_event import LogEvent
from vgpud.model.marks import Mark, MarkKind
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, Mode, Slice, State
from vgpud.modes.gpu_use import is_in
from vgpud.modes.preload import Preload
from vgpud.node.tenants.ancestry import belongings, owner_of
from vgpud.node.tenants.cgroups import processes_in
from vgpud.node.tenants.context import NodeContext
from vgpud.planner.bypass import (
    Belongings,
    Reading,
    Verdict,
    Watched,
    excess_bytes,
    first_sight,
    judge,
    sentence_of,
    under_limit,
)
from vgpud.proc import has_exited

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.5  # from the start of a survey to the start of the next
_REST_RATIO = 50  # the pause after a survey is at least this many times the survey's CPU time
# A bypass that begins just after a survey is marked after the pause and the readings: within a second if
# surveys take little CPU time. In the first pause a suspect tenant's libvgpu measures the driver's memory.
_READINGS = 8
_READING_PAUSE_SECONDS = 0.06

_EVENTS = {
    MarkKind.BYPASSED: EventKind.ALLOCATION_BYPASSED,
    MarkKind.TAMPERED: EventKind.ALLOCATION_TAMPERED,
    MarkKind.GATED: EventKind.ALLOCATION_GATED,
    MarkKind.UNKNOWN_CALLS: EventKind.ALLOCATION_UNKNOWN_CALLS,
}
# A slice: allocation id and position in the allocation. A move changes the device, and neither of the two.
Place = tuple[str, int]


@dataclass
class _Survey:
    """The readings of one survey. `least` is the smallest excess of each slice, in bytes."""

    everything: tuple[Allocation, ...]
    watched: dict[Place, Watched]
    registered: dict[str, Registered] = field(default_factory=dict)
    unknown: dict[str, UnknownCalls] = field(default_factory=dict)
    least: dict[Place, int] = field(default_factory=dict)
    pids: dict[str, set[int]] = field(default_factory=dict)  # pids of processes on devices, by allocation
    owners: dict[int, str] = field(default_factory=dict)
    known: Belongings | None = None
    cpu_seconds: float = 0.0


@dataclass
class Bypasses:
    context: NodeContext
    release_later: Callable[[str, str], object]
    _marks: dict[str, dict[MarkKind, Mark]] = field(default_factory=dict)
    _watched: dict[Place, Watched] = field(default_factory=dict)
    _older: frozenset[str] = frozenset()  # allocations that existed before vgpud started
    _stopped: set[str] = field(default_factory=set)

    def restore(self, marks: Iterable[Mark]) -> None:
        """At the start of vgpud: restores the recorded marks. Precondition: the book has the allocations."""
        self._older = frozenset(allocation.id for allocation in self.context.book)
        for mark in marks:
            self._marks.setdefault(mark.allocation_id, {})[mark.kind] = mark

    def resizing(self, allocation: Allocation) -> None:
        """Called before a resize. The first survey of a new allocation may come after it: a limit that was
        lowered below the tenant's use must not count as the tenant's first limit.
        """
        if allocation.id in self._older or not _is_watched(allocation):
            return
        for place, part in zip(_places(allocation), allocation.slices, strict=True):
            self._watched.setdefault(place, Watched(part.memory_bytes, part.memory_bytes))

    def marks(self, allocation: Allocation) -> tuple[Mark, ...]:
        """The marks of the allocation. The mark of a missing memory wall is not recorded: each call makes
        this mark anew.
        """
        preload = self.context.preload
        refusal = None if preload is None else preload.walls.refusal(allocation)
        found = tuple(self._marks.get(allocation.id, {}).values())
        return found if refusal is None else (*found, refusal)

    def is_bypassed(self, allocation: Allocation) -> bool:
        return MarkKind.BYPASSED in self._marks.get(allocation.id, {})

    async def run(self) -> None:
        """Surveys until the daemon stops."""
        while True:
            began = clock.now()
            cpu_seconds = await self.look()
            await asyncio.sleep(max(began + _LOOK_SECONDS - clock.now(), _REST_RATIO * cpu_seconds))

    async def look(self) -> float:
        """Runs one survey and returns its CPU time in seconds. Never raises: if it fails, the next survey
        tries again.
        """
        self._forget_gone()
        held = [allocation for allocation in self.context.book if _is_watched(allocation)]
        preload = self.context.preload
        if not held or preload is None:
            return 0.0
        survey = _Survey(tuple(self.context.book), dict(self._watched))
        await asyncio.to_thread(self._fill, preload, held, survey)
        self.context.tally.bypass_looks += 1
        for allocation in held:
            # the readings of an allocation that changed meanwhile may be of half-moved memory
            if allocation.id in self.context.book and self.context.book.get(allocation.id) is allocation:
                seen = survey.watched.keys() & _places(allocation)
                self._watched |= {place: survey.watched[place] for place in seen}
                await self._judge(preload, allocation, survey)
        return survey.cpu_seconds

    def _forget_gone(self) -> None:
        book = self.context.book
        self._marks = {name: marks for name, marks in self._marks.items() if name in book}
        self._watched = {place: one for place, one in self._watched.items() if place[0] in book}
        self._stopped = {name for name in self._stopped if name in book}

    # --- reading the figures, in a thread

    def _fill(self, preload: Preload, held: list[Allocation], survey: _Survey) -> None:
        began = time.thread_time()
        for allocation in held:
            # no arbiter answers now; it is restarted, and the processes register again
            with suppress(VgpuError):
                survey.registered[allocation.id] = preload.registered(allocation.id)
            with suppress(VgpuError):  # the allocation was released meanwhile
                survey.unknown[allocation.id] = preload.unknown_calls(allocation.id)
        survey.owners = {pid: name for name, one in survey.registered.items() for pid in one.pids}
        slices = {(a.id, at): (a, part) for a in held for at, part in enumerate(a.slices)}
        for place, reading in self._readings(preload, held, survey).items():
            allocation, part = slices[place]
            known, limit = survey.watched.get(place), part.memory_bytes
            is_new = place[0] not in self._older
            survey.watched[place] = watched = (
                first_sight(limit, reading, is_new, self._is_marked(allocation, part))
                if known is None
                else under_limit(known, limit, reading.held_bytes)
            )
            survey.least[place] = excess_bytes(watched, reading)
        self._read_again(preload, held, survey)
        survey.cpu_seconds = time.thread_time() - began

    def _read_again(self, preload: Preload, held: list[Allocation], survey: _Survey) -> None:
        suspects = [a for a in held if any(survey.least.get(place) for place in _places(a))]
        for allocation in suspects:
            with suppress(VgpuError):
                preload.learn(allocation.id)
        for _ in range(_READINGS - 1):
            if not suspects:
                return
            time.sleep(_READING_PAUSE_SECONDS)
            readings = self._readings(preload, suspects, survey)
            for place in [place for a in suspects for place in _places(a)]:
                seen = readings.get(place)
                excess = 0 if seen is None else excess_bytes(survey.watched[place], seen)
                survey.least[place] = min(survey.least.get(place, 0), excess)
            suspects = [a for a in suspects if any(survey.least[place] for place in _places(a))]

    def _readings(self, preload: Preload, held: list[Allocation], survey: _Survey) -> dict[Place, Reading]:
        """Reads the ledgers, then NVML, then the ledgers again, for every slice that can be read."""
        before = _counted(preload, held)
        devices = {part.device_uuid for allocation in held for part in allocation.slices}
        listed = {}
        for uuid in devices:
            with suppress(VgpuError):  # the device is lost or does not answer
                listed[uuid] = self.context.inventory.processes(uuid)
        after = _counted(preload, held)
        found = {}
        for allocation in held:
            for at, part in enumerate(allocation.slices):
                if (
                    allocation.id not in before
                    or allocation.id not in after
                    or part.device_uuid not in listed
                ):
                    continue
                own = [
                    one
                    for one in listed[part.device_uuid]
                    if is_in(one, part) and self._owner(one.pid, held, survey) == allocation.id
                ]
                survey.pids.setdefault(allocation.id, set()).update(one.pid for one in own)
                counted = max(before[allocation.id][at], after[allocation.id][at])
                bytes_held = sum(one.memory_bytes or 0 for one in own)
                found[allocation.id, at] = Reading(bytes_held, counted, len(own))
        return found

    def _owner(self, pid: int, held: list[Allocation], survey: _Survey) -> str:
        """The allocation to which a process belongs, looked up once per survey. A reused pid does no harm:
        only an excess in all readings counts, and neither process of that pid is in all of them.
        """
        if pid not in survey.owners:
            survey.known = survey.known or belongings(survey.everything, survey.owners)
            survey.owners[pid] = owner_of(pid, survey.known)
        return survey.owners[pid]

    # --- judging the figures, on the event loop

    def _is_marked(self, allocation: Allocation, part: Slice) -> bool:
        """True if the mark names the device of the slice, or a device that a slice had before a move."""
        mark = self._marks.get(allocation.id, {}).get(MarkKind.BYPASSED)
        if mark is None:
            return False
        others = {other.device_uuid for other in allocation.slices} - {part.device_uuid}
        return mark.subject not in others

    async def _judge(self, preload: Preload, allocation: Allocation, survey: _Survey) -> None:
        seen = survey.registered.get(allocation.id, Registered())
        marks = self._marks.get(allocation.id, {})
        if (seen.cuts or seen.shut) and MarkKind.TAMPERED not in marks:
            sentence = (
                "its processes hold more locks on its usage file than vgpu-arbiter looks at"
                if seen.shut
                else "its usage file was made larger than it may be, and was cut "
                f"{counted(seen.cuts, 'time')}"
            )
            await self._mark(allocation, MarkKind.TAMPERED, "", seen.cuts, sentence)
            await self._stop_if_ruled(preload, allocation, allocation.slices, survey)
        await self._judge_engine(allocation, seen if allocation.id in survey.registered else None)
        unknown = survey.unknown.get(allocation.id)
        driver = self.context.inventory.node.driver_version
        told = marks.get(MarkKind.UNKNOWN_CALLS)
        if unknown is not None and unknown.count and (told is None or told.subject != driver):
            such = f", such as {unknown.example}" if unknown.example else ""
            sentence = (
                f"driver {driver} has {unknown.count} functions that libvgpu does not know{such}: "
                "no limit holds there"
            )
            await self._mark(allocation, MarkKind.UNKNOWN_CALLS, driver, unknown.count, sentence)
        for place, part in zip(_places(allocation), allocation.slices, strict=True):
            await self._judge_slice(preload, allocation, place, part, survey)

    async def _judge_engine(self, allocation: Allocation, seen: Registered | None) -> None:
        """Marks a tenant if the driver refused to preempt it, and removes the mark when the refusal has
        ended. `seen` is None if the arbiter did not answer.
        """
        marked = MarkKind.GATED in self._marks.get(allocation.id, {})
        if seen is not None and seen.refusal and not marked:
            sentence = (
                f"the driver refused to take it off its device ({seen.refusal}): "
                "libvgpu's gate enforces its time slices"
            )
            await self._mark(allocation, MarkKind.GATED, "", 0, sentence)
        if seen is not None and not seen.refusal and marked:
            await self._unmark(allocation, MarkKind.GATED, "the engine cut enforces its time slices again")

    async def _judge_slice(
        self, preload: Preload, allocation: Allocation, place: Place, part: Slice, survey: _Survey
    ) -> None:
        if place not in survey.least or place not in self._watched:
            return
        excess, before = survey.least[place], self._watched[place]
        self._watched[place], verdict = judge(before, excess, clock.now())
        is_recorded = True
        if verdict is Verdict.MARK:
            sentence = sentence_of(excess, part.memory_bytes)
            is_recorded = await self._mark(allocation, MarkKind.BYPASSED, part.device_uuid, excess, sentence)
        if verdict in (Verdict.MARK, Verdict.STAYS):
            await self._stop_if_ruled(preload, allocation, (part,), survey)
        if verdict is Verdict.CLEAR:
            is_recorded = await self._clear(allocation)
        if not is_recorded:
            self._watched[place] = before  # the next survey gives the same verdict and tries again

    async def _mark(
        self, allocation: Allocation, kind: MarkKind, subject: str, amount: int, sentence: str
    ) -> bool:
        """Marks the allocation. Returns False, and marks nothing, if the mark cannot be recorded."""
        mark = Mark(allocation.id, kind, subject, amount, sentence, time.time_ns())
        try:
            await self.context.store.mark(mark, _EVENTS[kind], allocation)
        except VgpuError as error:
            log.error(
                LogEvent.ALLOCATION_MARK_NOT_RECORDED,
                allocation=allocation.id,
                mark=kind.value,
                why=str(error),
            )
            return False
        self._marks.setdefault(allocation.id, {})[kind] = mark
        self.context.tally.marked[kind.value] += 1
        audit.automatic("mark", sentence, **audit.of(allocation), mark=kind.value, amount=amount)
        return True

    async def _clear(self, allocation: Allocation) -> bool:
        if any(one.marked for place, one in self._watched.items() if place[0] == allocation.id):
            return True
        return await self._unmark(allocation, MarkKind.BYPASSED, "all its device memory is counted again")

    async def _unmark(self, allocation: Allocation, kind: MarkKind, why: str) -> bool:
        """Removes a mark. Returns False if the removal cannot be recorded; the mark stays then."""
        mark = self._marks.get(allocation.id, {}).get(kind)
        if mark is None:
            return True
        try:
            await self.context.store.unmark(mark, allocation, why)
        except VgpuError as error:
            log.error(LogEvent.ALLOCATION_MARK_NOT_REMOVED, allocation=allocation.id, why=str(error))
            return False
        self._marks.get(allocation.id, {}).pop(kind, None)
        audit.automatic("unmark", why, **audit.of(allocation), mark=kind.value)
        return True

    # --- ending a tenant

    async def _stop_if_ruled(
        self, preload: Preload, allocation: Allocation, parts: Iterable[Slice], survey: _Survey
    ) -> None:
        node, policy = self.context.inventory.node, self.context.policy()
        devices = [device for part in parts if (device := node.device(part.device_uuid)) is not None]
        if not any(policy.rule_for(one).settings_preload().on_bypass == "stop" for one in devices):
            return
        ended = await asyncio.to_thread(self._end_processes, preload, allocation, survey)
        if allocation.id in self._stopped or allocation.id not in self.context.book:
            return
        self._stopped.add(allocation.id)
        self.context.tally.stopped += 1
        reason = "it was marked, and on_bypass is stop"
        audit.automatic("stop", reason, **audit.of(allocation), ended=len(ended))
        await self._tell_stop(allocation, len(ended))
        self.release_later(allocation.id, reason)

    async def _tell_stop(self, allocation: Allocation, ended: int) -> None:
        count = counted(ended, "process")
        sentence = f"allocation {allocation.id}: vgpud ended {count} and releases it, as on_bypass is stop"
        try:
            user = allocation.request.counts_for.uid
            await self.context.store.notice(EventKind.ALLOCATION_STOPPED, allocation.id, sentence, user)
        except VgpuError as error:
            log.error(LogEvent.EVENT_OF_TENANT_STOP_NOT_RECORDED, allocation=allocation.id, why=str(error))

    def _end_processes(self, preload: Preload, allocation: Allocation, survey: _Survey) -> list[int]:
        """Kills the processes of the allocation, and no others: the ownership is checked again while a pidfd
        of the process is open.
        """
        registered = Registered()
        with suppress(VgpuError):
            registered = preload.registered(allocation.id)
        members = processes_in(allocation.request.lifetime.cgroup)
        candidates = {*registered.pids, *survey.pids.get(allocation.id, ()), *members}
        pidfds = {}
        for pid in candidates:
            with suppress(OSError):  # the process has ended
                pidfds[pid] = os.pidfd_open(pid)
        try:
            return self._end_those(preload, allocation, survey, pidfds)
        finally:
            for pidfd in pidfds.values():
                os.close(pidfd)

    def _end_those(
        self, preload: Preload, allocation: Allocation, survey: _Survey, pidfds: Mapping[int, int]
    ) -> list[int]:
        known = {}
        with suppress(VgpuError):
            known = dict.fromkeys(preload.registered(allocation.id).pids, allocation.id)
        owners = belongings(survey.everything, known)
        ended = []
        for pid, pidfd in pidfds.items():
            # while the process of the pidfd runs, no other process can have its pid
            if owner_of(pid, owners) != allocation.id or has_exited(pidfd):
                continue
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                ended.append(pid)
        return ended


def _is_watched(allocation: Allocation) -> bool:
    """True for active allocations in mode preload that are not being moved. In other modes hardware or the
    MPS server enforces the limits.
    """
    preload = all(part.mode is Mode.PRELOAD for part in allocation.slices) and bool(allocation.slices)
    return preload and allocation.state is State.ACTIVE and not allocation.moves


def _places(allocation: Allocation) -> tuple[Place, ...]:
    return tuple((allocation.id, at) for at in range(len(allocation.slices)))


def _counted(preload: Preload, held: list[Allocation]) -> dict[str, tuple[int, ...]]:
    found = {}
    for allocation in held:
        with suppress(VgpuError):  # the allocation was released meanwhile
            found[allocation.id] = preload.counted(allocation)
    return found
