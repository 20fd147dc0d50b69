"""Replies contain every field of the model that clients may see, and no other field."""

from vgpud.api import encode
from vgpud.model.device import (
    ComputeInstance,
    ComputeMode,
    Device,
    DeviceProcess,
    GpuInstance,
    Health,
    Mig,
    MigProfile,
    Node,
    Placement,
    Virtualisation,
)
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.plan import Step, StepKind
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import (
    Allocation,
    Decision,
    DeviceNode,
    Edits,
    Isolation,
    Lifetime,
    MigSlice,
    Mode,
    Mount,
    Owner,
    Reason,
    Request,
    Slice,
    State,
)
from vgpud.model.view import ComputeTime, DeviceView, NodeDescription, ReloadReport, SliceUse

HELD = Allocation(
    id="a1",
    request=Request(
        "r1", Owner(1000, 100), isolation=Isolation.HARDWARE, label="l", lifetime=Lifetime(42, 9)
    ),
    state=State.ACTIVE,
    slices=(
        Slice("GPU-1", Mode.MIG, 5, None, MigSlice(19, "1g.18gb", Placement(3, 1), 7, 0, "MIG-x")),
        Slice("GPU-2", Mode.PRELOAD, 6, Percent(1)),
    ),
    reasons=(Reason("GPU-1", True, Mode.MIG, "fits"), Reason("GPU-3", False, None, "full")),
    edits=Edits((("A", "1"),), (("A", "2"),), (Mount("/h", "/c", False),), (DeviceNode("/dev/x", 195, 0),)),
    created_unix_ns=2**62,
    revision=2**53 + 1,
    failure="gone",
)


def test_a_reply_has_every_field_of_an_allocation() -> None:
    use = [
        SliceUse("GPU-1", 1, (6, 7), 2, 3, 4, 5, ComputeTime(8, 9, 10, 11, 12)),
        SliceUse("GPU-3", 1, ()),
    ]
    sent = encode.allocation(HELD, with_edits=True, use=use)
    assert (sent.id, sent.request_id, sent.owner_uid, sent.owner_gid) == ("a1", "r1", 1000, 100)
    assert (sent.state, sent.isolation, sent.label, sent.failure) == ("active", "hardware", "l", "gone")
    assert (sent.created_unix_ns, sent.revision, sent.bound_pid) == (2**62, 2**53 + 1, 42)
    assert sent.cdi_name == "vgpud.io/vgpu=a1"
    mig, preload = sent.slices
    assert not mig.HasField("share_percent")
    assert (mig.mode, mig.memory_bytes, mig.mig.profile_id, mig.mig.uuid) == ("mig", 5, 19, "MIG-x")
    assert (mig.mig.placement.start, mig.mig.placement.size) == (3, 1)
    assert mig.mig.compute_instance_id == 0
    assert mig.mig.HasField("compute_instance_id")
    assert not preload.HasField("mig")
    assert Percent.from_float(preload.share_percent) == Percent(1)
    assert [(r.device_uuid, r.taken, r.mode) for r in sent.reasons] == [
        ("GPU-1", True, "mig"),
        ("GPU-3", False, ""),
    ]
    assert (dict(sent.edits.env), dict(sent.edits.host_env)) == ({"A": "1"}, {"A": "2"})
    assert (sent.edits.mounts[0].host_path, sent.edits.mounts[0].read_only) == ("/h", False)
    assert (sent.edits.device_nodes[0].major, sent.edits.device_nodes[0].HasField("minor")) == (195, True)
    turns, none = sent.use
    assert (turns.memory_peak_bytes, list(turns.pids)) == (3, [6, 7])
    assert (turns.compute_granted_ns, turns.compute_used_ns, turns.compute_waited_ns) == (8, 9, 10)
    assert (turns.compute_overrun_ns, turns.compute_bypasses) == (11, 12)
    known = {field.name for field, _ in none.ListFields()}
    assert known == {"device_uuid", "memory_used_bytes"}, "a meter that the mode lacks is not 0"


def test_an_allocation_without_edits_sends_no_environment_or_paths() -> None:
    sent = encode.allocation(HELD, with_edits=False)
    assert not sent.HasField("edits")
    assert b"/h" not in sent.SerializeToString()


