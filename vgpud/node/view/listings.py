"""Lists the node, its devices and the use of slices."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from vgpud import clock
from vgpud.model.device import Device
from vgpud.model.engine import EngineChoice
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, Mode
from vgpud.model.view import DeviceView, NodeDescription, SliceUse
from vgpud.modes.base import Effector
from vgpud.modes.preload import Preload
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.policies import Policies
from vgpud.node.store.allocations import AllocationStore
from vgpud.planner.use import DeviceUse

log = structlog.get_logger(__name__)

_SNAPSHOT_SECONDS = 1.0  # maximum age of the snapshot for listings
_LOOK_SECONDS = 0.5  # maximum time that a status waits for NVML


class Listings:
    def __init__(
        self,
        store: AllocationStore,
        inventory: Inventory,
        effectors: Mapping[Mode, Effector],
        engines: Engines,
        policies: Policies,
        is_drained: Callable[[str], bool],
        preload: Preload | None,
    ) -> None:
        self._store = store
        self._inventory = inventory
        self._effectors = effectors
        self._engines = engines
        self._policies = policies
        self._is_drained = is_drained
        self._preload = preload
        self._started = clock.now()

    async def slice_use(self, allocation: Allocation) -> tuple[SliceUse, ...]:
        """The use of each slice of an allocation. For a slice on a device that cannot be read, the entry is
        empty.
        """
        found = []
        for part in allocation.slices:
            try:
                device = self._inventory.device(part.device_uuid)
                found.append(await self._effectors[part.mode].use(allocation, part, device))
            except VgpuError as error:
                log.debug(LogEvent.ALLOCATION_USAGE_UNREADABLE, allocation=allocation.id, why=str(error))
                found.append(SliceUse(part.device_uuid, 0, ()))
        return tuple(found)

    def memory_limit(self, allocation: Allocation) -> str:
        """What enforces the memory limit of an allocation: "driver", where the driver limits its control
        group; else "libvgpu" in mode preload, and empty in other modes.
        """
        if self._preload is not None and self._preload.walls.stands(allocation.id):
            return "driver"
        return "libvgpu" if any(part.mode is Mode.PRELOAD for part in allocation.slices) else ""

    async def devices(self) -> tuple[tuple[DeviceView, ...], int]:
        await self._inventory.refresh(_SNAPSHOT_SECONDS)
        if self._inventory.error is not None and not self._inventory.node.devices:
            raise self._inventory.error
        views = []
        for device in self._inventory.node.devices:
            use = self._store.book.use_of(device.uuid)
            views.append(
                DeviceView(
                    device=device,
                    policy_mode=self._policies.policy.rule_for(device).mode,
                    mode=use.mode,
                    memory_allocated_bytes=use.memory_bytes,
                    share_allocated_hundredths=use.share_hundredths,
                    allocation_count=use.count,
                    drained=self._is_drained(device.uuid),
                    engine=self._engine(device, use),
                )
            )
        return tuple(views), self._store.revision

    def _engine(self, device: Device, use: DeviceUse) -> EngineChoice | None:
        """The engine of a device that has slices in mode preload (on MIG instances too), or is idle and may
        have them; None for other devices.
        """
        allowed = self._policies.policy.rule_for(device).allows(Mode.PRELOAD)
        on_top = any(one.mode is Mode.PRELOAD for one in use.shared)
        shared = use.mode is Mode.PRELOAD or on_top if use.mode is not None else allowed
        return self._engines.view(device) if shared else None

    async def look(self) -> None:
        """Refreshes the snapshot for `describe` and `plan`. It waits for NVML for a bounded time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._inventory.refresh(_SNAPSHOT_SECONDS)

    def describe(self) -> NodeDescription:
        error = self._inventory.error
        devices = self._inventory.node.devices
        simulated = ", simulated" if self._inventory.node.simulated else ""
        digest = self._policies.current.digest
        is_reloaded = self._store.account.tally.reload_succeeded
        refused = "" if is_reloaded else " (the last reload was refused: 'vgpuctl doctor' says why)"
        return NodeDescription(
            node=self._inventory.node,
            allocation_count=len(self._store.book),
            revision=self._store.revision,
            policy_digest=digest,
            status=f"{counted(len(devices), 'device')}{simulated}, "
            f"{counted(len(self._store.book), 'allocation')}, policy {digest[:8]}{refused}",
            uptime_seconds=clock.now() - self._started,
            hardware_error=str(error) if error is not None else "",
            arbiter_error="" if self._preload is None else self._preload.trouble(),
        )
