"""Reports events of devices to watchers and to the journal."""

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from vgpud.hardware.events import DeviceEvent
from vgpud.model.device import Device, Health
from vgpud.model.errors import VgpuError
from vgpud.model.event import EventKind
from vgpud.model.journal import Message
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted
from vgpud.node.devices.inventory import Inventory
from vgpud.node.store.allocations import AllocationStore

log = structlog.get_logger(__name__)


class Notices:
    def __init__(
        self,
        store: AllocationStore,
        inventory: Inventory,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._store = store
        self._inventory = inventory
        self._spawn = spawn

    async def event(self, event: DeviceEvent) -> None:
        """Reports an Xid error, a device that fell off the bus, a fatal error or a repair that NVML asks for,
        and refreshes the inventory. The ailment of a sick device is reported by `health`, once.
        """
        log.warning(
            LogEvent.DEVICE_FAULT_REPORTED,
            message_id=Message.DEVICE_FAULT_REPORTED,
            device=event.uuid,
            xid=event.xid,
            why=event.sentence,
        )
        before = self._health_of(event.uuid)
        ails = event.action is not None or bool(event.fatal)
        if ails:
            await self._inventory.refresh()
        # if NVML does not name the device, the next snapshot shows which one is lost
        told = ails and Health.SICK in (before, self._health_of(event.uuid))
        if event.uuid and not told:
            await self._store.notice(EventKind.DEVICE_CHANGED, event.uuid, event.sentence)
        if not ails:
            await self._inventory.refresh()

    def _health_of(self, uuid: str) -> Health | None:
        device = self._inventory.node.device(uuid)
        return None if device is None else device.health

    async def health(self, device: Device) -> bool:
        """Reports the health of a device. Returns True if the device is lost."""
        why = f": {device.health_reason}" if device.health_reason else ""
        lost = device.health is Health.LOST
        kind = EventKind.DEVICE_LOST if lost else EventKind.DEVICE_CHANGED
        await self._store.notice(kind, device.uuid, f"device {device.index} is {device.health.value}{why}")
        return lost

    async def drained(self, device: Device, is_drained: bool) -> None:
        now = "is drained: it accepts no" if is_drained else "is no longer drained: it accepts"
        sentence = f"device {device.index} {now} new allocations"
        await self._store.notice(EventKind.DEVICE_CHANGED, device.uuid, sentence)

    def arbiter(self, sentence: str) -> None:
        """Reports a sentence on the arbiter to watchers. Precondition: the journal has the sentence."""
        self._spawn(self._store.notice(EventKind.ARBITER_CHANGED, "vgpu-arbiter", sentence))

    async def started(self, version: str) -> None:
        """Reports the start of vgpud. A ledger that cannot be written does not prevent the start."""
        held = counted(len(self._store.book), "allocation")
        with suppress(VgpuError):
            await self._store.notice(EventKind.VGPUD_STARTED, "vgpud", f"vgpud {version} serves, with {held}")

    def notice(self, device_uuid: str, sentence: str, audited: bool = False) -> None:
        """Reports a sentence on a device. `audited`: an audit line has the sentence already."""
        device = self._inventory.node.device(device_uuid)
        name = device_uuid if device is None else f"device {device.index}"
        if not audited:
            log.warning(LogEvent.DEVICE_CONDITION_REPORTED, device=device_uuid, why=sentence)
        self._spawn(self._store.notice(EventKind.DEVICE_CHANGED, device_uuid, f"{name}: {sentence}"))
