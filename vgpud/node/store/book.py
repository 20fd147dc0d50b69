"""The present allocations in memory, those of the ledger and reservations, with the use of each device.

Only the event loop's thread uses it. The capacity for a request is booked together with the decision, before
any await, so that no other request can get the same capacity.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Lifetime, Request, Slice, State, Workload
from vgpud.planner.use import EMPTY, DeviceUse, charged

RequestKey = tuple[int, str]


def request_key(request: Request) -> RequestKey:
    """The key of a request: the owner's uid and the request id. The uid is a part of the key, so that one
    user cannot occupy the request ids of another.
    """
    return request.owner.uid, request.id


class Book:
    def __init__(self) -> None:
        self._by_id: dict[str, Allocation] = {}
        self._by_request: dict[RequestKey, str] = {}
        self._use: dict[str, DeviceUse] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._by_id.values())

    def __contains__(self, allocation_id: str) -> bool:
        return allocation_id in self._by_id

    @property
    def use(self) -> Mapping[str, DeviceUse]:
        """The use of each device, by UUID. Devices without allocations are missing."""
        return self._use

    def use_of(self, device_uuid: str) -> DeviceUse:
        return self._use.get(device_uuid, EMPTY)

    def add(self, allocation: Allocation) -> None:
        """Adds an allocation. Raises VgpuError(BUG) if one of its devices is in another mode; nothing is
        added then.
        """
        use: dict[str, DeviceUse] = {}
        for part in charged(allocation):
            before = use.get(part.device_uuid) or self.use_of(part.device_uuid)
            use[part.device_uuid] = before.with_slice(part)
        self._use.update(use)
        self._by_id[allocation.id] = allocation
        self._by_request[request_key(allocation.request)] = allocation.id

    def remove(self, allocation_id: str) -> None:
        allocation = self._by_id.pop(allocation_id, None)
        if allocation is None:
            return
        self._by_request.pop(request_key(allocation.request), None)
        for part in charged(allocation):
            left = self.use_of(part.device_uuid).without_slice(part)
            if left.count:
                self._use[part.device_uuid] = left
            else:
                self._use.pop(part.device_uuid, None)

    def replace(self, allocation: Allocation) -> None:
        """Replaces the allocation with the same id. Raises as `add` does; the book is unchanged then."""
        previous = self._by_id[allocation.id]
        if charged(previous) == charged(allocation):
            self._by_id[allocation.id] = allocation
            return
        self.remove(allocation.id)
        try:
            self.add(allocation)
        except VgpuError:
            self.add(previous)
            raise

    def get(self, allocation_id: str) -> Allocation:
        """The allocation with this id. Raises VgpuError(NO_SUCH_ALLOCATION)."""
        found = self._by_id.get(allocation_id)
        if found is None:
            raise VgpuError(
                ErrorCode.NO_SUCH_ALLOCATION,
                f"no allocation {allocation_id!r} among the {len(self._by_id)} on this node",
                "see 'vgpuctl ls'",
            )
        return found

    def by_request(self, request: Request) -> Allocation | None:
        """The allocation that was made for the same request before; None if there is none.

        Raises VgpuError(REQUEST_ID_REUSED) if the request id was used for another request.
        """
        found = self._by_request.get(request_key(request))
        if found is None:
            return None
        allocation = self._by_id[found]
        check_same_request(allocation.request, request)
        return allocation

    def allocations_on(self, device_uuid: str) -> tuple[Allocation, ...]:
        """The allocations on the device, except those that are being released. Reservations are included. A
        moving allocation is on both of its devices.
        """
        staying = (a for a in self._by_id.values() if a.state is not State.RELEASING)
        return tuple(
            a for a in staying if any(p.device_uuid == device_uuid for p in (*a.slices, *charged(a)))
        )

    def allocations_at(self, target: str) -> tuple[Allocation, ...]:
        """The allocations on a device or on a MIG device, except those that are being released."""
        staying = (a for a in self._by_id.values() if a.state is not State.RELEASING)
        return tuple(a for a in staying if any(p.target == target for p in a.slices))

    def slices_on(self, device_uuid: str) -> tuple[Slice, ...]:
        """The slices on the device, except those of allocations that are being released."""
        staying = (a for a in self._by_id.values() if a.state is not State.RELEASING)
        return tuple(p for a in staying for p in charged(a) if p.device_uuid == device_uuid)


def check_same_request(first: Request, second: Request) -> None:
    """Checks that two requests with the same id ask for the same. The calling process and the workload's
    names may differ.

    Raises VgpuError(REQUEST_ID_REUSED).
    """

    def body(request: Request) -> Request:
        bound = Lifetime(pid=1) if request.lifetime.pid else Lifetime()
        return replace(request, lifetime=bound, workload=Workload())

    if body(first) != body(second):
        raise VgpuError(
            ErrorCode.REQUEST_ID_REUSED,
            f"request id {second.id!r} was used before for a different request",
            "use a new request id, or repeat the first request unchanged",
        )
