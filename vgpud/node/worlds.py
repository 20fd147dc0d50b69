"""What the modes `mps` and `preload` get from the node: allocations, settings of the policy, and
callbacks.
"""

from collections.abc import Callable

from vgpud.lease import SharePolicy
from vgpud.model.rows import Rows
from vgpud.model.tenancy import Allocation
from vgpud.modes.mps import MpsRules, MpsWorld, Users
from vgpud.modes.preload import PreloadRules, PreloadWorld
from vgpud.modes.walls import Limiter, WallWorld
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.policies import Policies
from vgpud.node.keeper import NodeKeeper
from vgpud.node.store.book import Book
from vgpud.policy.model import MpsSettings, PreloadSettings

_POLICIES = {"hard": SharePolicy.HARD, "work-conserving": SharePolicy.WORK_CONSERVING}


def mps_rules(settings: MpsSettings) -> MpsRules:
    return MpsRules(
        users=Users(settings.users),
        processes_per_tenant=settings.processes_per_tenant,
        pooled_memory=settings.memory == "libvgpu",
        exclusive_process=settings.exclusive_process,
        partitions=settings.static_partitions,
        below_normal=settings.client_priority == "below-normal",
        check_seconds=settings.check_seconds,
        hang_seconds=settings.hang_seconds,
    )


def mps_world(
    policies: Policies,
    book: Book,
    inventory: Inventory,
    originals: Rows,
    keeper: Callable[[], NodeKeeper | None],
) -> MpsWorld:
    """Makes what mode mps gets from the node. `keeper` is a function, because the mode is constructed before
    the keeper.
    """

    def rules_for(device_uuid: str) -> MpsRules:
        device = inventory.node.device(device_uuid)
        if device is None:
            return MpsRules()
        return mps_rules(policies.policy.rule_for(device).settings_mps())

    def died(device_uuid: str, sentence: str) -> None:
        held = keeper()
        if held is not None:
            held.failures.mps_daemon_died(device_uuid, sentence)

    def notice(device_uuid: str, sentence: str, audited: bool = False) -> None:
        held = keeper()
        if held is not None:
            held.notices.notice(device_uuid, sentence, audited)

    return MpsWorld(book.allocations_at, rules_for, died, notice, originals)


def preload_rules(settings: PreloadSettings) -> PreloadRules:
    return PreloadRules(_POLICIES[settings.share_policy], settings.makes_evictable)


def preload_world(
    policies: Policies,
    book: Book,
    inventory: Inventory,
    engines: Engines,
    keeper: Callable[[], NodeKeeper | None],
) -> PreloadWorld:
    """Makes what mode preload gets from the node. `keeper` is a function, because the mode is constructed
    before the keeper.
    """

    def rules_for(device_uuid: str) -> PreloadRules:
        device = inventory.node.device(device_uuid)
        if device is None:
            return PreloadRules()
        return preload_rules(policies.policy.rule_for(device).settings_preload())

    def notice(sentence: str) -> None:
        held = keeper()
        if held is not None:
            held.notices.arbiter(sentence)

    return PreloadWorld(
        lambda: tuple(book), rules_for, engines.settle, engines.forget, engines.context_mib, notice
    )


def wall_world(
    limiter: Limiter, policies: Policies, book: Book, inventory: Inventory, containers: Rows
) -> WallWorld:
    """Makes what the memory limits of control groups (walls) get from the node. `containers` is the ledger's
    table of Kubernetes containers. The table is read directly, because a start of vgpud completes interrupted
    releases before the server for the kubelet has read it.
    """

    def wanted(device_uuid: str) -> bool:
        device = inventory.node.device(device_uuid)
        if device is None:
            return False
        return policies.policy.rule_for(device).settings_preload().memory_limit == "driver"

    def cgroups(allocation: Allocation) -> tuple[str, ...]:
        return tuple(row[4] for row in containers if row[0] == allocation.request.id)

    return WallWorld(limiter, lambda: tuple(book), lambda: inventory.node, wanted, cgroups)
