"""MPS with a whole vgpud on a simulated node: sizes, dead daemons, restarts, users, draining, operators."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import needs
from tests.demo.node import BUILD, POLICY, DemoNode, Tenant
from tests.e2e.conftest import NodeMaker, node_maker
from tests.e2e.support import (
    GIB,
    MIB,
    PROBE,
    allocate,
    client,
    eventually,
    helper_pids,
    is_alive,
    quota,
    release,
    states,
)
from tests.fusefile import locked_in_the_kernel
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.modes.mps.control import MpsControl

QUICK = POLICY + "[device.mps]\ncheck_seconds = 0.3\nhang_seconds = 1.0\n"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as maker:
        yield maker


def share(node: DemoNode, gib: int, percent: float, index: int = 0, **asked: Any) -> pb.Allocation:
    return allocate(
        node,
        isolation="compute",
        memory_bytes=gib * GIB,
        share_percent=percent,
        selector=pb.Selector(indices=[index]),
        **asked,
    )


def environment(node: DemoNode, held: pb.Allocation) -> dict[str, str]:
    return {**node.environment, **held.edits.env, **held.edits.host_env}


def start(node: DemoNode, held: pb.Allocation, *words: str, extra: dict[str, str] | None = None) -> Tenant:
    return Tenant(
        subprocess.Popen(
            [PROBE, *words],
            env={**environment(node, held), **(extra or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def holding(node: DemoNode, held: pb.Allocation) -> Tenant:
    tenant = start(node, held, "hold", str(64 * MIB), "--then-wait-on-stdin")
    assert tenant.line()["state"] == "held"
    return tenant


def filled(node: DemoNode, held: pb.Allocation, extra: dict[str, str] | None = None) -> int:
    tenant = start(node, held, "fill", "--piece", str(32 * MIB), extra=extra)
    total = int(tenant.line()["total_bytes"])
    tenant.end()
    return total


def result(node: DemoNode, held: pb.Allocation) -> str:
    tenant = start(node, held, "hold", str(MIB))
    found = str(tenant.line().get("result", "held"))
    tenant.process.kill()
    tenant.process.communicate()
    return found


def control_pid(node: DemoNode) -> int:
    (pid,) = helper_pids(node, "vgpud-mps@").values()
    return pid


def sms(node: DemoNode, held: pb.Allocation) -> int:
    code = (
        "import ctypes as c; u = c.CDLL('libcuda.so.1'); u.cuInit(0); v = c.c_int();"
        "u.cuDeviceGetAttribute(c.byref(v), 16, 0); print(v.value)"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code],
        env=environment(node, held),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_mps_shares_of_any_size_run_beside_each_other(make: NodeMaker) -> None:
    """The largest allocation starts last, while a server with smaller limits is running."""
    node = make(policy=QUICK)
    node.start()
    small = share(node, 1, 10)
    first = holding(node, small)
    middle, large = share(node, 2, 30), share(node, 8, 60)
    first.process.kill()
    first.process.wait()
    sizes = [filled(node, held) for held in (small, middle, large)]
    context = 544 * MIB  # memory of each limit that the driver uses for the context, measured on an H200
    for got, gib in zip(sizes, (1, 2, 8), strict=True):
        assert gib * GIB - context <= got < gib * GIB
    assert [sms(node, held) for held in (small, middle, large)] == [14, 40, 80]
    raised = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=64G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
    assert filled(node, small, raised) == sizes[0], "a tenant cannot raise its own limit"
    with pytest.raises(VgpuError) as refused:
        share(node, 1, 1)
    assert refused.value.code is ErrorCode.NO_CAPACITY
    release(node, small.id, middle.id, large.id)


def test_a_kill_and_restart_of_vgpud_leaves_mps_clients_running(make: NodeMaker) -> None:
    node = make(policy=QUICK)
    node.start()
    held = share(node, 2, 40)
    tenant = holding(node, held)
    daemon = control_pid(node)
    for _ in range(2):
        node.kill()
        assert is_alive(daemon)
        assert tenant.alive
        # a second program is refused, whether vgpud runs or not, because the allocation allows only one
        # client
        assert result(node, held) == "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"
        node.start()
    assert control_pid(node) == daemon
    assert states(node) == {held.id: "active"}
    assert tenant.end()[0] == 0


def test_a_dead_control_daemon_fails_its_allocations_and_is_reported_and_restarted(make: NodeMaker) -> None:
    node = make(policy=QUICK)
    node.start()
    held, other = share(node, 2, 40), share(node, 1, 10)
    tenant = holding(node, held)
    with client(node) as calls:
        before = calls.list_allocations().revision
    first = control_pid(node)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: set(states(node).values()) == {"failed"}, "what it carried was not marked")
    eventually(lambda: control_pid_or_none(node) not in (None, first), "it was not brought back")
    eventually(lambda: any("MPS is back" in s for s in told(node, before)), "watchers were not told")
    assert sum("died and took its clients along" in s for s in told(node, before)) == 2
    eventually(lambda: f'"{tenant.process.pid}"' in lost_clients(node), "the log does not say whom it took")
    tenant.process.kill()
    tenant.process.communicate()
    fresh = share(node, 4, 20)
    assert filled(node, fresh) < 4 * GIB
    release(node, held.id, other.id, fresh.id, force=True)


@needs("root", "fuse")
def test_a_tenant_that_locks_the_pipe_folder_in_the_kernel_delays_no_other_call(
    make: NodeMaker, tmp_path: Path
) -> None:
    """An attack: a tenant locks the pipe folder, which it may list, by a getdents(2) into a page of its own
    file system. vgpud must not wait for that lock on its event loop.
    """
    node = make(policy=QUICK)
    node.start()
    held = share(node, 1, 10)
    pipes = next(Path(m.host_path) for m in held.edits.mounts if m.container_path == "/run/vgpu/mps")
    first = control_pid(node)
    with locked_in_the_kernel(pipes, tmp_path / "mount"):
        os.kill(first, signal.SIGKILL)
        eventually(lambda: set(states(node).values()) == {"failed"}, "what it carried was not marked")
        other = quota(node, selector=pb.Selector(indices=[1]))
        assert states(node)[other.id] == "active"
    eventually(lambda: control_pid_or_none(node) not in (None, first), "it was not brought back")
    release(node, held.id, other.id, force=True)


def lost_clients(node: DemoNode) -> str:
    return "".join(line for line in node.log.read_text().splitlines() if "mps_clients_lost" in line)


def control_pid_or_none(node: DemoNode) -> int | None:
    """The daemon's pid, or None while it does not answer."""
    with client(node) as calls:
        daemons = calls.list_mps().daemons
    return daemons[0].pid if daemons and not daemons[0].trouble else None


