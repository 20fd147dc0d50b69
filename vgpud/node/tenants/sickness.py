"""Cares for sick devices: moves their tenants away if the policy says so, and notices when a device is well
again.
"""

import asyncio
from collections.abc import Callable

from vgpud import audit
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device, Health
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Lifetime
from vgpud.node.devices.inventory import Inventory
from vgpud.node.tenants.relocate import Relocations

LOOK_SECONDS = 10.0  # interval between checks: no event that all drivers have reports the end of an ailment
_ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())


class Sickness:
    def __init__(
        self,
        inventory: Inventory,
        relocations: Relocations,
        on_sick: Callable[[Device], str],
        notice: Callable[[str, str], None],
    ) -> None:
        """`notice` gets a sentence about a device, by its UUID, for the journal and the watchers."""
        self._inventory = inventory
        self._relocations = relocations
        self._on_sick = on_sick
        self._notice = notice
        self._tended: set[str] = set()

    async def tend_all(self) -> None:
        """At the start of vgpud: continues the care for devices that were sick before."""
        devices = self._inventory.node.devices
        await asyncio.gather(*(self.tend(one.uuid) for one in devices if one.health is Health.SICK))

    async def tend(self, device_uuid: str) -> None:
        """Cares for a device until it is well or lost. Does nothing if another call does so already."""
        if device_uuid in self._tended:
            return
        self._tended.add(device_uuid)
        try:
            told: set[tuple[str, str]] = set()
            while (device := self._inventory.node.device(device_uuid)) and device.health is Health.SICK:
                if self._on_sick(device) == "move":
                    await self._empty(device, told)
                await asyncio.sleep(LOOK_SECONDS)
                await self._inventory.refresh()
        finally:
            self._tended.discard(device_uuid)

    async def _empty(self, device: Device, told: set[tuple[str, str]]) -> None:
        """Moves the tenants that can be moved now; others are tried again later. Each reason is told
        once.
        """
        audit.by_itself(f"device {device.index} is sick: {device.ailment}")
        try:
            left = await self._relocations.evacuate(device.uuid, _ROOT)
        except VgpuError as error:
            self._notice(device.uuid, f"it is sick, and its tenants stay: {error}")
            return
        for name, why in sorted(set(left.staying) - told):
            self._notice(device.uuid, f"it is sick, and allocation {name} stays: {why}")
        told.update(left.staying)
