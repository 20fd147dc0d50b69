"""GPU instances that are divided into compute instances: which parts are allocated, and where one more fits.

A compute instance has separate compute slices and shares the memory of its GPU instance. A MigGeometry
(geometry.py) of its compute instance profiles says which placements are legal. Pure.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vgpud.model.device import Device, GpuInstance, MigProfile
from vgpud.model.tenancy import MigSlice
from vgpud.planner.geometry import Layout, MigGeometry, SlotKey, geometry_for, mask_of
from vgpud.planner.pool import Pool
from vgpud.planner.use import DeviceUse


def part_of(profile: MigProfile, slices: int) -> MigProfile | None:
    """The compute instance profile with this number of slices. If there are several, the one with most
    instances.
    """
    found = [p for p in profile.compute if p.slice_count == slices]
    return max(found, key=lambda p: (p.instance_count, -p.id), default=None)


class Division(NamedTuple):
    """A GPU instance that is divided or is to be divided. Masks are of `geometry`'s slots.

    `ready` instances can be allocated; they exist and are idle, or the layout has them and they are still to
    be made. `pinned` instances must stay. `grows`: may further compute instances be made in the GPU instance?
    """

    key: SlotKey
    geometry: MigGeometry
    layout: Layout
    ready: int
    pinned: int
    grows: bool


def divisions(device: Device, held: tuple[MigSlice, ...], pool: Pool, profile: MigProfile) -> list[Division]:
    """The GPU instances of a profile that are divided now, by tenants' slices, or by the layout."""
    standing = {one.key: one for one in device.mig.instances if one.profile_id == profile.id}
    keys = {key for key, one in standing.items() if one.is_divided}
    keys |= {mig.key for mig in held if mig.profile_id == profile.id and mig.compute_key is not None}
    keys |= {key for key, _ in pool.computes if key[0] == profile.id}
    keys -= {mig.key for mig in held if mig.compute_key is None}
    found = (_division(device, standing.get(key), key, held, pool, profile) for key in sorted(keys))
    return [division for division in found if division is not None]


def _division(
    device: Device,
    instance: GpuInstance | None,
    key: SlotKey,
    held: tuple[MigSlice, ...],
    pool: Pool,
    profile: MigProfile,
) -> Division | None:
    geometry = geometry_for(profile.compute)
    holding = {mig.compute_key for mig in held if mig.key == key and mig.compute_key is not None}
    own = instance is None or key in pool.own
    standing = {} if instance is None else {c.key: c.id for c in instance.compute_instances}
    used = _used(device, instance)
    if instance is not None and standing and not instance.is_divided:
        if used or not own:
            return None  # the GPU instance is in use as a whole, or foreign
        standing = {}  # the GPU instance is idle and can be destroyed
    if None in standing:
        return None  # the driver does not report placements
    layout = geometry.layout((), ())
    for place in {*holding, *standing}:
        layout = _with(geometry, layout, place)
    busy = {place for place, number in standing.items() if number in used or None in used}
    ours = {place for at, place in pool.own_computes if at == key}
    kept = holding | busy | ({*standing} - ours if pool.foreign != "remove" else set())
    idle = {place for place in standing if place in ours or pool.foreign == "lend"} - holding - busy
    wanted = {place for at, place in pool.computes if at == key}
    ready = _mask(geometry, wanted) & geometry.free(layout) | _mask(geometry, idle)
    return Division(key, geometry, layout, ready, _mask(geometry, kept), own and pool.dynamic)


def _used(device: Device, instance: GpuInstance | None) -> set[int | None]:
    """Ids of compute instances with processes; None stands for an unknown compute instance."""
    if instance is None:
        return set()
    return {p.compute_instance_id for p in device.processes if p.gpu_instance_id == instance.id}


def _with(geometry: MigGeometry, layout: Layout, place: SlotKey | None) -> Layout:
    if place in geometry.number:
        return layout._replace(slots=layout.slots | 1 << geometry.number[place])
    shut = 0 if place is None else geometry.overlapping(place[1])
    return layout._replace(blocked=layout.blocked | shut)


def _mask(geometry: MigGeometry, places: Iterable[SlotKey | None]) -> int:
    return mask_of(geometry.number[place] for place in places if place in geometry.number)


class Seat(NamedTuple):
    """An existing or possible place of a compute instance in a division. `cost` is as in geometry.Place."""

    division: Division
    place: SlotKey
    cost: int
    stands: bool


def seats(found: Iterable[Division], compute: MigProfile) -> Iterator[Seat]:
    """The best seat in each division that has a free seat."""
    for division in found:
        ready = [key for key in division.geometry.keys(division.ready) if key[0] == compute.id]
        if ready:
            yield Seat(division, ready[0], 0, True)
            continue
        place = division.geometry.best_place(division.layout, compute.id) if division.grows else None
        if place is not None:
            yield Seat(division, (compute.id, place.placement), place.cost, False)


def given_bytes(use: DeviceUse, key: SlotKey, profile: MigProfile) -> int:
    """Bytes of a GPU instance's memory that are allocated: the tenants' limits, and an even part for a tenant
    without a limit.
    """
    limits = sum(one.memory_bytes for one in use.shared if one.place[0] == key)
    sizes = (
        mig.compute_placement.size
        for mig in use.mig
        if mig.key == key and mig.compute_placement is not None and use.instance(mig.place) is None
    )
    return limits + sum(profile.memory_bytes * size // profile.slice_count for size in sizes)
