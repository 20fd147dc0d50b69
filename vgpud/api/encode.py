"""Converts replies: model -> proto. The conversion is exact: memory in bytes, shares as hundredths / 100.

A field of a message is the attribute of the same name; the functions name only the fields that differ. A
share in proto is the double nearest to its two decimals, so `Percent.from_float` reads back the same
hundredths.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model import mig_view, move_view, tenancy, view
from vgpud.model import plan as plans
from vgpud.model.device import Device, DeviceProcess, GpuInstance, Mig, MigProfile, Placement
from vgpud.model.errors import VgpuError
from vgpud.model.event import Event
from vgpud.model.marks import Mark, shown_state
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Decision, Edits, Reason, Slice, State, Workload

MaySee = Callable[[int | None], bool]
M = TypeVar("M", bound=Message)
# types of attributes that a message's field takes without a conversion
_PLAIN = frozenset({str, int, bool, float, type(None)})


def _message(kind: type[M], source: object, /, **fields: Any) -> M:  # noqa: ANN401 (values of fields)
    """A message of this kind. `fields` has the values that differ from the attributes of `source`; None
    leaves a field out.
    """
    for name in _names(cast(Any, kind)):
        if name not in fields:
            value = getattr(source, name)
            fields[name] = value if type(value) in _PLAIN else _value(value)
    return kind(**fields)


@cache
def _names(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 (a type of messages)
    return tuple(kind.DESCRIPTOR.fields_by_name)


def _value(value: Any) -> Any:  # noqa: ANN401 (any attribute)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_value(one) for one in value]
    encode = _ENCODERS.get(type(value))
    return value if encode is None else encode(value)


def error(failure: VgpuError) -> pb.Error:
    return _message(pb.Error, failure, number=failure.code.number, name=failure.code.name)


def node(described: view.NodeDescription, hostname: str, version: str) -> pb.NodeReply:
    found = described.node
    return _message(
        pb.NodeReply,
        described,
        hostname=hostname,
        vgpud_version=version,
        driver_version=found.driver_version,
        nvml_version=found.nvml_version,
        cuda_version=found.cuda_version,
        simulated=found.simulated,
        device_count=len(found.devices),
    )


# The messages of which each allocation of a listing has several are made field by field: that takes a third
# of the time.


def slice_(part: Slice) -> pb.Slice:
    return pb.Slice(
        device_uuid=part.device_uuid,
        mode=part.mode.value,
        memory_bytes=part.memory_bytes,
        share_percent=None if part.share is None else part.share.value,
        mig=None if part.mig is None else _value(part.mig),
    )


def _reason(why: Reason) -> pb.Reason:
    return pb.Reason(
        device_uuid=why.device_uuid,
        taken=why.taken,
        mode="" if why.mode is None else why.mode.value,
        sentence=why.sentence,
    )


def _workload(names: Workload) -> pb.Workload:
    return pb.Workload(namespace=names.namespace, pod=names.pod, container=names.container, claim=names.claim)


def edits(changes: Edits) -> pb.Edits:
    return _message(pb.Edits, changes, env=dict(changes.env), host_env=dict(changes.host_env))


def allocation(
    held: Allocation,
    *,
    with_edits: bool,
    use: Iterable[view.SliceUse] = (),
    standing: str = "",
    marks: Iterable[Mark] = (),
    memory_limit: str = "",
    stays: Iterable[tuple[str, int]] = (),
) -> pb.Allocation:
    """The protobuf message of an allocation. `with_edits` is False for callers without rights on the
    allocation: they do not get its environment variables and paths.
    """
    request = held.request
    shown = tuple(marks)
    return _message(
        pb.Allocation,
        held,
        request_id=request.id,
        owner_uid=request.owner.uid,
        owner_gid=request.owner.gid,
        state=shown_state(held, shown),
        edits=edits(held.edits) if with_edits else None,
        label=request.label,
        bound_pid=request.lifetime.pid,
        use=[slice_use(part) for part in use],
        isolation=_value(request.isolation),
        priority=request.priority,
        suspended_pids=[process.pid for process in held.suspended],
        suspended_bytes=sum(process.memory_bytes for process in held.suspended),
        cause=held.cause.value if held.state is State.SUSPENDED else "",
        standing=standing,
        marks=_value(shown),
        memory_limit=memory_limit,
        stays=[pb.Stay(kind=kind, bytes=size) for kind, size in stays],
        workload=_value(request.workload),
    )


def slice_use(use: view.SliceUse) -> pb.SliceUse:
    return _message(pb.SliceUse, use, **_compute(use.compute))


def _compute(time: view.ComputeTime | None) -> dict[str, int | None]:
    """The message fields for a slice's compute time; without values if the time is not measured."""
    names = ("granted_ns", "used_ns", "waited_ns", "overrun_ns", "bypasses")
    return {f"compute_{name}": None if time is None else getattr(time, name) for name in names}


def plan(decision: Decision, steps: Iterable[plans.Step]) -> pb.PlanReply:
    return _message(
        pb.PlanReply, decision, possible=decision.refusal is None, steps=[_value(step) for step in steps]
    )


def event(happened: Event, held: pb.Allocation | None) -> pb.Event:
    return _message(pb.Event, happened, allocation=held)