def told(node: DemoNode, after: int) -> list[str]:
    """Returns the sentences of the events that are later than revision `after`."""
    with client(node, timeout_seconds=300) as calls:
        last = calls.list_allocations().revision
        sentences = []
        for event in calls.watch(after):
            sentences.append(event.sentence)
            if event.revision >= last:
                break
    return sentences


def test_no_program_of_an_mps_tenant_starts_without_limits(make: NodeMaker) -> None:
    """Programs start continuously while the control daemon is killed. Each program is limited or refused."""
    node = make(policy=QUICK)
    node.start()
    held = share(node, 1, 10)
    seen: dict[str, int] = {}
    for round_number in range(40):
        if round_number in (10, 20, 30):
            eventually(lambda: control_pid_or_none(node), "it was not brought back")
            os.kill(control_pid(node), signal.SIGKILL)
        tenant = start(node, held, "fill", "--piece", str(64 * MIB))
        output, _ = tenant.process.communicate(timeout=300)
        last = json.loads(output.splitlines()[-1])
        seen[last["result"]] = seen.get(last["result"], 0) + 1
        assert int(last.get("total_bytes", 0)) <= GIB
    assert seen.get("CUDA_ERROR_OUT_OF_MEMORY", 0) > 0
    assert set(seen) <= {
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA_ERROR_MPS_CONNECTION_FAILED",
        "CUDA_ERROR_MPS_RPC_FAILURE",
    }


