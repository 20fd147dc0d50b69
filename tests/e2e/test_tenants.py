"""Allocations that are bound to processes: they are released however the process ends, even while vgpud or
the arbiter is down.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOTDIR
from pathlib import Path

import pytest

from tests.demo.node import ROOT, DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import (
    GIB,
    PROBE,
    client,
    eventually,
    helper_pids,
    is_alive,
    quota,
    release,
    simulate,
    states,
)
from vgpud import lease_layout as layout
from vgpud.lease import read_limits

QUOTA = ["--isolation", "quota", "--memory", "1GiB", "--device", "0"]
HOLD = [PROBE, "hold", "64MiB", "--then-wait-on-stdin"]


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node()
    node.start()
    return node


def holding(node: DemoNode, options: list[str] | None = None) -> tuple[Tenant, str]:
    """A tenant that holds memory, and its allocation."""
    before = states(node)
    tenant = node.tenant(options or QUOTA, HOLD)
    tenant.line()
    (new,) = states(node).keys() - before.keys()
    return tenant, new


def gone(node: DemoNode, allocation: str) -> bool:
    return allocation not in states(node)


@pytest.mark.parametrize("isolation", ["quota", "compute", "hardware", "device"])
def test_a_killed_tenants_allocation_is_released(node: DemoNode, isolation: str) -> None:
    sizes = [] if isolation == "device" else ["--memory", "1GiB"]
    tenant, allocation = holding(node, ["--isolation", isolation, *sizes, "--device", "3"])
    os.kill(tenant.process.pid, signal.SIGKILL)
    eventually(lambda: gone(node, allocation), "its allocation is released")
    assert tenant.end()[0] == -9
    with client(node) as calls:
        device = calls.list_devices().devices[3]
    assert (device.mode, device.allocation_count, list(device.mig.instances)) == ("", 0, [])


def test_an_allocation_stays_while_a_child_of_its_tenant_runs(node: DemoNode) -> None:
    """The child uses the memory, so the allocation stays until the child ends."""
    script = f'exec 3<&0; {PROBE} hold 64MiB --then-wait-on-stdin <&3 & echo "{{\\"child\\": $!}}"; wait'
    tenant = node.tenant(QUOTA, ["sh", "-c", script])
    child = int({**tenant.line(), **tenant.line()}["child"])
    (allocation,) = states(node)
    os.kill(tenant.process.pid, signal.SIGKILL)
    tenant.process.wait(300)
    assert is_alive(child)
    with client(node) as calls:
        eventually(lambda: calls.get_allocation(allocation).use[0].pids == [child], "only the child is in it")
    assert states(node) == {allocation: "active"}
    refused = node.ctl("release", allocation, check=False)
    assert refused.returncode == 35
    assert "E305" in refused.stderr
    assert str(child) in refused.stderr
    os.kill(child, signal.SIGKILL)
    eventually(lambda: gone(node, allocation), "it goes with the child")
    tenant.end()


def test_a_child_that_outlives_its_allocation_gets_no_memory(node: DemoNode) -> None:
    """The allocation ends with the parent process. The driver calls of the child that outlives it get no
    memory.
    """
    script = f"exec 3<&0; (read go; exec {PROBE} fill --piece 64MiB) <&3 & exit 0"
    tenant = node.tenant(QUOTA, ["sh", "-c", script])
    tenant.process.wait(300)
    eventually(lambda: states(node) == {}, "the parent's end releases it")
    output, _ = tenant.process.communicate("go\n", timeout=300)
    assert '"CUDA_SUCCESS"' not in output
    assert '"total_bytes": 0' in output or '"total_bytes"' not in output, output


def test_a_run_of_a_missing_command_leaves_no_allocation(node: DemoNode) -> None:
    done = node.ctl("run", *QUOTA, "--", "no-such-program", check=False)
    assert done.returncode == 127
    eventually(lambda: states(node) == {}, "nothing stays allocated")


def test_a_run_ends_with_the_exit_code_or_signal_of_its_command(node: DemoNode) -> None:
    assert node.ctl("run", *QUOTA, "--", "sh", "-c", "exit 7", check=False).returncode == 7
    assert node.ctl("run", *QUOTA, "--", "sh", "-c", "kill -TERM $$", check=False).returncode == -15
    eventually(lambda: states(node) == {}, "nothing stays allocated")


def slow_alloc(node: DemoNode, source: str) -> subprocess.Popen[str]:
    """Starts a client and waits until its Allocate call is under way. The simulator makes the call slow."""
    simulate(
        *(node, "fault", "slow", "--function", "nvmlDeviceCreateGpuInstance*"),
        *("--microseconds", "1500000", "--count", "1"),
    )
    client = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], env=node.environment, cwd=ROOT, text=True
    )
    eventually(lambda: "allocating" in states(node).values(), "the daemon is at work on it")
    return client


CALL = """
    from vgpud.api.client import Client
    from vgpud.api.gen import vgpud_pb2 as pb
    asked = pb.AllocateRequest(isolation="hardware", memory_bytes=16 << 30, **{extra})
    asked.selector.indices.append(5)
    Client().allocate(asked)
