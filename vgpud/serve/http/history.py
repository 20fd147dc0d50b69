"""The last hour of each device and tenant, for the status page: kept in memory, drawn as SVG."""

from collections import deque
from itertools import islice
from typing import NamedTuple

from vgpud.model.observation import Observation
from vgpud.model.tenancy import Allocation
from vgpud.model.view import DeviceView, SliceMeter, on_device_bytes

SAMPLE_SECONDS = 30.0
SAMPLES = 120
# maximum of tenants in the history: the event loop can draw so many in some 30 ms, and draws all of them once
# per sample
MOST_TENANTS = 200


class Sample(NamedTuple):
    """One sample. `memory` and `busy` are fractions from 0 to 1; `busy` is None if it is not known."""

    memory: float
    busy: float | None


class _Time(NamedTuple):
    at_seconds: float
    used_ns: int


class History:
    def __init__(self) -> None:
        self._past: dict[str, deque[Sample]] = {}
        self._times: dict[str, _Time] = {}
        self._drawn: dict[tuple[str, int, int], str] = {}  # drawings made since the last sample

    def add(self, seen: Observation, now_seconds: float) -> None:
        """Adds a sample of each device and of the first MOST_TENANTS allocations. Devices and allocations
        that no longer exist are forgotten.
        """
        fresh = {view.device.uuid: _device(view, seen) for view in seen.devices}
        times: dict[str, _Time] = {}
        for allocation in islice(seen.allocations, MOST_TENANTS):
            meters = seen.metered.meters.get(allocation.id, ())
            fresh[allocation.id] = Sample(_memory(allocation, meters), None)
            if meters and all(meter.compute is not None for meter in meters):
                used = sum(meter.compute.used_ns for meter in meters if meter.compute is not None)
                times[allocation.id] = _Time(now_seconds, used)
                busy = _rate(self._times.get(allocation.id), times[allocation.id], len(meters))
                fresh[allocation.id] = fresh[allocation.id]._replace(busy=busy)
        self._times = times
        past = {}
        for key, sample in fresh.items():
            past[key] = self._past.get(key) or deque(maxlen=SAMPLES)
            past[key].append(sample)
        self._past = past
        self._drawn.clear()

    def clear(self) -> None:
        """Forgets all samples. Called while the status page is off: there are no samples then, and a picture
        would not show the gap.
        """
        for kept in (self._past, self._times, self._drawn):
            kept.clear()

    def drawn(self, key: str, width: int, height: int) -> str:
        """Draws the history as an SVG: memory as an area, compute as a line, the newest at the right. Empty
        if there are fewer than two samples.
        """
        key_and_size = key, width, height
        if key_and_size not in self._drawn:
            self._drawn[key_and_size] = self._draw(key, width, height)
        return self._drawn[key_and_size]

    def _draw(self, key: str, width: int, height: int) -> str:
        past = self._past.get(key, ())
        if len(past) < 2:
            return ""
        step = width / (SAMPLES - 1)
        first = width - step * (len(past) - 1)
        memory = [(first + step * at, sample.memory) for at, sample in enumerate(past)]
        area = f"{first:.1f},{height} {_points(memory, height)} {width},{height}"
        busy = [(first + step * at, one.busy) for at, one in enumerate(past) if one.busy is not None]
        line = f"<polyline class=busy points='{_points(busy, height)}' />" if len(busy) > 1 else ""
        return (
            f"<svg class=past viewBox='0 0 {width} {height}' preserveAspectRatio=none role=img>"
            f"<title>the last hour: memory (area) and compute (line)</title>"
            f"<rect class=room width={width} height={height} />"
            f"<polygon class=memory points='{area}' />{line}</svg>"
        )


def _device(view: DeviceView, seen: Observation) -> Sample:
    vitals = seen.metered.vitals.get(view.device.uuid)
    busy = None if vitals is None or vitals.busy_percent is None else vitals.busy_percent / 100
    usable = max(1, view.device.memory_usable_bytes)
    return Sample(min(1.0, view.device.memory_used_bytes / usable), busy)


def _memory(allocation: Allocation, meters: tuple[SliceMeter, ...]) -> float:
    limit = sum(part.memory_bytes for part in allocation.slices)
    return min(1.0, sum(on_device_bytes(allocation, meter) for meter in meters) / max(1, limit))


def _rate(before: _Time | None, now: _Time, slices: int) -> float | None:
    if before is None or now.at_seconds <= before.at_seconds:
        return None
    used = (now.used_ns - before.used_ns) / 1e9 / (now.at_seconds - before.at_seconds) / slices
    return min(1.0, max(0.0, used))


def _points(values: list[tuple[float, float]], height: int) -> str:
    return " ".join(f"{x:.1f},{height - 1 - value * (height - 2):.1f}" for x, value in values)