def test_a_reply_has_every_field_of_a_device() -> None:
    profile = MigProfile(19, "1g.18gb", 1, 7, 16, 123, (Placement(0, 1), Placement(1, 1)))
    instance = GpuInstance(
        1, 19, Placement(1, 1), (ComputeInstance(0, 0, "MIG-1"), ComputeInstance(1, 0, ""))
    )
    card = Device(
        uuid="GPU-1",
        index=3,
        name="N",
        minor=0,
        pci_bus_id="0000:01:00.0",
        memory_total_bytes=100,
        memory_reserved_bytes=1,
        memory_used_bytes=2,
        sm_count=132,
        compute_capability=(9, 0),
        mig=Mig(True, True, False, (profile,), (instance,)),
        compute_mode=ComputeMode.EXCLUSIVE_PROCESS,
        mps_capable=True,
        numa_node=0,
        virtualisation=Virtualisation.PASSTHROUGH,
        processes=(DeviceProcess(5, None, "compute"), DeviceProcess(6, 0, "mps")),
        health=Health.LOST,
        health_reason="xid 79",
    )
    sent = encode.device(DeviceView(card, "auto", Mode.MPS, 9, 3333, 2))
    assert (sent.uuid, sent.index, sent.compute_capability, sent.sm_count) == ("GPU-1", 3, "9.0", 132)
    assert sent.HasField("minor")
    assert sent.HasField("numa_node")
    assert (sent.mig.capable, sent.mig.current, sent.mig.pending) == (True, True, False)
    assert [(p.start, p.size) for p in sent.mig.profiles[0].placements] == [(0, 1), (1, 1)]
    assert list(sent.mig.instances[0].uuids) == ["MIG-1"]
    assert [p.HasField("memory_bytes") for p in sent.processes] == [False, True]
    assert (sent.health, sent.virtualisation, sent.compute_mode) == (
        "lost",
        "passthrough",
        "exclusive_process",
    )
    assert (sent.mode, sent.share_allocated_percent, sent.allocation_count) == ("mps", 33.33, 2)


def test_fields_that_nvml_does_not_report_are_left_out() -> None:
    sent = encode.device(DeviceView(Device("GPU-1", 0), "mig", None, 0, 0, 0))
    assert not any(sent.HasField(field) for field in ("minor", "sm_count", "numa_node"))
    assert (sent.compute_capability, sent.mode) == ("", "")


def test_the_reply_to_a_refused_plan_has_the_refusal() -> None:
    refusal = VgpuError(ErrorCode.NO_CAPACITY, "no room for 5GiB", "ask for 4GiB", ("GPU-1: full",))
    sent = encode.plan(Decision(refusal=refusal), ())
    assert not sent.possible
    assert (sent.refusal.number, sent.refusal.name) == (401, "NO_CAPACITY")
    assert list(sent.refusal.details) == ["GPU-1: full"]
    done = encode.plan(Decision(slices=HELD.slices), (Step(StepKind.ATTACH, "why", "GPU-1", Mode.MIG, 0),))
    assert done.possible
    assert not done.HasField("refusal")
    assert (done.steps[0].kind, done.steps[0].mode) == ("attach", "mig")


def test_each_remaining_kind_of_reply_has_all_its_fields() -> None:
    node = encode.node(
        NodeDescription(Node((Device("G", 0),)), 2, 3, "d", "s", 1.5, "no driver"), "host", "1.0"
    )
    assert (node.device_count, node.allocation_count, node.hardware_error) == (1, 2, "no driver")
    event = encode.event(Event(4, EventKind.DEVICE_LOST, "GPU-1", "gone", 5), None)
    assert (event.revision, event.kind, event.HasField("allocation")) == (4, "device_lost", False)
    policy = encode.policy("{}", {"version": 7}, "d", ["/f"])
    assert (dict(policy.origins), list(policy.files)) == ({"version": "7"}, ["/f"])
    report = encode.reload_report(ReloadReport(True, "d", ("a",), ("b",)))
    assert (list(report.done), list(report.waiting)) == (["a"], ["b"])
