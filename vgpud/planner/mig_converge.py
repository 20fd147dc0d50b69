"""Plans the steps that reconcile a device with its desired layout, except where tenants block a
change. Pure.
"""

from collections.abc import Iterator

from vgpud.model.device import Device
from vgpud.planner.geometry import SlotKey, geometry_for
from vgpud.planner.mig_parts import LayoutStep, Scene, scene_of
from vgpud.planner.mig_plan import Do, MigStep, idle_parts, step_of
from vgpud.planner.pool import Pool, stock_of
from vgpud.planner.use import DeviceUse


def towards(device: Device, use: DeviceUse, pool: Pool, layout: frozenset[SlotKey]) -> tuple[MigStep, ...]:
    """The steps towards `layout`: destroy vgpud's idle instances that are not in it, and create the missing
    ones that have room.
    """
    geometry = geometry_for(device.mig.profiles)
    scene = scene_of(device, geometry, stock_of(geometry, device, use.mig, pool), use, pool)
    known = frozenset(key for key in layout if key in geometry.number)
    steps: list[MigStep] = []
    if not device.mig.current:
        steps.append(MigStep(Do.ENABLE, device.uuid, "the device has a layout and MIG mode is off"))
    going = list(_going(scene, pool, known))
    steps += [step_of(device, move, "not in the layout, and unallocated") for move in going]
    coming = _coming(scene, pool, known, going)
    return (*steps, *(step_of(device, move, why) for move, why in coming))


def _parts_wanted(pool: Pool, key: SlotKey) -> frozenset[SlotKey]:
    return frozenset(part for at, part in pool.computes if at == key)


def _going(scene: Scene, pool: Pool, layout: frozenset[SlotKey]) -> Iterator[LayoutStep]:
    geometry = scene.geometry
    ours = geometry.state(pool.own & geometry.number.keys()) & ~scene.stock.pinned
    for one in scene.device.mig.instances:
        if one.key not in geometry.number:
            continue
        wanted = _parts_wanted(pool, one.key) if one.key in layout else frozenset()
        as_wanted = one.key in layout and one.key not in (scene.whole if wanted else scene.parts)
        if ours >> geometry.number[one.key] & 1 and not as_wanted and not (wanted and one.key in scene.parts):
            yield LayoutStep(False, one.key)
        elif one.key in scene.parts:
            yield from (
                LayoutStep(False, one.key, part)
                for part in idle_parts(scene, pool, one.key)
                if part not in wanted
            )


_HAS_IT = "in the layout, and unallocated"


def _coming(
    scene: Scene, pool: Pool, layout: frozenset[SlotKey], going: list[LayoutStep]
) -> Iterator[tuple[LayoutStep, str]]:
    geometry, stock = scene.geometry, scene.stock
    standing = {one.key: one for one in scene.device.mig.instances if one.key in geometry.number}
    gone = {move.key for move in going if move.part is None}
    taken = geometry.state(standing.keys() - gone) | stock.layout.slots & stock.pinned
    for key in sorted(layout, key=lambda key: (-key[1].size, key[1], key[0])):
        wanted, bit = _parts_wanted(pool, key), 1 << geometry.number[key]
        if not taken & bit:
            # an instance whose slot is not free is blocked by another instance
            if geometry.free(stock.layout._replace(slots=taken)) & bit:
                taken |= bit
                yield from ((LayoutStep(True, key, part), _HAS_IT) for part in _ordered(wanted))
                if not wanted:
                    yield LayoutStep(True, key), _HAS_IT
        elif key in pool.own and key in standing and key not in gone:
            if wanted and key not in scene.whole:
                yield from (
                    (LayoutStep(True, key, part), _HAS_IT) for part in _missing(scene, key, wanted, going)
                )
            elif not standing[key].compute_instances:
                # an earlier start was interrupted before it made the compute instance, or the instance was
                # deleted by hand
                yield LayoutStep(True, key), "it has no compute instance"


def _missing(
    scene: Scene, key: SlotKey, wanted: frozenset[SlotKey], going: list[LayoutStep]
) -> list[SlotKey]:
    """The compute instances of the layout that are missing and have room."""
    division = scene.parts.get(key)
    if division is None:
        return _ordered(wanted)
    geometry, taken = division.geometry, division.layout.slots
    taken &= ~geometry.state(move.part for move in going if move.key == key and move.part is not None)
    found = []
    for part in _ordered(wanted):
        if geometry.free(division.layout._replace(slots=taken)) >> geometry.number[part] & 1:
            taken |= 1 << geometry.number[part]
            found.append(part)
    return found


def _ordered(parts: frozenset[SlotKey]) -> list[SlotKey]:
    return sorted(parts, key=lambda part: (-part[1].size, part))
