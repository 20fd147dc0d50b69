"""What the daemon answers: model -> proto. Exact: bytes as they are, shares as hundredths / 100.

A share in proto is the double nearest to its two decimals, so `Percent.from_float` reads back the
same hundredths.
"""

from collections.abc import Iterable, Mapping

from vgpud.api.encode_device import placement
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import VgpuError
from vgpud.model.event import Event
from vgpud.model.marks import Mark
from vgpud.model.plan import Step
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Decision, Edits, MigSlice, Reason, Slice, State
from vgpud.model.view import NodeDescription, ReloadReport, SliceUse


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
) -> pb.Allocation:
    """Without edits for callers whom the allocation does not concern: env and paths are its owner's."""
    request = held.request
    return pb.Allocation(
        id=held.id,
        request_id=request.id,
        owner_uid=request.owner.uid,
        owner_gid=request.owner.gid,
        state=held.state.value,
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
        suspended_pids=[process.pid for process in held.suspended],
        suspended_bytes=sum(process.memory_bytes for process in held.suspended),
        cause=held.cause.value if held.state is State.SUSPENDED else "",
        standing=standing,
        marks=[_mark(mark) for mark in marks],
    )


def _mark(mark: Mark) -> pb.Mark:
    return pb.Mark(
        kind=mark.kind.value,
        subject=mark.subject,
        amount=mark.amount,
        sentence=mark.sentence,
        since_unix_ns=mark.since_unix_ns,
    )


def slice_use(use: SliceUse) -> pb.SliceUse:
    time = use.compute
    return pb.SliceUse(
        device_uuid=use.device_uuid,
        memory_used_bytes=use.memory_used_bytes,
        memory_driver_bytes=use.memory_driver_bytes,
        memory_peak_bytes=use.memory_peak_bytes,
        refusals_limit=use.refusals_limit,
        refusals_card=use.refusals_card,
        pids=use.pids,
        compute_granted_ns=time.granted_ns if time is not None else None,
        compute_used_ns=time.used_ns if time is not None else None,
        compute_waited_ns=time.waited_ns if time is not None else None,
        compute_overrun_ns=time.overrun_ns if time is not None else None,
        compute_bypasses=time.bypasses if time is not None else None,
    )


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
    """`origins` is shown as text, "file:line" for each key path."""
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
