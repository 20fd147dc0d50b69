"""Puts devices into modes and takes them out of modes, with one change at a time on each device."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Mode
from vgpud.modes.base import Effector
from vgpud.node.devices.inventory import Inventory


@contextmanager
def lost_is_left() -> Iterator[None]:
    """Ignores the error GPU_LOST. The record of the device's original settings then stays."""
    try:
        yield
    except VgpuError as error:
        if error.code is not ErrorCode.GPU_LOST:
            raise


class Transitions:
    """Puts devices into modes. `in_use(device_uuid)` returns True if the device has an allocation that is not
    being released.
    """

    def __init__(
        self,
        effectors: Mapping[Mode, Effector],
        inventory: Inventory,
        in_use: Callable[[str], bool],
    ) -> None:
        self._effectors = effectors
        self._inventory = inventory
        self._in_use = in_use
        self._applied: dict[str, Mode] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def _lock(self, device_uuid: str) -> asyncio.Lock:
        return self._locks.setdefault(device_uuid, asyncio.Lock())

    async def ensure(self, device_uuid: str, mode: Mode) -> None:
        """Puts the device into the mode, unless it is in that mode already. Raises VgpuError: DEVICE_IN_USE
        if something on the device prevents the mode, or the error of the mode.
        """
        if self._applied.get(device_uuid) is mode:
            return
        async with self._lock(device_uuid):
            if self._applied.get(device_uuid) is mode:
                return
            effector = self._effectors[mode]
            device = self._inventory.device(device_uuid)
            obstacle = await effector.verify(device)
            if obstacle is not None:
                await self._inventory.refresh()
                raise VgpuError(
                    ErrorCode.DEVICE_IN_USE,
                    f"device {device.index} cannot serve in mode {mode.value}: {obstacle}",
                    "see 'vgpuctl devices' for what runs on it, or name another device",
                )
            await effector.apply(device)
            self._applied[device_uuid] = mode
            if mode is Mode.MIG:
                await self._inventory.refresh()

    async def release(self, device_uuid: str, mode: Mode) -> None:
        """Takes the device out of the mode, unless an allocation uses it."""
        async with self._lock(device_uuid):
            if self._in_use(device_uuid):
                return
            self._applied.pop(device_uuid, None)
            with lost_is_left():
                await self._effectors[mode].unapply(device_uuid)
            if mode is Mode.MIG:
                await self._inventory.refresh()

    async def abandon(self, device_uuid: str, mode: Mode) -> None:
        """Takes a device out of its mode after a failed allocation, unless another allocation uses it. A
        release that ended meanwhile left the mode on for the failed allocation.
        """
        if self._applied.get(device_uuid) is mode:
            await self.release(device_uuid, mode)

    def assume(self, device_uuid: str, mode: Mode) -> None:
        """At the start of vgpud: records that the device is in this mode already."""
        self._applied[device_uuid] = mode

    def lost(self, device_uuid: str) -> None:
        """Forgets the mode of a device, for example when its MPS daemon died, so that the next `ensure`
        applies it again.
        """
        self._applied.pop(device_uuid, None)
