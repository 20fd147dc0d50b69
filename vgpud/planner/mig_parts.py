"""Plans layouts that divide GPU instances: words such as 1c.3g.71gb*3, the parts of each GPU instance, and
the steps inside one. Pure.

Parts of one profile are packed into few GPU instances: the largest first, each into the first with room. All
words that name the same memory slice (1c.3g.71gb@4) are parts of the GPU instance at that slice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from vgpud.model.device import Device, MigProfile, split_name
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.planner.division import Division, divisions, part_of
from vgpud.planner.geometry import ComputeKey, MigGeometry, SlotKey, geometry_for
from vgpud.planner.layouts import Blocked, find_profile, parse
from vgpud.planner.pool import Pool, Stock
from vgpud.planner.terms import bare_name
from vgpud.planner.use import DeviceUse


class Bin(NamedTuple):
    """A GPU instance of `profile`, anywhere or at `start`, that is divided into compute instances of the
    profiles `parts`.
    """

    profile: MigProfile
    start: int | None
    parts: tuple[int, ...]


def split(geometry: MigGeometry, words: Sequence[str]) -> tuple[tuple[str, ...], tuple[Bin, ...]]:
    """Splits a layout's words into words for whole GPU instances, one of them for each bin, and the bins.

    Raises VgpuError: BAD_REQUEST for an invalid word, IMPOSSIBLE for parts that a GPU instance cannot hold.
    """
    if not any(split_name(word) for word in words):
        return tuple(words), ()
    plain: list[str] = []
    parts: dict[tuple[int, int | None], list[int]] = {}
    for word, entry in zip(words, parse(words), strict=True):
        named = split_name(entry.profile)
        if named is None:
            plain.append(word)
            continue
        profile = find_profile(geometry, named[1])
        part = part_of(profile, named[0])
        if part is None:
            raise VgpuError(
                ErrorCode.IMPOSSIBLE,
                f"a {bare_name(profile.name)} has no compute instance of {named[0]} slices",
                f"it has {profile.slice_count} compute slices: ask for fewer",
            )
        if part.slice_count == profile.slice_count:
            plain += [_word(profile, entry.start)] * entry.times
        else:
            parts.setdefault((profile.id, entry.start), []).extend([part.id] * entry.times)
    bins = [
        one
        for (number, start), ids in parts.items()
        for one in _packed(next(p for p in geometry.profiles if p.id == number), start, ids)
    ]
    return (*plain, *(_word(one.profile, one.start) for one in bins)), tuple(bins)


def _word(profile: MigProfile, start: int | None) -> str:
    return str(profile.id) if start is None else f"{profile.id}@{start}"


def _packed(profile: MigProfile, start: int | None, ids: list[int]) -> list[Bin]:
    geometry = geometry_for(profile.compute)
    slices = {p.id: p.slice_count for p in profile.compute}
    found: list[list[int]] = [[]]
    for number in sorted(ids, key=lambda number: -slices[number]):
        for held in found:
            if geometry.packed([*held, number]) in geometry.with_counts:
                held.append(number)
                break
        else:
            found.append([number])
    if start is not None and len(found) > 1:
        raise VgpuError(
            ErrorCode.IMPOSSIBLE,
            f"the {bare_name(profile.name)} at memory slice {start} cannot be divided into "
            f"{len(ids)} compute instances with {sum(slices[n] for n in ids)} compute slices together",
            f"it has {profile.slice_count} compute slices, in which the compute instances must have places",
        )
    return [Bin(profile, start, tuple(held)) for held in found]


class Scene(NamedTuple):
    """One device as plans see it. `parts` are the GPU instances that are divided now (by existing or
    allocated compute instances), `whole` the undivided ones that have a compute instance.
    """

    device: Device
    geometry: MigGeometry
    stock: Stock
    parts: Mapping[SlotKey, Division]
    whole: frozenset[SlotKey]


def scene_of(device: Device, geometry: MigGeometry, stock: Stock, use: DeviceUse, pool: Pool) -> Scene:
    free = replace(pool, computes=frozenset(), dynamic=True)
    found = {d.key: d for p in device.mig.profiles for d in divisions(device, use.mig, free, p)}
    whole = (one.key for one in device.mig.instances if one.compute_instances and one.key not in found)
    return Scene(device, geometry, stock, found, frozenset(whole))


def divide(scene: Scene, bins: Sequence[Bin], state: int) -> frozenset[ComputeKey] | Blocked:
    """Returns how the GPU instances of `state` are divided into `bins` so that the fewest instances change;
    Blocked if pinned instances prevent it.
    """
    found: set[ComputeKey] = set()
    for profile in scene.geometry.profiles:
        keys = [key for key in scene.geometry.keys(state) if key[0] == profile.id]
        mine = [one for one in bins if one.profile.id == profile.id]
        if not mine and not any(key in scene.parts for key in keys):
            continue
        computes = _assigned(scene, keys, [*mine, *[None] * (len(keys) - len(mine))])
        if computes is None:
            pinned = [key for key in keys if _is_pinned(scene, key)]
            return Blocked(tuple(pinned or keys))
        found |= computes
    return frozenset(found)


def _assigned(scene: Scene, keys: list[SlotKey], entries: list[Bin | None]) -> set[ComputeKey] | None:
    """The compute instances of the cheapest assignment of `entries` (bins; None: undivided) to the GPU
    instances `keys`: the one for which the fewest instances are destroyed. All assignments are tried. None if
    no assignment keeps every instance that must stay and puts each bin at the place that it names.
    """
    best: tuple[int, list[int]] | None = None
    options = [[_cost(scene, key, entry) for entry in entries] for key in keys]
    seen: set[tuple[Bin | None, ...]] = set()
    if all(entry is None for entry in entries):
        orders: Iterator[tuple[int, ...]] = iter([tuple(range(len(entries)))])
    else:
        orders = permutations(range(len(entries)))
    for order in orders:
        chosen = tuple(entries[at] for at in order)
        if chosen in seen:
            continue
        seen.add(chosen)
        costs = [options[n][at] for n, at in enumerate(order)]
        if None in costs:
            continue
        total = sum(cost[0] for cost in costs if cost is not None)
        if best is None or total < best[0]:
            best = total, list(order)
    if best is None:
        return None
    picked = [options[n][at] for n, at in enumerate(best[1])]
    return {(key, part) for key, cost in zip(keys, picked, strict=True) if cost for part in cost[1]}


def _cost(scene: Scene, key: SlotKey, entry: Bin | None) -> tuple[int, tuple[SlotKey, ...]] | None:
    """The cost of dividing the GPU instance at `key` as `entry` asks: the number of instances to destroy, and
    the compute instances of the entry. None if an instance to destroy must stay, or if the entry names
    another place.
    """
    now = scene.parts.get(key)
    if entry is None:
        if now is None:
            return 0, ()
        return None if _is_pinned(scene, key) else (now.layout.slots.bit_count(), ())
    if entry.start not in (None, key[1].start):
        return None
    if now is None:
        return None if _is_pinned(scene, key) else (int(key in scene.whole), _anywhere(entry))
    geometry = now.geometry
    states = [
        state
        for state in geometry.with_counts.get(geometry.packed(entry.parts), ())
        if not now.pinned & ~state
        and not state & now.layout.blocked
        and (now.grows or state == now.layout.slots)
    ]
    if not states:
        return None
    state = min(
        states,
        key=lambda s: ((now.layout.slots & ~s).bit_count(), -geometry.worth(geometry.free_after[s]), s),
    )
    return (now.layout.slots & ~state).bit_count(), geometry.keys(state)


def _anywhere(entry: Bin) -> tuple[SlotKey, ...]:
    geometry = geometry_for(entry.profile.compute)
    states = geometry.with_counts[geometry.packed(entry.parts)]
    return geometry.keys(max(states, key=lambda state: (geometry.worth(geometry.free_after[state]), -state)))


def _is_pinned(scene: Scene, key: SlotKey) -> bool:
    return bool(scene.stock.pinned >> scene.geometry.number[key] & 1)


class LayoutStep(NamedTuple):
    """One instance to destroy or create. `part` is the compute instance, or None for a whole GPU instance."""

    create: bool
    key: SlotKey
    part: SlotKey | None = None


def moves(scene: Scene, state: int, computes: frozenset[ComputeKey]) -> tuple[LayoutStep, ...]:
    """The steps from the existing instances to `state`, divided as in `computes`: first all removals, then
    creations, the largest instances first.

    A GPU instance that becomes divided or undivided is destroyed and made anew. A GPU instance that stays
    divided keeps the parts that are in both layouts.
    """
    now = scene.stock.layout.slots
    wanted: dict[SlotKey, set[SlotKey]] = {}
    for key, part in computes:
        wanted.setdefault(key, set()).add(part)
    going = [LayoutStep(False, key) for key in scene.geometry.keys(now & ~state)]
    coming: list[LayoutStep] = []
    for key in sorted(scene.geometry.keys(state), key=lambda key: (-key[1].size, key[1], key[0])):
        parts = wanted.get(key, set())
        there = scene.parts.get(key)
        has = set() if there is None else set(there.geometry.keys(there.layout.slots))
        if not now >> scene.geometry.number[key] & 1 or _changes_kind(scene, key, bool(parts)):
            if now >> scene.geometry.number[key] & 1:
                going.append(LayoutStep(False, key))
            has = set()
            coming += [] if parts else [LayoutStep(True, key)]
        elif parts:
            going += [LayoutStep(False, key, part) for part in sorted(has - parts)]
        coming += [LayoutStep(True, key, part) for part in sorted(parts - has, key=_largest)]
    return (*going, *coming)


def _changes_kind(scene: Scene, key: SlotKey, divided: bool) -> bool:
    return key in scene.whole if divided else key in scene.parts


def _largest(part: SlotKey) -> tuple[int, SlotKey]:
    return -part[1].size, part


def part_name(device: Device, key: SlotKey, part: SlotKey) -> str:
    """The name of a compute instance in NVML's form, such as 1c.3g.71gb; its ids if the card lists no such
    profile.
    """
    profile = device.mig.profile(key[0])
    compute = None if profile is None else profile.compute_profile(part[0])
    return f"{key[0]}/{part[0]}" if compute is None else bare_name(compute.name)
