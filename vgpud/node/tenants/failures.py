"""Marks allocations as failed if their device or their MPS daemon was lost. A failed allocation stays until
its owner releases it.
"""

from dataclasses import replace

import structlog

from vgpud import audit
from vgpud.model.errors import VgpuError
from vgpud.model.journal import Message
from vgpud.model.lifecycle import Change
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import State
from vgpud.node.store.account import held as fields_of
from vgpud.node.tenants.context import NodeContext

log = structlog.get_logger(__name__)


class Failures:
    def __init__(self, context: NodeContext) -> None:
        self._book = context.book
        self._store = context.store
        self._changes = context.changes
        self._transitions = context.transitions
        self._spawn = context.background.spawn

    def mps_daemon_died(self, device_uuid: str, sentence: str) -> None:
        """Called when an MPS daemon died, with which its tenants die: marks their allocations as failed."""
        why = f"{sentence}; vgpud marks their allocations as failed"
        log.error(LogEvent.MPS_DAEMON_DIED, message_id=Message.MPS_DAEMON_DIED, device=device_uuid, why=why)
        self._transitions.lost(device_uuid)
        self._spawn(self.mark_on(device_uuid, sentence))

    async def mark_on(self, device_uuid: str, sentence: str) -> None:
        """Marks the allocations on a lost device or MIG device as failed (see `mark`)."""
        for allocation in tuple(self._book):
            if any(device_uuid in (part.device_uuid, part.target) for part in allocation.slices):
                await self.mark(allocation.id, sentence)

    async def mark(self, allocation_id: str, sentence: str) -> None:
        """Marks the allocation as failed if it is active or being resized, and sends watchers an event. Waits
        for a running change of it first.
        """
        await self._changes.settle(allocation_id)
        if allocation_id not in self._book:
            return
        held = self._book.get(allocation_id)
        if held.state not in (State.ACTIVE, State.RESIZING):
            return
        failed = replace(held, state=State.FAILED, failure=sentence)
        try:
            await self._store.commit(failed, Change.FAILED, sentence)
        except VgpuError as error:
            log.error(LogEvent.ALLOCATION_FAILURE_NOT_RECORDED, allocation=allocation_id, why=str(error))
            return
        audit.automatic("fail", sentence, **(audit.of(failed) | fields_of(failed)))
