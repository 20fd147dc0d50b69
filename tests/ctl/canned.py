"""Prepared replies of a small node: three devices, one of them in MIG mode, and two allocations."""

import json
import time

from vgpud.api.gen import vgpud_pb2 as pb

GIB = 1024**3
DAY_NS = 86400 * 10**9
A = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
B = "GPU-bbbbbbbb-0000-4000-8000-000000000002"
C = "GPU-cccccccc-0000-4000-8000-000000000003"


def node(simulated: bool = False, hardware_error: str = "") -> pb.NodeReply:
    return pb.NodeReply(
        hostname="node1",
        vgpud_version="0.1.0",
        driver_version="580.159.04",
        nvml_version="13.580.159.04",
        cuda_version="13.0",
        simulated=simulated,
        device_count=3,
        allocation_count=2,
        revision=41,
        policy_digest="5e0a",
        status="serving 2 allocations on 3 devices",
        uptime_seconds=7261.5,
        hardware_error=hardware_error,
    )


def device(uuid: str, index: int, **more: object) -> pb.Device:
    fields: dict[str, object] = {
        "uuid": uuid,
        "index": index,
        "name": "NVIDIA H200",
        "minor": index,
        "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
        "memory_total_bytes": 141 * GIB,
        "memory_reserved_bytes": GIB // 2,
        "sm_count": 132,
        "compute_capability": "9.0",
        "compute_mode": "default",
        "mps_capable": True,
        "numa_node": 0,
        "virtualisation": "none",
        "health": "ok",
        "policy_mode": "auto",
        "mig": pb.Mig(capable=True),
    }
    return pb.Device(**{**fields, **more})  # type: ignore[arg-type]


def devices(third_health: str = "ok") -> pb.ListDevicesReply:
    busy = device(
        A,
        0,
        mode="preload",
        memory_used_bytes=3 * GIB + GIB // 2,
        memory_allocated_bytes=4 * GIB,
        share_allocated_percent=30,
        allocation_count=1,
        engine="gate",
        engine_reason="refused",
        engine_why="the driver refuses to stop channels: status 0x56",
        processes=[pb.DeviceProcess(pid=4321, memory_bytes=3 * GIB, kind="compute")],
    )
    place = pb.Placement(start=2, size=1)
    mig = pb.Mig(
        capable=True,
        current=True,
        pending=True,
        profiles=[pb.MigProfile(id=19, name="1g.18gb", slice_count=1, instance_count=7, placements=[place])],
        instances=[pb.GpuInstance(id=9, profile_id=19, placement=place, uuids=["MIG-1"])],
    )
    split = device(B, 1, mode="mig", memory_allocated_bytes=18 * GIB, allocation_count=1, mig=mig)
    third = device(
        C,
        2,
        name="NVIDIA L4",
        memory_total_bytes=24 * GIB,
        health=third_health,
        health_reason="Xid 79, it has fallen off the bus" if third_health != "ok" else "",
        mig=pb.Mig(),
    )
    third.ClearField("numa_node")
    return pb.ListDevicesReply(devices=[busy, split, third], revision=41)


def preload(state: str = "active", failure: str = "") -> pb.Allocation:
    return pb.Allocation(
        id="a1b2c3d4",
        request_id="vgpuctl-1",
        owner_uid=4242424,
        owner_gid=100,
        state=state,
        failure=failure,
        slices=[pb.Slice(device_uuid=A, mode="preload", memory_bytes=4 * GIB, share_percent=30)],
        reasons=[
            pb.Reason(device_uuid=A, taken=True, mode="preload", sentence="fullest that fits"),
            pb.Reason(device_uuid=B, mode="mig", sentence="is in mode mig"),
            pb.Reason(device_uuid=C, sentence="4GiB would fit, but it is emptier"),
        ],
        edits=pb.Edits(
            env={"CUDA_VISIBLE_DEVICES": A, "LD_PRELOAD": "/usr/lib/libvgpu.so.1", "VGPU_LEASE": "/vgpu"},
            host_env={"VGPU_LEASE": "/run/vgpud/leases/a b", "LD_PRELOAD": "/opt/vgpud/libvgpu.so"},
            mounts=[pb.Mount(host_path="/run/vgpud/leases/a1b2c3d4", container_path="/vgpu")],
            device_nodes=[pb.DeviceNode(path="/dev/nvidia0", major=195, minor=0, permissions="rw")],
        ),
        cdi_name="vgpud.io/vgpu=a1b2c3d4",
        label="träning\x1b[31m",
        created_unix_ns=1_767_225_600_123_456_789,
        revision=40,
        bound_pid=4321,
        isolation="quota",
    )


def mig() -> pb.Allocation:
    piece = pb.MigSlice(
        profile_id=19, profile_name="1g.18gb", placement=pb.Placement(start=2, size=1), uuid="MIG-1"
    )
    return pb.Allocation(
        id="e5f6a7b8",
        request_id="r2",
        owner_uid=0,
        owner_gid=0,
        state="active",
        slices=[pb.Slice(device_uuid=B, mode="mig", memory_bytes=18 * GIB, mig=piece)],
        cdi_name="vgpud.io/vgpu=e5f6a7b8",
        workload=pb.Workload(namespace="ml", pod="train-0", container="main", claim="weights"),
        revision=41,
        isolation="hardware",
    )


