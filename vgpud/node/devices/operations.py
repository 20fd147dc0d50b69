"""Operations of administrators on devices: list MPS daemons, end an MPS client, drain a device. This module
also says which devices are closed to requests.
"""

import asyncio
from collections.abc import Callable, Iterator

from vgpud import audit
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Isolation, Mode, Request
from vgpud.model.view import DrainView, MpsDaemon
from vgpud.modes.mig import MigMode
from vgpud.modes.mps import MpsMode
from vgpud.node.devices.drains import Drains
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.notices import Notices
from vgpud.node.devices.transitions import lost_is_left
from vgpud.node.store.book import Book
from vgpud.planner.use import DeviceUse
from vgpud.planner.words import DRAINED


class Operations:
    def __init__(
        self,
        book: Book,
        inventory: Inventory,
        mig: MigMode | None,
        mps: MpsMode | None,
        drains: Drains,
        notices: Notices,
    ) -> None:
        """`mig` and `mps` are the effectors; None if a test replaces them."""
        self._book = book
        self._inventory = inventory
        self._mig = mig
        self._mps_mode = mps
        self._drains = drains
        self._notices = notices
        self.undrained: Callable[[str], object] = lambda _: None  # called with a device that is open again

    def is_drained(self, device_uuid: str) -> bool:
        return device_uuid in self._drains

    def closed(self, request: Request) -> dict[str, str]:
        """Devices and MIG devices that do not accept the request now, each with the reason."""
        uuids = [device.uuid for device in self._inventory.node.devices]
        shut = dict.fromkeys(self._drains.of(uuids), DRAINED)
        mps = self._mps_mode
        if mps is not None and request.isolation in (None, Isolation.COMPUTE):
            for device in self._inventory.node.devices:
                for target in _mps_targets(device.uuid, self._book.use_of(device.uuid)):
                    why = mps.closed_to(request.owner.uid, device, target)
                    if why is not None:
                        shut.setdefault(target, why)
        return shut

    async def mps(self) -> tuple[MpsDaemon, ...]:
        mode = self._mps()
        # The daemons are asked concurrently, so that the waits for hung daemons overlap.
        found = await asyncio.gather(*(mode.report(device) for device in self._inventory.node.devices))
        return tuple(daemon for daemons in found for daemon in daemons)

    async def terminate(self, device_uuid: str, pid: int) -> None:
        with audit.change("terminate MPS client", device=device_uuid, client=pid):
            device = self._owner_of(device_uuid)
            await self._mps().terminate(device, pid)
        self._notices.notice(
            device.uuid, f"MPS client {pid} was ended by 'vgpuctl mps terminate'", audited=True
        )

    def _owner_of(self, target: str) -> Device:
        """The device with this UUID, or the device that contains the MIG device with this UUID. Raises
        VgpuError(NO_SUCH_DEVICE).
        """
        for device in self._inventory.node.devices:
            if any(compute.uuid == target for i in device.mig.instances for compute in i.compute_instances):
                return device
        return self._inventory.device(target)

    async def drain(self, device_uuid: str, drained: bool) -> DrainView:
        """Drains or undrains a device. Returns at once, with the allocations and processes that are still on
        the device; callers poll until there are none. Raises VgpuError(NO_SUCH_DEVICE).
        """
        await self._inventory.refresh()
        device = self._inventory.device(device_uuid)
        if drained != self.is_drained(device_uuid):
            with audit.change("drain" if drained else "undrain", device=device_uuid):
                await self._drains.put(device_uuid, drained)
            await self._notices.drained(device, drained)
            if not drained:
                self.undrained(device_uuid)
        held = tuple(a.id for a in self._book if any(p.device_uuid == device_uuid for p in a.slices))
        pids = tuple(sorted({process.pid for process in device.processes}))
        return DrainView(device_uuid, drained, held, pids)

    async def hand_back(self, device_uuid: str) -> None:
        """Forgets the applied layout and the drain of a device without allocations, and restores the state
        that the device had before vgpud.
        """
        if self._book.use_of(device_uuid).count:
            return
        with audit.change("hand back", device=device_uuid), lost_is_left():
            if self._mig is not None:
                await self._mig.records.apply(device_uuid, None)
                await self._mig.restore(device_uuid)
            if self._mps_mode is not None:
                await self._mps_mode.unapply(device_uuid)
        await self._drains.put(device_uuid, False)

    def _mps(self) -> MpsMode:
        if self._mps_mode is None:
            raise VgpuError(ErrorCode.UNSUPPORTED, "this node has no mode mps", "see 'vgpuctl status'")
        return self._mps_mode


def _mps_targets(device_uuid: str, use: DeviceUse) -> Iterator[str]:
    """The device or its MIG devices, whichever MPS serves now."""
    if use.mode is Mode.MPS:
        yield device_uuid
    for mig in use.mig:
        shared = use.instance(mig.place)
        if shared is not None and shared.mode is Mode.MPS and mig.uuid:
            yield mig.uuid
