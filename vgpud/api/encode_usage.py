"""Sensors, meters and processes as the daemon shows them: model -> proto."""

from collections.abc import Callable, Iterable

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.view import Metered, NodeProcess, SliceMeter, Vitals


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
    time = meter.compute
    return pb.SliceMeter(
        device_uuid=meter.device_uuid,
        memory_used_bytes=meter.memory_used_bytes,
        processes=meter.processes,
        memory_peak_bytes=meter.memory_peak_bytes,
        refusals_limit=meter.refusals_limit,
        refusals_card=meter.refusals_card,
        throttled_ns=meter.throttled_ns,
        compute_used_ns=time.used_ns if time is not None else None,
        compute_waited_ns=time.waited_ns if time is not None else None,
        compute_granted_ns=time.granted_ns if time is not None else None,
        compute_overrun_ns=time.overrun_ns if time is not None else None,
        compute_bypasses=time.bypasses if time is not None else None,
    )


def processes(
    found: Iterable[NodeProcess], sees_commands_of: Callable[[int | None], bool]
) -> pb.ListProcessesReply:
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
            )
            for process in found
        ]
    )
