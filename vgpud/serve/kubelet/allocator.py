"""Maps the kubelet's device ids to allocations and back, and interprets the kubelet's calls.

The kubelet does not name the pod of a call, does not report the end of a pod, and may repeat ids that vgpud
knows. Repeated ids mean one of three things: a repeated call, another container of the same pod (the kubelet
reuses the ids of an init container for later containers), or a new pod after one whose end vgpud has not
noticed. The kubelet admits one pod after the other, and starts a pod's containers after its last call. So if
the containers of an allocation have not started, its ids belong to the same pod; if they have ended, its ids
belong to a new pod. Without hooks that report containers, PodResources is asked.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import structlog

from vgpud import audit, clock
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import KUBELET_PREFIX, Allocation, Lifetime, State, workload_of
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.kubelet.backoff import Backoff
from vgpud.serve.kubelet.holds import Hold, Holds
from vgpud.serve.kubelet.pods import Listing, Pods
from vgpud.serve.kubelet.resources import Resource, cards_of, request_id, request_of
from vgpud.serve.kubelet.started import Started

log = structlog.get_logger(__name__)

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())
_LEAVE_SECONDS = 5.0  # maximum wait for the processes of an ended pod
_PAUSE_SECONDS = 0.2
_ADMISSION_SECONDS = 10.0  # maximum time between the calls for two containers of one pod
# maximum time until a pod's init container starts, which includes the pull of its image
_START_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class _Admission:
    """When an allocation was made, and the pods that were new in the kubelet's list at that time, including
    the allocation's own.

    `cuts` is the number of admissions that had failed until then.
    """

    at_seconds: float
    newcomers: frozenset[str]
    cuts: int


class Allocator:
    """Makes and releases the kubelet's allocations. `devices` returns the node's devices. `changed` is called
    when ids become held or free.
    """

    def __init__(
        self,
        keeper: NodeKeeper,
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
        # calls run one at a time, because the kubelet too admits one pod at a time
        self._one_at_a_time = asyncio.Lock()
        self._unseen: dict[str, float] = {}  # the time since which no pod has the allocation, by request id
        # The pods that are being admitted, by the request id of their allocation.
        self._admitted: dict[str, _Admission] = {}
        self._cuts = 0  # admissions that failed: by a refusal, or because the kubelet was restarted
        self._listed_since: dict[str, float] = {}  # the time of the first list that had the pod, by pod
        # Pods with an allocation that the present kubelet process has listed.
        self._listed_once: frozenset[str] = frozenset()
        # Request ids of allocations with running containers whose ids the kubelet gave to another pod.
        self._disputed: set[str] = set()

    def held_ids(self, resource_name: str) -> tuple[frozenset[str], frozenset[str]]:
        """The ids of the resource that allocations hold, and the unhealthy ones among them. Unhealthy are ids
        of failed allocations, and of running containers whose ids the kubelet believes to be free.
        """
        states = {a.request.id: a.state for a in self._keeper.book}
        holds = self.holds.of(resource_name)
        failed = [
            hold.ids
            for hold in holds
            if states.get(hold.request_id) is State.FAILED or hold.request_id in self._disputed
        ]
        return frozenset().union(*(hold.ids for hold in holds)), frozenset().union(*failed)

    # --- allocation

    async def allocate(self, resource: Resource, ids: Collection[str]) -> Allocation:
        """Makes or finds the allocation for these ids. Raises VgpuError. The same ids give the same
        allocation until the pod with them has ended.
        """
        audit.asked_by(ROOT, "kubelet")
        async with self._one_at_a_time:
            wanted = frozenset(ids)
            if len(wanted) != len(ids):
                raise VgpuError(
                    ErrorCode.BAD_REQUEST,
                    f"of {len(ids)} ids of {resource.name} only {len(wanted)} are different",
                    "report this with the kubelet's version and log",
                )
            try:
                return await self._allocate(resource, wanted)
            except VgpuError:
                self._cuts += 1  # the kubelet fails the pod, so the next call is for another pod
                self._back_off(resource, wanted)
                raise
            finally:
                self._changed()

    def _back_off(self, resource: Resource, ids: frozenset[str]) -> None:
        """Starts a back-off if the pod would fit the cards together but fits no single card. The pod must
        then wait, instead of being created and refused in a loop.
        """
        one_card = resource.divisible and resource.rule.across == "refuse"
        if one_card and len(cards_of(resource, ids, self._devices())) > 1:
            self.scattered.refused(resource.name)

    async def _allocate(self, resource: Resource, ids: frozenset[str]) -> Allocation:
        known = self.holds.overlapping(resource.name, ids)
        # raises VgpuError for unknown ids
        request_of(resource, ids, self._devices(), request_id(resource.name, ids))
        if known:
            listed = await self._list()
            alive = [hold for hold in known if not await self._leave_if_stale(hold, ids, listed)]
            if alive:
                return await self._again(resource, ids, alive, listed)
        return await self._new(resource, ids)

    async def _new(
        self, resource: Resource, ids: frozenset[str], allocation_id: str | None = None
    ) -> Allocation:
        name = request_id(resource.name, ids)
        request = request_of(resource, ids, self._devices(), name)
        listed = await self._list()
        now = clock.now()
        since = self._listed_since
        pods = () if listed is None else listed.pods
        newcomers = frozenset(pod for pod in pods if now - since[pod] < _ADMISSION_SECONDS)
        await self.holds.put(Hold(name, resource.name, ids, newcomers=newcomers))
        self._changed()
        try:
            allocation = await self._keeper.allocate(request, allocation_id)
        except VgpuError:
            await self.holds.drop(name)
            raise
        if listed is not None:
            self._admitted[name] = _Admission(now, newcomers, self._cuts)
        log.info(
            LogEvent.ALLOCATED_FOR_KUBELET, allocation=allocation.id, resource=resource.name, ids=len(ids)
        )
        return allocation

    async def _list(self) -> Listing | None:
        listed = await self._pods.list()
        if listed is not None:
            now = clock.now()
            self._listed_since = {pod: self._listed_since.get(pod, now) for pod in listed.pods}
            held = frozenset(hold.pod.rpartition("/")[0] for hold in self.holds)
            self._listed_once = held & (self._listed_once | listed.pods)
        return listed

    def kubelet_found(self, age_seconds: float) -> None:
        """Called when vgpud first sees a kubelet process, of that age: at first its list may lack pods. A new
        kubelet admits again what its predecessor was admitting, perhaps with other ids. A new vgpud completes
        the admissions that the present kubelet had begun.
        """
        self._listed_once = frozenset()
        self._cuts += 1
        begun_within_seconds = min(age_seconds, _ADMISSION_SECONDS)
        for hold in self.holds:
            allocation = self._allocation(hold.request_id)
            if allocation is None or hold.pod or not hold.newcomers:
                continue
            since_seconds = time.time() - allocation.created_unix_ns / 1e9
            if 0 <= since_seconds < begun_within_seconds:
                at_seconds = clock.now() - since_seconds
                self._admitted[hold.request_id] = _Admission(at_seconds, hold.newcomers, self._cuts)

    async def _leave_if_stale(self, hold: Hold, ids: frozenset[str], listed: Listing | None) -> bool:
        """If the pod of the hold has ended, releases its allocation, because the kubelet has given the ids to
        another pod. Returns True if it was released.
        """
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
                return False  # no pod has the allocation yet, so the call is a repetition
        with audit.because("the kubelet gives its ids to another pod", hold.pod):
            await self._release(allocation, _LEAVE_SECONDS)
        return True

    def _is_being_admitted(self, request_id: str, listed: Listing) -> bool:
        """Was the allocation made for the pod that the kubelet is admitting now?

        In doubt the answer is True. Then containers of two pods may share the allocation; but if it were
        wrongly released, no container of the pod could start.
        """
        made = self._admitted.get(request_id)
        if made is None or made.cuts != self._cuts:
            return False
        if clock.now() - made.at_seconds >= _ADMISSION_SECONDS:
            return False
        possible = self._possible_pods(request_id, made)
        return possible <= listed.pods or not possible.isdisjoint(listed.pods)

    def _possible_pods(self, request_id: str, made: _Admission) -> frozenset[str]:
        """The pods to which the allocation may belong: those that were new when it was made and have no other
        allocation.
        """
        others = (hold.pod for hold in self.holds if hold.request_id != request_id and hold.pod)
        return made.newcomers - {pod.rpartition("/")[0] for pod in others}

    async def _again(
        self,
        resource: Resource,
        ids: frozenset[str],
        alive: list[Hold],
        listed: Listing | None,
    ) -> Allocation:
        """The allocation for ids some of which a living pod holds: the call is repeated, or is for another
        container of that pod.
        """
        hold = alive[0]
        self._refuse_those_that_run(alive)
        if len(alive) == 1 and ids <= hold.ids:
            return await self._keeper.allocate(self._held(hold).request)
        admitting = listed is not None and self._is_being_admitted(hold.request_id, listed)
        known = admitting or (listed is not None and listed.holder(hold.resource, hold.ids))
        if len(alive) == 1 and admitting and not resource.divisible:
            return await self._replace(resource, hold, hold.ids | ids)
        if len(alive) > 1 or not known or not resource.divisible:
            unknown = "" if listed is not None else ", and the kubelet does not say for which pods"
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"of {len(ids)} ids of {resource.name} some are held by {len(alive)} allocations{unknown}",
                "let an init container ask for as many as the containers after it, or for none",
            )
        return await self._grow(resource, hold, hold.ids | ids)

    def _refuse_those_that_run(self, alive: list[Hold]) -> None:
        """Refuses ids of allocations with running containers: the admission of their pod is over, so the call
        is for another pod.
        """
        for hold in alive:
            if self.started.began(hold.request_id):
                self._disputed.add(hold.request_id)
                raise VgpuError(
                    ErrorCode.ALLOCATION_BUSY,
                    f"the kubelet gives another pod ids of {hold.resource} that are held by "
                    f"{hold.pod or 'a container'}, which has started",
                    "the kubelet has lost its record of them; its next pod gets other ids",
                )

    async def _grow(self, resource: Resource, hold: Hold, ids: frozenset[str]) -> Allocation:
        """Enlarges the allocation to all ids of the pod's containers, because containers with overlapping ids
        share one allocation.
        """
        allocation = self._held(hold)
        larger = request_of(resource, ids, self._devices(), hold.request_id)
        if larger.selector != allocation.request.selector:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                f"containers of one pod got overlapping ids of {resource.name} from different cards",
                "let an init container ask for as many as the containers after it, or for none",
            )
        with audit.of_pod(hold.pod):
            grown = await self._keeper.resize(allocation.id, ROOT, larger.memory_bytes, larger.share)
        await self.holds.put(replace(hold, ids=ids))
        return grown

    async def _replace(self, resource: Resource, hold: Hold, ids: frozenset[str]) -> Allocation:
        """Makes an allocation of more cards in the place of the hold's, which no container has used. It has
        the same id, because the kubelet keeps the CDI name that it got for the first container.
        """
        allocation = self._held(hold)
        request_of(resource, ids, self._devices(), hold.request_id)  # refuses several MIG instances
        with audit.because("a later container of the pod has more ids", hold.pod):
            await self._release(allocation, 0.0)
        return await self._new(resource, ids, allocation.id)

    def _held(self, hold: Hold) -> Allocation:
        allocation = self._allocation(hold.request_id)
        if allocation is None:
            raise VgpuError(ErrorCode.NO_SUCH_ALLOCATION, f"{hold.request_id} was just released", "try again")
        return allocation

    def _allocation(self, name: str) -> Allocation | None:
        held = tuple(self._keeper.book)
        return next((allocation for allocation in held if allocation.request.id == name), None)

    async def _release(self, allocation: Allocation, patience_seconds: float) -> None:
        """Releases an allocation after waiting for its processes. Raises VgpuError(TENANT_ALIVE) if processes
        remain.
        """
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
        """Records the init process of a container that is about to run in the allocation. `pod` is its name,
        or "" if unknown.

        Returns False if the kubelet did not request the allocation. Raises VgpuError: ALLOCATION_BUSY if the
        allocation has failed or is being released, LEDGER_FAILED.
        """
        async with self._one_at_a_time:
            return await self._bind(allocation_id, init, pod)

    async def _bind(self, allocation_id: str, init: Lifetime, pod: str) -> bool:
        found = next((a for a in self._keeper.book if a.id == allocation_id), None)
        if found is None or not found.request.id.startswith(KUBELET_PREFIX):
            return False
        if found.state is not State.ACTIVE:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation_id} is {found.state.value}, no container can run under it",
                "delete the pod: the new pod gets a new allocation",
            )
        name = found.request.id
        with audit.of_pod(pod):
            audit.record("bind", None, **audit.of(found), init=init.pid)
        await self.started.add(name, init)
        hold = next((hold for hold in self.holds if hold.request_id == name), None)
        if hold is not None and pod:
            await self._name(found, await self.holds.bind(hold, pod))
        return True

    async def _name(self, allocation: Allocation, hold: Hold) -> None:
        await self._keeper.name(allocation.id, workload_of(hold.pod))

    # --- release

    async def check(self, release_seconds: float, settled: bool = False) -> None:
        """Asks the kubelet once for its pods, and releases allocations that no pod has.

        An allocation is released at once if a container ran in it, its pod is known, and the kubelet's list
        is `settled` or had the pod before. Otherwise it is released after it was missing for
        `release_seconds` in consecutive lists. Allocations with running containers are kept.
        """
        async with self._one_at_a_time:
            listed = await self._list()
            if listed is None:
                self._unseen.clear()
                return
            for allocation in tuple(self._keeper.book):
                name = allocation.request.id
                if not name.startswith(KUBELET_PREFIX):
                    continue
                seen = await self._seen(allocation, listed)
                if seen or self.started.runs(name) or self._may_start(name, listed):
                    self._unseen.pop(name, None)
                elif self._unseen_seconds(name) >= (
                    0.0 if self._has_ended(name, settled) else release_seconds
                ):
                    await self._release_unseen(allocation)
            names = {allocation.request.id for allocation in self._keeper.book}
            for hold in self.holds:
                if hold.request_id not in names:
                    await self._drop(hold.request_id)

    def _may_start(self, name: str, listed: Listing) -> bool:
        """May the allocation belong to an init container that has not started? (The kubelet never lists init
        containers.)

        That is possible if its pod is unknown, and a pod that appeared when the allocation was made is still
        listed.
        """
        made = self._admitted.get(name)
        known = any(hold.pod for hold in self.holds if hold.request_id == name)
        if made is None or known or clock.now() - made.at_seconds >= _START_SECONDS:
            return False
        return not self._possible_pods(name, made).isdisjoint(listed.pods)

    def _unseen_seconds(self, name: str) -> float:
        now = clock.now()
        return now - self._unseen.setdefault(name, now)

    def _has_ended(self, name: str, settled: bool) -> bool:
        """Has the allocation's pod certainly ended? Precondition: the pod is not listed, and no container
        runs.
        """
        pod = next((h.pod.rpartition("/")[0] for h in self.holds if h.request_id == name), "")
        return self.started.began(name) and bool(pod) and (settled or pod in self._listed_once)

    def waits_for_a_pods_end(self) -> bool:
        """True if there is an allocation whose containers have all ended."""
        return any(
            self.started.began(h.request_id) and not self.started.runs(h.request_id) for h in self.holds
        )

    async def _seen(self, allocation: Allocation, listed: Listing) -> bool:
        """Returns whether a pod has the allocation. Also records the ids and the pod if they were unknown."""
        name = allocation.request.id
        hold = next((hold for hold in self.holds if hold.request_id == name), None)
        if hold is None:  # the file of holds was lost; the request id can be computed again from the ids
            mine = next((h for h in listed.held if request_id(h.resource, h.ids) == name), None)
            if mine is None:
                return False
            hold = Hold(name, mine.resource, mine.ids)
        pod = listed.holder(hold.resource, hold.ids)
        # no listed container has the ids, so only an init container may have them, which its pod may start
        # again
        if not pod:
            return listed.is_init_of_active(hold.pod) and self._is_latest(hold)
        named = await self.holds.bind(hold, pod)
        if not hold.pod:
            with audit.because("the kubelet's PodResources names it", named.pod):
                audit.record("bind", None, **audit.of(allocation))
        await self._name(allocation, named)
        return True

    def _is_latest(self, hold: Hold) -> bool:
        """Is this the newest hold for its pod's name? An older one belongs to an ended pod of the
        same name.
        """
        named = [h.request_id for h in self.holds if (h.resource, h.pod) == (hold.resource, hold.pod)]
        return named[-1:] == [hold.request_id]

    async def _release_unseen(self, allocation: Allocation) -> None:
        pod = next((hold.pod for hold in self.holds if hold.request_id == allocation.request.id), "")
        try:
            with audit.because("no pod holds it", pod):
                await self._release(allocation, 0.0)
        except VgpuError as error:
            log.warning(
                LogEvent.ALLOCATION_WITHOUT_POD_NOT_RELEASED, allocation=allocation.id, why=str(error)
            )
        else:
            self._changed()
