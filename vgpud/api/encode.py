"""Converts replies: model -> proto. The conversion is exact: memory in bytes, shares as hundredths / 100.

A share in proto is the double nearest to its two decimals, so `Percent.from_float` reads back the same
hundredths.
"""

from collections.abc import Callable, Iterable, Mapping

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.device import Device, DeviceProcess, GpuInstance, Mig, MigProfile, Placement
from vgpud.model.errors import VgpuError
from vgpud.model.event import Event
from vgpud.model.marks import Mark, shown_state
from vgpud.model.mig_view import MigChange, MigDevice, MigInstance, MigPlan
from vgpud.model.move_view import NO_EVACUATION, DefragView, Evacuation, TenantMove
from vgpud.model.plan import Step
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Decision, Edits, MigSlice, Reason, Slice, State, Workload
from vgpud.model.view import (
    ComputeTime,
    DeviceView,
    DrainView,
    Metered,
    MpsClient,
    MpsDaemon,
    NodeDescription,
    NodeProcess,
    ReloadReport,
    SliceMeter,
    SliceUse,
    Vitals,
)

MaySee = Callable[[int | None], bool]


def error(failure: VgpuError) -> pb.Error:
    return pb.Error(
        number=failure.code.number,
        name=failure.code.name,
        sentence=failure.sentence,
        hint=failure.hint,
        details=failure.details,
    )


def node(described: NodeDescription, hostname: str, version: str) -> pb.NodeReply:
    return pb.NodeReply(
        hostname=hostname,
        vgpud_version=version,
        driver_version=described.node.driver_version,
        nvml_version=described.node.nvml_version,
        cuda_version=described.node.cuda_version,
        simulated=described.node.simulated,
        device_count=len(described.node.devices),
        allocation_count=described.allocation_count,
        revision=described.revision,
        policy_digest=described.policy_digest,
        status=described.status,
        uptime_seconds=described.uptime_seconds,
        hardware_error=described.hardware_error,
        arbiter_error=described.arbiter_error,
    )


def _percent(share: Percent | None) -> float | None:
    return None if share is None else share.value


def slice_(part: Slice) -> pb.Slice:
    return pb.Slice(
        device_uuid=part.device_uuid,
        mode=part.mode.value,
        memory_bytes=part.memory_bytes,
        share_percent=_percent(part.share),
        mig=None if part.mig is None else _mig_slice(part.mig),
    )


def _mig_slice(mig: MigSlice) -> pb.MigSlice:
    return pb.MigSlice(
        profile_id=mig.profile_id,
        profile_name=mig.profile_name,
        placement=placement(mig.placement),
        gpu_instance_id=mig.gpu_instance_id,
        compute_instance_id=mig.compute_instance_id,
        uuid=mig.uuid,
        compute_placement=None if mig.compute_placement is None else placement(mig.compute_placement),
    )


def reason(why: Reason) -> pb.Reason:
    return pb.Reason(
        device_uuid=why.device_uuid,
        taken=why.taken,
        mode=why.mode.value if why.mode is not None else "",
        sentence=why.sentence,
    )


def edits(changes: Edits) -> pb.Edits:
    return pb.Edits(
        env=dict(changes.env),
        host_env=dict(changes.host_env),
        mounts=[
            pb.Mount(
                host_path=mount.host_path, container_path=mount.container_path, read_only=mount.read_only
            )
            for mount in changes.mounts
        ],
        device_nodes=[
            pb.DeviceNode(path=node.path, major=node.major, minor=node.minor, permissions=node.permissions)
            for node in changes.device_nodes
        ],
    )


