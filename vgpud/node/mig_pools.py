"""What is wanted of each device's MIG: by an administrator, who comes first, or by the policy."""

from collections.abc import Callable, Mapping

import structlog

from vgpud.model.device import Device
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Mode
from vgpud.modes.mig import Wish
from vgpud.modes.mig_records import Applied, MigRecords
from vgpud.node.book import Book
from vgpud.node.inventory import Inventory
from vgpud.planner import layouts
from vgpud.planner.geometry import SlotKey, table_for
from vgpud.planner.layouts import OFF, Blocked
from vgpud.planner.pool import Pool, stock_of
from vgpud.policy.load import LoadedPolicy
from vgpud.policy.model import DeviceRule, MigSettings

log = structlog.get_logger(__name__)


class Pools:
    """`intended` holds layouts that are being applied, from the moment they are decided on."""

    def __init__(
        self, records: MigRecords, inventory: Inventory, book: Book, policy: Callable[[], LoadedPolicy]
    ) -> None:
        self._records = records
        self._inventory = inventory
        self._book = book
        self._policy = policy
        self.intended: dict[str, Applied | None] = {}
        # where the words of a policy name no place, they mean the same places until they change
        self._resolved: dict[tuple[str, tuple[str, ...]], frozenset[SlotKey]] = {}
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
        """Shall MIG mode be off?"""
        applied = self.applied(device.uuid)
        return applied.off if applied is not None else self._words(device) == (OFF,)

    def layout(self, device: Device) -> frozenset[SlotKey] | None:
        """The instances wanted; None where none are fixed."""
        if self.rule(device).mode == Mode.UNMANAGED.value:
            return None
        applied = self.applied(device.uuid)
        if applied is not None:
            return None if applied.off else applied.instances
        words = self._words(device)
        return None if words is None or words == (OFF,) else self._resolve(device, words)

    def _words(self, device: Device) -> tuple[str, ...] | None:
        rule = self.rule(device)
        return rule.settings_mig().layout if rule.mode in ("auto", "mig") else None

    def _resolve(self, device: Device, words: tuple[str, ...]) -> frozenset[SlotKey] | None:
        known = self._resolved.get((device.uuid, words))
        if known is not None:
            return known
        if not device.mig.profiles:
            return None
        table = table_for(device.mig.profiles)
        pool = Pool(self._records.own(device.uuid), foreign=self.settings(device).foreign)
        stock = stock_of(table, device, self._book.use_of(device.uuid).mig, pool)
        try:
            target = layouts.target(table, stock.layout, stock.pinned, words)
            if isinstance(target, Blocked):  # what is in the way goes when it is released
                rest = stock.pinned & ~table.state(target.pinned)
                target = layouts.target(table, stock.layout._replace(blocked=0), rest, words)
        except VgpuError as error:
            log.error("layout of the policy cannot be had", device=device.uuid, why=str(error))
            return None
        if isinstance(target, Blocked):
            return None
        self._resolved[device.uuid, words] = frozenset(table.keys(target))
        return self._resolved[device.uuid, words]

    def pool(self, device: Device) -> Pool:
        settings = self.settings(device)
        applied = self.applied(device.uuid)
        key = (device.mig, settings, applied, self._records.revision)
        kept = self._kept.get(device.uuid)
        if kept is not None and all(a is b or a == b for a, b in zip(kept[0], key, strict=True)):
            return kept[1]
        layout = self.layout(device)
        grows = settings.grows if applied is None else bool(settings.dynamic)
        pool = Pool(
            self._records.own(device.uuid), layout, grows and not self.is_off(device), settings.foreign
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
        return Wish(self.layout(device), settings.foreign, settings.reset)
