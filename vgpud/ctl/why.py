"""`vgpuctl why`: explains the limits of an allocation or of its process, and what holds it back now."""

import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence

from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import tables, words
from vgpud.ctl.allocations import allocation_id
from vgpud.ctl.connect import connect
from vgpud.ctl.document import plain
from vgpud.ctl.table import Column, Table, facts
from vgpud.ctl.terminal import Terminal, View
from vgpud.ctl.top import SAMPLE_SECONDS
from vgpud.model.device import Health
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.marks import MarkKind
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Cause, Mode, State

_NEARLY_FULL = 0.95
_NOTICED_PERCENT = 1.0  # percent of the time; less waiting than this is not mentioned


def why(arguments: Namespace, terminal: Terminal) -> int:
    """The exit code is Exit.DIFFERS for a process outside of all allocations, which vgpud does not limit."""
    with connect(arguments) as client:
        found = _find(client, arguments.subject)
        if isinstance(found, pb.NodeProcess):
            return _outside(found, terminal)
        devices = {item.uuid: item for item in client.list_devices().devices}
        processes = client.list_processes().processes
        before = client.get_usage()
        if _is_preload(found):
            time.sleep(SAMPLE_SECONDS)
        now = client.get_usage()
        trouble = client.get_node().arbiter_error if _is_preload(found) else ""
    after = _meters(now, found.id)
    # vgpud caches its meters for all clients, so the first reading may be older than the allocation.
    meters = list(zip(after, _meters(before, found.id) or after, strict=False))
    limits = [
        *([trouble] if trouble else []),
        *_past(found, processes),
        *limiting(found, devices, meters, SAMPLE_SECONDS),
    ]
    document = {
        "allocation": plain(found),
        "limits": limits,
        "meters": [plain(meter) for meter, _ in meters],
        "reasons": [plain(reason) for reason in found.reasons],
    }
    columns = (Column("WHAT LIMITS IT NOW"),)
    shown = [
        facts(_asked(found)),
        tables.reasons(found.reasons),
        Table(columns, [(sentence,) for sentence in limits]),
    ]
    terminal.show(View("Why", document, [found.id], [table for table in shown if table.rows]))
    return Exit.OK.value


def _is_preload(held: pb.Allocation) -> bool:
    return any(part.mode == Mode.PRELOAD for part in held.slices)


def _find(client: Client, subject: str) -> pb.Allocation | pb.NodeProcess:
    """The allocation with this id, or of the process with this pid; the process itself if it is outside of
    all allocations. Raises VgpuError(NO_SUCH_ALLOCATION) if there is neither.
    """
    try:
        return client.get_allocation(subject if subject.isdigit() else allocation_id(client, subject))
    except VgpuError as error:
        if error.code is not ErrorCode.NO_SUCH_ALLOCATION or not (subject.isascii() and subject.isdigit()):
            raise
    processes = [item for item in client.list_processes().processes if item.pid == int(subject)]
    held = next((item.allocation_id for item in processes if item.allocation_id), "")
    if not held:
        bound = [item.id for item in client.list_allocations().allocations if item.bound_pid == int(subject)]
        held = bound[0] if bound else ""
    if held:
        return client.get_allocation(held)
    if processes:
        return processes[0]
    raise VgpuError(
        ErrorCode.NO_SUCH_ALLOCATION,
        f"{subject} is neither an allocation nor a process on a device",
        "see 'vgpuctl ls' and 'vgpuctl ps'",
    )


def _outside(process: pb.NodeProcess, terminal: Terminal) -> int:
    where = f"process {process.pid} runs outside vgpud on {process.device_uuid}"
    sentence = f"{where}: no allocation limits it; after a forced release of its own, it gets no more memory"
    if process.silent_mode:
        where = f"process {process.pid} runs on {process.device_uuid}"
        sentence = f"{where}: its allocation is unknown, because {words.silent(process.silent_mode)}"
    document = {"process": plain(process), "limits": [sentence]}
    terminal.show(View("Why", document, [str(process.pid)], [Table((Column(""),), [(sentence,)])]))
    return Exit.DIFFERS.value


