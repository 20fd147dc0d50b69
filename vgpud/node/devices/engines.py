"""Chooses the engine that enforces the time slices of a device's tenants in mode preload.

The engine is chosen for the first such tenant of a device, before the arbiter gets the tenant's lease, and
stays until the last such tenant is released. The choice is written to <run>/engines/UUID, where the arbiter
and a restarted vgpud read it. The probe runs once per device, boot and driver version. If the probe gives no
answer, the device gets the engine gate. A probe that fails within _QUICK_SECONDS is not recorded: it runs
again the next time that an idle device gets a tenant.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from vgpud import clock
from vgpud.hardware.engine_probe import EngineProbe
from vgpud.lease.engines import EngineFiles
from vgpud.model.device import Device
from vgpud.model.engine import Engine, EngineChoice, EngineReason, EngineVerdict
from vgpud.model.log_event import LogEvent
from vgpud.node.devices.inventory import Inventory
from vgpud.planner.engine import choose_engine, is_fallback

log = structlog.get_logger(__name__)

_QUICK_SECONDS = 5.0


class Engines:
    def __init__(self, files: EngineFiles, probe: EngineProbe, inventory: Inventory, boot_id: str) -> None:
        self._files = files
        self._probe = probe
        self._inventory = inventory
        self._boot_id = boot_id
        self._chosen: dict[str, EngineChoice] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._told: dict[str, EngineChoice] = {}
        self._verdicts: dict[str, EngineVerdict | None] = {}
        # Callbacks: the policy's setting for a device, and the report of an unexpected engine.
        self.setting: Callable[[Device], str] = lambda _: "auto"
        self.notice: Callable[[str, str], None] = lambda uuid, sentence: None

    def view(self, device: Device) -> EngineChoice:
        """The engine in force on the device. If the device has no preload tenant, the engine that it would
        get with one.
        """
        chosen = self._chosen.get(device.uuid)
        if chosen is not None:
            return chosen
        if device.uuid not in self._verdicts:  # cached, so that a listing reads no files
            self._verdicts[device.uuid] = self._verdict(device.uuid)
        return choose_engine(self.setting(device), device, self._verdicts[device.uuid])

    async def settle(self, device_uuid: str) -> None:
        """Ensures that the device has an engine. Raises VgpuError if the choice cannot be written."""
        async with self._locks.setdefault(device_uuid, asyncio.Lock()):
            if device_uuid in self._chosen:
                return
            device = self._inventory.device(device_uuid)
            setting = self.setting(device)
            choice = choose_engine(setting, device, self._verdict(device_uuid))
            if choice.engine is Engine.UNKNOWN:
                choice = choose_engine(setting, device, await self._ask(device))
            self._files.choose(device_uuid, choice)
            self._chosen[device_uuid] = choice
        self._tell(device, setting, choice)

    def context_mib(self, device_uuid: str) -> int:
        """The memory of a CUDA context, as the probe found it; 0: not known."""
        verdict = self._verdict(device_uuid)
        return 0 if verdict is None else verdict.context_mib

    def forget(self, device_uuid: str) -> None:
        """Forgets the engine of a device whose last preload tenant was released."""
        self._chosen.pop(device_uuid, None)
        self._files.forget(device_uuid)

    async def resume(self, device_uuids: Iterable[str]) -> frozenset[str]:
        """At the start of vgpud: keeps the engines of devices that have tenants in mode preload.

        Returns the devices that had the engine cut with another driver and now get the gate; no process of a
        tenant survives a change of the driver. Raises VgpuError if a choice cannot be written.
        """
        lost = set()
        for uuid in device_uuids:
            choice = self._files.chosen(uuid)
            if choice is None:  # for example, an old vgpud without engines made the allocation
                choice = EngineChoice(
                    Engine.GATE, EngineReason.TENANTS, "its tenants came before it had an engine"
                )
                self._files.choose(uuid, choice)
            if choice.engine is Engine.CUT and self._is_of_another_driver(uuid):
                await self.settle(uuid)
                if self._chosen[uuid].engine is not Engine.CUT:
                    lost.add(uuid)
            else:
                self._chosen[uuid] = choice
        return frozenset(lost)

    def _is_of_another_driver(self, device_uuid: str) -> bool:
        kept, device = self._files.verdict(device_uuid), self._inventory.node.device(device_uuid)
        return kept is not None and device is not None and self._verdict(device_uuid) is None

    def _verdict(self, device_uuid: str) -> EngineVerdict | None:
        kept = self._files.verdict(device_uuid)
        now = (self._boot_id, self._inventory.node.driver_version)
        return kept if kept is not None and (kept.boot_id, kept.driver_version) == now else None

    async def _ask(self, device: Device) -> EngineVerdict:
        driver = self._inventory.node.driver_version
        began = clock.now()
        verdict = await asyncio.to_thread(self._probe.ask, device.uuid, self._boot_id, driver)
        log.info(
            LogEvent.COMPUTE_ENGINE_PROBED, device=device.uuid, engine=verdict.engine.value, why=verdict.why
        )
        if not verdict.failed or clock.now() - began > _QUICK_SECONDS:
            self._files.keep(device.uuid, verdict)
            self._verdicts[device.uuid] = verdict
        return verdict

    def _tell(self, device: Device, setting: str, choice: EngineChoice) -> None:
        """Reports an unexpected fallback to the gate, and after that each change of the device's
        engine once.
        """
        worth = is_fallback(setting, choice) or device.uuid in self._told
        if worth and self._told.get(device.uuid) != choice:
            self._told[device.uuid] = choice
            self.notice(device.uuid, f"its engine is {choice.engine.value}: {choice.why}")
