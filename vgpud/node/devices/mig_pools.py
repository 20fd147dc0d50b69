"""The desired MIG layout of each device: the one that an administrator applied, or else the policy's."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from vgpud.model.device import Device
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Mode
from vgpud.modes.mig import Wish
from vgpud.modes.mig_records import Applied, MigRecords
from vgpud.node.devices.inventory import Inventory
from vgpud.node.store.book import Book
from vgpud.planner import layouts
from vgpud.planner.geometry import ComputeKey, SlotKey, geometry_for
from vgpud.planner.layouts import OFF, Blocked
from vgpud.planner.mig_parts import divide, scene_of, split
from vgpud.planner.pool import Pool, stock_of
from vgpud.policy.load import LoadedPolicy
from vgpud.policy.model import DeviceRule, MigSettings

log = structlog.get_logger(__name__)

# A layout: its GPU instances, and the compute instances into which these are divided.
Layout = tuple[frozenset[SlotKey], frozenset[ComputeKey]]


class Pools:
    """The desired layouts. `intended` has each layout from the decision to apply it until it is on record."""

    def __init__(
        self, records: MigRecords, inventory: Inventory, book: Book, policy: Callable[[], LoadedPolicy]
    ) -> None:
        self._records = records
        self._inventory = inventory
        self._book = book
        self._policy = policy
        self.intended: dict[str, Applied | None] = {}
        # A layout of the policy without placements is resolved once. The placements stay until the policy's
        # text for it changes.
        self._resolved: dict[tuple[str, tuple[str, ...]], Layout] = {}
        self._kept: dict[str, tuple[tuple[object, ...], Pool]] = {}

    def rule(self, device: Device) -> DeviceRule:
        return self._policy().policy.rule_for(device)

    def settings(self, device: Device) -> MigSettings:
        return self.rule(device).settings_mig()

    def applied(self, device_uuid: str) -> Applied | None:
        if device_uuid in self.intended:
            return self.intended[device_uuid]
        return self._records.applied(device_uuid)

    def origin(self, device: Device) -> str:
        if self.applied(device.uuid) is not None:
            return "applied"
        return "policy" if self._words(device) is not None else ""

    def is_off(self, device: Device) -> bool:
        """True if MIG mode of the device is to be off."""
        applied = self.applied(device.uuid)
        return applied.off if applied is not None else self._words(device) == (OFF,)

    def layout(self, device: Device) -> frozenset[SlotKey] | None:
        """The desired GPU instances of a device; None for a device without a fixed layout."""
        wanted = self._wanted(device)
        return None if wanted is None else wanted[0]

    def computes(self, device: Device) -> frozenset[ComputeKey]:
        """The compute instances into which the GPU instances of the layout are divided."""
        wanted = self._wanted(device)
        return frozenset() if wanted is None else wanted[1]

    def _wanted(self, device: Device) -> Layout | None:
        if self.rule(device).mode == Mode.UNMANAGED.value:
            return None
        applied = self.applied(device.uuid)
        if applied is not None:
            return None if applied.off else (applied.instances, applied.computes)
        words = self._words(device)
        return None if words is None or words == (OFF,) else self._resolve(device, words)

    def _words(self, device: Device) -> tuple[str, ...] | None:
        rule = self.rule(device)
        return rule.settings_mig().layout if rule.mode in ("auto", "mig") else None

    def _resolve(self, device: Device, words: tuple[str, ...]) -> Layout | None:
        known = self._resolved.get((device.uuid, words))
        if known is not None:
            return known
        if not device.mig.profiles:
            return None
        geometry = geometry_for(device.mig.profiles)
        pool = self._base(device)
        use = self._book.use_of(device.uuid)
        stock = stock_of(geometry, device, use.mig, pool)
        try:
            plain, bins = split(geometry, words)
            target = layouts.target(geometry, stock.layout, stock.pinned, plain)
            # If allocated instances block the target, it is computed as if they were gone: they are removed
            # after their release.
            if isinstance(target, Blocked):
                rest = stock.pinned & ~geometry.state(target.pinned)
                target = layouts.target(geometry, stock.layout._replace(blocked=0), rest, plain)
        except VgpuError as error:
            log.error(LogEvent.MIG_LAYOUT_IMPOSSIBLE, device=device.uuid, why=str(error))
            return None
        if isinstance(target, Blocked):
            return None
        scene = scene_of(device, geometry, stock, use, pool)
        computes = divide(scene, bins, target)
        # If allocated instances block the desired division into compute instances, the target is the division
        # of an empty device. The instances in the way are removed when they are released.
        if isinstance(computes, Blocked):
            empty = scene._replace(parts={}, stock=stock._replace(pinned=0))
            computes = divide(empty, bins, target)
            assert not isinstance(computes, Blocked), "an empty device blocks nothing"
        self._resolved[device.uuid, words] = frozenset(geometry.keys(target)), computes
        return self._resolved[device.uuid, words]

    def _base(self, device: Device) -> Pool:
        """The pool of the device, without its layout."""
        own, parts = self._records.own(device.uuid), self._records.own_parts(device.uuid)
        return Pool(own, foreign=self.settings(device).foreign, own_computes=parts)

    def pool(self, device: Device) -> Pool:
        settings = self.settings(device)
        applied = self.applied(device.uuid)
        key = (device.mig, settings, applied, self._records.revision)
        kept = self._kept.get(device.uuid)
        if kept is not None and all(a is b or a == b for a, b in zip(kept[0], key, strict=True)):
            return kept[1]
        wanted = self._wanted(device)
        grows = settings.grows if applied is None else bool(settings.dynamic)
        pool = replace(
            self._base(device),
            layout=None if wanted is None else wanted[0],
            dynamic=grows and not self.is_off(device),
            computes=frozenset() if wanted is None else wanted[1],
        )
        self._kept[device.uuid] = key, pool
        return pool

    def pools(self) -> Mapping[str, Pool]:
        return {d.uuid: self.pool(d) for d in self._inventory.node.devices if d.mig.capable}

    def wish(self, device_uuid: str) -> Wish:
        device = self._inventory.node.device(device_uuid)
        if device is None:
            return Wish()
        settings = self.settings(device)
        return Wish(self.layout(device), settings.foreign, settings.reset, self.computes(device))
