"""The table of host memory that tenants take: buffers of libvgpu, and what the driver has saved.

Every path that orders a buffer or a save enters it here first, in one step, so that orders at the same time
cannot pass the check together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog

from vgpud.lease import within
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Mode
from vgpud.modes.base import Suspendable
from vgpud.node.store.book import Book
from vgpud.planner.suspend import HostMemory, check_host, saved_bytes
from vgpud.policy.model import PoolSettings

_MEMINFO = Path("/proc/meminfo")

log = structlog.get_logger(__name__)


def host_memory(pool: PoolSettings, meminfo: Path = _MEMINFO) -> HostMemory:
    """The host's available memory in bytes (MemAvailable of proc(5)), and the policy's bounds on its use."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    return HostMemory(available, pool.host_memory_reserve, pool.host_memory)


class HostTable:
    """`host` reads the host's free memory and the policy's bounds of it."""

    def __init__(self, book: Book, suspendable: Suspendable | None, host: Callable[[], HostMemory]) -> None:
        self._book = book
        self._suspendable = suspendable
        self._host = host
        # Largest number of bytes that a tenant may come to take, by allocation id. `_changes`: changes that
        # are under way. `_soon`: running tenants that make their buffers ahead of an eviction.
        self._changes: dict[str, int] = {}
        self._soon: dict[str, int] = {}

    def __contains__(self, allocation_id: str) -> bool:
        """Has a change that is under way ordered host memory for the tenant?"""
        return allocation_id in self._changes

    def movable_bytes(self, allocation: Allocation) -> int:
        """The memory that libvgpu can evict, in bytes, at most the tenant's limit: a tenant can write any
        figure into its lease. Raises VgpuError(LEASE_FAILED).
        """
        if self._suspendable is None:
            return 0
        swaps = within(self._suspendable.swaps(allocation.id), _limit_bytes(allocation))
        return sum(swap.movable_bytes for swap in swaps)

    def taken_bytes(self, allocation: Allocation) -> int:
        """Bytes of host memory that the tenant takes now, running or suspended."""
        evicted, saved = saved_bytes(allocation)
        return max(self._buffer_bytes(allocation), evicted) + saved

    def _buffer_bytes(self, allocation: Allocation) -> int:
        if self._suspendable is None or all(p.mode is not Mode.PRELOAD for p in allocation.slices):
            return 0
        try:
            made = sum(swap.host_bytes for swap in self._suspendable.swaps(allocation.id))
        except VgpuError as error:  # no lease, for example if the allocation is being made or was released
            log.debug(LogEvent.SWAP_STATE_UNREADABLE, allocation=allocation.id, why=str(error))
            return 0
        return min(made, _limit_bytes(allocation))

    @contextmanager
    def ordered(self, allocation: Allocation, buffer_bytes: int, driver_bytes: int = 0) -> Iterator[None]:
        """Orders host memory for a change of the tenant, until the block ends: a buffer of `buffer_bytes`,
        and `driver_bytes` in addition, which the driver saves. A part of the buffer that exists already needs
        no more memory.

        Raises VgpuError(NO_CAPACITY).
        """
        self._changes[allocation.id] = self._checked(self._taken(), allocation, buffer_bytes, driver_bytes)
        try:
            yield
        finally:
            self._changes.pop(allocation.id, None)

    def expect(self, soon: Iterable[Allocation]) -> dict[str, VgpuError]:
        """Orders the buffers of tenants that will soon be evicted, in place of all earlier orders of this
        kind. Returns the errors of those for which the host has no memory, by allocation id.
        """
        self._soon, refused, taken = {}, {}, self._taken()
        for allocation in soon:
            try:
                movable = self.movable_bytes(allocation)
                self._soon[allocation.id] = self._checked(taken, allocation, movable)
            except VgpuError as error:
                refused[allocation.id] = error
        return refused

    def _taken(self) -> Mapping[str, int]:
        return {allocation.id: self.taken_bytes(allocation) for allocation in self._book}

    def _checked(
        self, taken: Mapping[str, int], allocation: Allocation, buffer_bytes: int, driver_bytes: int = 0
    ) -> int:
        own = taken.get(allocation.id, 0)
        total = max(min(buffer_bytes, _limit_bytes(allocation)), own) + driver_bytes
        if total > own:
            coming = sum(self._coming(name, now) for name, now in taken.items() if name != allocation.id)
            check_host(total - own, sum(taken.values()) + coming, self._host(), coming)
        return total

    def _coming(self, allocation_id: str, taken_bytes: int) -> int:
        """Bytes that are ordered for a tenant and that it does not take yet."""
        ordered = max(self._changes.get(allocation_id, 0), self._soon.get(allocation_id, 0))
        return max(ordered - taken_bytes, 0)


def _limit_bytes(allocation: Allocation) -> int:
    return sum(part.memory_bytes for part in allocation.slices)
