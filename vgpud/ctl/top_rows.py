"""The values that `vgpuctl top` shows, computed from two samples of a node and the time between them.
Pure.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.model.engine import Engine
from vgpud.model.tenancy import State

CELLS = 12
LOOKS_A_CELL = 5  # samples in one character; at the usual delay of 2 s, the whole line covers 2 minutes
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class History:
    """The past percentages of each figure, one per sample; None if a sample had no figure."""

    def __init__(self) -> None:
        self._past: dict[Hashable, deque[float | None]] = {}

    def add(self, figures: Iterable[tuple[Hashable, float | None]]) -> None:
        """Adds one sample. Keys that are not in the sample are forgotten."""
        kept = {}
        for key, value in figures:
            past = self._past.get(key) or deque(maxlen=CELLS * LOOKS_A_CELL)
            past.append(value)
            kept[key] = past
        self._past = kept

    def line(self, key: Hashable, blocks: str = BLOCKS) -> str:
        """The history as block characters, the newest at the right. Each character is the mean of its
        samples.
        """
        past = list(self._past.get(key, ()))
        ends = range(len(past), 0, -LOOKS_A_CELL)
        return "".join(_cell(past[max(0, end - LOOKS_A_CELL) : end], blocks) for end in reversed(ends))


def _cell(looks: list[float | None], blocks: str) -> str:
    known = [value for value in looks if value is not None]
    if not known:
        return " "
    mean = sum(known) / len(known)
    return blocks[min(len(blocks) - 1, max(0, int(mean / 100 * len(blocks))))]


SORTS = ("memory", "share", "waited", "refused", "device", "owner", "age")


class Look(NamedTuple):
    """One sample of the node. `trouble` is the reason why it has no devices."""

    moment_seconds: float
    devices: Sequence[pb.Device]
    allocations: Sequence[pb.Allocation]
    usage: pb.UsageReply
    simulated: bool = False
    trouble: str = ""
    processes: Sequence[pb.NodeProcess] = ()
    title: str = ""


class OutsideRow(NamedTuple):
    """The row of a process that no allocation limits: it was started outside vgpud, or evades the limits of
    its allocation.
    """

    pid: int
    owner: str
    device: str
    memory_bytes: int | None
    command: str
    allocation: str


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The row of a device. Percentages refer to the whole device; None means not known."""

    index: int
    name: str
    uuid: str
    mode: str
    memory_used_bytes: int
    memory_limit_bytes: int
    memory_allocated_bytes: int
    share_allocated_percent: float
    busy_percent: int | None
    temperature_celsius: int | None
    power_watts: float | None
    tenants: int
    health: str
    reason: str


class TenantRow(NamedTuple):
    """The row of a slice. Rates are percentages of the time between the two samples, at most 100."""

    allocation: str
    owner: str
    device: str
    mode: str
    state: str
    memory_used_bytes: int
    memory_limit_bytes: int
    memory_peak_bytes: int | None
    share_asked_percent: float | None
    share_used_percent: float | None
    throttled_percent: float | None
    waited_percent: float | None
    overrun_percent: float | None
    bypasses: int | None
    refused: int | None
    processes: int
    age_seconds: float
    label: str


def device_rows(look: Look) -> list[DeviceRow]:
    vitals = {item.device_uuid: item for item in look.usage.devices}
    return [_device(item, vitals.get(item.uuid)) for item in look.devices]


def _device(item: pb.Device, vitals: pb.DeviceVitals | None) -> DeviceRow:
    def known(field: str) -> int | None:
        return int(getattr(vitals, field)) if vitals is not None and vitals.HasField(field) else None  # type: ignore[arg-type]

    power = known("power_milliwatts")
    return DeviceRow(
        index=item.index,
        name=item.name,
        uuid=item.uuid,
        mode=(item.mode or "idle") + _gate(item) + (", drained" if item.drained else ""),
        memory_used_bytes=item.memory_used_bytes,
        memory_limit_bytes=max(0, item.memory_total_bytes - item.memory_reserved_bytes),
        memory_allocated_bytes=item.memory_allocated_bytes,
        share_allocated_percent=item.share_allocated_percent,
        busy_percent=known("busy_percent"),
        temperature_celsius=known("temperature_celsius"),
        power_watts=None if power is None else power / 1000,
        tenants=item.allocation_count,
        health=item.health,
        reason=item.health_reason,
    )


def _gate(item: pb.Device) -> str:
    """Text that names the engine of a device if it is the fallback (gate)."""
    return f" by {item.engine}" if item.mode and item.engine == Engine.GATE else ""


