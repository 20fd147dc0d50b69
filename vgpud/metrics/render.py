"""An observation as the text that Prometheus scrapes."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from vgpud.metrics import families as f
from vgpud.metrics.exposition import Family, label, labelled, write
from vgpud.model.device import Health
from vgpud.model.observation import Observation
from vgpud.model.tally import BUCKETS_SECONDS
from vgpud.model.tenancy import Allocation, Slice, State
from vgpud.model.view import DeviceView, SliceMeter, Vitals

Samples = list[tuple[str, float]]
_NO_VITALS = Vitals()


def render(seen: Observation) -> str:
    """All families of `families.ALL`, in that order, those without samples too."""
    samples: dict[Family, Samples] = {family: [] for family in f.ALL}
    _daemon(seen, samples)
    for view in seen.devices:
        _device(view, seen.metered.vitals.get(view.device.uuid, _NO_VITALS), samples)
    for state, count in _states(seen).items():
        samples[f.ALLOCATIONS].append((labelled({"state": state}), count))
    for allocation in seen.allocations:
        _allocation(allocation, seen.metered.meters.get(allocation.id, ()), samples)
    _decisions(seen, samples)
    return write(samples.items())


def _states(seen: Observation) -> dict[str, int]:
    counted = Counter(allocation.state for allocation in seen.allocations)
    return {state.value: counted[state] for state in State}


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


def _allocation(
    allocation: Allocation, meters: tuple[SliceMeter, ...], samples: dict[Family, Samples]
) -> None:
    uid = str(allocation.request.owner.uid)
    info = {
        "allocation": allocation.id,
        "uid": uid,
        "mode": allocation.slices[0].mode.value if allocation.slices else "",
        "state": allocation.state.value,
        "label": allocation.request.label,
    }
    samples[f.ALLOCATION_INFO].append((labelled(info), 1))
    for at, part in enumerate(allocation.slices):
        inner = f'{{allocation="{label(allocation.id)}",gpu_uuid="{label(part.device_uuid)}",uid="{uid}"'
        short = inner + "}"
        samples[f.MEMORY_LIMIT].append((short, part.memory_bytes))
        if part.share is not None:
            samples[f.COMPUTE_LIMIT].append((short, part.share.hundredths / 10_000))
        if at < len(meters):
            for family, value in _metered(part, meters[at]):
                samples[family].append((short, value))
            samples[f.MEMORY_REFUSED] += _refusals(inner, meters[at])


def _metered(part: Slice, meter: SliceMeter) -> Iterator[tuple[Family, float]]:
    yield f.MEMORY_USED, meter.memory_used_bytes
    yield f.PROCESSES, meter.processes
    if meter.memory_peak_bytes is not None:
        yield f.MEMORY_PEAK, meter.memory_peak_bytes
    if meter.throttled_ns is not None:
        yield f.THROTTLED, meter.throttled_ns / 1e9
    time = meter.compute
    if time is not None:
        yield f.COMPUTE_GRANTED, time.granted_ns / 1e9
        yield f.COMPUTE_USED, time.used_ns / 1e9
        yield f.COMPUTE_WAITED, time.waited_ns / 1e9
        yield f.COMPUTE_OVERRUN, time.overrun_ns / 1e9
        yield f.COMPUTE_BYPASSED, time.bypasses


def _refusals(inner: str, meter: SliceMeter) -> Samples:
    causes = (("limit", meter.refusals_limit), ("card", meter.refusals_card))
    return [(f'{inner},cause="{cause}"}}', count) for cause, count in causes if count is not None]


def _decisions(seen: Observation, samples: dict[Family, Samples]) -> None:
    tally = seen.tally
    samples[f.MADE] += [(labelled({"mode": mode}), n) for mode, n in sorted(tally.made.items())]
    samples[f.REFUSED] += [(labelled({"reason": why}), n) for why, n in sorted(tally.refused.items())]
    samples[f.RELEASED].append(("", tally.released))
    samples[f.RESIZED].append(("", tally.resized))
    samples[f.FAILED].append(("", tally.failed))
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
