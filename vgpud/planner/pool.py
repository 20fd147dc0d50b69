"""What is known of a device's MIG instances beside what NVML shows: whose they are, and which stay."""

from dataclasses import dataclass
from typing import NamedTuple

from vgpud.model.device import Device
from vgpud.model.tenancy import MigSlice
from vgpud.planner.geometry import Layout, SlotKey, Table


@dataclass(frozen=True, slots=True)
class Pool:
    """`own` were made by vgpud. `layout` is what is wanted on the device, None where nothing is.

    Requests get other instances than the layout's only if `dynamic`. `foreign` is the policy for
    instances that someone else made: "keep" them, "lend" them to tenants, or "remove" them when in
    the way.
    """

    own: frozenset[SlotKey] = frozenset()
    layout: frozenset[SlotKey] | None = None
    dynamic: bool = True
    foreign: str = "keep"


NO_POOL = Pool()


class Stock(NamedTuple):
    """The instances of one device sorted by what may be done with them; masks of its table's slots.

    `ready` can be given to a tenant as they are (or, of the layout, once made); `pinned` must stay:
    they are held, in use, or not ours.
    """

    layout: Layout
    ready: int
    pinned: int


def stock_of(table: Table, device: Device, held: tuple[MigSlice, ...], pool: Pool) -> Stock:
    """What stands on a device (or shall, by its layout), and what of it is free."""
    layout = table.layout(device.mig.instances, held)
    held_slots = pinned = table.layout((), held).slots if device.mig.instances else layout.slots
    ready = 0
    if pool.layout:
        ready = table.state(pool.layout & table.number.keys()) & table.free(layout)
    if device.mig.instances:
        used = {process.gpu_instance_id for process in device.processes}
        for instance in device.mig.instances:
            key = (instance.profile_id, instance.placement)
            bit = 1 << table.number[key] if key in table.number else 0
            own = key in pool.own
            if instance.id in used or (not own and pool.foreign != "remove"):
                pinned |= bit
            if instance.id not in used and (own or pool.foreign == "lend"):
                ready |= bit
    return Stock(layout, ready & ~held_slots, pinned)
