"""What is known of a device's MIG instances beside what NVML shows: whose they are, and which stay."""

from dataclasses import dataclass
from typing import NamedTuple

from vgpud.model.device import Device, GpuInstance
from vgpud.model.tenancy import MigSlice
from vgpud.planner.geometry import ComputeKey, Layout, SlotKey, Table


@dataclass(frozen=True, slots=True)
class Pool:
    """`own` were made by vgpud. `layout` is what is wanted on the device, None where nothing is.

    Requests get other instances than the layout's only if `dynamic`. `foreign` is the policy for
    instances that someone else made: "keep" them, "lend" them to tenants, or "remove" them when in
    the way. `computes` are the compute instances that the layout divides GPU instances of its own into,
    `own_computes` those that vgpud made.
    """

    own: frozenset[SlotKey] = frozenset()
    layout: frozenset[SlotKey] | None = None
    dynamic: bool = True
    foreign: str = "keep"
    computes: frozenset[ComputeKey] = frozenset()
    own_computes: frozenset[ComputeKey] = frozenset()


NO_POOL = Pool()


class Stock(NamedTuple):
    """The instances of one device sorted by what may be done with them; masks of its table's slots.

    `ready` can be given to a tenant whole as they are (or, of the layout, once made); `pinned` must
    stay: they are held, in use, or not ours.
    """

    layout: Layout
    ready: int
    pinned: int


def stock_of(table: Table, device: Device, held: tuple[MigSlice, ...], pool: Pool) -> Stock:
    """What stands on a device (or shall, by its layout), and what of it is free."""
    layout = table.layout(device.mig.instances, held)
    if not device.mig.instances and not pool.layout:
        return Stock(layout, 0, layout.slots)
    held_slots = pinned = table.layout((), held).slots if device.mig.instances else layout.slots
    ready = 0
    divided = {key for key, _ in pool.computes}
    if pool.layout:
        ready = table.state((pool.layout - divided) & table.number.keys()) & table.free(layout)
    if device.mig.instances:
        used = {process.gpu_instance_id for process in device.processes}
        for instance in device.mig.instances:
            key = (instance.profile_id, instance.placement)
            bit = 1 << table.number[key] if key in table.number else 0
            own = key in pool.own
            parts = instance.is_divided
            ours = own and not (parts and _has_others(instance, pool))
            if instance.id in used or (not ours and pool.foreign != "remove"):
                pinned |= bit
            if instance.id not in used and (own or pool.foreign == "lend") and not parts:
                ready |= bit if key not in divided else 0
    return Stock(layout, ready & ~held_slots, pinned)


def _has_others(instance: GpuInstance, pool: Pool) -> bool:
    """Did someone else make a compute instance in it?"""
    return any((instance.key, one.key) not in pool.own_computes for one in instance.compute_instances)
