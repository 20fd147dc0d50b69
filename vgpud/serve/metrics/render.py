"""Renders an observation as the text that Prometheus scrapes.

Most lines are those of allocations, and most allocations have not changed since the last scrape, so their
lines are cached for each family.
"""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from vgpud.model.device import Health
from vgpud.model.marks import Mark, MarkKind, shown_state
from vgpud.model.observation import Observation
from vgpud.model.tally import BUCKETS_SECONDS
from vgpud.model.tenancy import PAUSED, Allocation, Slice, State, Workload
from vgpud.model.view import ComputeTime, DeviceView, SliceMeter, Vitals
from vgpud.serve.metrics import families as f
from vgpud.serve.metrics.exposition import Family, label, labelled, lines, write

Samples = list[tuple[str, float]]
_NO_VITALS = Vitals()
_NO_TIMES = (None,) * 5


#: The families that have at most one sample for each slice, in the order of `families.ALL`. (MEMORY_REFUSED
#: has one for each cause.)
_PER_SLICE = (
    f.MEMORY_LIMIT,
    f.MEMORY_USED,
    f.MEMORY_PEAK,
    f.COMPUTE_LIMIT,
    f.COMPUTE_USED,
    f.COMPUTE_WAITED,
    f.COMPUTE_GRANTED,
    f.COMPUTE_OVERRUN,
    f.COMPUTE_BYPASSED,
    f.THROTTLED,
    f.PROCESSES,
)
_PER_ALLOCATION = (f.ALLOCATION_INFO, *_PER_SLICE, f.MEMORY_REFUSED)


class _Written(NamedTuple):
    """The cached lines of one allocation: one text for each family of `_PER_ALLOCATION`, and the values from
    which they were made.
    """

    allocation: Allocation
    state: str
    meters: tuple[SliceMeter, ...]
    info: str
    # for each slice, the beginnings of its lines: the metric's name and the labels
    heads: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]