def test_a_control_daemon_that_died_while_vgpud_was_down_is_noticed(make: NodeMaker) -> None:
    """While vgpud is down it cannot close the pipe. Only the guard keeps the tenant from using the whole
    device.
    """
    node = make(policy=QUICK)
    node.start()
    held = share(node, 2, 40)
    tenant = holding(node, held)
    first = control_pid(node)
    node.kill()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not is_alive(first), "it did not die")
    tenant.process.kill()
    tenant.process.communicate()
    assert result(node, held) == "CUDA_ERROR_MPS_CONNECTION_FAILED"
    node.start()
    eventually(lambda: control_pid_or_none(node) not in (None, first), "it was not brought back")
    assert GIB < filled(node, held) < 2 * GIB


def test_a_vgpud_killed_while_it_starts_mps_converges(make: NodeMaker) -> None:
    """vgpud is killed after it has started an MPS daemon that does not accept clients yet. The next vgpud
    adopts or ends this daemon.
    """
    node = make(policy=QUICK)
    for point in ("allocate.apply-mode", "allocate.attach-0", "allocate.commit"):
        with contextlib.suppress(RuntimeError, VgpuError):
            node.start(fault_point=point)
            share(node, 2, 40, request_id=point)
        assert node.daemon is not None
        node.daemon.wait(timeout=300)
        node.start()
        held = share(node, 2, 40, request_id=point)
        assert GIB < filled(node, held) < 2 * GIB
        assert len(helper_pids(node, "vgpud-mps@")) == 1
        release(node, held.id)
        assert helper_pids(node, "vgpud-mps@") == {}
        node.stop()


def test_the_edits_of_an_mps_allocation_name_nothing_of_others_and_give_no_cuda_after_its_release(
    make: NodeMaker,
) -> None:
    node = make(policy=QUICK)
    node.start()
    held, other = share(node, 1, 10), share(node, 1, 10)
    assert other.id not in str(held.edits)
    sources = {m.container_path: Path(m.host_path) for m in held.edits.mounts}
    assert set(sources) == {
        "/run/vgpu/mps",
        "/run/vgpu/mps-tenant",
        "/run/vgpu/libvgpu-guard.so",
    }, "nothing of the host's but what is MPS's: /dev/shm has the files of every user"
    assert all(path.exists() for path in sources.values())
    assert all(mount.read_only for mount in held.edits.mounts), "a container can fill no folder of the host"
    assert not list(sources["/run/vgpu/mps"].glob("**/*log*/*"))
    assert (BUILD / "lib" / "libvgpu-guard.so").exists()
    release(node, held.id)
    assert result(node, held) == "CUDA_ERROR_MPS_CONNECTION_FAILED"
    assert result(node, other) == "held"
    release(node, other.id)
    assert helper_pids(node, "vgpud-mps@") == {}
    assert result(node, other) == "CUDA_ERROR_MPS_CONNECTION_FAILED"


def test_a_second_mps_user_of_a_device_is_refused_with_the_reason(make: NodeMaker) -> None:
    node = make(policy=QUICK)
    node.start()
    share(node, 1, 10, owner_uid=1000, owner_gid=1000)
    with pytest.raises(VgpuError) as refused:
        share(node, 1, 10, owner_uid=1001, owner_gid=1001)
    assert any("serves uid 1000, and uid 1001 would wait" in line for line in refused.value.details)
    elsewhere = allocate(
        node, isolation="compute", memory_bytes=GIB, share_percent=10, owner_uid=1001, owner_gid=1001
    )
    first = states(node)
    assert elsewhere.slices[0].device_uuid not in {
        part.device_uuid for a in listed(node) if a.owner_uid == 1000 for part in a.slices
    }
    assert len(first) == 2


