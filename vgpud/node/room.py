"""Free capacity: how many more allocations of a request would fit now, as the servers for Kubernetes report
it.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from vgpud.model.device import Device, MigProfile, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import MODE_OF, Isolation, Mode, Request, Selector
from vgpud.node.devices.inventory import Inventory
from vgpud.node.keeper import NodeKeeper
from vgpud.node.store.book import Book
from vgpud.planner.choose import choose
from vgpud.planner.locality import nearest_devices
from vgpud.planner.pool import NO_POOL
from vgpud.planner.terms import Terms, all_terms, bare_name
from vgpud.planner.use import EMPTY

# errors of refusals that no release can change
_NEVER = (ErrorCode.DENIED_BY_POLICY, ErrorCode.UNSUPPORTED, ErrorCode.IMPOSSIBLE)


class Room:
    """Asks the planner how much would fit on a device. Changes nothing."""

    def __init__(self, keeper: NodeKeeper, inventory: Inventory, book: Book) -> None:
        self._keeper = keeper
        self._inventory = inventory
        self._book = book

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._inventory.node.devices

    def more(self, one: Request, device_uuid: str, most: int) -> int | None:
        """How many allocations like `one` fit on the device beside the present ones, at most `most`.

        None if the device can never serve such a request, whatever is released.
        """
        node, use = self._inventory.node, dict(self._book.use)
        pools = {} if self._keeper.mig is None else self._keeper.mig.pools.pools()
        closed = self._keeper.operations.closed(one)
        asked = replace(one, count=1, selector=Selector(uuids=(device_uuid,)))
        policy = self._keeper.policies.policy
        for found in range(most):
            decision = choose(asked, node, policy, use, pools=pools, closed=closed)
            if decision.refusal is not None:
                return None if not found and decision.refusal.code in _NEVER else found
            # One allocation fits after a move of idle instances. How many fit after the move is not known.
            if decision.moves:
                return found + 1
            piece = decision.slices[0]
            use[device_uuid] = use.get(device_uuid, EMPTY).with_slice(piece)
        return most

    def refusal(self, one: Request) -> VgpuError | None:
        """Why no device of the node could serve `one` even if the device were empty; None if a device
        could.
        """
        asked = replace(one, count=1, selector=Selector())
        pools = {} if self._keeper.mig is None else self._keeper.mig.pools.pools()
        decision = choose(asked, self._inventory.node, self._keeper.policies.policy, {}, pools=pools)
        return decision.refusal

    def units(self, one: Request, device_uuid: str, unit_bytes: int) -> int | None:
        """How many units of `unit_bytes` of memory are free on the device; None if the device can never serve
        `one`.

        If `one` has a share, each unit also needs its part of the compute. The compute may run out first:
        memory can be overcommitted, and other tenants may hold more compute than memory.
        """
        fits = self.more(one, device_uuid, 1)
        if not fits:
            return fits
        device, use = self._inventory.device(device_uuid), self._book.use_of(device_uuid)
        mode = MODE_OF[one.isolation or Isolation.QUOTA]
        units = (self.memory_bytes(device, mode) - use.memory_bytes) // unit_bytes
        if one.share is None:
            return units
        share_left = self._terms(device).share_hundredths(mode) - use.share_hundredths
        return min(units, share_left * device.memory_usable_bytes // (unit_bytes * 10000))

    def memory_bytes(self, device: Device, mode: Mode) -> int:
        """The memory that all tenants of the device may hold together, according to the policy."""
        return self._terms(device).memory_bytes(mode, device.memory_usable_bytes)

    def _terms(self, device: Device) -> Terms:
        return all_terms(self._keeper.policies.policy, self._inventory.node)[device.uuid]

    def nearest(self, device_uuids: tuple[str, ...], must: tuple[str, ...], count: int) -> tuple[str, ...]:
        """Returns the `count` of the given devices that are nearest to each other, including those in
        `must`.
        """
        return nearest_devices(self._inventory.node, device_uuids, must, count)

    def places(self, device: Device) -> tuple[tuple[MigProfile, str, tuple[Placement, ...]], ...]:
        """The MIG profiles that requests may have on the device, each with its bare name and placements.

        Empty without MIG. On a device with a fixed layout, only the placements of that layout's undivided
        instances.
        """
        mig = self._keeper.mig
        pool = NO_POOL if mig is None or not device.mig.capable else mig.pools.pool(device)
        allowed = self._keeper.policies.policy.rule_for(device).settings_mig().profiles
        found = []
        for profile in device.mig.profiles:
            name, at = bare_name(profile.name), profile.placements
            if not pool.dynamic:
                whole = (pool.layout or frozenset()) - {key for key, _ in pool.computes}
                at = tuple(place for place in at if (profile.id, place) in whole)
            if at and (allowed is None or name in allowed):
                found.append((profile, name, at))
        return tuple(found)

    def profiles(self, device: Device) -> Mapping[str, int]:
        """How many instances of each MIG profile the device can hold, by bare name. Profiles of compute
        instances that take a part of a GPU instance are included.
        """
        counts = {bare_name(p.name): p.instance_count for p in device.mig.profiles}
        for profile in device.mig.profiles:
            for part in profile.compute:
                counts.setdefault(bare_name(part.name), profile.instance_count * part.instance_count)
        return MappingProxyType(counts)
