"""The node as mode `mps` sees it: allocations of a device, the policy's settings, callbacks for notices."""

from collections.abc import Callable

from vgpud.modes.base import Originals
from vgpud.modes.mps import MpsRules, MpsWorld, Users
from vgpud.node.devices.inventory import Inventory
from vgpud.node.keeper import NodeKeeper
from vgpud.node.store.book import Book
from vgpud.policy.model import MpsSettings


def rules_of(settings: MpsSettings) -> MpsRules:
    return MpsRules(
        users=Users(settings.users),
        processes_per_tenant=settings.processes_per_tenant,
        pooled_memory=settings.memory == "libvgpu",
        exclusive_process=settings.exclusive_process,
        below_normal=settings.client_priority == "below-normal",
        check_seconds=settings.check_seconds,
        hang_seconds=settings.hang_seconds,
    )


def mps_world(
    book: Book, inventory: Inventory, originals: Originals, keeper: Callable[[], NodeKeeper | None]
) -> MpsWorld:
    """`keeper` is a function, because the mode is constructed before the keeper."""

    def rules_for(device_uuid: str) -> MpsRules:
        device, held = inventory.node.device(device_uuid), keeper()
        if device is None or held is None:
            return MpsRules()
        return rules_of(held.policy().policy.rule_for(device).settings_mps())

    def died(device_uuid: str, sentence: str) -> None:
        held = keeper()
        if held is not None:
            held.helper_died(device_uuid, sentence)

    def notice(device_uuid: str, sentence: str) -> None:
        held = keeper()
        if held is not None:
            held.device_notice(device_uuid, sentence)

    return MpsWorld(book.allocations_at, rules_for, died, notice, originals)