def listed(node: DemoNode) -> list[pb.Allocation]:
    with client(node) as calls:
        return list(calls.list_allocations().allocations)


@pytest.mark.parametrize("users", ["queue", "multi"])
def test_the_policy_admits_a_second_mps_user_and_only_holders_of_a_share_reach_the_pipes(
    make: NodeMaker, users: str
) -> None:
    node = make(policy=QUICK + f'users = "{users}"\n')
    node.start()
    first = share(node, 1, 10, owner_uid=1000, owner_gid=1000)
    share(node, 1, 10, owner_uid=1001, owner_gid=1001)
    with client(node) as calls:
        (daemon,) = calls.list_mps().daemons
    assert daemon.multi_user == (users == "multi")
    waits = "programs of uid 1001 wait while any of uid 1000 run"
    eventually(lambda: (waits in node.log.read_text()) == (users == "queue"), "who waits was not said")
    folder = Path(first.edits.host_env["CUDA_MPS_PIPE_DIRECTORY"]).parents[1]

    def reach() -> list[int]:
        entries = struct.iter_unpack("<HHI", os.getxattr(folder, "system.posix_acl_access")[4:])
        return [uid for tag, _, uid in entries if tag == 2]

    assert reach() == [1000, 1001]
    assert folder.stat().st_mode & 0o7 == 0
    release(node, first.id)
    assert reach() == [1001]


def test_an_operator_lists_and_ends_mps_clients(make: NodeMaker) -> None:
    node = make(policy=QUICK + "processes_per_tenant = 2\n")
    node.start()
    held = share(node, 2, 40)
    tenants = [holding(node, held), holding(node, held)]
    (daemon,) = node.ctl_json("mps", "ls")["items"]
    assert daemon["servers"][0]["state"] == "ACTIVE"
    clients = {c["pid"]: c for c in daemon["clients"]}
    assert set(clients) == {t.process.pid for t in tenants}
    assert {c["allocationId"] for c in clients.values()} == {held.id}
    assert all(int(c["memoryBytes"]) > 64 * MIB for c in clients.values())
    table = node.ctl("mps", "ls").stdout
    assert "2 of 48" in table
    node.ctl("mps", "terminate", str(tenants[0].process.pid))
    left = node.ctl_json("mps", "ls")["items"][0]["clients"]
    assert [c["pid"] for c in left] == [tenants[1].process.pid]
    said = f"MPS client {tenants[0].process.pid} was ended"
    eventually(lambda: said in node.ctl("events").stdout, "watchers are told")
    missing = node.ctl("mps", "terminate", "999999", check=False)
    assert missing.returncode == 6
    for tenant in tenants:
        tenant.process.kill()
        tenant.process.communicate()


def test_libvgpu_holds_all_processes_of_a_tenant_to_one_limit(make: NodeMaker) -> None:
    """One process may use the whole limit. With MPS's own limits each process would have an equal part."""
    node = make(policy=QUICK + 'processes_per_tenant = 4\nmemory = "libvgpu"\n')
    node.start()
    held, beside = share(node, 4, 40), share(node, 2, 40)
    first = start(node, held, "hold", str(2 * GIB), "--then-wait-on-stdin")
    assert first.line()["state"] == "held"
    rest = filled(node, held)
    assert GIB // 2 < rest < 2 * GIB, "with the first process's contexts they come to the limit"
    assert GIB < filled(node, beside) <= 2 * GIB
    shown = node.ctl_json("show", held.id)
    assert int(shown["use"][0]["memoryUsedBytes"]) >= 2 * GIB
    node.kill()
    node.start()
    assert states(node) == {held.id: "active", beside.id: "active"}
    assert filled(node, held) == rest, "a restart changes nothing"
    first.end()
    assert filled(node, held) > 3 * GIB
    release(node, held.id, beside.id)
    assert not list((node.run_dir / "leases").iterdir())


