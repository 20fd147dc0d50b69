"""The activity of tenants: libvgpu is asked through the arbiter, and its answers are read from the leases."""

import asyncio
from collections.abc import Container, Mapping
from contextlib import suppress

import structlog

from vgpud import clock
from vgpud.lease import LeaseActivity
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Mode
from vgpud.modes.base import Effector
from vgpud.modes.preload import Preload
from vgpud.node.tenants.blocked import Blocked

log = structlog.get_logger(__name__)

_QUIET_SECONDS = 2.0  # longest wait for running work; after it the driver waits
_LOOK_SECONDS = 0.01
_ASK_SECONDS = 0.25


class Activities:
    """Activity by allocation; None for a tenant without libvgpu or whose lease cannot be read."""

    def __init__(self, effectors: Mapping[Mode, Effector], blocked: Blocked) -> None:
        effector = effectors[Mode.PRELOAD]
        self._preload = effector if isinstance(effector, Preload) else None
        self._blocked = blocked
        self._left: dict[str, int] = {}  # each tenant's count of calls when it was suspended

    async def ask(self, allocation_id: str) -> None:
        """Asks libvgpu to publish its activity, which `read` returns a moment later. Never raises."""
        if self._preload is not None:
            with suppress(VgpuError):
                await self._preload.look(allocation_id)

    def read(self, allocation: Allocation) -> LeaseActivity | None:
        if self._preload is None or any(part.mode is not Mode.PRELOAD for part in allocation.slices):
            return None
        try:
            return self._preload.activity(allocation.id)
        except VgpuError as error:  # for example, the allocation was released meanwhile
            log.debug("cannot read a tenant's activity", allocation=allocation.id, why=str(error))
            return None

    async def quieten(self, going: Allocation, idle_since: LeaseActivity | None) -> None:
        """Waits until no thread of libvgpu is inside the driver, because the driver's lock would block it.
        The wait is bounded: a long kernel or a stopped program answers late.

        Raises VgpuError(ALLOCATION_BUSY) if the tenant has worked since `idle_since`.
        """
        began = asked = clock.now()
        now = self.read(going)
        while now is not None and not now.quiet and clock.now() < began + _QUIET_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            if clock.now() > asked + _ASK_SECONDS:  # the arbiter may have missed the first request
                await self.ask(going.id)
                asked = clock.now()
            now = self.read(going)
        if now is None:
            return
        self._left[going.id] = now.calls
        if idle_since is not None and (now.calls > idle_since.calls or now.wants):
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY, f"allocation {going.id} works again", "it is left to its work"
            )

    def left(self, going: Allocation) -> None:
        """Records that the tenant was suspended now: later CUDA calls mean that it wants to work."""
        now = self.read(going)
        if now is not None:
            self._left[going.id] = now.calls

    def wants(self, allocation: Allocation) -> bool:
        """Does a suspended tenant want to work? Includes a call that passed libvgpu during the suspension, a
        call that libvgpu does not know, and a tenant without libvgpu."""
        return self._waits(allocation) or self._blocked.holds(allocation)

    async def watch(self) -> None:
        """Watches for blocked threads that libvgpu does not see, until the daemon stops."""
        await self._blocked.run(self._waits)

    def _waits(self, allocation: Allocation) -> bool:
        """Does the tenant want to work, according to libvgpu?"""
        now = self.read(allocation)
        if now is None:
            return False
        return now.wants > 0 or now.calls > self._left.setdefault(allocation.id, now.calls)

    def keep(self, there: Container[str]) -> None:
        """Forgets every tenant that is not in `there`."""
        for gone in [name for name in self._left if name not in there]:
            del self._left[gone]
