"""MIG as the daemon shows it: model -> proto."""

from collections.abc import Callable

from vgpud.api import encode
from vgpud.api.encode_device import placement
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.mig_view import MigChange, MigDevice, MigInstance, MigPlan

MaySee = Callable[[int | None], bool]


def device(view: MigDevice, may_see: MaySee) -> pb.MigDevice:
    """`may_see(uid)` says whether the caller may know what a process of that user is."""
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
        instances=[_instance(instance, may_see) for instance in view.instances],
        free=[pb.MigFree(profile_name=free.profile_name, count=free.count) for free in view.free],
        pci_device_id=card.pci_device_id,
    )


def _instance(view: MigInstance, may_see: MaySee) -> pb.MigInstance:
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
                pid=process.pid, uid=process.uid, command=process.command if may_see(process.uid) else ""
            )
            for process in view.processes
        ],
        compute_placement=None if view.compute_placement is None else placement(view.compute_placement),
    )


def plan(view: MigPlan) -> pb.MigPlanReply:
    return pb.MigPlanReply(
        changes=[_change(change) for change in view.changes],
        refusal=None if view.refusal is None else encode.error(view.refusal),
    )


def _change(change: MigChange) -> pb.MigChange:
    return pb.MigChange(
        device_uuid=change.device_uuid,
        device_index=change.device_index,
        kind=change.do,
        profile_name=change.profile_name,
        placement=None if change.placement is None else placement(change.placement),
        reason=change.reason,
        compute_placement=None if change.compute_placement is None else placement(change.compute_placement),
    )
