"""Pauses tenants: by the engine cut, the arbiter keeps them off their devices, and their memory stays there.

The order is in the lease, which outlives the arbiter; the record is in the ledger. The order is written
first. A start writes the order again as the record says, so that an interrupted pause is undone.
"""

import asyncio
from dataclasses import replace

import structlog

from vgpud import clock
from vgpud.model.engine import Engine
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, Mode, State
from vgpud.modes.preload import Preload
from vgpud.node.tenants.checkpoints import Checkpoints, check_well
from vgpud.node.tenants.context import NodeContext

log = structlog.get_logger(__name__)

# maximum wait for a tenant to be off its devices; the arbiter needs less than a millisecond
_OFF_SECONDS = 2.0
_LOOK_SECONDS = 0.001


class Pauses:
    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._engines = context.engines
        self._do = Checkpoints(context)

    async def pause(self, allocation: Allocation) -> Allocation:
        """Pauses a tenant. Raises VgpuError, for example UNSUPPORTED without the engine cut; a tenant that
        was not paused before then runs on.
        """
        allocation = await self._do.wait_until_settled(allocation.id)
        check_well(allocation)
        preload = self._check_engine(allocation)
        if allocation.state is not State.ACTIVE:
            held = counted(len(allocation.suspended), "process")
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation.id} is suspended, with {held}",
                f"run 'vgpuctl resume {allocation.id}' first",
            )
        if allocation.paused:
            # since the pause was recorded, the driver may have refused to preempt the tenant
            await self._until_off(preload, allocation.id)
            return allocation
        return await asyncio.shield(
            self._context.changes.begin(allocation.id, self._pause(preload, allocation))
        )

    async def _pause(self, preload: Preload, running: Allocation) -> Allocation:
        try:
            await preload.pause(running.id, True)
            self._context.fault("pause.order")
            await self._until_off(preload, running.id)
            paused = replace(running, paused=True)
            return await self._context.store.commit(paused, Change.PAUSED, "paused, off its devices")
        except VgpuError:
            await preload.pause(running.id, False)
            raise

    async def unpause(self, allocation: Allocation) -> Allocation:
        """Ends the pause of a tenant. A suspended tenant runs only after it is resumed. Raises VgpuError."""
        allocation = await self._do.wait_until_settled(allocation.id)
        check_well(allocation)
        if not allocation.paused or self._context.preload is None:
            return allocation
        work = self._unpause(self._context.preload, allocation)
        return await asyncio.shield(self._context.changes.begin(allocation.id, work))

    async def _unpause(self, preload: Preload, paused: Allocation) -> Allocation:
        await preload.pause(paused.id, False)
        self._context.fault("unpause.order")
        return await self._context.store.commit(replace(paused, paused=False), Change.UNPAUSED, "unpaused")

    async def restore(self, allocation_id: str) -> None:
        """At the start of vgpud: writes the order into the lease again, as the record says."""
        preload, book = self._context.preload, self._context.book
        if preload is None or allocation_id not in book:
            return
        held = book.get(allocation_id)
        if not held.has_lease or held.state in (State.FAILED, State.RELEASING):
            return
        try:
            if preload.is_pause_ordered(held.id) != held.paused:
                await preload.pause(held.id, held.paused)
        except VgpuError as error:
            log.error(LogEvent.TENANT_PAUSE_NOT_RESTORED, allocation=held.id, why=str(error))

    def _check_engine(self, allocation: Allocation) -> Preload:
        """Raises VgpuError(UNSUPPORTED) if the engine cut does not enforce the time slices on every device of
        the allocation.
        """
        preload = self._context.preload
        for part in allocation.slices:
            if part.mode is not Mode.PRELOAD or part.mig is not None or preload is None:
                raise _cannot(allocation, f"mode {part.device_mode.value} has no engine cut", _OTHER_MODES)
            device = self._context.inventory.device(part.device_uuid)
            choice = self._engines.view(device)
            if choice.engine is not Engine.CUT:
                raise _cannot(allocation, f"device {device.index} has the engine {choice.engine.value}")
        # an allocation has at least one slice, so the loop over the slices has checked `preload`
        assert preload is not None
        return preload

    async def _until_off(self, preload: Preload, allocation_id: str) -> None:
        """Waits until the tenant is off its devices. Raises VgpuError(UNSUPPORTED) if the driver refuses to
        stop it, or if a process stays on for _OFF_SECONDS.
        """
        end = clock.now() + _OFF_SECONDS
        while True:
            state = await asyncio.to_thread(preload.registered, allocation_id)
            if state.paused:
                return
            if state.refusal or clock.now() > end:
                why = state.refusal or f"a process of it stays on for {_OFF_SECONDS:g} seconds"
                raise _cannot(self._context.book.get(allocation_id), f"the driver does not stop it ({why})")
            await asyncio.sleep(_LOOK_SECONDS)


_OTHER_MODES = "tenants of mode preload on whole devices can be paused"


def _cannot(
    allocation: Allocation,
    why: str,
    hint: str = "use 'vgpuctl suspend', which waits for its work and takes its memory off, too",
) -> VgpuError:
    return VgpuError(ErrorCode.UNSUPPORTED, f"allocation {allocation.id} cannot be paused: {why}", hint)
