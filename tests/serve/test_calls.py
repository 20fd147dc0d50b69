"""Every call of the API over real sockets: requests, replies, permissions."""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.support import eventually as wait_until
from tests.serve.live import Live
from vgpud.api.client import Client
from vgpud.api.doors import CHANGING, LEAST_DOOR
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Lifetime, Owner
from vgpud.proc import start_ticks
from vgpud.serve.calls import SERVICE
from vgpud.serve.handlers import HANDLERS
from vgpud.serve.server import MAX_REQUEST_BYTES


def ask(**fields: object) -> pb.AllocateRequest:
    return pb.AllocateRequest(request_id="r1", memory_bytes=GIB, **fields)  # type: ignore[arg-type]


def code_of(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(VgpuError) as caught:
        call()
    assert caught.value.hint
    return caught.value.code


def test_the_table_of_rights_covers_every_method_of_the_api() -> None:
    methods = {method.name for method in SERVICE.methods}
    assert set(LEAST_DOOR) == methods
    assert set(HANDLERS) == methods - {"Watch"}


def test_ro_sock_answers_reading_calls(live: Live, reader: Client) -> None:
    node = reader.get_node()
    assert (node.device_count, node.status, node.vgpud_version != "") == (1, "well", True)
    devices = reader.list_devices().devices
    assert [(d.uuid, d.share_allocated_percent) for d in devices] == [("GPU-1", 12.34)]
    policy = reader.get_policy()
    assert json.loads(policy.json)["planner"] == {"strategy": "pack", "user_places_percent": 75}
    assert (policy.digest, list(policy.files)) == ("abc", ["/etc/p.toml"])
    assert dict(policy.origins) == {"version": "/etc/p.toml"}
    plan = reader.plan(ask())
    assert (plan.possible, plan.slices[0].memory_bytes, plan.steps[0].kind) == (True, GIB, "attach")
    assert reader.plan(ask(count=2)).refusal.number == ErrorCode.IMPOSSIBLE.number
    assert live.keeper.held == {}


def test_an_allocation_is_made_resized_and_released(live: Live, tenant: Client) -> None:
    held = tenant.allocate(ask(share_percent=12.5, label="mine"))
    assert (held.owner_uid, held.owner_gid, held.label) == (os.geteuid(), os.getegid(), "mine")
    assert held.edits.host_env["VGPU_LEASE"].endswith("leases/x")
    assert live.keeper.requests[0].share == Percent(1250)
    assert live.keeper.requests[0].lifetime == Lifetime()
    assert tenant.allocate(ask(share_percent=12.5, label="mine")).id == held.id
    assert tenant.resize(held.id, memory_bytes=2 * GIB).slices[0].memory_bytes == 2 * GIB
    assert tenant.resize(held.id, share_percent=0.01).slices[0].share_percent == 0.01
    got = tenant.get_allocation(held.id)
    assert (got.use[0].memory_peak_bytes, list(got.use[0].pids)) == (6, [77])
    listed = tenant.list_allocations()
    assert [one.id for one in listed.allocations] == [held.id]
    assert listed.revision == 1
    assert not tenant.release(held.id).already_released
    assert live.keeper.callers[0].process.pid == os.getpid()
    assert code_of(lambda: tenant.release(held.id)) is ErrorCode.NO_SUCH_ALLOCATION


def test_a_client_retries_to_connect_while_the_listeners_queue_is_full(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack: many connections keep the listener's queue full, and the kernel refuses a further one at
    once.
    """
    path = live.run_dir / "full.sock"
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                other = opened.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(path))

        def a_place_becomes_free(_: float) -> None:
            path.unlink(missing_ok=True)
            path.symlink_to(live.ro)

        monkeypatch.setattr("vgpud.api.client.time.sleep", a_place_becomes_free)
        with Client(path) as client:
            assert client.get_node().vgpud_version


def test_only_root_can_force_a_release(live: Live, tenant: Client, admin: Client) -> None:
    """An attack: processes that outlive a forced release hold device memory that no quota counts."""
    tenant.release(tenant.allocate(ask()).id, force=True)
    admin.release(admin.allocate(ask()).id, force=True)
    assert live.keeper.forced == [False, True]


def test_vgpud_generates_a_request_id_if_a_request_has_none(live: Live, tenant: Client) -> None:
    ids = {tenant.allocate(pb.AllocateRequest()).request_id for _ in range(2)}
    assert len(ids) == 2
    assert all(ids)


def test_an_allocation_with_bind_to_caller_is_bound_to_the_calling_process(
    live: Live, tenant: Client
) -> None:
    held = tenant.allocate(ask(bind_to_caller=True))
    assert held.bound_pid == os.getpid()
    ticks = start_ticks(os.getpid())
    assert live.keeper.requests[0].lifetime == Lifetime(os.getpid(), ticks or 0)


def test_invalid_requests_are_refused_before_they_reach_the_keeper(live: Live, tenant: Client) -> None:
    assert code_of(lambda: tenant.allocate(pb.AllocateRequest(memory_bytes=0))) is ErrorCode.BAD_QUANTITY
    assert code_of(lambda: tenant.allocate(ask(share_percent=float("nan")))) is ErrorCode.BAD_PERCENT
    assert code_of(lambda: tenant.allocate(pb.AllocateRequest(count=65))) is ErrorCode.BAD_REQUEST
    assert code_of(lambda: tenant.resize("a")) is ErrorCode.BAD_REQUEST
    assert code_of(lambda: tenant.release("")) is ErrorCode.BAD_REQUEST
    assert code_of(lambda: tenant.get_allocation("x" * 200)) is ErrorCode.BAD_REQUEST
    assert live.keeper.requests == []


def layout() -> pb.MigRequest:
    return pb.MigRequest(targets=[pb.MigTarget(layout=["1g.18gb*2"])])


def test_a_client_gets_an_error_with_number_sentence_hint_and_details(live: Live, admin: Client) -> None:
    calls: dict[str, Callable[[], object]] = {
        "GetNode": admin.get_node,
        "ListDevices": admin.list_devices,
        "Allocate": lambda: admin.allocate(ask()),
        "Release": lambda: admin.release("a1"),
        "Resize": lambda: admin.resize("a1", 1),
        "Pause": lambda: admin.pause("a1"),
        "Unpause": lambda: admin.unpause("a1"),
        "Suspend": lambda: admin.suspend("a1"),
        "Resume": lambda: admin.resume("a1"),
        "Move": lambda: admin.move("a1", ["GPU-2"]),
        "Defrag": lambda: admin.defrag(pb.DefragRequest()),
        "PlanDefrag": lambda: admin.plan_defrag(pb.DefragRequest()),
        "GetAllocation": lambda: admin.get_allocation("a1"),
        "ListAllocations": admin.list_allocations,
        "Plan": lambda: admin.plan(ask()),
        "Watch": lambda: next(admin.watch()),
        "GetPolicy": admin.get_policy,
        "ReloadPolicy": admin.reload_policy,
        "ListMps": admin.list_mps,
        "TerminateMpsClient": lambda: admin.terminate_mps_client("GPU-1", 7),
        "DrainDevice": lambda: admin.drain_device("GPU-1"),
        "ListMig": admin.list_mig,
        "PlanMig": lambda: admin.plan_mig(layout()),
        "ApplyMig": lambda: admin.apply_mig(layout()),
        "GetUsage": admin.get_usage,
        "ListProcesses": admin.list_processes,
        "ListEvents": admin.list_events,
    }
    assert set(calls) == set(LEAST_DOOR)
    sent = VgpuError(ErrorCode.GPU_LOST, "GPU-1 is lost: xid 79", "reboot", ("GPU-1",))
    for call in calls.values():
        live.keeper.failure = sent
        with pytest.raises(VgpuError) as caught:
            call()
        assert caught.value == sent
    for name, call in calls.items():
        live.keeper.failure = RuntimeError("secret /path")
        with pytest.raises(VgpuError) as caught:
            call()
        assert caught.value.code is ErrorCode.BUG
        assert name in caught.value.sentence
        assert "secret" not in repr(caught.value)


def test_each_socket_admits_only_the_methods_of_its_rights(
    live: Live, reader: Client, tenant: Client, admin: Client
) -> None:
    changing: dict[str, Callable[[Client], object]] = {
        "Allocate": lambda c: c.allocate(ask()),
        "Release": lambda c: c.release("nothing"),
        "Resize": lambda c: c.resize("nothing", 1),
        "Pause": lambda c: c.pause("nothing"),
        "Unpause": lambda c: c.unpause("nothing"),
        "Suspend": lambda c: c.suspend("nothing"),
        "Resume": lambda c: c.resume("nothing"),
        "Move": lambda c: c.move("nothing", ["GPU-2"]),
        "Defrag": lambda c: c.defrag(pb.DefragRequest()),
        "ReloadPolicy": lambda c: c.reload_policy(dry_run=True),
        "TerminateMpsClient": lambda c: c.terminate_mps_client("GPU-1", 7),
        "DrainDevice": lambda c: c.drain_device("GPU-1"),
        "ApplyMig": lambda c: c.apply_mig(layout()),
    }
    assert set(changing) == CHANGING
    for call in changing.values():
        with pytest.raises(VgpuError, match=r"ro\.sock") as caught:
            call(reader)
        assert caught.value.code is ErrorCode.NOT_ALLOWED
    for name in ("ReloadPolicy", "TerminateMpsClient", "DrainDevice"):
        assert code_of(partial(changing[name], tenant)) is ErrorCode.NOT_ALLOWED
    assert live.keeper.requests == []
    assert live.keeper.reloads == []
    tenant.allocate(ask())
    report = admin.reload_policy(dry_run=True)
    assert (report.changed, report.digest, list(report.done)) == (True, "def", ["done"])
    assert live.keeper.reloads == [True]


def test_only_the_administrator_names_another_owner(live: Live, tenant: Client, admin: Client) -> None:
    other = ask(owner_uid=1234, owner_gid=99)
    assert code_of(lambda: tenant.allocate(other)) is ErrorCode.NOT_ALLOWED
    assert code_of(lambda: tenant.plan(other)) is ErrorCode.NOT_ALLOWED
    assert admin.allocate(other).owner_uid == 1234
    assert live.keeper.requests[0].owner == Owner(1234, 99)


def test_an_allocations_edits_are_sent_only_to_its_owner_and_the_administrator(
    live: Live, reader: Client, admin: Client
) -> None:
    theirs = admin.allocate(ask(owner_uid=1234, owner_gid=99))
    mine = admin.allocate(pb.AllocateRequest(request_id="r2"))
    assert theirs.HasField("edits")
    assert not reader.get_allocation(theirs.id).HasField("edits")
    assert reader.get_allocation(mine.id).HasField("edits")
    shown = {one.id: one.HasField("edits") for one in reader.list_allocations().allocations}
    assert shown == {theirs.id: False, mine.id: True}
    shown = {one.id: one.HasField("edits") for one in admin.list_allocations().allocations}
    assert shown == {theirs.id: True, mine.id: True}
    events = reader.watch(0)
    assert [next(events).allocation.HasField("edits") for _ in range(2)] == [False, True]


def test_a_uid_in_the_grpc_metadata_of_a_call_is_ignored(live: Live) -> None:
    claimed = (("uid", "1234"), ("x-uid", "1234"), ("vgpud-uid", "1234"), ("authorization", "uid 1234"))
    with grpc.insecure_channel(f"unix:{live.tenant}") as channel:
        held = VgpudStub(channel).Allocate(ask(), metadata=claimed, timeout=300)
    assert held.owner_uid == os.geteuid()


def test_a_caller_of_grpcs_own_socket_that_bypasses_the_relay_is_refused(live: Live) -> None:
    with Client(live.run_dir / "private" / "grpc.sock", 300) as client:
        assert code_of(client.get_node) is ErrorCode.NOT_ALLOWED


def test_a_watch_resumes_without_gap_or_repeat(live: Live, tenant: Client, reader: Client) -> None:
    events = reader.watch()
    first = tenant.allocate(pb.AllocateRequest(request_id="a"))
    assert next(events).subject == first.id
    tenant.allocate(pb.AllocateRequest(request_id="b"))
    tenant.release(first.id)
    seen = next(events).revision
    assert seen == 2
    again = reader.watch(seen)
    event = next(again)
    assert (event.revision, event.kind, event.allocation.id) == (3, "allocation_released", first.id)
    assert [next(reader.watch(0)).revision, next(reader.watch(1)).revision] == [1, 2]


def test_a_watch_from_a_revision_that_is_no_longer_kept_is_refused(live: Live, reader: Client) -> None:
    live.keeper.oldest = 5
    assert code_of(lambda: next(reader.watch(4))) is ErrorCode.BAD_REVISION


def test_a_watch_whose_client_disconnects_ends(live: Live) -> None:
    with Client(live.ro) as client:
        watches = [client.watch(0) for _ in range(5)]
        wait_until(lambda: live.keeper.watchers == 5)
        first = watches[0]
        assert isinstance(first, Generator)
        first.close()
    wait_until(lambda: live.keeper.watchers == 0)


def test_grpc_health_and_reflection_answer_on_every_socket(live: Live) -> None:
    for path in (live.ro, live.tenant, live.admin):
        with grpc.insecure_channel(f"unix:{path}") as channel:
            # typed as Any, because the stubs of grpc_health have no typed methods
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", "vgpud.v1.Vgpud"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=300)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            services = ProtoReflectionDescriptorDatabase(channel)
            assert "vgpud.v1.Vgpud" in services.get_services()
            found = services.FindFileContainingSymbol("vgpud.v1.Vgpud")
            assert {method.name for method in found.service[0].method} == set(LEAST_DOOR)


def test_undecodable_or_oversized_messages_and_unknown_methods_are_refused(live: Live) -> None:
    with grpc.insecure_channel(f"unix:{live.tenant}") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/vgpud.v1.Vgpud/Allocate")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=300)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            call(b"x" * (MAX_REQUEST_BYTES + 1), timeout=300)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            unknown: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                "/vgpud.v1.Vgpud/Format"
            )
            unknown(b"", timeout=300)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert live.keeper.requests == []


def test_a_listing_larger_than_the_socket_buffers_arrives_whole(live: Live, admin: Client) -> None:
    held = admin.allocate(ask(label="x" * 250))
    kept = live.keeper.held[held.id]
    live.keeper.held.update({f"b{i}": kept for i in range(12_000)})
    listed = admin.list_allocations()
    assert len(listed.allocations) == 12_001
    assert listed.ByteSize() > 5_000_000


def test_mps_and_drain_calls_reach_the_keeper(live: Live, reader: Client, admin: Client) -> None:
    (shown,) = reader.list_mps().daemons
    assert (shown.device_uuid, shown.client_limit, shown.servers[0].state) == ("GPU-1", 48, "FAULT")
    assert [(c.pid, c.HasField("uid"), c.command) for c in shown.clients] == [(7, True, ""), (8, False, "")]
    seen = admin.list_mps().daemons[0]
    assert seen.clients[0].command == "python secret.py"
    admin.terminate_mps_client("GPU-1", 7)
    reply = admin.drain_device("GPU-1")
    assert (reply.drained, reply.idle, list(reply.allocation_ids), list(reply.pids)) == (
        True,
        False,
        ["a"],
        [9],
    )
    assert not admin.drain_device("GPU-1", undrain=True).drained
    assert live.keeper.operated == [
        ("terminate", "GPU-1", 7),
        ("drain", "GPU-1", True),
        ("drain", "GPU-1", False),
    ]
    assert code_of(lambda: admin.drain_device("")) is ErrorCode.BAD_REQUEST


def test_mig_listings_show_root_the_processes_of_instances(live: Live, admin: Client) -> None:
    (device,) = admin.list_mig().devices
    (instance,) = device.instances
    assert (instance.profile_name, instance.allocation_id, instance.own) == ("1g.18gb", "a1", True)
    assert [free.count for free in device.free] == [3]
    assert instance.processes[0].command == "python"


def test_mig_plans_and_refusals_reach_the_client(live: Live, admin: Client) -> None:
    (change,) = admin.plan_mig(layout()).changes
    assert (change.kind, change.profile_name, change.placement.start) == ("create", "1g.18gb*2", 6)
    refused = admin.plan_mig(pb.MigRequest(defrag=pb.Selector())).refusal
    assert refused.number == ErrorCode.DEVICE_IN_USE.number
    with pytest.raises(VgpuError) as empty:
        admin.apply_mig(pb.MigRequest())
    assert empty.value.code is ErrorCode.BAD_REQUEST
    with pytest.raises(VgpuError) as wordless:
        admin.plan_mig(pb.MigRequest(targets=[pb.MigTarget()]))
    assert wordless.value.code is ErrorCode.BAD_REQUEST


def test_the_reply_to_getusage_leaves_unknown_figures_unset(reader: Client) -> None:
    usage = reader.get_usage()
    (vitals,) = usage.devices
    assert (vitals.temperature_celsius, vitals.power_milliwatts, vitals.busy_percent) == (41, 250_000, 87)
    assert not vitals.HasField("power_limit_milliwatts")
    (meters,) = usage.allocations
    (meter,) = meters.slices
    assert meters.allocation_id == "a1"
    assert (meter.throttled_ns, meter.compute_used_ns, meter.compute_waited_ns) == (7, 8, 9)
    assert (meter.compute_granted_ns, meter.compute_overrun_ns, meter.compute_bypasses) == (10, 3, 1)


def test_a_processs_command_is_shown_to_its_user_and_the_administrator(reader: Client, admin: Client) -> None:
    assert [p.command for p in admin.list_processes().processes] == ["python train.py", "?"]
    shown = reader.list_processes().processes
    assert [p.pid for p in shown] == [77, 78]
    assert not shown[1].HasField("uid")
    assert not shown[1].HasField("memory_bytes")


def test_events_are_listed_by_user(live: Live, reader: Client) -> None:
    live.keeper.events = [
        (Event(number, EventKind.ALLOCATION_ACTIVE, f"of {user}", "it runs", 7, user), None)
        for number, user in enumerate((0, 1000, 1001, 1001), 1)
    ]
    assert [one.subject for one in reader.list_events(1, 1000).events] == ["of 1000"]
    assert [one.subject for one in reader.list_events(9, 0).events] == ["of 0"]
    assert len(reader.list_events(9).events) == 4


def test_a_call_for_too_many_events_is_refused(reader: Client) -> None:
    assert code_of(lambda: reader.list_events(1_001)) is ErrorCode.BAD_REQUEST
