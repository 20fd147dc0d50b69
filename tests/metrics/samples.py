"""An observation with every case: a device in each mode, a lost device, tenants with every meter."""

from collections import Counter

from vgpud.model.device import Device, GpuInstance, Health, Mig, MigProfile, Node, Placement
from vgpud.model.engine import Engine, EngineChoice, EngineReason
from vgpud.model.event import Event, EventKind
from vgpud.model.marks import Mark, MarkKind
from vgpud.model.observation import Observation, ProcessFigures
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tally import Tally
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Owner, Request, Slice, State, Workload
from vgpud.model.view import ComputeTime, DeviceView, Metered, NodeDescription, SliceMeter, Vitals

A, B, C = (f"GPU-{letter * 8}-0000-4000-8000-000000000001" for letter in "abc")
PROFILES = (
    MigProfile(19, "1g.18gb", 1, 7, 16, 16 * GIB, tuple(Placement(i, 1) for i in range(7))),
    MigProfile(9, "3g.71gb", 3, 2, 60, 70 * GIB, (Placement(0, 4), Placement(4, 4))),
)
MIG = Mig(
    True,
    True,
    True,
    PROFILES,
    (GpuInstance(1, 19, Placement(0, 1), ()), GpuInstance(2, 9, Placement(4, 4), ())),
)
NODE = Node(
    devices=(
        Device(A, 0, "NVIDIA H200", pci_bus_id="00000000:1B:00.0", memory_total_bytes=141 * GIB),
        Device(B, 1, 'NVIDIA "H200"', memory_total_bytes=141 * GIB, mig=MIG),
        Device(
            C,
            2,
            "NVIDIA H200",
            memory_total_bytes=141 * GIB,
            health=Health.LOST,
            health_reason="off the bus <b>",
        ),
    ),
    driver_version="580.159.04",
    nvml_version="13",
    cuda_version="13.0",
    simulated=True,
)
QUOTA = Allocation(
    "aaaa00000001",
    Request(
        "r1",
        Owner(1000, 1000),
        label='<script>alert("1")</script>\n\\',
        workload=Workload("ml", "train-0", "main", "weights"),
    ),
    State.ACTIVE,
    (Slice(A, Mode.PRELOAD, 4 * GIB, Percent.parse("12.5")),),
    created_unix_ns=10**18,
)
HARD = Allocation(
    "bbbb00000001",
    Request("r2", Owner(1001, 1001)),
    State.FAILED,
    (Slice(B, Mode.MIG, 70 * GIB, None, MigSlice(9, "3g.71gb", Placement(4, 4), 2, 0, "MIG-1")),),
    created_unix_ns=10**18,
    failure="device 1 is gone",
)
TIME = ComputeTime(1_500_000_000, 10**9, 3 * 10**9, 250_000_000, 2)
METER = SliceMeter(A, 3 * GIB, 2, 3 * GIB + 1, 5, 1, 2_500_000_000, TIME)


def engine_of(mode: Mode | None) -> EngineChoice | None:
    return (
        EngineChoice(Engine.CUT, EngineReason.PROBED, "a kernel stood still")
        if mode is Mode.PRELOAD
        else None
    )


def observation() -> Observation:
    views = tuple(
        DeviceView(device, "auto", mode, 4 * GIB, 1250, 1, drained=device.index == 1, engine=engine_of(mode))
        for device, mode in zip(NODE.devices, (Mode.PRELOAD, Mode.MIG, None), strict=True)
    )
    tally = Tally(made=Counter(preload=2), refused=Counter(NO_CAPACITY=3), released=1, reload_unix_seconds=5)
    tally.suspended.update(idle=2, turn=1)
    tally.resumed.update(idle=1)
    tally.moved.update(done=3, back=1)
    tally.resume_waited_seconds = 2.5
    tally.marked.update({"bypassed": 1, "unknown-calls": 2})
    tally.bypass_looks, tally.stopped = 9, 1
    tally.took(0.004)
    tally.took(99)
    return Observation(
        version="0.1.0",
        described=NodeDescription(NODE, 2, 41, "5e0a" * 16, "3 devices, 2 allocations", 7.5),
        devices=views,
        allocations=(QUOTA, HARD),
        metered=Metered(
            {A: Vitals(41, 250_500, 700_000, 87), B: Vitals(30, 76_000, 700_000, None)},
            {QUOTA.id: (METER,), HARD.id: (SliceMeter(B, GIB, 1),)},
        ),
        tally=tally,
        nvml_errors={15: 2},
        process=ProcessFigures(70 * 2**20, 1.5, 33, 1e9),
        watchers=1,
        marks=(
            Mark(QUOTA.id, MarkKind.BYPASSED, A, 590 * 2**20, "it holds", 10**18),
            Mark(QUOTA.id, MarkKind.UNKNOWN_CALLS, "610.4", 3, "it has", 10**18),
            Mark(HARD.id, MarkKind.UNKNOWN_CALLS, "610.4", 5, "it has", 10**18),
        ),
        events=(Event(41, EventKind.ALLOCATION_ACTIVE, "aaaa00000001", "allocation <made>", 10**18),),
    )
