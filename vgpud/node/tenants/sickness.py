"""Reacts to the health of devices: marks the tenants of lost devices as failed, moves tenants off sick
devices if the policy says so, and checks until a device is well again.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from vgpud import audit
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device, Health
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Lifetime
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.failures import Failures
from vgpud.node.tenants.relocate import Relocations

LOOK_SECONDS = 10.0  # interval between checks: no event that all drivers have reports the end of an ailment
_ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())


class Sickness:
    def __init__(
        self,
        context: NodeContext,
        relocations: Relocations,
        failures: Failures,
        being_made: Callable[[], Iterable[asyncio.Task[Any]]],
    ) -> None:
        """`being_made` returns the tasks of the allocations that are being made."""
        self._context = context
        self._inventory = context.inventory
        self._notices = context.notices
        self._relocations = relocations
        self._failures = failures
        self._being_made = being_made
        self._tended: set[str] = set()
        self.repaired: Callable[[str], object] = lambda _: None  # called with a device that is well again

    def on_sick(self, device: Device) -> str:
        """The value of the policy's key `on_sick` for the device."""
        return self._context.policy().rule_for(device).on_sick

    def health_changed(self, devices: Iterable[Device]) -> None:
        for device in devices:
            self._context.background.spawn(self._react(device))

    async def _react(self, device: Device) -> None:
        """Reports the health of a device to watchers. Fails the allocations of a lost device, and cares for a
        sick one (`tend`).
        """
        if await self._notices.health(device):
            # Allocations that are being made may be on this device, so they are waited for.
            await asyncio.gather(*self._being_made(), return_exceptions=True)
            await self._failures.mark_on(device.uuid, f"device {device.index} is lost")
        if device.health is Health.SICK:
            await self.tend(device.uuid)

    async def tend_all(self) -> None:
        """At the start of vgpud: continues the care for devices that were sick before."""
        devices = self._inventory.node.devices
        await asyncio.gather(*(self.tend(one.uuid) for one in devices if one.health is Health.SICK))

    async def tend(self, device_uuid: str) -> None:
        """Cares for a device until it is no longer sick. Does nothing if another call already cares for the
        device.
        """
        if device_uuid in self._tended:
            return
        self._tended.add(device_uuid)
        try:
            told: set[tuple[str, str]] = set()
            while (device := self._inventory.node.device(device_uuid)) and device.health is Health.SICK:
                if self.on_sick(device) == "move":
                    await self._empty(device, told)
                await asyncio.sleep(LOOK_SECONDS)
                await self._inventory.refresh()
            if device is not None and device.health is Health.OK:
                self.repaired(device_uuid)
        finally:
            self._tended.discard(device_uuid)

    async def _empty(self, device: Device, told: set[tuple[str, str]]) -> None:
        """Moves the tenants that can be moved now; vgpud tries the others again later. Each reason is
        reported once.
        """
        audit.by_itself(f"device {device.index} is sick: {device.ailment}")
        try:
            left = await self._relocations.evacuate(device.uuid, _ROOT)
        except VgpuError as error:
            self._notices.notice(device.uuid, f"it is sick, and its tenants stay: {error}")
            return
        for name, why in sorted(set(left.staying) - told):
            self._notices.notice(device.uuid, f"it is sick, and allocation {name} stays: {why}")
        told.update(left.staying)
