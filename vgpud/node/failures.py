"""Marks allocations whose device or helper is gone as failed; they stay until their owners release them."""

from dataclasses import replace

import structlog

from vgpud import audit
from vgpud.model.errors import VgpuError
from vgpud.model.event import EventKind
from vgpud.model.tenancy import State
from vgpud.node.account import Account
from vgpud.node.checkpoints import Surroundings
from vgpud.node.execute import new_event

log = structlog.get_logger(__name__)


class Failures:
    def __init__(self, around: Surroundings, account: Account) -> None:
        self._book = around.book
        self._ledger = around.ledger
        self._hub = around.hub
        self._changes = around.changes
        self._account = account

    async def mark_on(self, device_uuid: str, sentence: str) -> None:
        """Marks every allocation on a lost device or MIG device."""
        for allocation in tuple(self._book):
            if any(device_uuid in (part.device_uuid, part.target) for part in allocation.slices):
                await self.mark(allocation.id, sentence)

    async def mark(self, allocation_id: str, sentence: str) -> None:
        """Marks the allocation if it is active or being resized, and tells watchers."""
        await self._changes.settle(allocation_id)
        if allocation_id not in self._book:
            return
        held = self._book.get(allocation_id)
        if held.state not in (State.ACTIVE, State.RESIZING):
            return
        text = f"allocation {allocation_id}: {sentence}"
        event = new_event(EventKind.ALLOCATION_FAILED, allocation_id, text)
        try:
            failed = await self._ledger.commit(replace(held, state=State.FAILED, failure=sentence), event)
        except VgpuError as error:
            log.error("failure not recorded", allocation=allocation_id, why=str(error))
            return
        # else its release began meanwhile
        if allocation_id in self._book and self._book.get(allocation_id) is held:
            self._book.replace(failed)
        self._hub.publish(replace(event, revision=failed.revision), failed)
        self._account.failed(failed, sentence)
        audit.automatic("fail", sentence, allocation=failed.id, owner=failed.request.owner.uid)
