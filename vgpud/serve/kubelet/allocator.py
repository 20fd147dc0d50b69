"""From ids of the kubelet to an allocation, and back: the one place that knows what its calls can mean.

The kubelet never says for which pod it asks, nor that a pod has ended, and it may ask again for ids
that vgpud knows. That is the same call once more, a container of the same pod (the kubelet gives the ids
of an init container again to the containers after it), or a new pod after one whose end vgpud has not
seen yet. The kubelet admits one pod after the other, and starts a pod's containers after the last of its
calls: ids of an allocation whose containers have not started yet are asked for by the same pod, those of
one whose containers have ended by another. Where no hooks tell of containers, PodResources does.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import structlog

from vgpud import audit, clock
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import KUBELET_PREFIX, Allocation, Lifetime, State
from vgpud.serve.keeper import Keeper
from vgpud.serve.kubelet.backoff import Backoff
from vgpud.serve.kubelet.holds import Hold, Holds
from vgpud.serve.kubelet.pods import Listing, Pods
from vgpud.serve.kubelet.resources import Resource, cards_of, request_id, request_of
from vgpud.serve.kubelet.started import Started

log = structlog.get_logger(__name__)

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())
_LEAVE_SECONDS = 5.0  # processes of a pod that is gone may take so long to end
_PAUSE_SECONDS = 0.2
_ADMISSION_SECONDS = 10.0  # between the calls for two containers of one pod
_START_SECONDS = 900.0  # until a pod's init container starts: its image may have to come first


@dataclass(frozen=True, slots=True)
class _Admission:
    """When an allocation was made, and the pods that the kubelet listed then, its own among them.

    `fresh` are those that were not listed at the check before; `refusals` counts those until then.
    """

    at_seconds: float
    pods: frozenset[str]
    fresh: frozenset[str]
    refusals: int


class Allocator:
    """`devices` are those of the node now; `changed` is called when ids came to be held or free."""

    def __init__(
        self,
        keeper: Keeper,
        holds: Holds,
        pods: Pods,
        devices: Callable[[], tuple[Device, ...]],
        changed: Callable[[], None],
        started: Started,
    ) -> None:
        self.holds = holds
        self.started = started
        self.scattered = Backoff()
        self._keeper = keeper
        self._pods = pods
        self._devices = devices
        self._changed = changed
        self._one_at_a_time = asyncio.Lock()  # as the kubelet admits pods
        self._unseen: dict[str, float] = {}  # by request id: since when no pod has it
        self._admitted: dict[str, _Admission] = {}  # by request id, of the pod that is being admitted
        self._refusals = 0
        self._checked_pods: frozenset[str] = frozenset()
        self._disputed: set[str] = set()  # request ids of what runs, whose ids the kubelet gave out again

    def held_ids(self, resource_name: str) -> tuple[frozenset[str], frozenset[str]]:
        """The ids of the resource that allocations stand for, and those among them that are not to be had: of
        failed allocations, and of containers that run though the kubelet takes their ids for free."""
        states = {a.request.id: a.state for a in self._keeper.list()[0]}
        holds = self.holds.of(resource_name)
        failed = [
            hold.ids
            for hold in holds
            if states.get(hold.request_id) is State.FAILED or hold.request_id in self._disputed
        ]
        return frozenset().union(*(hold.ids for hold in holds)), frozenset().union(*failed)

    # --- allocate

    async def allocate(self, resource: Resource, ids: Collection[str]) -> Allocation:
        """Raises VgpuError. The same ids give the same allocation until their pod has gone."""
        audit.asked_by(ROOT, "kubelet")
        async with self._one_at_a_time:
            wanted = frozenset(ids)
            if len(wanted) != len(ids):
                raise VgpuError(
                    ErrorCode.BAD_REQUEST, f"{len(ids)} ids of {resource.name}, some of them twice", ""
                )
            try:
                return await self._allocate(resource, wanted)
            except VgpuError:
                self._refusals += 1  # its pod fails; what comes next is another pod's
                self._back_off(resource, wanted)
                raise
            finally:
                self._changed()

    def _back_off(self, resource: Resource, ids: frozenset[str]) -> None:
        """A pod that fits the sum of the cards and none of them shall wait, not be made and fail again."""
        one_card = resource.divisible and resource.rule.across == "refuse"
        if one_card and len(cards_of(resource, ids, self._devices())) > 1:
            self.scattered.refused(resource.name)

    async def _allocate(self, resource: Resource, ids: frozenset[str]) -> Allocation:
        known = self.holds.overlapping(resource.name, ids)
        request_of(
            resource, ids, self._devices(), request_id(resource.name, ids)
        )  # ids that are none are refused
        if known:
            listed = await self._pods.list()
            alive = [hold for hold in known if not await self._leave_if_stale(hold, ids, listed)]
            if alive:
                return await self._again(resource, ids, alive, listed)
        return await self._new(resource, ids)

    async def _new(self, resource: Resource, ids: frozenset[str]) -> Allocation:
        name = request_id(resource.name, ids)
        request = request_of(resource, ids, self._devices(), name)
        await self.holds.put(Hold(name, resource.name, ids))
        listed = await self._pods.list()
        self._changed()
        try:
            allocation = await self._keeper.allocate(request)
        except VgpuError:
            await self.holds.drop(name)
            raise
        if listed is not None:
            fresh = listed.pods - self._checked_pods
            self._admitted[name] = _Admission(clock.now(), listed.pods, fresh, self._refusals)
        log.info("the kubelet's", allocation=allocation.id, resource=resource.name, ids=len(ids))
        return allocation

    async def _leave_if_stale(self, hold: Hold, ids: frozenset[str], listed: Listing | None) -> bool:
        """Has its pod gone? Then what it held is released first, for the kubelet gives it out anew."""
        allocation = self._allocation(hold.request_id)
        if allocation is None:
            await self._drop(hold.request_id)
            return True
        if listed is None or listed.holder(hold.resource, hold.ids) or self.started.runs(hold.request_id):
            return False
        if not self.started.began(hold.request_id) and allocation.state is not State.FAILED:
            if self._is_being_admitted(hold.request_id, listed):
                return False
            if not hold.pod and hold.ids == ids:
                return False  # no pod had it yet: the same call once more
        with audit.because("the kubelet gives its ids to another pod", hold.pod):
            await self._release(allocation, _LEAVE_SECONDS)
        return True

    def _is_being_admitted(self, request_id: str, listed: Listing) -> bool:
        """Was it made for a container of the pod that the kubelet asks for now? That pod is still listed."""
        made = self._admitted.get(request_id)
        return (
            made is not None
            and made.refusals == self._refusals
            and clock.now() - made.at_seconds < _ADMISSION_SECONDS
            and made.pods <= listed.pods
        )

    async def _again(
        self,
        resource: Resource,
        ids: frozenset[str],
        alive: list[Hold],
        listed: Listing | None,
    ) -> Allocation:
        """Ids of which a living pod holds some: the same call, or another container of that pod."""
        hold = alive[0]
        self._refuse_those_that_run(alive)
        if len(alive) == 1 and ids <= hold.ids:
            return await self._keeper.allocate(self._held(hold).request)
        known = listed is not None and (
            self._is_being_admitted(hold.request_id, listed) or listed.holder(hold.resource, hold.ids)
        )
        if len(alive) > 1 or not known or not resource.divisible:
            unknown = "" if listed is not None else ", and the kubelet does not say for which pods"
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"of {len(ids)} ids of {resource.name} some are held by {len(alive)} allocations{unknown}",
                "let an init container ask for as many as the containers after it, or for none",
            )
        return await self._grow(resource, hold, hold.ids | ids)

    def _refuse_those_that_run(self, alive: list[Hold]) -> None:
        """The admission of a pod is over when a container of it has started: another pod asks for its ids."""
        for hold in alive:
            if self.started.began(hold.request_id):
                self._disputed.add(hold.request_id)
                raise VgpuError(
                    ErrorCode.ALLOCATION_BUSY,
                    f"ids of {hold.resource} are held by {hold.pod or 'a container'}, which has started, and "
                    "the kubelet gives them to another pod",
                    "the kubelet lost its account of them: its next choice has others",
                )

    async def _grow(self, resource: Resource, hold: Hold, ids: frozenset[str]) -> Allocation:
        """The containers of a pod whose ids overlap share one allocation, of all their ids."""
        allocation = self._held(hold)
        larger = request_of(resource, ids, self._devices(), hold.request_id)
        if larger.selector != allocation.request.selector:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                f"containers of one pod were given {resource.name} of different cards that overlap",
                "let an init container ask for as many as the containers after it, or for none",
            )
        with audit.of_pod(hold.pod):
            grown = await self._keeper.resize(allocation.id, ROOT, larger.memory_bytes, larger.share)
        await self.holds.put(replace(hold, ids=ids))
        return grown

    def _held(self, hold: Hold) -> Allocation:
        allocation = self._allocation(hold.request_id)
        if allocation is None:
            raise VgpuError(ErrorCode.NO_SUCH_ALLOCATION, f"{hold.request_id} was just released", "try again")
        return allocation

    def _allocation(self, name: str) -> Allocation | None:
        held, _ = self._keeper.list()
        return next((allocation for allocation in held if allocation.request.id == name), None)

    async def _release(self, allocation: Allocation, patience_seconds: float) -> None:
        """Raises VgpuError(TENANT_ALIVE) where processes stay in it."""
        end = clock.now() + patience_seconds
        while True:
            try:
                await self._keeper.release(allocation.id, ROOT, force=False)
                break
            except VgpuError as error:
                if error.code is ErrorCode.NO_SUCH_ALLOCATION:
                    break
                if error.code is not ErrorCode.TENANT_ALIVE or clock.now() >= end:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)
        await self._drop(allocation.request.id)

    async def _drop(self, request_id: str) -> None:
        self._unseen.pop(request_id, None)
        self._admitted.pop(request_id, None)
        self._disputed.discard(request_id)
        await self.started.forget(request_id)
        await self.holds.drop(request_id)

    # --- containers

    async def bind(self, allocation_id: str, init: Lifetime, pod: str) -> bool:
        """A container of the allocation is about to run, with this init; `pod` is its name, "" if unknown.

        False for an allocation that is not the kubelet's. Raises VgpuError: ALLOCATION_BUSY where it has
        failed or is on its way out, LEDGER_FAILED.
        """
        async with self._one_at_a_time:
            return await self._bind(allocation_id, init, pod)

    async def _bind(self, allocation_id: str, init: Lifetime, pod: str) -> bool:
        found = next((a for a in self._keeper.list()[0] if a.id == allocation_id), None)
        if found is None or not found.request.id.startswith(KUBELET_PREFIX):
            return False
        if found.state is not State.ACTIVE:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation_id} is {found.state.value}, no container can run under it",
                "delete the pod: its new one gets an allocation of its own",
            )
        name = found.request.id
        with audit.of_pod(pod):
            audit.record("bind", None, allocation=allocation_id, owner=found.request.owner.uid, init=init.pid)
        await self.started.add(name, init)
        hold = next((hold for hold in self.holds if hold.request_id == name), None)
        if hold is not None and pod:
            await self.holds.bind(hold, pod)
        return True

    # --- release

    async def check(self, release_seconds: float, settled: bool = False) -> None:
        """Asks the kubelet once; releases what no pod has any more.

        At once where a container ran under it, its pod is known, and the kubelet's list is `settled`; else
        after `release_seconds` of answers without a gap. Nothing is released under a container that runs.
        """
        async with self._one_at_a_time:
            listed = await self._pods.list()
            if listed is None:
                self._unseen.clear()
                return
            for allocation in self._keeper.list()[0]:
                name = allocation.request.id
                if not name.startswith(KUBELET_PREFIX):
                    continue
                seen = await self._seen(allocation, listed)
                if seen or self.started.runs(name) or self._may_start(name, listed):
                    self._unseen.pop(name, None)
                elif self._unseen_seconds(name) >= (
                    0.0 if settled and self._has_ended(name) else release_seconds
                ):
                    await self._release_unseen(allocation)
            self._checked_pods = listed.pods
            names = {allocation.request.id for allocation in self._keeper.list()[0]}
            for hold in self.holds:
                if hold.request_id not in names:
                    await self._drop(hold.request_id)

    def _may_start(self, name: str, listed: Listing) -> bool:
        """Is it of an init container, which is never listed, of a pod that has not started it yet?

        Which pod that is cannot be told: one that came when the allocation was made, and is still there.
        """
        made = self._admitted.get(name)
        known = any(hold.pod for hold in self.holds if hold.request_id == name)
        if made is None or known or clock.now() - made.at_seconds >= _START_SECONDS:
            return False
        return not made.fresh.isdisjoint(listed.pods)

    def _unseen_seconds(self, name: str) -> float:
        now = clock.now()
        return now - self._unseen.setdefault(name, now)

    def _has_ended(self, name: str) -> bool:
        """Had it a container of a pod that is known by name? It does not run, or this would not be asked."""
        return self.started.began(name) and any(h.pod for h in self.holds if h.request_id == name)

    def waits_for_a_pods_end(self) -> bool:
        """Is there an allocation whose containers have all ended?"""
        return any(
            self.started.began(h.request_id) and not self.started.runs(h.request_id) for h in self.holds
        )

    async def _seen(self, allocation: Allocation, listed: Listing) -> bool:
        """Does a pod hold it? Also learns ids, and the pod, that were not known yet."""
        name = allocation.request.id
        hold = next((hold for hold in self.holds if hold.request_id == name), None)
        if hold is None:  # the file was lost: the ids themselves give the name
            mine = next((h for h in listed.held if request_id(h.resource, h.ids) == name), None)
            if mine is None:
                return False
            hold = Hold(name, mine.resource, mine.ids)
        pod = listed.holder(hold.resource, hold.ids)
        if not pod:  # an init container alone may have it, which its pod may start again
            return listed.is_init_of_active(hold.pod) and self._is_latest(hold)
        named = await self.holds.bind(hold, pod)
        if not hold.pod:
            with audit.because("the kubelet's PodResources names it", named.pod):
                audit.record("bind", None, allocation=allocation.id, owner=allocation.request.owner.uid)
        return True

    def _is_latest(self, hold: Hold) -> bool:
        """Not so where a pod of the same name has come after the one that had it."""
        named = [h.request_id for h in self.holds if (h.resource, h.pod) == (hold.resource, hold.pod)]
        return named[-1:] == [hold.request_id]

    async def _release_unseen(self, allocation: Allocation) -> None:
        pod = next((hold.pod for hold in self.holds if hold.request_id == allocation.request.id), "")
        try:
            with audit.because("no pod holds it", pod):
                await self._release(allocation, 0.0)
        except VgpuError as error:
            log.warning("no pod holds it, but it cannot go yet", allocation=allocation.id, why=str(error))
        else:
            log.info("released what no pod holds", allocation=allocation.id)
            self._changed()
