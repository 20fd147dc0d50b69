"""Reads the activity of tenants: the arbiter passes the request to libvgpu, which writes its report into the
lease.
"""

import asyncio
from collections.abc import Callable, Collection, Container
from contextlib import suppress

import structlog

from vgpud import clock
from vgpud.lease import LeaseActivity
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Mode
from vgpud.modes.base import Suspendable

log = structlog.get_logger(__name__)

_QUIET_SECONDS = 2.0  # maximum wait for running kernels; after that the driver's checkpoint waits for them
_LOOK_SECONDS = 0.004
_ASK_SECONDS = 0.25
# Time in which libvgpu must move a tenant's memory, and the same time again for each _MOVE_BYTES of it.
# (libvgpu first allocates a host buffer.)
_MOVE_SECONDS = 20.0
_MOVE_BYTES = 8 << 30


def seconds_to_move(held_bytes: int) -> float:
    """The maximum time that libvgpu may take to move this memory."""
    return _MOVE_SECONDS * (1 + held_bytes / _MOVE_BYTES)


class Activities:
    """The activity of each allocation. The activity is None for a tenant without libvgpu, or if the lease
    cannot be read.
    """

    def __init__(self, suspendable: Suspendable | None) -> None:
        self._suspendable = suspendable
        self._left: dict[str, int] = {}  # each tenant's number of CUDA calls at its suspension

    async def ask(self, allocation_id: str) -> None:
        """Asks libvgpu to publish the tenant's activity, which `read` returns a moment later. Never
        raises.
        """
        if self._suspendable is not None:
            with suppress(VgpuError):
                await self._suspendable.look(allocation_id)

    async def wait(self, late: Callable[[bool], Collection[str]], most_seconds: float = float("inf")) -> bool:
        """Waits for reports of libvgpu in leases, until `late` names no tenant whose report is missing.
        Returns False if one is still missing after `most_seconds`. An error of `late` ends the wait.

        Missing tenants are asked again every _ASK_SECONDS, because the arbiter may have missed the first
        request. The next call of `late` then has the argument True.
        """
        began = asked = clock.now()
        is_asked = False
        while missing := late(is_asked):
            if clock.now() > began + most_seconds:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
            if is_asked := clock.now() > asked + _ASK_SECONDS:
                for name in missing:
                    await self.ask(name)
                asked = clock.now()
        return True

    def read(self, allocation: Allocation) -> LeaseActivity | None:
        if self._suspendable is None or any(part.mode is not Mode.PRELOAD for part in allocation.slices):
            return None
        try:
            return self._suspendable.activity(allocation.id)
        except VgpuError as error:  # the lease is gone, for example if the allocation was released meanwhile
            log.debug(LogEvent.TENANT_ACTIVITY_UNREADABLE, allocation=allocation.id, why=str(error))
            return None

    async def quieten(self, going: Allocation, idle_since: LeaseActivity | None) -> None:
        """Waits until no thread of the tenant's libvgpu is inside the driver. The driver's lock would block a
        thread that is still inside. The wait is bounded, because a long kernel or a stopped program answers
        late.

        Raises VgpuError(ALLOCATION_BUSY) if the tenant has worked since `idle_since`.
        """

        def works(_: bool) -> tuple[str, ...]:
            now = self.read(going)
            return () if now is None or now.quiet else (going.id,)

        await self.wait(works, _QUIET_SECONDS)
        if (now := self.read(going)) is None:
            return
        self._left[going.id] = now.calls
        if idle_since is not None and (now.calls > idle_since.calls or now.wants):
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {going.id} has work again, so it is not suspended",
                "'vgpuctl suspend' suspends it although it works",
            )

    async def left(self, going: Allocation) -> None:
        """Records the number of CUDA calls of a tenant that is swapped out: a later call means that the
        tenant has work. The last report may be older than the tenant's last calls, so a new one is awaited,
        for a bounded time.
        """
        last = self.read(going)
        await self.ask(going.id)

        def silent(_: bool) -> tuple[str, ...]:
            if (now := self.read(going)) is None:
                return ()
            self._left[going.id] = now.calls
            return () if last is None or _has_answered(last, now) else (going.id,)

        await self.wait(silent, _QUIET_SECONDS)

    def wants(self, allocation: Allocation) -> bool:
        """Does a suspended tenant have work, according to libvgpu's reports? False without libvgpu."""
        now = self.read(allocation)
        if now is None:
            return False
        return now.wants > 0 or now.calls > self._left.setdefault(allocation.id, now.calls)

    def keep(self, there: Container[str]) -> None:
        """Forgets the figures of every tenant that is not in `there`."""
        for gone in [name for name in self._left if name not in there]:
            del self._left[gone]


def _has_answered(last: LeaseActivity, now: LeaseActivity) -> bool:
    """Has each process that still lives reported since `last`?"""
    answered = dict(now.answers)
    return all(answered[process] > times for process, times in last.answers if process in answered)
