"""What operators do to devices: look at MPS, end a client, drain; and what that closes to requests."""

from collections.abc import Mapping

import structlog

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Isolation, Mode, Request
from vgpud.model.view import DrainView, MpsDaemon
from vgpud.modes.base import Effector
from vgpud.modes.mps import MpsMode
from vgpud.node.book import Book
from vgpud.node.drains import Drains
from vgpud.node.inventory import Inventory

log = structlog.get_logger(__name__)


class Operations:
    def __init__(
        self, book: Book, inventory: Inventory, effectors: Mapping[Mode, Effector], drains: Drains
    ) -> None:
        self._book = book
        self._inventory = inventory
        self._effectors = effectors
        self._drains = drains

    def is_drained(self, device_uuid: str) -> bool:
        return device_uuid in self._drains

    def closed(self, request: Request) -> dict[str, str]:
        """Devices that take no request like this one now, with the reason of each."""
        uuids = [device.uuid for device in self._inventory.node.devices]
        shut = dict.fromkeys(self._drains.of(uuids), "it is drained")
        mps = self._effectors.get(Mode.MPS)
        if isinstance(mps, MpsMode) and request.isolation in (None, Isolation.COMPUTE):
            for device in self._inventory.node.devices:
                held = self._book.use_of(device.uuid).mode is Mode.MPS
                why = mps.closed_to(request.owner.uid, device) if held else None
                if why is not None:
                    shut.setdefault(device.uuid, why)
        return shut

    async def mps(self) -> tuple[MpsDaemon, ...]:
        mode = self._mps()
        found = [await mode.report(device) for device in self._inventory.node.devices]
        return tuple(daemon for daemon in found if daemon is not None)

    async def terminate(self, device_uuid: str, pid: int) -> None:
        await self._mps().terminate(self._inventory.device(device_uuid), pid)
        log.warning("MPS client ended by an operator", device=device_uuid, pid=pid)

    async def drain(self, device_uuid: str, drained: bool) -> DrainView:
        """Says at once what is left on the device; ask again to learn when it is idle."""
        await self._inventory.refresh()
        device = self._inventory.device(device_uuid)
        if drained != self.is_drained(device_uuid):
            await self._drains.put(device_uuid, drained)
            log.info("drained" if drained else "undrained", device=device_uuid)
        held = tuple(a.id for a in self._book if any(p.device_uuid == device_uuid for p in a.slices))
        pids = tuple(sorted({process.pid for process in device.processes}))
        return DrainView(device_uuid, drained, held, pids)

    def _mps(self) -> MpsMode:
        mode = self._effectors.get(Mode.MPS)
        if not isinstance(mode, MpsMode):
            raise VgpuError(ErrorCode.UNSUPPORTED, "this node has no mode mps", "see 'vgpuctl status'")
        return mode
