"""The node as mode `preload` sees it: the allocations, and the policy's settings of a device."""

from collections.abc import Callable

from vgpud.lease import SharePolicy
from vgpud.modes.preload import PreloadRules, PreloadWorld
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory
from vgpud.node.keeper import NodeKeeper
from vgpud.node.store.book import Book
from vgpud.policy.model import PreloadSettings

_POLICIES = {"hard": SharePolicy.HARD, "work-conserving": SharePolicy.WORK_CONSERVING}


def rules_of(settings: PreloadSettings) -> PreloadRules:
    return PreloadRules(
        _POLICIES[settings.share_policy], settings.latency_quantum_us, settings.turn is not None
    )


def preload_world(
    book: Book, inventory: Inventory, engines: Engines, keeper: Callable[[], NodeKeeper | None]
) -> PreloadWorld:
    """`keeper` is a function, because the mode is constructed before the keeper."""

    def rules_for(device_uuid: str) -> PreloadRules:
        device, held = inventory.node.device(device_uuid), keeper()
        if device is None or held is None:
            return PreloadRules()
        return rules_of(held.policy().policy.rule_for(device).settings_preload())

    return PreloadWorld(lambda: tuple(book), rules_for, engines.settle, engines.forget)
