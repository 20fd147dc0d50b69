"""Manages the memory that swapped-out tenants keep on their devices until another tenant needs the room
(planner/kept.py).
"""

from collections.abc import Iterable

import structlog

from vgpud.lease import ProcessSwap, within
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import format_bytes
from vgpud.model.tenancy import Allocation, State
from vgpud.modes.base import Suspendable
from vgpud.node.devices.inventory import Inventory
from vgpud.node.store.book import Book
from vgpud.node.tenants.activities import Activities, seconds_to_move
from vgpud.planner.kept import SHARE_ALL, keep_share, shrunk
from vgpud.planner.suspend import is_away

log = structlog.get_logger(__name__)


class Kept:
    def __init__(
        self, book: Book, inventory: Inventory, suspendable: Suspendable | None, activities: Activities
    ) -> None:
        self._book = book
        self._inventory = inventory
        self._activities = activities
        self._suspendable = suspendable

    def bytes_of(self, allocation: Allocation) -> int:
        """The bytes that a suspended tenant keeps on its device; 0 for other tenants."""
        if not allocation.is_swapped or allocation.state is not State.SUSPENDED:
            return 0
        return sum(swap.kept_bytes for swap in self._swaps(allocation))

    def allow(self, going: Allocation, stays_bytes: int, room_for: str) -> None:
        """Writes to the lease how much movable memory `going` may keep on the device while it is swapped out.

        `stays_bytes` is memory of `going` that cannot be moved. The allocation `room_for` ("" if none waits)
        gets the room next, so it is counted with its full limit. Raises VgpuError(LEASE_FAILED).
        """
        if self._suspendable is None:
            return
        (part,) = going.slices
        uuid = part.device_uuid
        charged = self._book.use_of(uuid).memory_bytes - part.memory_bytes + stays_bytes
        charged += sum(self.bytes_of(other) for other in self._away(uuid) if other.id != room_for)
        # a tenant whose memory is on the device is already charged in full
        if room_for in self._book and is_away(coming := self._book.get(room_for)):
            charged += sum(one.memory_bytes for one in coming.slices if one.device_uuid == uuid)
            charged -= coming.stays_bytes
        movable = sum(swap.movable_bytes for swap in self._swaps(going))
        self._suspendable.keep(going.id, keep_share(self._capacity(uuid), charged, movable))

    def forbid(self, allocation: Allocation) -> None:
        """Forbids the tenant to keep any of its movable memory on the device. Raises
        VgpuError(LEASE_FAILED).
        """
        if self._suspendable is not None:
            self._suspendable.keep(allocation.id, 0)

    def forbid_beside(self, coming: Allocation) -> None:
        """Forbids all other tenants of the devices to keep memory there, because the card has less room than
        NVML's figures say.
        """
        for part in coming.slices:
            for other in self._away(part.device_uuid):
                if other.id != coming.id and self.bytes_of(other):
                    self._less(other, 0)
                    log.warning(
                        LogEvent.DEVICE_FULL_EVICTING_SUSPENDED_TENANT_MEMORY,
                        allocation=other.id,
                        device=part.device_uuid,
                        for_allocation=coming.id,
                    )

    async def clear(self, allocation: Allocation) -> None:
        """Evicts all memory that a swapped-out tenant keeps on the device. Never raises. Memory that is not
        evicted in time stays on the device.
        """
        if self.bytes_of(allocation):
            self._less(allocation, 0)
            await self._until({allocation.id: 0})

    async def make_way(self, coming: Allocation) -> None:
        """Evicts kept memory of other tenants until `coming`, whose room is booked, fits on its devices.

        Never raises. If the eviction is late, `coming` waits for room or gets an out-of-memory error.
        """
        for part in coming.slices:
            uuid = part.device_uuid
            kept = {a.id: self.bytes_of(a) for a in self._away(uuid) if a.id != coming.id}
            if not any(kept.values()):
                continue
            less = shrunk(self._capacity(uuid), self._book.use_of(uuid).memory_bytes, kept)
            for name, now in less.items():
                self._less(self._book.get(name), now)
            await self._until(less)
            for name, now in less.items():
                if self._bytes_now(name) <= now:
                    freed = format_bytes(kept[name] - now)
                    log.info(
                        LogEvent.SUSPENDED_TENANT_MEMORY_EVICTED,
                        allocation=name,
                        bytes=freed,
                        device=uuid,
                        for_allocation=coming.id,
                    )

    def _less(self, allocation: Allocation, allowed_bytes: int) -> None:
        movable = sum(swap.movable_bytes for swap in self._swaps(allocation))
        try:
            if self._suspendable is not None:
                self._suspendable.keep(allocation.id, allowed_bytes * SHARE_ALL // max(movable, 1))
        except VgpuError as error:  # the lease is gone, for example if the allocation was released meanwhile
            log.debug(
                LogEvent.SUSPENDED_TENANT_MEMORY_LIMIT_NOT_WRITTEN, allocation=allocation.id, why=str(error)
            )

    async def _until(self, allowed: dict[str, int]) -> None:
        most = seconds_to_move(sum(map(self._bytes_now, allowed)))
        for name in allowed:
            await self._activities.ask(name)

        def late(_: bool = False) -> list[str]:
            return [name for name, bytes_ in allowed.items() if self._bytes_now(name) > bytes_]

        if not await self._activities.wait(late, most):
            log.warning(
                LogEvent.SUSPENDED_TENANT_MEMORY_EVICTION_TIMEOUT, allocations=late(), seconds=round(most)
            )

    def _bytes_now(self, name: str) -> int:
        return self.bytes_of(self._book.get(name)) if name in self._book else 0

    def _away(self, uuid: str) -> Iterable[Allocation]:
        return [a for a in self._book.allocations_on(uuid) if a.is_swapped and a.state is State.SUSPENDED]

    def _capacity(self, uuid: str) -> int:
        return self._inventory.device(uuid).memory_usable_bytes

    def _swaps(self, allocation: Allocation) -> tuple[ProcessSwap, ...]:
        limit = sum(part.memory_bytes for part in allocation.slices)
        try:
            return () if self._suspendable is None else within(self._suspendable.swaps(allocation.id), limit)
        except VgpuError as error:
            log.debug(LogEvent.SWAP_STATE_UNREADABLE, allocation=allocation.id, why=str(error))
            return ()
