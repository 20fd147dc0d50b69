"""Devices as the daemon shows them: model -> proto."""

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.device import Device, DeviceProcess, GpuInstance, Mig, MigProfile, Placement
from vgpud.model.view import DeviceView


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
        processes=[_process(process) for process in card.processes],
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


def _process(process: DeviceProcess) -> pb.DeviceProcess:
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