def allocation(
    held: Allocation,
    *,
    with_edits: bool,
    use: Iterable[SliceUse] = (),
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
    return pb.Allocation(
        id=held.id,
        request_id=request.id,
        owner_uid=request.owner.uid,
        owner_gid=request.owner.gid,
        state=shown_state(held, shown),
        slices=[slice_(part) for part in held.slices],
        reasons=[reason(why) for why in held.reasons],
        edits=edits(held.edits) if with_edits else None,
        cdi_name=held.cdi_name,
        label=request.label,
        created_unix_ns=held.created_unix_ns,
        revision=held.revision,
        failure=held.failure,
        bound_pid=request.lifetime.pid,
        use=[slice_use(part) for part in use],
        isolation=request.isolation.value if request.isolation is not None else "",
        priority=request.priority,
        suspended_pids=[process.pid for process in held.suspended],
        suspended_bytes=sum(process.memory_bytes for process in held.suspended),
        cause=held.cause.value if held.state is State.SUSPENDED else "",
        standing=standing,
        marks=[_mark(mark) for mark in shown],
        memory_limit=memory_limit,
        stays_bytes=held.stays_bytes,
        stays=[pb.Stay(kind=kind, bytes=size) for kind, size in stays],
        paused=held.paused,
        workload=_workload(request.workload),
    )


def _workload(names: Workload) -> pb.Workload:
    return pb.Workload(namespace=names.namespace, pod=names.pod, container=names.container, claim=names.claim)


def _mark(mark: Mark) -> pb.Mark:
    return pb.Mark(
        kind=mark.kind.value,
        subject=mark.subject,
        amount=mark.amount,
        sentence=mark.sentence,
        since_unix_ns=mark.since_unix_ns,
    )


def slice_use(use: SliceUse) -> pb.SliceUse:
    return pb.SliceUse(
        device_uuid=use.device_uuid,
        memory_used_bytes=use.memory_used_bytes,
        memory_driver_bytes=use.memory_driver_bytes,
        memory_peak_bytes=use.memory_peak_bytes,
        refusals_limit=use.refusals_limit,
        refusals_card=use.refusals_card,
        pids=use.pids,
        **_compute(use.compute),
    )


def _compute(time: ComputeTime | None) -> dict[str, int]:
    """The message fields for a slice's compute time; none if the time is not measured."""
    if time is None:
        return {}
    return {
        "compute_granted_ns": time.granted_ns,
        "compute_used_ns": time.used_ns,
        "compute_waited_ns": time.waited_ns,
        "compute_overrun_ns": time.overrun_ns,
        "compute_bypasses": time.bypasses,
    }


def plan(decision: Decision, steps: Iterable[Step]) -> pb.PlanReply:
    return pb.PlanReply(
        possible=decision.refusal is None,
        slices=[slice_(part) for part in decision.slices],
        reasons=[reason(why) for why in decision.reasons],
        steps=[_step(step) for step in steps],
        refusal=None if decision.refusal is None else error(decision.refusal),
    )


def _step(step: Step) -> pb.Step:
    return pb.Step(
        kind=step.kind.value,
        device_uuid=step.device_uuid,
        mode=step.mode.value if step.mode is not None else "",
        reason=step.reason,
    )


def event(happened: Event, held: pb.Allocation | None) -> pb.Event:
    return pb.Event(
        revision=happened.revision,
        kind=happened.kind.value,
        subject=happened.subject,
        sentence=happened.sentence,
        unix_ns=happened.unix_ns,
        allocation=held,
    )


def policy(json: str, origins: Mapping[str, object], digest: str, files: Iterable[str]) -> pb.PolicyReply:
    """The reply with the policy. `origins` becomes text, "file:line" for each key path."""
    return pb.PolicyReply(
        json=json,
        origins={key: str(origin) for key, origin in origins.items()},
        digest=digest,
        files=files,
    )


def reload_report(report: ReloadReport) -> pb.ReloadPolicyReply:
    return pb.ReloadPolicyReply(
        changed=report.changed, digest=report.digest, done=report.done, waiting=report.waiting
    )


# --- devices


def device(view: DeviceView) -> pb.Device:
    card = view.device
    return pb.Device(
        uuid=card.uuid,
        index=card.index,
        name=card.name,
        minor=card.minor,
        pci_bus_id=card.pci_bus_id,
        memory_total_bytes=card.memory_total_bytes,
        memory_reserved_bytes=card.memory_reserved_bytes,
        memory_used_bytes=card.memory_used_bytes,
        sm_count=card.sm_count,
        compute_capability=_capability(card),
        mig=_mig(card.mig),
        compute_mode=card.compute_mode.value,
        mps_capable=card.mps_capable,
        numa_node=card.numa_node,
        virtualisation=card.virtualisation.value,
        processes=[_device_process(process) for process in card.processes],
        health=card.health.value,
        health_reason=card.health_reason,
        policy_mode=view.policy_mode,
        mode=view.mode.value if view.mode is not None else "",
        memory_allocated_bytes=view.memory_allocated_bytes,
        share_allocated_percent=view.share_allocated_hundredths / 100,
        allocation_count=view.allocation_count,
        drained=view.drained,
        engine=view.engine.engine.value if view.engine is not None else "",
        engine_reason=view.engine.reason.value if view.engine is not None else "",
        engine_why=view.engine.why if view.engine is not None else "",
    )


def _capability(card: Device) -> str:
    if card.compute_capability is None:
        return ""
    major, minor = card.compute_capability
    return f"{major}.{minor}"


def _device_process(process: DeviceProcess) -> pb.DeviceProcess:
    return pb.DeviceProcess(pid=process.pid, memory_bytes=process.memory_bytes, kind=process.kind)


def _mig(mig: Mig) -> pb.Mig:
    return pb.Mig(
        capable=mig.capable,
        current=mig.current,
        pending=mig.pending,
        profiles=[_profile(profile) for profile in mig.profiles],
        instances=[_instance(instance) for instance in mig.instances],
    )


def _profile(profile: MigProfile) -> pb.MigProfile:
    return pb.MigProfile(
        id=profile.id,
        name=profile.name,
        slice_count=profile.slice_count,
        instance_count=profile.instance_count,
        sm_count=profile.sm_count,
        memory_bytes=profile.memory_bytes,
        placements=[placement(place) for place in profile.placements],
        compute=[_profile(part) for part in profile.compute],
    )


def _instance(instance: GpuInstance) -> pb.GpuInstance:
    return pb.GpuInstance(
        id=instance.id,
        profile_id=instance.profile_id,
        placement=placement(instance.placement),
        uuids=[part.uuid for part in instance.compute_instances if part.uuid],
    )


def placement(place: Placement) -> pb.Placement:
    return pb.Placement(start=place.start, size=place.size)


# --- MIG layouts


def mig_device(view: MigDevice, sees_commands_of: MaySee) -> pb.MigDevice:
    """The message of a device's MIG layout. `sees_commands_of(uid)`: may the caller see the command lines of
    that user's processes?
    """
    card = view.device
    return pb.MigDevice(
        device_uuid=card.uuid,
        device_index=card.index,
        name=card.name,
        current=card.mig.current,
        pending=card.mig.pending,
        layout=view.layout or (),
        origin=view.origin,
        dynamic=view.dynamic,
        instances=[_mig_instance(instance, sees_commands_of) for instance in view.instances],
        free=[pb.MigFree(profile_name=free.profile_name, count=free.count) for free in view.free],
        pci_device_id=card.pci_device_id,
    )


def _mig_instance(view: MigInstance, sees_commands_of: MaySee) -> pb.MigInstance:
    return pb.MigInstance(
        profile_id=view.profile_id,
        profile_name=view.profile_name,
        placement=placement(view.placement),
        gpu_instance_id=view.gpu_instance_id,
        uuids=view.uuids,
        own=view.own,
        in_layout=view.in_layout,
        allocation_id=view.allocation_id,
        processes=[
            pb.MigProcess(
                pid=process.pid,
                uid=process.uid,
                command=process.command if sees_commands_of(process.uid) else "",
            )
            for process in view.processes
        ],
        compute_placement=None if view.compute_placement is None else placement(view.compute_placement),
    )


def mig_plan(view: MigPlan) -> pb.MigPlanReply:
    return pb.MigPlanReply(
        changes=[_mig_change(change) for change in view.changes],
        refusal=None if view.refusal is None else error(view.refusal),
    )


def _mig_change(change: MigChange) -> pb.MigChange:
    return pb.MigChange(
        device_uuid=change.device_uuid,
        device_index=change.device_index,
        kind=change.do,
        profile_name=change.profile_name,
        placement=None if change.placement is None else placement(change.placement),
        reason=change.reason,
        compute_placement=None if change.compute_placement is None else placement(change.compute_placement),
    )


# --- moves, MPS daemons, drains


def defrag(view: DefragView) -> pb.DefragReply:
    return pb.DefragReply(device_uuid=view.device_uuid, moves=[tenant_move(one) for one in view.moves])


def tenant_move(one: TenantMove) -> pb.TenantMove:
    return pb.TenantMove(
        allocation_id=one.allocation_id,
        source=one.source,
        target=one.target,
        memory_bytes=one.memory_bytes,
        done=one.done,
    )


def mps_daemon(shown: MpsDaemon, sees_commands_of: MaySee) -> pb.MpsDaemon:
    return pb.MpsDaemon(
        device_uuid=shown.device_uuid,
        device_index=shown.device_index,
        pid=shown.pid,
        version=shown.version,
        multi_user=shown.multi_user,
        client_limit=shown.client_limit,
        servers=[pb.MpsServer(pid=s.pid, uid=s.uid, state=s.state) for s in shown.servers],
        clients=[_mps_client(client, sees_commands_of(client.uid)) for client in shown.clients],
        trouble=shown.trouble,
    )


def _mps_client(client: MpsClient, with_command: bool) -> pb.MpsClient:
    return pb.MpsClient(
        pid=client.pid,
        server_pid=client.server_pid,
        uid=client.uid,
        allocation_id=client.allocation_id,
        memory_bytes=client.memory_bytes,
        command=client.command if with_command else "",
    )


def drain(view: DrainView, gone: Evacuation = NO_EVACUATION) -> pb.DrainDeviceReply:
    return pb.DrainDeviceReply(
        device_uuid=view.device_uuid,
        drained=view.drained,
        idle=view.idle,
        allocation_ids=view.allocation_ids,
        pids=view.pids,
        moved=[tenant_move(one) for one in gone.moved],
        staying=[pb.Staying(allocation_id=name, why=why) for name, why in gone.staying],
    )


# --- meters and processes


def usage(metered: Metered, revision: int) -> pb.UsageReply:
    return pb.UsageReply(
        devices=[_vitals(uuid, vitals) for uuid, vitals in metered.vitals.items()],
        allocations=[
            pb.AllocationMeters(allocation_id=name, slices=[_meter(meter) for meter in meters])
            for name, meters in metered.meters.items()
        ],
        revision=revision,
    )


def _vitals(uuid: str, vitals: Vitals) -> pb.DeviceVitals:
    return pb.DeviceVitals(
        device_uuid=uuid,
        temperature_celsius=vitals.temperature_celsius,
        power_milliwatts=vitals.power_milliwatts,
        power_limit_milliwatts=vitals.power_limit_milliwatts,
        busy_percent=vitals.busy_percent,
    )


def _meter(meter: SliceMeter) -> pb.SliceMeter:
    return pb.SliceMeter(
        device_uuid=meter.device_uuid,
        memory_used_bytes=meter.memory_used_bytes,
        processes=meter.processes,
        memory_peak_bytes=meter.memory_peak_bytes,
        refusals_limit=meter.refusals_limit,
        refusals_card=meter.refusals_card,
        throttled_ns=meter.throttled_ns,
        **_compute(meter.compute),
    )


def processes(found: Iterable[NodeProcess], sees_commands_of: MaySee) -> pb.ListProcessesReply:
    return pb.ListProcessesReply(
        processes=[
            pb.NodeProcess(
                pid=process.pid,
                uid=process.uid,
                command=process.command if sees_commands_of(process.uid) else "",
                allocation_id=process.allocation_id,
                device_uuid=process.device_uuid,
                memory_bytes=process.memory_bytes,
                device_index=process.device_index,
                mode=process.mode,
                label=process.label,
                standing=process.standing,
                unlimited=not process.limited,
                silent_mode=process.silent_mode,
            )
            for process in found
        ]
    )
