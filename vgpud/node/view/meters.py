"""Reads all sensors and meters at once. Callers within the same half second share a reading."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog

from vgpud import clock
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Mode, State
from vgpud.model.view import Metered, SliceMeter, Vitals
from vgpud.modes.base import Effector
from vgpud.node.devices.inventory import Inventory
from vgpud.node.store.book import Book

log = structlog.get_logger(__name__)

_SHARED_SECONDS = 0.5
_FRESH_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # maximum time of each wait for the hardware
# interval between readings of sensors: temperature and power change slowly, and each reading is a driver call
_SENSOR_SECONDS = 5.0
# states in which an allocation's slices may be incomplete, so that they are not metered
_NOT_METERED = (State.ALLOCATING, State.RELEASING)


class Meters:
    def __init__(self, book: Book, inventory: Inventory, effectors: Mapping[Mode, Effector]) -> None:
        self._book = book
        self._inventory = inventory
        self._effectors = effectors
        self._last = Metered({}, {})
        self._taken = float("-inf")  # time of the reading, in seconds of the monotonic clock
        self._vitals: dict[str, Vitals] = {}
        self._vitals_taken = float("-inf")
        self._running: asyncio.Task[None] | None = None
        self._sensing: asyncio.Task[dict[str, Vitals]] | None = None

    async def read(self, max_age_seconds: float = _SHARED_SECONDS) -> Metered:
        """Reads all meters. Never raises, and waits for hung hardware only for a bounded time: a value that
        cannot be read is left out.
        """
        oldest = clock.now() - max_age_seconds
        while self._taken < oldest:
            if self._running is None:
                self._running = asyncio.ensure_future(self._take())
                self._running.add_done_callback(self._ended)
            await asyncio.shield(self._running)
        return self._last

    @property
    def nvml_errors(self) -> Mapping[int, int]:
        return self._inventory.nvml_errors

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running = None

    async def _take(self) -> None:
        began = clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._inventory.refresh(_FRESH_SECONDS)
        await self._look_at_sensors()
        held = [a for a in self._book if a.state not in _NOT_METERED and a.slices]
        meters = await asyncio.to_thread(self._read_all, held)
        self._last = Metered(dict(self._vitals), meters)
        self._taken = began

    async def _look_at_sensors(self) -> None:
        if clock.now() - self._vitals_taken <= _SENSOR_SECONDS:
            return
        if self._sensing is None:
            self._sensing = asyncio.ensure_future(self._inventory.vitals())
        done, _ = await asyncio.wait((self._sensing,), timeout=_LOOK_SECONDS)
        if done:  # while the driver hangs, no second reading is started
            self._vitals, self._sensing = self._sensing.result(), None
            self._vitals_taken = clock.now()

    def _read_all(self, held: list[Allocation]) -> dict[str, tuple[SliceMeter, ...]]:
        node = self._inventory.node
        known = {device.uuid: device for device in node.devices}
        found = {}
        for allocation in held:
            devices = [known[part.device_uuid] for part in allocation.slices if part.device_uuid in known]
            if len(devices) < len(allocation.slices):
                continue
            try:
                found[allocation.id] = self._effectors[allocation.slices[0].mode].meters(allocation, devices)
            except VgpuError as error:  # no meters, for example if the allocation was released meanwhile
                log.debug(LogEvent.ALLOCATION_METERS_UNREADABLE, allocation=allocation.id, why=str(error))
        return found
