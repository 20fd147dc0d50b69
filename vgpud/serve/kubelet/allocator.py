"""From ids of the kubelet to an allocation, and back: the one place that knows what its calls can mean.

The kubelet never says for which pod it asks, nor that a pod has ended, and it may ask again for ids
that we know. That is the same call once more, a container of the same pod (the kubelet gives the ids
of an init container again to the containers after it), or a new pod after one whose end we have not
seen yet. PodResources tells which.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace

import structlog

from vgpud import audit, clock
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import KUBELET_PREFIX, Allocation, Lifetime, State
from vgpud.serve.keeper import Keeper
from vgpud.serve.kubelet.holds import Hold, Holds
from vgpud.serve.kubelet.pods import Held, Pods
from vgpud.serve.kubelet.resources import Resource, request_id, request_of

log = structlog.get_logger(__name__)

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())
_LEAVE_SECONDS = 5.0  # processes of a pod that is gone may take so long to end
_PAUSE_SECONDS = 0.2


class Allocator:
    """`devices` are those of the node now; `changed` is called when ids came to be held or free."""

    def __init__(
        self,
        keeper: Keeper,
        holds: Holds,
        pods: Pods,
        devices: Callable[[], tuple[Device, ...]],
        changed: Callable[[], None],
    ) -> None:
        self.holds = holds
        self._keeper = keeper
        self._pods = pods
        self._devices = devices
        self._changed = changed
        self._one_at_a_time = asyncio.Lock()  # as the kubelet admits pods
        self._unseen: dict[str, float] = {}  # by request id: since when no pod has it

    def held_ids(self, resource_name: str) -> tuple[frozenset[str], frozenset[str]]:
        """The ids of the resource that allocations stand for, and those of failed allocations among them."""
        states = {a.request.id: a.state for a in self._keeper.list()[0]}
        holds = self.holds.of(resource_name)
        failed = [hold.ids for hold in holds if states.get(hold.request_id) is State.FAILED]
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
            finally:
                self._changed()

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
        self._changed()
        try:
            allocation = await self._keeper.allocate(request)
        except VgpuError:
            await self.holds.drop(name)
            raise
        log.info("the kubelet's", allocation=allocation.id, resource=resource.name, ids=len(ids))
        return allocation

    async def _leave_if_stale(self, hold: Hold, ids: frozenset[str], listed: tuple[Held, ...] | None) -> bool:
        """Has its pod gone? Then what it held is released first, for the kubelet gives it out anew."""
        allocation = self._allocation(hold.request_id)
        if allocation is None:
            await self.holds.drop(hold.request_id)
            return True
        if listed is None or _holder(hold, listed) is not None:
            return False
        if not hold.pod and hold.ids == ids and allocation.state is not State.FAILED:
            return False  # no pod had it yet: the same call once more
        with audit.because("the kubelet gives its ids to another pod", hold.pod):
            await self._release(allocation, _LEAVE_SECONDS)
        return True

    async def _again(
        self,
        resource: Resource,
        ids: frozenset[str],
        alive: list[Hold],
        listed: tuple[Held, ...] | None,
    ) -> Allocation:
        """Ids of which a living pod holds some: the same call, or another container of that pod."""
        hold = alive[0]
        if len(alive) == 1 and ids <= hold.ids:
            return await self._keeper.allocate(self._held(hold).request)
        holders = {name.rpartition("/")[0] for one in alive if (name := _holder(one, listed or ()))}
        if len(alive) > 1 or listed is None or len(holders) != 1 or not resource.divisible:
            unknown = "" if listed is not None else ", and the kubelet does not say for which pods"
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"of {len(ids)} ids of {resource.name} some are held by {len(alive)} allocations{unknown}",
                "let an init container ask for as many as the containers after it, or for none",
            )
        return await self._grow(resource, hold, hold.ids | ids)

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
        self._unseen.pop(allocation.request.id, None)
        await self.holds.drop(allocation.request.id)

    # --- release

    async def check(self, release_seconds: float) -> None:
        """Asks the kubelet once; releases what no pod has held for so long of answers without a gap."""
        async with self._one_at_a_time:
            listed = await self._pods.list()
            if listed is None:
                self._unseen.clear()
                return
            now = clock.now()
            for allocation in self._keeper.list()[0]:
                name = allocation.request.id
                if not name.startswith(KUBELET_PREFIX):
                    continue
                if await self._seen(allocation, listed):
                    self._unseen.pop(name, None)
                elif now - self._unseen.setdefault(name, now) >= release_seconds:
                    await self._release_unseen(allocation)
            names = {allocation.request.id for allocation in self._keeper.list()[0]}
            for hold in self.holds:
                if hold.request_id not in names:
                    await self.holds.drop(hold.request_id)
                    self._unseen.pop(hold.request_id, None)

    async def _seen(self, allocation: Allocation, listed: tuple[Held, ...]) -> bool:
        """Does a pod hold it? Also learns ids, and the pod, that were not known yet."""
        name = allocation.request.id
        hold = next((hold for hold in self.holds if hold.request_id == name), None)
        if hold is None:  # the file was lost: the ids themselves give the name
            mine = next((h for h in listed if request_id(h.resource, h.ids) == name), None)
            if mine is None:
                return False
            hold = Hold(name, mine.resource, mine.ids)
        pod = _holder(hold, listed)
        if pod is None:
            return False
        named = await self.holds.bind(hold, pod)
        if not hold.pod:
            with audit.because("the kubelet's PodResources names it", named.pod):
                audit.record("bind", None, allocation=allocation.id, owner=allocation.request.owner.uid)
        return True

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


def _holder(hold: Hold, listed: Collection[Held]) -> str | None:
    """The first container that has one of its ids."""
    return next(
        (h.pod for h in listed if h.resource == hold.resource and not h.ids.isdisjoint(hold.ids)), None
    )
