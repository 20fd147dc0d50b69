"""Facts about a device's MIG instances that NVML does not report: which ones vgpud made, and which
must stay.
"""

from dataclasses import dataclass
from typing import NamedTuple

from vgpud.model.device import Device, GpuInstance
from vgpud.model.tenancy import MigSlice
from vgpud.planner.geometry import ComputeKey, Layout, MigGeometry, SlotKey


@dataclass(frozen=True, slots=True)
class Pool:
    """What vgpud knows about a device's instances. `own` instances were made by vgpud. `layout` is the
    desired layout of the device, or None.

    Requests get instances outside the layout only if `dynamic`. `foreign` is the policy for instances that
    vgpud did not make: "keep" them, "lend" them to tenants, or "remove" them when they block a request.
    `computes` are the compute instances that divide GPU instances of the layout, `own_computes` those that
    vgpud made.
    """

    own: frozenset[SlotKey] = frozenset()
    layout: frozenset[SlotKey] | None = None
    dynamic: bool = True
    foreign: str = "keep"
    computes: frozenset[ComputeKey] = frozenset()
    own_computes: frozenset[ComputeKey] = frozenset()


NO_POOL = Pool()


class Stock(NamedTuple):
    """The instances of one device by what vgpud may do with them, as masks of the geometry's slots.

    `ready` instances can be allocated undivided; they exist and are idle, or the layout has them and they are
    still to be made. `pinned` instances must stay: they are allocated, in use, or foreign (unless the policy
    removes foreign ones).
    """

    layout: Layout
    ready: int
    pinned: int


def stock_of(geometry: MigGeometry, device: Device, held: tuple[MigSlice, ...], pool: Pool) -> Stock:
    """The existing and desired instances of a device, and which of them are free."""
    layout = geometry.layout(device.mig.instances, held)
    if not device.mig.instances and not pool.layout:
        return Stock(layout, 0, layout.slots)
    held_slots = pinned = geometry.layout((), held).slots if device.mig.instances else layout.slots
    ready = 0
    divided = {key for key, _ in pool.computes}
    if pool.layout:
        ready = geometry.state((pool.layout - divided) & geometry.number.keys()) & geometry.free(layout)
    if device.mig.instances:
        used = {process.gpu_instance_id for process in device.processes}
        for instance in device.mig.instances:
            key = (instance.profile_id, instance.placement)
            bit = 1 << geometry.number[key] if key in geometry.number else 0
            own = key in pool.own
            parts = instance.is_divided
            ours = own and not (parts and _has_others(instance, pool))
            if instance.id in used or (not ours and pool.foreign != "remove"):
                pinned |= bit
            if instance.id not in used and (own or pool.foreign == "lend") and not parts:
                ready |= bit if key not in divided else 0
    return Stock(layout, ready & ~held_slots, pinned)


def _has_others(instance: GpuInstance, pool: Pool) -> bool:
    """True if the GPU instance has a compute instance that vgpud did not make."""
    return any((instance.key, one.key) not in pool.own_computes for one in instance.compute_instances)