def _meters(usage: pb.UsageReply, allocation_id: str) -> Sequence[pb.SliceMeter]:
    return next((item.slices for item in usage.allocations if item.allocation_id == allocation_id), [])


def _asked(held: pb.Allocation) -> list[tuple[str, str]]:
    return [
        ("allocation", held.id),
        ("owner", f"{words.user(held.owner_uid)} (uid {held.owner_uid})"),
        ("state", held.state),
        ("failure", held.failure),
        ("isolation asked for", held.isolation or "what the policy chooses"),
        ("memory limit", words.memory_limit(held)),
        ("label", held.label),
        ("pod", words.pod(held.workload)),
        ("claim", words.claim(held.workload)),
        ("since", words.moment(held.created_unix_ns)),
        ("ends with process", str(held.bound_pid or "")),
        ("moved", words.moved(held)),
    ]


def _past(held: pb.Allocation, processes: Iterable[pb.NodeProcess]) -> Iterator[str]:
    """Yields sentences on what evades the limits of an allocation: its marks, and processes that libvgpu does
    not count.
    """
    for mark in held.marks:
        if mark.kind in (MarkKind.BYPASSED, MarkKind.TAMPERED):
            yield f"it is {mark.kind}: {mark.sentence}"
    for process in processes:
        if process.allocation_id == held.id and process.unlimited:
            named = f"process {process.pid}" + (f" ({process.command})" if process.command else "")
            yield (
                f"{named} on device {process.device_index} is not counted by libvgpu, and the allocation "
                "is marked as bypassed"
            )


def limiting(
    held: pb.Allocation,
    devices: dict[str, pb.Device],
    meters: Sequence[tuple[pb.SliceMeter, pb.SliceMeter]],
    seconds: float,
) -> Iterator[str]:
    """Yields at least one sentence: one for each limit that applies, with advice if the limit holds the
    tenant back.
    """
    if held.state == State.FAILED:
        yield f"it has failed: {held.failure}; release it and allocate again"
    if held.state in (State.SUSPENDING, State.RESUMING):
        change = "resumed" if held.state == State.RESUMING else "suspended or moved"
        yield f"it is being {change}, and its processes may wait until that has ended"
    if held.state == State.SUSPENDED:
        resumes = f"'vgpuctl resume {held.id}' resumes it"
        if held.cause in (Cause.IDLE, Cause.TURN):
            resumes = f"it resumes by itself when it has work and room; {resumes}"
        yield f"it is suspended ({held.standing or held.cause}): {resumes}"
        yield f"memory: {words.stays(held)}"
    if held.paused and words.is_gated(held):
        yield "it is paused, but the driver does not stop it: it still computes, held by the gate"
    elif held.paused:
        yield f"it is paused, and kept off its devices: 'vgpuctl unpause {held.id}' lets its work go on"
    for at, part in enumerate(held.slices):
        device = devices.get(part.device_uuid)
        name = "its device" if device is None else f"device {device.index}"
        if device is not None and device.health != Health.OK:
            yield f"{name} is {device.health}: {device.health_reason}"
        if not words.shares_memory(part) and held.state != State.SUSPENDED:
            yield from _memory(part, meters[at][0] if at < len(meters) else None, name)
        yield from _compute(part, device, name)
        if at < len(meters):
            alone = device is not None and device.allocation_count == 1
            yield from _held_back(part, *meters[at], seconds, name, alone)
        if device is not None:
            yield from _neighbours(device, name)


