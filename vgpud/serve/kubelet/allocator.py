"""Maps the kubelet's device ids to allocations and back, and interprets the kubelet's calls.

The kubelet does not name the pod of a call, does not report the end of a pod, and may repeat ids that vgpud
knows. Repeated ids mean one of three things: a repeated call, another container of the same pod (the kubelet
reuses the ids of an init container for later containers), or a new pod after one whose end vgpud has not
noticed. The kubelet admits one pod after the other, and starts a pod's containers after its last call. So if
the containers of an allocation have not started, its ids belong to the same pod; if they have ended, its ids
belong to a new pod. Without hooks that report containers, PodResources is asked. If it is not known which of
these a call is, the pod is refused, because it could otherwise run with more than it asked for.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum, auto

import structlog

from vgpud import audit, clock
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted
from vgpud.model.tenancy import KUBELET_PREFIX, Allocation, Lifetime, State, workload_of
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.kubelet.backoff import Backoff
from vgpud.serve.kubelet.holds import Hold, Holds
from vgpud.serve.kubelet.pods import Life, Listing, Pods
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
    """When an allocation was made, and the number of admissions that had failed until then (`cuts`)."""

    at_seconds: float
    cuts: int


class _Phase(Enum):
    """Whether the kubelet is still admitting the pod for which an allocation was made."""

    GOES_ON = auto()
    OVER = auto()
    UNKNOWN = auto()


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
        node_name: str = "",
    ) -> None:
        self.holds = holds
        self.started = started
        self.scattered = Backoff()
        self._keeper = keeper
        self._pods = pods
        self._devices = devices
        self._changed = changed
        self._node_name = node_name
        # calls run one at a time, because the kubelet too admits one pod at a time
        self._one_at_a_time = asyncio.Lock()
        self._unseen: dict[str, float] = {}  # the time since which no pod has the allocation, by request id
        # The admissions of pods, by the request id of their allocation.
        self._admitted: dict[str, _Admission] = {}
        self._cuts = 0  # admissions that failed: by a refusal, or because the kubelet was restarted
        self._life: Life | None = None  # identifies the kubelet process whose list was read last
        # The time of the first list that had the pod, by pod; None until the present kubelet process has
        # given a list.
        self._listed_since: dict[str, float] | None = None
        # Pods with an allocation that the present kubelet process has listed.
        self._listed_once: frozenset[str] = frozenset()
        # True if the present kubelet process has listed a pod of the API server
        self._list_is_whole = False
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
        await self._admit(Hold(name, resource.name, ids), await self._list())
        self._changed()
        try:
            allocation = await self._keeper.allocate(request, allocation_id)
        except VgpuError:
            await self.holds.drop(name)
            raise
        log.info(
            LogEvent.ALLOCATED_FOR_KUBELET, allocation=allocation.id, resource=resource.name, ids=len(ids)
        )
        return allocation

    async def _admit(self, hold: Hold, listed: Listing | None) -> None:
        """Records that the kubelet is now admitting the pod of the hold, which is one of the newly listed
        pods.
        """
        now, since = clock.now(), self._listed_since or {}
        pods = frozenset() if listed is None else listed.pods
        new = frozenset(pod for pod in pods if now - since[pod] < _ADMISSION_SECONDS)
        await self.holds.put(replace(hold, newcomers=new))
        self._admitted[hold.request_id] = _Admission(now, self._cuts)

    async def _list(self) -> Listing | None:
        life = self._pods.life()
        listed = await self._pods.list()
        if life != self._pods.life():
            return None  # another kubelet process may have answered
        if life != self._life:
            self._life = life
            self._listed_once = frozenset()
            self._list_is_whole = False
            self._listed_since = None
        if listed is not None:
            now = clock.now()
            # Pods of the first list are not new: the kubelet gives no ids before vgpud is registered.
            old, first = self._listed_since or {}, now if self._listed_since is not None else -math.inf
            self._listed_since = {pod: old.get(pod, first) for pod in listed.pods}
            held = frozenset(hold.pod.rpartition("/")[0] for hold in self.holds)
            # The pods of the previous list (`old`) count too, because the pod of a hold may have become known
            # from that list.
            self._listed_once = held & (self._listed_once | old.keys() | listed.pods)
            self._list_is_whole = self._list_is_whole or listed.has_pods_beside_static(self._node_name)
        return listed

    async def kubelet_found(self) -> None:
        """Called when vgpud first sees a kubelet process, before vgpud registers there. Reads its first list,
        which may lack pods. Counts admissions that were in progress as failed, because a new kubelet begins
        them again, perhaps with other ids.
        """
        async with self._one_at_a_time:
            self._cuts += 1
            await self._list()

    async def _leave_if_stale(self, hold: Hold, ids: frozenset[str], listed: Listing | None) -> bool:
        """If the pod of the hold has ended, releases its allocation, because the kubelet has given the ids to
        another pod. Returns True if it was released.
        """
        allocation = self._allocation(hold.request_id)
        if allocation is None:
            await self._drop(hold.request_id)
            return True
        if listed is None or listed.holder(hold.resource, hold.ids) or self.started.lives(hold.request_id):
            return False
        # For a later container of the pod, the kubelet reuses the ids of an init container: it takes all of
        # that container's ids from them, or adds further ids to them (kubernetes/kubernetes,
        # pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate).
        # A container that PodResources has listed is no init container. If its ids are given again, its pod
        # has ended, also where a pod of the same name has been created since.
        reused = (ids <= hold.ids or hold.ids <= ids) and not hold.pod
        if reused and not self.started.began(hold.request_id) and allocation.state is not State.FAILED:
            if self._admission(hold, allocation, listed) is not _Phase.OVER:
                return False
            if hold.ids == ids:
                return False  # no pod has the allocation yet, so the call is a repetition
        with audit.because("the kubelet gives its ids to another pod", hold.pod):
            await self._release(allocation, _LEAVE_SECONDS)
        return True

    def _admission(self, hold: Hold, allocation: Allocation, listed: Listing | None) -> _Phase:
        """The admission of the pod for which the allocation was made. OVER: an admission has failed since,
        _ADMISSION_SECONDS have passed, or the pods that were new then are no longer listed. Otherwise UNKNOWN
        if the kubelet listed no new pod then or lists no pod now, or if an earlier vgpud made the allocation.
        """
        made = self._admitted.get(hold.request_id)
        since_seconds = time.time() - allocation.created_unix_ns / 1e9
        if made is not None:
            since_seconds = clock.now() - made.at_seconds
        failed = made is not None and made.cuts != self._cuts
        if failed or not 0 <= since_seconds < _ADMISSION_SECONDS:
            return _Phase.OVER
        possible = self._possible_pods(hold)
        if not possible or listed is None or not listed.pods:
            return _Phase.UNKNOWN
        if possible.isdisjoint(listed.pods):
            return _Phase.OVER
        return _Phase.UNKNOWN if made is None else _Phase.GOES_ON

    def _possible_pods(self, hold: Hold) -> frozenset[str]:
        """The pods to which the allocation may belong: those that were new when it was made and have no other
        allocation.
        """
        others = (other.pod for other in self.holds if other.request_id != hold.request_id and other.pod)
        return hold.newcomers - {pod.rpartition("/")[0] for pod in others}

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
        # A listed container is no init container, so its ids are not given to another one of its pod. The
        # kubelet gives ids twice if it was asked for its list during the first call, after a pod had ended
        # (kubernetes/kubernetes, pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices).
        holder = "" if listed is None else listed.holder(resource.name, ids)
        if holder:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"the kubelet gives a container ids of {resource.name} that {holder} has",
                "the kubelet's next pod gets other ids",
            )
        admitting = self._admission(hold, self._held(hold), listed) is _Phase.GOES_ON
        known = admitting or (listed is not None and listed.holder(hold.resource, hold.ids))
        repeated = ids == hold.ids and not hold.pod
        if len(alive) == 1 and (repeated or (known and ids <= hold.ids)):
            if not known:
                # the pod of this call may not be the pod of the first call with these ids
                await self._admit(hold, listed)
            return await self._keeper.allocate(self._held(hold).request)
        if len(alive) == 1 and admitting and not resource.divisible:
            return await self._replace(resource, hold, hold.ids | ids)
        if len(alive) > 1 or not known or not resource.divisible:
            unknown = "" if known else ", and the kubelet does not say for which pods"
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"of {counted(len(ids), 'id')} of {resource.name} some are held by "
                f"{counted(len(alive), 'allocation')}{unknown}",
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
        """Replaces the hold's unused allocation by an allocation of more cards with the same id, because the
        kubelet keeps the CDI name that it got for the first container.
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
        """Records the init process of a container that is about to run in the allocation. `pod` is the
        container as "namespace/pod/container", or "" if unknown.

        Returns False if the kubelet did not request the allocation, for a pod or a claim. Raises VgpuError:
        ALLOCATION_BUSY if the allocation is not active or belongs to another pod, or the errors of the
        ledger.
        """
        async with self._one_at_a_time:
            return await self._bind(allocation_id, init, pod)

    async def _bind(self, allocation_id: str, init: Lifetime, pod: str) -> bool:
        found = next((a for a in self._keeper.book if a.id == allocation_id), None)
        if found is None or not found.request.by_kubelet:
            return False
        if found.state is not State.ACTIVE:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation_id} is {found.state.value}, no container can run under it",
                "delete the pod: the new pod gets a new allocation",
            )
        name = found.request.id
        hold = self.holds.get(name)
        self._check_pod(found, hold, pod)
        with audit.of_pod(pod):
            audit.record("bind", None, **audit.of(found), init=init.pid)
        await self.started.add(name, init)
        if self._keeper.preload is not None:
            await self._keeper.preload.walls.build(found)
        workload = found.request.workload
        if hold is not None and pod:
            await self._name(found, await self.holds.bind(hold, pod))
        elif pod and workload.claim and not workload.container:
            await self._keeper.name(found.id, replace(workload_of(pod), claim=workload.claim))
        return True

    def _check_pod(self, allocation: Allocation, hold: Hold | None, pod: str) -> None:
        holder = "" if hold is None else hold.pod
        if pod and holder and pod.rpartition("/")[0] != holder.rpartition("/")[0]:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation.id} belongs to {holder}, and not to the pod of {pod}",
                "delete the pod: the new pod gets a new allocation",
            )

    async def _name(self, allocation: Allocation, hold: Hold) -> None:
        await self._keeper.name(allocation.id, workload_of(hold.pod))

    # --- release

    async def check(self, release_seconds: float, settled: bool = False) -> None:
        """Asks the kubelet once for its pods, and releases allocations that no pod has.

        An allocation is released at once if its pod has certainly ended (`_has_ended`). Otherwise it is
        released after it was missing for `release_seconds` in consecutive lists. Allocations with running
        containers are kept, and so are all while the kubelet may not know the pods of the API server.
        `settled` says that the kubelet has run for long.
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
                elif self._has_ended(name, settled) or (
                    self._may_end(name) and self._unseen_seconds(name) >= release_seconds
                ):
                    await self._release_unseen(allocation)
            names = {allocation.request.id for allocation in self._keeper.book}
            for hold in self.holds:
                if hold.request_id not in names:
                    await self._drop(hold.request_id)
            await self.started.keep(names)

    def _may_start(self, name: str, listed: Listing) -> bool:
        """May the allocation belong to an init container that has not started? (The kubelet never lists init
        containers.)

        That is possible if its pod is unknown, and a pod that appeared when the allocation was made is still
        listed.
        """
        made, hold = self._admitted.get(name), self.holds.get(name)
        if made is None or hold is None or hold.pod or clock.now() - made.at_seconds >= _START_SECONDS:
            return False
        return not self._possible_pods(hold).isdisjoint(listed.pods)

    def _unseen_seconds(self, name: str) -> float:
        now = clock.now()
        return now - self._unseen.setdefault(name, now)

    def _has_ended(self, name: str, settled: bool) -> bool:
        """Has the allocation's pod certainly ended? Precondition: the pod is not listed, and no container
        runs.
        """
        if not self.started.began(name) or self.started.lives(name):
            return False
        if self.started.pod_is_gone(name):
            return True
        pod = self._pod(name)
        return bool(pod) and (pod in self._listed_once or (settled and self._list_is_whole))

    def _may_end(self, name: str) -> bool:
        """Can the pod have ended, because it is not listed? The list proves nothing if the kubelet was
        started while its API server is away: it then lists only the static pods.
        """
        return self._list_is_whole or self._pod(name) in self._listed_once

    def _pod(self, name: str) -> str:
        """The pod of an allocation as "namespace/pod"; "" if it is unknown."""
        hold = self.holds.get(name)
        return "" if hold is None else hold.pod.rpartition("/")[0]

    def waits_for_a_pod(self) -> bool:
        """True if there is an allocation whose containers have all ended, or whose pod is not known yet."""
        return any(
            not self.started.lives(h.request_id) if self.started.began(h.request_id) else not h.pod
            for h in self.holds
        )

    async def _seen(self, allocation: Allocation, listed: Listing) -> bool:
        """Returns whether a pod has the allocation. Also records the ids and the pod if they were unknown."""
        name = allocation.request.id
        hold = self.holds.get(name)
        if hold is None:  # the row of the hold is unreadable; the request id is computed again from the ids
            mine = next((h for h in listed.held if request_id(h.resource, h.ids) == name), None)
            if mine is None:
                return False
            hold = Hold(name, mine.resource, mine.ids)
        pod = listed.holder(hold.resource, hold.ids)
        # no listed container has the ids, so only an init container may have them, which its pod may start
        # again
        if not pod:
            may_start_again = listed.is_init_of_active(hold.pod) and self._is_latest(hold)
            return may_start_again and not self.started.pod_is_gone(name)
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
        hold = self.holds.get(allocation.request.id)
        try:
            with audit.because("no pod holds it", "" if hold is None else hold.pod):
                await self._release(allocation, 0.0)
        except VgpuError as error:
            log.warning(
                LogEvent.ALLOCATION_WITHOUT_POD_NOT_RELEASED, allocation=allocation.id, why=str(error)
            )
        else:
            self._changed()