def policy(json: str, origins: Mapping[str, object], digest: str, files: Iterable[str]) -> pb.PolicyReply:
    """The reply with the policy. `origins` becomes text, "file:line" for each key path."""
    texts = {key: str(origin) for key, origin in origins.items()}
    return pb.PolicyReply(json=json, origins=texts, digest=digest, files=files)


def reload_report(report: view.ReloadReport) -> pb.ReloadPolicyReply:
    return _message(pb.ReloadPolicyReply, report)


# --- devices


def device(shown: view.DeviceView) -> pb.Device:
    card, engine = shown.device, shown.engine
    of_view = ("policy_mode", "mode", "memory_allocated_bytes", "allocation_count", "drained")
    return _message(
        pb.Device,
        card,
        **{name: _value(getattr(shown, name)) for name in of_view},
        compute_capability=_capability(card),
        share_allocated_percent=shown.share_allocated_hundredths / 100,
        engine="" if engine is None else engine.engine.value,
        engine_reason="" if engine is None else engine.reason.value,
        engine_why="" if engine is None else engine.why,
    )


def _capability(card: Device) -> str:
    if card.compute_capability is None:
        return ""
    major, minor = card.compute_capability
    return f"{major}.{minor}"


def _instance(instance: GpuInstance) -> pb.GpuInstance:
    uuids = [part.uuid for part in instance.compute_instances if part.uuid]
    return _message(pb.GpuInstance, instance, uuids=uuids)


# --- MIG layouts


def mig_device(shown: mig_view.MigDevice, sees_commands_of: MaySee) -> pb.MigDevice:
    """The message of a device's MIG layout. `sees_commands_of(uid)`: may the caller see the command lines of
    that user's processes?
    """
    card = shown.device
    return _message(
        pb.MigDevice,
        shown,
        device_uuid=card.uuid,
        device_index=card.index,
        name=card.name,
        current=card.mig.current,
        pending=card.mig.pending,
        pci_device_id=card.pci_device_id,
        instances=[_mig_instance(instance, sees_commands_of) for instance in shown.instances],
    )


def _mig_instance(shown: mig_view.MigInstance, sees_commands_of: MaySee) -> pb.MigInstance:
    processes = [_with_command(pb.MigProcess, one, sees_commands_of(one.uid)) for one in shown.processes]
    return _message(pb.MigInstance, shown, processes=processes)


def _with_command(kind: type[M], process: Any, shown: bool, **fields: Any) -> M:  # noqa: ANN401
    """The message of a process. Without `shown` its command line is empty."""
    return _message(kind, process, command=process.command if shown else "", **fields)


def mig_plan(shown: mig_view.MigPlan) -> pb.MigPlanReply:
    return _message(pb.MigPlanReply, shown)


# --- moves, MPS daemons, drains


def defrag(shown: move_view.DefragView) -> pb.DefragReply:
    return _message(pb.DefragReply, shown)


def mps_daemon(shown: view.MpsDaemon, sees_commands_of: MaySee) -> pb.MpsDaemon:
    clients = [_with_command(pb.MpsClient, one, sees_commands_of(one.uid)) for one in shown.clients]
    return _message(pb.MpsDaemon, shown, clients=clients)


def drain(shown: view.DrainView, gone: move_view.Evacuation = move_view.NO_EVACUATION) -> pb.DrainDeviceReply:
    staying = [pb.Staying(allocation_id=name, why=why) for name, why in gone.staying]
    return _message(pb.DrainDeviceReply, shown, moved=_value(gone.moved), staying=staying)


# --- meters and processes


def usage(metered: view.Metered, revision: int) -> pb.UsageReply:
    return pb.UsageReply(
        devices=[
            _message(pb.DeviceVitals, vitals, device_uuid=uuid) for uuid, vitals in metered.vitals.items()
        ],
        allocations=[
            pb.AllocationMeters(allocation_id=name, slices=[_meter(meter) for meter in meters])
            for name, meters in metered.meters.items()
        ],
        revision=revision,
    )


def _meter(meter: view.SliceMeter) -> pb.SliceMeter:
    return _message(pb.SliceMeter, meter, **_compute(meter.compute))


def processes(found: Iterable[view.NodeProcess], sees_commands_of: MaySee) -> pb.ListProcessesReply:
    return pb.ListProcessesReply(
        processes=[
            _with_command(pb.NodeProcess, one, sees_commands_of(one.uid), unlimited=not one.limited)
            for one in found
        ]
    )


_ENCODERS: dict[type, Callable[[Any], object]] = {
    Percent: lambda share: share.value,
    VgpuError: error,
    Reason: _reason,
    Slice: slice_,
    Workload: _workload,
    GpuInstance: _instance,
    mig_view.MigChange: lambda change: _message(pb.MigChange, change, kind=change.do),
    **{
        kind: partial(_message, message)
        for kind, message in (
            (DeviceProcess, pb.DeviceProcess),
            (Mark, pb.Mark),
            (Mig, pb.Mig),
            (MigProfile, pb.MigProfile),
            (Placement, pb.Placement),
            (mig_view.MigFree, pb.MigFree),
            (move_view.TenantMove, pb.TenantMove),
            (plans.Step, pb.Step),
            (tenancy.DeviceNode, pb.DeviceNode),
            (tenancy.MigSlice, pb.MigSlice),
            (tenancy.Mount, pb.Mount),
            (view.MpsServer, pb.MpsServer),
        )
    },
}
