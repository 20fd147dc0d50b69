"""Draws devices as bars to scale: the unit is the memory slice under MIG, the byte otherwise."""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import NamedTuple

from vgpud.model.device import Device, Health, Placement
from vgpud.model.observation import Observation
from vgpud.model.quantity import show_bytes
from vgpud.model.tenancy import Allocation, Slice
from vgpud.model.view import DeviceView, SliceMeter, on_device_bytes

WIDTH, HEIGHT = 1000, 40
_COLOURS = 8
_CHARACTER = 6.2  # approximate width of a character in the style sheet's font
_SLIM = 28.0  # a part of a bar that is narrower than this has no text
# Memory outside of tenants is shown from this amount on. Less than this may be the driver's own; a process
# has a context of some 500 MiB.
_OUTSIDE_BYTES = 256 << 20


class Part(NamedTuple):
    """A part of a bar. `at` and `size` are in the bar's unit; `used` is the fraction in use, from 0 to 1.
    `link` is the id of an allocation.
    """

    at: float
    size: float
    style: str
    text: str
    title: str
    used: float = 0.0
    link: str = ""


def colours(allocations: Iterable[Allocation]) -> dict[str, str]:
    """The CSS style of each allocation, by its id. Allocations on the same device get different styles as
    long as there are enough styles.
    """
    taken: dict[str, set[int]] = {}
    found: dict[str, str] = {}
    for allocation in sorted(allocations, key=lambda a: (a.created_unix_ns, a.id)):
        beside = set().union(*(taken.setdefault(part.device_uuid, set()) for part in allocation.slices))
        free = (number for number in range(_COLOURS) if number not in beside)
        chosen = next(free, len(found) % _COLOURS)
        for part in allocation.slices:
            taken[part.device_uuid].add(chosen)
        found[allocation.id] = f"c{chosen}"
    return found


def device_bar(view: DeviceView, seen: Observation, styles: Mapping[str, str] | None = None) -> str:
    """Draws a device as an SVG. A lost device is drawn in one colour."""
    styles = colours(seen.allocations) if styles is None else styles
    device = view.device
    if device.health is Health.LOST:
        return _svg([Part(0, 1, "lost", device.health.value, device.health_reason)], 1, 0)
    slots = memory_slots(device)
    if device.mig.current and slots:
        return _svg(list(_instances(device, seen, styles)), slots, slots)
    total = max(1, device.memory_usable_bytes)
    parts = list(_slices(device, seen, styles))
    if outside := min(total, outside_bytes(device, seen)):
        title = f"{show_bytes(outside)} outside vgpud"
        parts.append(Part(total - outside, outside, "outside", "outside vgpud", title))
    return _svg(parts, total, 0)


def outside_bytes(device: Device, seen: Observation) -> int:
    """Memory in use on the device that is no tenant's; 0 if it is not known, or as little as the driver's
    own. Memory of a suspended tenant may still be on the device, so all of it counts as the tenant's.
    """
    used = 0
    for _, _, meter in _held(device, seen):
        if meter is None:
            return 0
        used += meter.memory_used_bytes
    outside = device.memory_used_bytes - used
    return outside if outside >= _OUTSIDE_BYTES else 0


def memory_slots(device: Device) -> int:
    """Memory slices of the card: the largest end of any placement of any profile."""
    ends = [place.start + place.size for profile in device.mig.profiles for place in profile.placements]
    return max(ends, default=0)


def _held(device: Device, seen: Observation) -> Iterator[tuple[Allocation, Slice, SliceMeter | None]]:
    for allocation in sorted(seen.allocations, key=lambda a: (a.created_unix_ns, a.id)):
        meters = seen.metered.meters.get(allocation.id, ())
        for at, part in enumerate(allocation.slices):
            if part.device_uuid == device.uuid:
                yield allocation, part, meters[at] if at < len(meters) else None


def _fraction(allocation: Allocation, part: Slice, meter: SliceMeter | None) -> float:
    used = 0 if meter is None else on_device_bytes(allocation, meter)
    return min(1.0, used / max(1, part.memory_bytes))