def allocations(*items: pb.Allocation) -> pb.ListAllocationsReply:
    return pb.ListAllocationsReply(allocations=items or (preload(), mig()), revision=41)


def aged(item: pb.Allocation, days: int) -> pb.Allocation:
    item.created_unix_ns = time.time_ns() - days * DAY_NS - 3600 * 10**9
    return item


def used() -> pb.Allocation:
    item = preload()
    item.marks.add(
        kind="bypassed",
        subject=A,
        amount=GIB,
        sentence="its processes hold 1GiB of device memory that libvgpu does not count",
        since_unix_ns=1_767_225_600_123_456_789,
    )
    item.use.add(
        device_uuid=A,
        memory_used_bytes=3 * GIB,
        memory_driver_bytes=GIB // 2,
        memory_peak_bytes=4 * GIB,
        refusals_limit=2,
        refusals_card=1,
        pids=[4321, 4322],
        compute_granted_ns=12_500_000_000,
        compute_used_ns=12_600_000_000,
        compute_waited_ns=37_500_000_000,
        compute_overrun_ns=100_000_000,
        compute_bypasses=3,
    )
    return item


def plan() -> pb.PlanReply:
    item = preload()
    steps = [
        pb.Step(kind="apply-mode", device_uuid=A, mode="preload", reason="it is idle"),
        pb.Step(kind="attach", device_uuid=A, mode="preload", reason="write the lease"),
    ]
    return pb.PlanReply(possible=True, slices=item.slices, reasons=item.reasons, steps=steps)


def refused_plan() -> pb.PlanReply:
    refusal = pb.Error(
        number=401,
        name="NO_CAPACITY",
        sentence="no device has 100GiB free, the most is 24GiB",
        hint="ask for 24GiB or less",
        details=["said by the table"],
    )
    reasons = [
        pb.Reason(device_uuid=A, sentence="76GiB too little"),
        pb.Reason(device_uuid=B, sentence="mig"),
    ]
    return pb.PlanReply(refusal=refusal, reasons=reasons)


def policy() -> pb.PolicyReply:
    effective = {
        "version": 1,
        "planner": {"strategy": "pack"},
        "device": [{"match": {"name": "NVIDIA H200*"}, "mode": "auto", "mig": {"change_mode": True}}],
    }
    return pb.PolicyReply(
        json=json.dumps(effective),
        origins={
            "version": "/etc/vgpud/vgpud.toml:1",
            "planner.strategy": "built-in",
            "device[0].match.name": "/etc/vgpud/conf.d/60-site.toml:3",
        },
        digest="5e0a",
        files=["/etc/vgpud/vgpud.toml", "/etc/vgpud/conf.d/60-site.toml"],
    )


def event(revision: int, sentence: str = "released") -> pb.Event:
    return pb.Event(
        revision=revision,
        kind="allocation_released",
        subject="a1b2c3d4",
        sentence=sentence,
        unix_ns=1_767_225_600_000_000_007,
    )


def usage(used_ns: int = 0, waited_ns: int = 0, **meter: object) -> pb.UsageReply:
    """The usage of `allocations`: the first is metered by a lease, and the second only by NVML. The third
    device has no figures.
    """
    first, second = allocations().allocations
    lease: dict[str, object] = {
        "device_uuid": A,
        "memory_used_bytes": 3 * GIB,
        "processes": 2,
        "memory_peak_bytes": 3 * GIB,
        "refusals_limit": 1,
        "refusals_card": 0,
        "throttled_ns": 0,
        "compute_used_ns": used_ns,
        "compute_waited_ns": waited_ns,
        "compute_granted_ns": 0,
        "compute_overrun_ns": 0,
        "compute_bypasses": 0,
        **meter,
    }
    return pb.UsageReply(
        devices=[
            pb.DeviceVitals(device_uuid=A, temperature_celsius=41, power_milliwatts=250_000, busy_percent=87),
            pb.DeviceVitals(device_uuid=B, temperature_celsius=30, power_milliwatts=76_000),
        ],
        allocations=[
            pb.AllocationMeters(allocation_id=first.id, slices=[pb.SliceMeter(**lease)]),  # type: ignore[arg-type]
            pb.AllocationMeters(
                allocation_id=second.id, slices=[pb.SliceMeter(device_uuid=B, memory_used_bytes=GIB)]
            ),
        ],
        revision=41,
    )


def processes() -> pb.ListProcessesReply:
    return pb.ListProcessesReply(
        processes=[
            pb.NodeProcess(
                pid=4242, uid=0, command="python", allocation_id="a1b2c3d4", device_uuid=A, memory_bytes=GIB
            ),
            pb.NodeProcess(pid=4343, command="", device_uuid=B, device_index=1),
        ]
    )


def events() -> pb.ListEventsReply:
    return pb.ListEventsReply(
        events=[
            pb.Event(
                revision=40, kind="allocation_active", subject="a1b2c3d4", sentence="made", unix_ns=10**18
            ),
            pb.Event(
                revision=41, kind="policy_reloaded", subject="5e0a", sentence="in force", unix_ns=10**18
            ),
        ]
    )