def test_the_client_priority_is_that_of_the_allocation_or_else_of_the_policy(make: NodeMaker) -> None:
    node = make(policy=QUICK + 'client_priority = "below-normal"\n')
    node.start()
    asked = {"": "1", "normal": "0", "below-normal": "1"}
    for word, value in asked.items():
        held = share(node, 1, 10, priority=word)
        assert held.edits.env["CUDA_MPS_CLIENT_PRIORITY"] == value
    for wrong in (
        {"isolation": "compute", "priority": "high"},
        {"isolation": "compute", "priority": "above-normal"},
    ):
        with pytest.raises(VgpuError) as refused:
            allocate(node, memory_bytes=GIB, **wrong)
        assert refused.value.code is ErrorCode.BAD_REQUEST


def test_a_drained_mps_device_empties_and_stays_drained(make: NodeMaker) -> None:
    node = make(policy=QUICK)
    node.start()
    held = share(node, 1, 10)
    drained = node.ctl("drain", "0", check=False)
    assert drained.returncode == 1
    assert held.id in drained.stderr + drained.stdout
    with pytest.raises(VgpuError) as refused:
        share(node, 1, 10)
    assert any("it is drained" in line for line in refused.value.details)
    assert share(node, 1, 10, index=1).state == "active"
    node.kill()
    node.start()
    release(node, held.id)
    idle = node.ctl("drain", "0")
    assert "for the driver, drain devices 1, 2, 3, 4, 5, 6, 7 too" in idle.stderr + idle.stdout
    assert "idle" in idle.stderr + idle.stdout
    assert node.ctl_json("devices")["items"][0]["drained"]
    node.ctl("undrain", "0")
    assert share(node, 1, 10).state == "active"


def test_the_compute_mode_is_exclusive_under_mps_and_restored_afterwards(make: NodeMaker) -> None:
    node = make(policy=QUICK + "exclusive_process = true\n")
    node.start()
    held = share(node, 1, 10)

    def mode() -> str:
        return str(node.ctl_json("devices")["items"][0]["computeMode"])

    eventually(lambda: mode() == "exclusive_process", "the compute mode was not set")
    bare = {k: v for k, v in environment(node, held).items() if not k.startswith(("LD_PRELOAD", "CUDA_MPS"))}
    program = subprocess.run([PROBE, "hold", "1MiB"], env=bare, capture_output=True, text=True, check=False)
    tenant = holding(node, held)
    again = subprocess.run([PROBE, "hold", "1MiB"], env=bare, capture_output=True, text=True, check=False)
    assert program.returncode == 0, "with nobody there, even EXCLUSIVE_PROCESS lets one program in"
    assert again.returncode != 0, "beside an MPS server it does not"
    node.kill()
    node.start()
    tenant.end()
    release(node, held.id)
    eventually(lambda: mode() == "default", "the compute mode was not put back")


def test_mps_limits_that_another_program_changed_are_set_again_and_reported(make: NodeMaker) -> None:
    """An attack: on branch 535 any program that reaches the pipe can set limits. Here root sets them."""
    node = make(policy=QUICK)
    node.start()
    held = share(node, 4, 40)
    pipe = Path(held.edits.host_env["CUDA_MPS_PIPE_DIRECTORY"])
    program = shutil.which("nvidia-cuda-mps-control", path=node.environment["PATH"])
    assert program is not None
    control = MpsControl(program, pipe, node.folder)

    def limits() -> tuple[str, str]:
        words = ("get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0")
        return control.ask(words[0]), control.ask(words[1])

    before = limits()
    control.ask("set_default_active_thread_percentage 1")
    control.ask("set_default_device_pinned_mem_limit 0 1M")
    eventually(lambda: limits() == before, "the limits are set again")

    def is_told() -> bool:
        with client(node) as calls:
            told = [one.sentence for one in calls.list_events(100).events]
        return any("were not as vgpud had set them, and are set again" in one for one in told)

    eventually(is_told, "an event tells of the change")
    assert "set MPS limits" in node.log.read_text()
