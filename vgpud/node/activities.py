"""What tenants do: asked of libvgpu in their processes through the arbiter, and read from their leases."""

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
from vgpud.node.blocked import Blocked

log = structlog.get_logger(__name__)

_QUIET_SECONDS = 2.0  # what runs is waited for so long here, and then by the driver
_LOOK_SECONDS = 0.01
_ASK_SECONDS = 0.25


class Activities:
    """What is read is None for a tenant that has no libvgpu, or cannot be asked."""

    def __init__(self, effectors: Mapping[Mode, Effector], blocked: Blocked) -> None:
        effector = effectors[Mode.PRELOAD]
        self._preload = effector if isinstance(effector, Preload) else None
        self._blocked = blocked
        self._left: dict[str, int] = {}  # calls of suspended tenants when they went

    async def ask(self, allocation_id: str) -> None:
        """What `read` answers a moment later is new. An arbiter that is away is no error."""
        if self._preload is not None:
            with suppress(VgpuError):
                await self._preload.look(allocation_id)

    def read(self, allocation: Allocation) -> LeaseActivity | None:
        if self._preload is None or any(part.mode is not Mode.PRELOAD for part in allocation.slices):
            return None
        try:
            return self._preload.activity(allocation.id)
        except VgpuError as error:  # released meanwhile, say
            log.debug("no activity", allocation=allocation.id, why=str(error))
            return None

    async def quieten(self, going: Allocation, idle_since: LeaseActivity | None) -> None:
        """Until nothing of libvgpu is in the driver any more, whose lock would hold it; not for ever, as a
        long kernel, or a program that was stopped, answers late.

        Raises VgpuError(ALLOCATION_BUSY) if the tenant has worked since `idle_since`.
        """
        began = asked = clock.now()
        now = self.read(going)
        while now is not None and not now.quiet and clock.now() < began + _QUIET_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            if clock.now() > asked + _ASK_SECONDS:  # the arbiter may not have answered the first time
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
        """It has just been sent away: what it calls from now on, it calls since it wants to work."""
        now = self.read(going)
        if now is not None:
            self._left[going.id] = now.calls

    def wants(self, allocation: Allocation) -> bool:
        """Does a suspended tenant want to work? Also one whose call slipped past libvgpu as it went, or that
        libvgpu does not know, and one without libvgpu."""
        return self._waits(allocation) or self._blocked.holds(allocation)

    async def watch(self) -> None:
        """For what libvgpu does not see; as long as the daemon serves."""
        await self._blocked.run(self._waits)

    def _waits(self, allocation: Allocation) -> bool:
        """As libvgpu has it."""
        now = self.read(allocation)
        if now is None:
            return False
        return now.wants > 0 or now.calls > self._left.setdefault(allocation.id, now.calls)

    def keep(self, there: Container[str]) -> None:
        """Forgets all others."""
        for gone in [name for name in self._left if name not in there]:
            del self._left[gone]