"""


@pytest.mark.parametrize("extra", [{"bind_to_caller": True, "request_id": "bound"}, {}])
def test_an_allocation_of_a_killed_caller_without_a_request_id_is_released(
    node: DemoNode, extra: dict[str, object]
) -> None:
    """The allocation is bound to the killed caller, or has no request id. In both cases no later call could
    release it.
    """
    caller = slow_alloc(node, CALL.format(extra=extra))
    (allocation,) = states(node)
    caller.kill()
    caller.wait()
    assert states(node).get(allocation, "") in ("allocating", ""), "the call goes on to its end"
    eventually(lambda: gone(node, allocation), "what it made is released")
    with client(node) as calls:
        assert not calls.list_devices().devices[5].mig.instances


def test_an_allocation_of_a_killed_caller_is_found_by_its_request_id(node: DemoNode) -> None:
    caller = slow_alloc(node, CALL.format(extra={"request_id": "mine"}))
    (allocation,) = states(node)
    caller.kill()
    caller.wait()
    again = node.ctl(
        *("alloc", "--isolation", "hardware", "--memory", "16GiB", "--device", "5", "--request-id", "mine")
    )
    assert again.stdout.strip() == allocation
    assert states(node) == {allocation: "active"}
    release(node, allocation)


def test_vgpud_finds_tenants_that_ended_while_it_was_down(make_node: NodeMaker) -> None:
    """While vgpud is down, one tenant exits, one is killed, and one stays. After a stop and after a kill, the
    next start of vgpud notices both ends.
    """
    node = make_node()
    node.start()
    ending, first = holding(node)
    killed, second = holding(node)
    staying, third = holding(node)
    node.kill()
    assert ending.end()[0] == 0
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.end()
    node.start()
    eventually(lambda: states(node) == {third: "active"}, "those of the dead are released")
    assert not (node.run_dir / "leases" / first).exists()
    assert not (node.run_dir / "leases" / second).exists()
    assert staying.end()[0] == 0
    eventually(lambda: states(node) == {}, "and that of the living when it ends")


def test_sigterm_to_vgpud_leaves_tenants_and_helpers_running(make_node: NodeMaker) -> None:
    """The helpers inherit no descriptors of vgpud: an inherited socket or ledger lock would prevent the next
    start of vgpud.
    """
    node = make_node()
    node.start()
    tenant, _ = holding(node)
    mps, _ = holding(node, ["--isolation", "compute", "--memory", "1GiB", "--device", "1"])
    held, helpers = states(node), helper_pids(node)
    assert len(helpers) == 2, helpers
    for unit, pid in helpers.items():
        links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [link for link in links if "/state/" in link or "private" in link], unit
    assert node.stop() == 0
    assert not list(node.run_dir.glob("*.sock"))
    assert tenant.alive
    assert mps.alive
    assert helper_pids(node) == helpers
    node.start()
    assert states(node) == held
    assert helper_pids(node) == helpers
    tenant.end()
    mps.end()
    eventually(lambda: states(node) == {}, "they end")
    assert node.stop() == 0
    eventually(lambda: helper_pids(node) == {}, "with nothing allocated a stop leaves no helper")
    assert not any(is_alive(pid) for pid in helpers.values())


def test_a_killed_arbiter_is_restarted_and_its_tenants_register_again(make_node: NodeMaker) -> None:
    """The next call of a client makes vgpud restart the arbiter. The limits are unchanged, and the tenants
    connect again.
    """
    node = make_node()
    node.start()
    tenant, first = holding(node)
    (arbiter,) = helper_pids(node, "vgpud-arbiter").values()
    os.kill(arbiter, signal.SIGKILL)
    assert tenant.alive
    assert read_limits(node.run_dir / "leases" / first).devices[0].memory_bytes == GIB
    second = quota(node, 2)
    filled = node.tenant(QUOTA, [PROBE, "fill", "--piece", "64MiB"])
    answer = filled.line()
    assert answer["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0 < int(answer["total_bytes"]) <= GIB
    filled.end()
    with client(node) as calls:
        eventually(
            lambda: list(calls.get_allocation(first).use[0].pids) == [tenant.process.pid],
            "the running tenant is known again",
        )
    (again,) = helper_pids(node, "vgpud-arbiter").values()
    assert again != arbiter
    release(node, second.id)
    assert tenant.end()[0] == 0
    eventually(lambda: states(node) == {}, "everything can be released")


def test_a_killed_arbiter_is_restarted_without_a_call(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    tenant, _ = holding(node)
    (arbiter,) = helper_pids(node, "vgpud-arbiter").values()
    os.kill(arbiter, signal.SIGKILL)
    eventually(
        lambda: helper_pids(node, "vgpud-arbiter").get("vgpud-arbiter", arbiter) != arbiter, "it is back"
    )
    os.kill(tenant.process.pid, signal.SIGKILL)
    tenant.end()
    eventually(lambda: states(node) == {}, "the end of its tenant is noticed")
    with client(node) as calls:
        told = [one.sentence for one in calls.list_events().events if one.subject == "vgpu-arbiter"]
    assert told == ["vgpu-arbiter has ended: vgpud starts it again", "vgpu-arbiter runs again"]


@contextmanager
def earlier_arbiter(run_dir: Path) -> Iterator[None]:
    """Makes the running arbiter answer as that of a version that serves no lease whose folder is a link."""
    control = run_dir / "arbiter" / "control.sock"
    own, earlier = control.with_name("own.sock"), control.with_name("earlier.sock")
    refusal = struct.pack("<IIIIq", layout.MSG_ERROR, layout.VERSION, layout.NO_SLOT, 0, ENOTDIR)

    def answer(message: bytes) -> bytes:
        (kind,) = struct.unpack_from("<I", message)
        name = message[layout.MESSAGE_ALLOCATION :].split(b"\0", 1)[0].decode()
        if kind == layout.MSG_ADD and (run_dir / "leases" / name).is_symlink():
            return refusal.ljust(layout.MESSAGE_SIZE, b"\0")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(str(own))
            line.send(message)
            reply = bytearray(line.recv(layout.PROCESS_LIST_SIZE))
        (flags,) = struct.unpack_from("<I", reply, layout.MESSAGE_TURN_FLAGS)
        struct.pack_into("<I", reply, layout.MESSAGE_TURN_FLAGS, flags & ~layout.LIST_LINKS)
        return bytes(reply)

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            while True:
                line, _ = listener.accept()
                with line, suppress(OSError, struct.error):  # the arbiter or the client has ended
                    line.send(answer(line.recv(layout.MESSAGE_SIZE)), socket.MSG_NOSIGNAL)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(earlier))
        listener.listen(100)
        own.hardlink_to(control)
        earlier.replace(control)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_arbiter_that_runs_since_before_an_upgrade_serves_new_tenants(make_node: NodeMaker) -> None:
    node = make_node()
    (node.run_dir / "tenants" / "0" / "leases").mkdir(parents=True)
    node.start()
    leases = node.run_dir / "leases"
    first, linked = holding(node)
    (leases / linked).readlink()
    with earlier_arbiter(node.run_dir):
        second, plain = holding(node)
        assert not (leases / plain).is_symlink()
        with client(node) as calls:
            eventually(
                lambda: list(calls.get_allocation(plain).use[0].pids) == [second.process.pid],
                "the arbiter serves the tenant",
            )
        (arbiter,) = helper_pids(node, "vgpud-arbiter").values()
        os.kill(arbiter, signal.SIGKILL)
        eventually(
            lambda: helper_pids(node, "vgpud-arbiter").get("vgpud-arbiter", arbiter) != arbiter, "it is back"
        )
    third, later = holding(node)
    assert (leases / later).is_symlink()
    for tenant in (first, second, third):
        assert tenant.end()[0] == 0
    eventually(lambda: states(node) == {}, "everything is released")
    assert list(leases.iterdir()) == []


def test_memory_limits_hold_without_vgpud_and_the_arbiter(make_node: NodeMaker) -> None:
    """The limits hold while vgpud and the arbiter are down, because libvgpu reads them from the lease."""
    node = make_node()
    node.start()
    held = quota(node, 1)
    node.kill()
    (arbiter,) = helper_pids(node, "vgpud-arbiter").values()
    os.kill(arbiter, signal.SIGKILL)
    filled = subprocess.run(
        [PROBE, "fill", "--piece", "64MiB"],
        env={**node.environment, **held.edits.env, **held.edits.host_env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answer = json.loads(filled.stdout.splitlines()[0])
    assert answer["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0 < int(answer["total_bytes"]) <= GIB
    node.start()
    eventually(lambda: len(helper_pids(node, "vgpud-arbiter")) == 1, "a start finds the arbiter gone")
    release(node, held.id)


def test_a_killed_mps_daemon_fails_its_allocations_and_no_others(make_node: NodeMaker) -> None:
    """The clients of an MPS daemon end with it. vgpud marks their allocations as failed and reports them. A
    release then frees their room.
    """
    node = make_node()
    node.start()
    ask = ["--isolation", "compute", "--memory", "1GiB", "--device", "0"]
    tenant, bound = holding(node, ask)
    with client(node) as calls:
        after = calls.get_node().revision
    held = node.ctl_json("alloc", *ask)["id"]
    other = quota(node, selector={"indices": [1]})
    (daemon,) = helper_pids(node, "vgpud-mps@").values()
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: states(node).get(held) == "failed", "it is noticed")
    assert states(node)[other.id] == "active"
    status = node.ctl("status", check=False)
    assert status.returncode == 37
    assert held in status.stdout
    with client(node) as calls:
        failed = set()
        for event in calls.watch(after):
            if event.kind == "allocation_failed":
                failed.add(event.subject)
            if failed == {held, bound}:
                break
    tenant.process.kill()
    tenant.end()
    eventually(lambda: gone(node, bound), "bound to a process, it goes with it")
    assert node.ctl_json("alloc", *ask, "--request-id", "new")["state"] == "active"
    assert len(helper_pids(node, "vgpud-mps@")) == 1
    release(node, *states(node))
    assert node.ctl("status", check=False).returncode == 0
    assert node.stop() == 0
    assert helper_pids(node) == {}


def test_an_mps_daemon_killed_while_vgpud_is_down_is_noticed_at_the_start(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    held = node.ctl_json("alloc", "--isolation", "compute", "--memory", "1GiB", "--device", "0")["id"]
    node.kill()
    (daemon,) = helper_pids(node, "vgpud-mps@").values()
    os.kill(daemon, signal.SIGKILL)
    node.start()
    assert states(node)[held] in ("active", "failed")
    if states(node)[held] == "active":
        assert len(helper_pids(node, "vgpud-mps@")) == 1, "an active allocation has its daemon"
    release(node, held)
    assert node.stop() == 0
    assert helper_pids(node) == {}