def _memory(part: pb.Slice, meter: pb.SliceMeter | None, name: str) -> Iterator[str]:
    limit = words.memory(part.memory_bytes)
    if meter is None:
        yield f"memory on {name}: at most {limit}"
        return
    used = words.memory(meter.memory_used_bytes)
    state = ""
    if meter.memory_used_bytes > part.memory_bytes:
        state = "it holds more than its lowered limit and gets no more"
    elif meter.memory_used_bytes >= _NEARLY_FULL * part.memory_bytes:
        state = "it is full"
    advice = f", {state}: give it more with 'vgpuctl resize', or use less" if state else ""
    yield f"memory on {name}: {used} of {limit}{advice}"
    if meter.refusals_limit:
        times = counted(meter.refusals_limit, "time")
        yield f"memory was refused {times} because it would have passed {limit}"
    if meter.refusals_card:
        times = counted(meter.refusals_card, "time")
        yield f"memory was refused {times} because {name} itself was full"


def _compute(part: pb.Slice, device: pb.Device | None, name: str) -> Iterator[str]:
    if part.mode == Mode.MIG or part.HasField("mig"):
        yield from _instance(part, device, name)
    elif part.mode == Mode.EXCLUSIVE:
        yield f"compute on {name}: nothing, the card is its own"
    elif not part.HasField("share_percent"):
        yield f"compute on {name}: no share was asked for, so it takes what others leave"
    elif part.mode == Mode.MPS:
        yield f"compute on {name}: at most {words.share(part)} of the multiprocessors, by MPS"
    else:
        engine = "" if device is None or not device.engine else f", by the engine {device.engine}"
        yield f"compute on {name}: {words.share(part)} of the time, in turns{engine}"


def _instance(part: pb.Slice, device: pb.Device | None, name: str) -> Iterator[str]:
    profile = _profile(device, part.mig.profile_id)
    if not part.mig.HasField("compute_placement"):
        sms = "" if profile is None else f", {profile.sm_count} multiprocessors"
        yield f"compute on {name}: the GPU instance {words.mig_name(part)}{sms}, by hardware"
        return
    slices = part.mig.compute_placement.size
    sms = "" if profile is None else f", {slices} of {profile.slice_count} compute slices"
    yield f"compute on {name}: the compute instance {words.mig_name(part)}{sms}, by hardware"
    if profile is not None:
        shared = f"{words.memory(profile.memory_bytes)} of its GPU instance with the other compute instances"
        yield f"memory on {name}: hardware does not divide it, it shares the {shared} there"


def _profile(device: pb.Device | None, profile_id: int) -> pb.MigProfile | None:
    known = [] if device is None else device.mig.profiles
    return next((profile for profile in known if profile.id == profile_id), None)


def _held_back(
    part: pb.Slice, now: pb.SliceMeter, before: pb.SliceMeter, seconds: float, name: str, alone: bool
) -> Iterator[str]:
    """Sentences on the compute that a slice had, waited for, and was held back from. The meters are updated
    at each grant of a time slice, so over a short time they can grow by more than that time.
    """
    share = words.share(part) or "its share"
    waited = (now.compute_waited_ns - before.compute_waited_ns) / 1e7 / seconds
    throttled = (now.throttled_ns - before.throttled_ns) / 1e7 / seconds
    used = (now.compute_used_ns - before.compute_used_ns) / 1e7 / seconds
    if used >= _NOTICED_PERCENT:
        yield f"it had {name} for {min(used, 100):.0f}% of the last {seconds:g} s"
    if waited >= _NOTICED_PERCENT:
        why = f"to keep to {share}" if alone else f"for the time slices of others on {name}"
        yield f"it waited {min(waited, 100):.0f}% of that time {why}"
    if throttled >= _NOTICED_PERCENT:
        yield f"its launches were held back for {min(throttled, 100):.0f}% of that time to keep to {share}"


def _neighbours(device: pb.Device, name: str) -> Iterator[str]:
    others = device.allocation_count - 1
    if others > 0:
        noun = "allocation shares" if others == 1 else "allocations share"
        share = words.percent(device.share_allocated_percent)
        memory = words.memory(device.memory_allocated_bytes)
        given = f"{share} of its compute and {memory} of its memory are given in all"
        yield f"{others} other {noun} {name}: {given}"