class Renderer:
    """Renders observations as text. Its cache contains the lines of the last observation only."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}  # cached lines by allocation id
        self._names_workloads = True

    def render(self, seen: Observation) -> str:
        """The text of all families of `families.ALL`, in that order. Families without samples are
        included.
        """
        samples: dict[Family, Samples] = {family: [] for family in f.ALL}
        _daemon(seen, samples)
        for view in seen.devices:
            _device(view, seen.metered.vitals.get(view.device.uuid, _NO_VITALS), samples)
        for state, count in _states(seen).items():
            samples[f.ALLOCATIONS].append((labelled({"state": state}), count))
        _decisions(seen, samples)
        _marks(seen.marks, samples)
        return write(samples.items(), self._of_allocations(seen))

    def _of_allocations(self, seen: Observation) -> dict[Family, str]:
        now = {}
        if seen.names_workloads != self._names_workloads:
            self._names_workloads = seen.names_workloads
            self._written = {}
        for allocation in seen.allocations:
            meters = seen.metered.meters.get(allocation.id, ())
            state = shown_state(allocation, seen.marks)
            last = self._written.get(allocation.id)
            # an allocation and its slices are immutable, so the same object gives the same lines
            if last is None or last.allocation is not allocation or last.state != state:
                heads = tuple(_heads(allocation, part) for part in allocation.slices)
                info = _info(allocation, state, seen.names_workloads)
                lines = _lines(allocation, meters, info, heads)
                last = _Written(allocation, state, meters, info, heads, lines)
            elif last.meters is not meters:
                written = _lines(allocation, meters, last.info, last.heads)
                last = last._replace(meters=meters, lines=written)
            now[allocation.id] = last
        self._written = now
        columns = zip(*(one.lines for one in now.values()), strict=True)
        return {family: "".join(column) for family, column in zip(_PER_ALLOCATION, columns, strict=False)}


def _heads(allocation: Allocation, part: Slice) -> tuple[str, ...]:
    """The beginning of each line of a slice: name and labels, without the closing brace."""
    name, uuid, uid = label(allocation.id), label(part.device_uuid), allocation.request.owner.uid
    labels = f'{{allocation="{name}",gpu_uuid="{uuid}",uid="{uid}"'
    return tuple(family.name + labels for family in (*_PER_SLICE, f.MEMORY_REFUSED))


def _info(allocation: Allocation, state: str, names_workloads: bool) -> str:
    workload = allocation.request.workload if names_workloads else Workload()
    labels = {
        "allocation": allocation.id,
        "uid": str(allocation.request.owner.uid),
        "mode": allocation.slices[0].mode.value if allocation.slices else "",
        "state": state,
        "label": allocation.request.label,
        "namespace": workload.namespace,
        "pod": workload.pod,
        "container": workload.container,
        "claim": workload.claim,
    }
    return lines(f.ALLOCATION_INFO, [(labelled(labels), 1)])


def _lines(
    allocation: Allocation, meters: tuple[SliceMeter, ...], info: str, heads: tuple[tuple[str, ...], ...]
) -> tuple[str, ...]:
    rows = [
        _row(beginnings, part, meters[at] if at < len(meters) else None)
        for at, (beginnings, part) in enumerate(zip(heads, allocation.slices, strict=True))
    ]
    if len(rows) == 1:
        return (info, *rows[0])
    return (
        (info, *map("".join, zip(*rows, strict=True))) if rows else (info, *("",) * len(_PER_ALLOCATION[1:]))
    )


def _row(heads: tuple[str, ...], part: Slice, meter: SliceMeter | None) -> list[str]:
    """The finished lines of a slice. Numbers are formatted as by `exposition.number`."""
    values = zip(heads, _values(part, meter), strict=False)
    row = ["" if value is None else f"{head}}} {value}\n" for head, value in values]
    refused = ""
    if meter is not None and meter.refusals_limit is not None:
        refused += f'{heads[-1]},cause="limit"}} {meter.refusals_limit}\n'
    if meter is not None and meter.refusals_card is not None:
        refused += f'{heads[-1]},cause="card"}} {meter.refusals_card}\n'
    row.append(refused)
    return row


def _values(part: Slice, meter: SliceMeter | None) -> tuple[float | None, ...]:
    """The values of a slice for the families of `_PER_SLICE`. A value None has no line."""
    share = None if part.share is None else part.share.hundredths / 10_000
    if meter is None:
        return (part.memory_bytes, None, None, share, *_NO_TIMES, None, None)
    return (
        part.memory_bytes,
        meter.memory_used_bytes,
        meter.memory_peak_bytes,
        share,
        *(_NO_TIMES if meter.compute is None else _times(meter.compute)),
        None if meter.throttled_ns is None else meter.throttled_ns / 1e9,
        meter.processes,
    )


def _times(time: ComputeTime) -> tuple[float, ...]:
    seconds = (time.used_ns / 1e9, time.waited_ns / 1e9, time.granted_ns / 1e9, time.overrun_ns / 1e9)
    return (*seconds, time.bypasses)


def _states(seen: Observation) -> dict[str, int]:
    counted = Counter(shown_state(allocation, seen.marks) for allocation in seen.allocations)
    return {state: counted[state] for state in (*map(str, State), PAUSED)}


def _daemon(seen: Observation, samples: dict[Family, Samples]) -> None:
    node, tally, process = seen.described.node, seen.tally, seen.process
    versions = {
        "version": seen.version,
        "driver_version": node.driver_version,
        "cuda_version": node.cuda_version,
    }
    samples[f.BUILD_INFO].append((labelled(versions), 1))
    samples[f.POLICY_INFO].append((labelled({"digest": seen.described.policy_digest}), 1))
    for family, value in (
        (f.SIMULATED, int(node.simulated)),
        (f.HARDWARE_UP, int(not seen.described.hardware_error)),
        (f.UPTIME, seen.described.uptime_seconds),
        (f.REVISION, seen.described.revision),
        (f.RELOAD_OK, int(tally.reload_succeeded)),
        (f.RELOAD_TIME, tally.reload_unix_seconds),
        (f.WATCHERS, seen.watchers),
        (f.COLLECT, seen.collect_seconds),
        (f.RESIDENT, process.resident_bytes),
        (f.CPU, process.cpu_seconds),
        (f.OPEN_FDS, process.open_descriptors),
        (f.START_TIME, process.start_unix_seconds),
    ):
        samples[family].append(("", value))
    samples[f.NVML_ERRORS] += [
        (labelled({"code": str(code)}), count) for code, count in sorted(seen.nvml_errors.items())
    ]


def _device(view: DeviceView, vitals: Vitals, samples: dict[Family, Samples]) -> None:
    device = view.device
    name = {"gpu_uuid": device.uuid, "gpu": str(device.index)}
    info = {"name": device.name, "pci_bus_id": device.pci_bus_id, "policy_mode": view.policy_mode}
    samples[f.GPU_INFO].append((labelled({**name, **info}), 1))
    mode = "idle" if view.mode is None else view.mode.value
    samples[f.GPU_MODE].append((labelled({**name, "mode": mode}), 1))
    if view.engine is not None:
        engine = {"engine": view.engine.engine.value, "reason": view.engine.reason.value}
        samples[f.GPU_ENGINE].append((labelled({**name, **engine}), 1))
    short = labelled(name)
    figures: tuple[tuple[Family, float | None], ...] = (
        (f.GPU_HEALTHY, int(device.health is Health.OK)),
        (f.GPU_DRAINED, int(view.drained)),
        (f.GPU_MEMORY_LIMIT, max(0, device.memory_usable_bytes)),
        (f.GPU_MEMORY_ALLOCATED, view.memory_allocated_bytes),
        (f.GPU_MEMORY_USED, device.memory_used_bytes),
        (f.GPU_COMPUTE_ALLOCATED, view.share_allocated_hundredths / 10_000),
        (f.GPU_BUSY, None if vitals.busy_percent is None else vitals.busy_percent / 100),
        (f.GPU_TEMPERATURE, vitals.temperature_celsius),
        (f.GPU_POWER, _watts(vitals.power_milliwatts)),
        (f.GPU_POWER_LIMIT, _watts(vitals.power_limit_milliwatts)),
        (f.GPU_ALLOCATIONS, view.allocation_count),
        (f.GPU_PROCESSES, len({process.pid for process in device.processes})),
        (f.GPU_MIG_INSTANCES, len(device.mig.instances)),
    )
    for family, value in figures:
        if value is not None:
            samples[family].append((short, value))


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _marks(marks: tuple[Mark, ...], samples: dict[Family, Samples]) -> None:
    functions: dict[str, int] = {}
    for mark in marks:
        labels = {"allocation": mark.allocation_id}
        samples[f.ALLOCATION_MARKED].append((labelled({**labels, "mark": mark.kind.value}), 1))
        if mark.kind is MarkKind.BYPASSED:
            samples[f.BYPASSED_BYTES].append((labelled({**labels, "gpu_uuid": mark.subject}), mark.amount))
        if mark.kind is MarkKind.UNKNOWN_CALLS:
            functions[mark.subject] = max(mark.amount, functions.get(mark.subject, 0))
    samples[f.UNKNOWN_CALLS] += [(labelled({"driver_version": name}), n) for name, n in functions.items()]


def _decisions(seen: Observation, samples: dict[Family, Samples]) -> None:
    tally = seen.tally
    samples[f.MADE] += [(labelled({"mode": mode}), n) for mode, n in sorted(tally.made.items())]
    samples[f.REFUSED] += [(labelled({"reason": why}), n) for why, n in sorted(tally.refused.items())]
    samples[f.RELEASED].append(("", tally.released))
    samples[f.RESIZED].append(("", tally.resized))
    samples[f.FAILED].append(("", tally.failed))
    samples[f.MARKED] += [(labelled({"mark": kind}), n) for kind, n in sorted(tally.marked.items())]
    samples[f.BYPASS_LOOKS].append(("", tally.bypass_looks))
    samples[f.STOPPED].append(("", tally.stopped))
    samples[f.SUSPENDED] += [(labelled({"cause": cause}), n) for cause, n in sorted(tally.suspended.items())]
    samples[f.RESUMED] += [(labelled({"cause": cause}), n) for cause, n in sorted(tally.resumed.items())]
    samples[f.MOVED] += [(labelled({"outcome": outcome}), n) for outcome, n in sorted(tally.moved.items())]
    samples[f.RESUME_WAITED].append(("", tally.resume_waited_seconds))
    samples[f.WAITING].append(("", seen.waiting))
    bounds = [*(repr(bound) for bound in BUCKETS_SECONDS), "+Inf"]
    counts = list(accumulate(tally.made_buckets))
    samples[f.MADE_SECONDS] += [
        (f'_bucket{{le="{bound}"}}', count) for bound, count in zip(bounds, counts, strict=True)
    ]
    samples[f.MADE_SECONDS] += [("_sum", tally.made_seconds), ("_count", counts[-1])]