def tenant_rows(look: Look, before: Look | None, now_unix_ns: int) -> list[TenantRow]:
    indices = {item.uuid: str(item.index) for item in look.devices}
    meters = _meters(look)
    earlier = {} if before is None else _meters(before)
    seconds = 0.0 if before is None else look.moment_seconds - before.moment_seconds
    rows = []
    for item in look.allocations:
        for at, part in enumerate(item.slices):
            meter = meters.get((item.id, at))
            past = earlier.get((item.id, at))
            device = indices.get(part.device_uuid, words.short_uuid(part.device_uuid))
            rows.append(_tenant(item, part, device, (meter, past, seconds), now_unix_ns))
    return rows


def outside_rows(look: Look) -> list[OutsideRow]:
    return [
        OutsideRow(
            item.pid,
            words.user(item.uid) if item.HasField("uid") else "",
            str(item.device_index),
            item.memory_bytes if item.HasField("memory_bytes") else None,
            item.command,
            item.allocation_id,
        )
        for item in look.processes
        if item.unlimited or not (item.allocation_id or item.silent_mode)
    ]


def _meters(look: Look) -> dict[tuple[str, int], pb.SliceMeter]:
    return {
        (item.allocation_id, at): meter
        for item in look.usage.allocations
        for at, meter in enumerate(item.slices)
    }


def _tenant(
    item: pb.Allocation,
    part: pb.Slice,
    device: str,
    metered: tuple[pb.SliceMeter | None, pb.SliceMeter | None, float],
    now_unix_ns: int,
) -> TenantRow:
    meter, past, seconds = metered

    def rate(field: str) -> float | None:
        if meter is None or past is None or seconds <= 0 or not meter.HasField(field):  # type: ignore[arg-type]
            return None
        grown = float(getattr(meter, field) - getattr(past, field)) / 1e7 / seconds
        # The meters are not read exactly at the times of the two samples, so the rate can exceed 100 %.
        return min(max(0.0, grown), 100.0)

    refused = None
    if meter is not None and meter.HasField("refusals_limit"):
        refused = meter.refusals_limit + meter.refusals_card
    turns = meter is not None and meter.HasField("compute_bypasses")
    bypasses = meter.compute_bypasses if meter is not None and turns else None
    peak = meter.memory_peak_bytes if meter is not None and meter.HasField("memory_peak_bytes") else None
    return TenantRow(
        allocation=item.id,
        owner=words.user(item.owner_uid),
        device=device,
        mode=part.mode + (f" {words.mig_name(part)}" if part.HasField("mig") else ""),
        state=_state(item),
        memory_used_bytes=_used_bytes(item, meter),
        memory_limit_bytes=part.memory_bytes,
        memory_peak_bytes=peak,
        share_asked_percent=part.share_percent if part.HasField("share_percent") else None,
        share_used_percent=rate("compute_used_ns"),
        throttled_percent=rate("throttled_ns"),
        waited_percent=rate("compute_waited_ns"),
        overrun_percent=rate("compute_overrun_ns"),
        bypasses=bypasses,
        refused=refused,
        processes=meter.processes if meter is not None else 0,
        age_seconds=max(0.0, (now_unix_ns - item.created_unix_ns) / 1e9),
        label=words.label(item),
    )


def _used_bytes(item: pb.Allocation, meter: pb.SliceMeter | None) -> int:
    """Bytes of the allocation on the device. libvgpu also counts memory of a suspended tenant that is on the
    host, so its meter is not used then.
    """
    if item.state == State.SUSPENDED:
        return item.stays_bytes
    return meter.memory_used_bytes if meter is not None else 0


def _state(item: pb.Allocation) -> str:
    passed = words.passed(item)
    if not passed:
        return item.state
    return passed if item.state == State.ACTIVE else f"{item.state}, {passed}"


def chosen(rows: Iterable[TenantRow], sort: str, reverse: bool, text: str) -> list[TenantRow]:
    """The rows that contain `text` (case is ignored), sorted. A sort by device, owner or age is ascending,
    any other descending; `reverse` turns that around.
    """
    wanted = text.casefold()
    kept = [row for row in rows if not wanted or wanted in _searched(row)]
    keys = {
        "memory": lambda row: row.memory_used_bytes,
        "share": lambda row: row.share_used_percent or row.share_asked_percent or 0.0,
        "waited": lambda row: row.waited_percent or 0.0,
        "refused": lambda row: row.refused or 0,
        "device": lambda row: row.device.rjust(8),
        "owner": lambda row: row.owner,
        "age": lambda row: row.age_seconds,
    }
    kept.sort(key=lambda row: (row.age_seconds, row.allocation))
    return sorted(kept, key=keys[sort], reverse=is_descending(sort, reverse))


def is_descending(sort: str, reverse: bool) -> bool:
    return (sort not in ("device", "owner", "age")) != reverse


def _searched(row: TenantRow) -> str:
    return " ".join(
        (row.allocation, row.owner, f"gpu{row.device}", row.mode, row.state, row.label)
    ).casefold()