def _instances(device: Device, seen: Observation, styles: Mapping[str, str]) -> Iterator[Part]:
    held = {
        part.mig.place: (allocation, _fraction(allocation, part, meter))
        for allocation, part, meter in _held(device, seen)
        if part.mig is not None
    }
    for instance in device.mig.instances:
        profile = device.mig.profile(instance.profile_id)
        name = profile.name if profile is not None else f"profile {instance.profile_id}"
        place = instance.placement
        where = f"at memory slice {place.start}, {place.size} wide"
        if not instance.is_divided:
            yield _instance(place.start, place.size, name, where, held.get((instance.key, None)), styles)
            continue
        step = place.size / (instance.slice_count or len(instance.compute_instances))
        for at, one in enumerate(instance.compute_instances):
            lies = one.placement or Placement(at, 1)
            part = None if profile is None else profile.compute_profile(one.profile_id)
            yield _instance(
                place.start + lies.start * step,
                lies.size * step,
                name if part is None else part.name,
                f"{where}, {lies.size} of its compute slices from {lies.start} on",
                held.get((instance.key, one.key)),
                styles,
            )


def _instance(
    at: float,
    size: float,
    name: str,
    where: str,
    owner: tuple[Allocation, float] | None,
    styles: Mapping[str, str],
) -> Part:
    if owner is None:
        return Part(at, size, "idle", name, f"{name} {where}, idle")
    allocation, used = owner
    title = f"{name} {where}, allocation {allocation.id}"
    return Part(at, size, styles[allocation.id], name, title, used, allocation.id)


def _slices(device: Device, seen: Observation, styles: Mapping[str, str]) -> Iterator[Part]:
    at = 0
    for allocation, part, meter in _held(device, seen):
        text = f"{show_bytes(part.memory_bytes)}{f' {part.share}' if part.share is not None else ''}"
        title = f"allocation {allocation.id}, uid {allocation.request.owner.uid}, {text}"
        label, used = allocation.request.label or text, _fraction(allocation, part, meter)
        yield Part(at, part.memory_bytes, styles[allocation.id], label, title, used, allocation.id)
        at += part.memory_bytes


def _svg(parts: list[Part], total: float, grid: int) -> str:
    scale = WIDTH / total
    drawn = [f"<rect class=room width={WIDTH} height={HEIGHT} />"]
    # The grid lines come first in the SVG, so that the parts are drawn over them.
    drawn += [_line(WIDTH * i / grid) for i in range(1, grid)]
    for part in parts:
        x, width = part.at * scale, part.size * scale
        tag, end = (f"a href='#{escape(part.link)}'", "a") if part.link else ("g", "g")
        drawn.append(f"<{tag}><title>{escape(part.title)}</title>{_rectangle(part.style, x, width, HEIGHT)}")
        if part.used:
            drawn.append(
                f"<rect class=used x={x:.1f} y={HEIGHT - 6} width={width * part.used:.1f} height=6 />"
            )
        room = int((width - 8) / _CHARACTER)
        if width >= _SLIM and room > 2:
            shown = part.text if len(part.text) <= room else part.text[: room - 1] + "…"
            drawn.append(f"<text x={x + 5:.1f} y=22>{escape(shown)}</text>")
        drawn.append(f"</{end}>")
    edges = {round(end * scale, 1) for part in parts for end in (part.at, part.at + part.size)}
    drawn += [_line(x) for x in sorted(edges) if 0 < x < WIDTH]
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{''.join(drawn)}</svg>"


def _line(x: float) -> str:
    return f"<line class=line x1={x:.1f} x2={x:.1f} y1=0 y2={HEIGHT} />"


def _rectangle(style: str, x: float, width: float, height: float) -> str:
    return f"<rect class={style} x={x:.1f} width={width:.1f} height={height} />"


def use_bar(used: int, limit: int, style: str) -> str:
    """A bar of a tenant's memory use. A use above the limit is drawn as a full bar."""
    width = 120 * min(1.0, used / max(1, limit))
    return (
        "<svg viewBox='0 0 120 12' role=img><rect class=room width=120 height=12 />"
        f"<rect class={style} width={width:.1f} height=12 /></svg>"
    )
