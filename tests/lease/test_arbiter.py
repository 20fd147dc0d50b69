"""The arbiter with live tenants: registration, reclaiming memory, restart, absence, hostile input."""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lease.conftest import Node, eventually, lease_used
from tests.native.harness import (
    ARBITER,
    CONTEXT_BYTES,
    GIB,
    GID,
    MIB,
    PROBE,
    TEST_BUILD,
    UID,
    UUIDS,
    Tenant,
    connect_to_arbiter,
)
from vgpud import lease_layout as layout
from vgpud.lease import DeviceLimits, close_lease, read_usage, remove_lease, update_limits, write_lease
from vgpud.model.errors import ErrorCode, VgpuError

HOLD = (PROBE, "hold", "256MiB", "--then-wait-on-stdin")
HELD = CONTEXT_BYTES + 256 * MIB


def held_by(process: "subprocess.Popen[str]") -> dict[str, object]:
    assert process.stdout is not None
    line: dict[str, object] = json.loads(process.stdout.readline())
    assert line["state"] == "held", line
    return line


def test_a_tenant_registers_and_is_listed(node: Node) -> None:
    lease = node.lease()
    process = node.tenant(lease, *HOLD)
    held_by(process)
    eventually(lambda: node.client.list("a1") == (process.pid,))
    (slot,) = read_usage(lease).processes
    assert slot.registered
    assert lease_used(lease) == HELD
    process.communicate("")
    eventually(lambda: lease_used(lease) == 0 and node.client.list("a1") == ())


def test_the_memory_of_a_killed_process_is_given_back(node: Node) -> None:
    lease = node.lease()
    processes = [node.tenant(lease, PROBE, "hold", "100MiB", "--then-wait-on-stdin") for _ in range(5)]
    for process in processes:
        held_by(process)
    assert lease_used(lease) == 5 * (CONTEXT_BYTES + 100 * MIB)
    for process in processes:
        process.kill()
        process.wait()
    eventually(lambda: lease_used(lease) == 0)
    assert read_usage(lease).device(0).peak_bytes == CONTEXT_BYTES + 100 * MIB


@pytest.mark.parametrize("fault", ["FAKE_DIE_AT_CALL", "FAKE_DIE_IN_CONTEXT"])
def test_the_memory_of_a_process_killed_inside_the_driver_is_given_back(node: Node, fault: str) -> None:
    lease = node.lease()
    process = node.tenant(lease, *HOLD, **{fault: "3"})
    assert process.wait(300) == -signal.SIGKILL
    eventually(lambda: lease_used(lease) == 0 and read_usage(lease).processes == ())


def test_the_memory_of_processes_killed_at_random_is_given_back(node: Node) -> None:
    lease = node.lease(memory_bytes=4 * GIB)
    dice = random.Random(5)
    for _ in range(12):
        processes = [node.tenant(lease, PROBE, "churn", "100000000", "--piece", "64MiB") for _ in range(2)]
        eventually(lambda: len(node.client.list("a1")) == 2)
        threading.Event().wait(dice.random() * 0.05)
        for process in processes:
            process.kill()
            process.communicate()
        eventually(lambda: lease_used(lease) == 0 and read_usage(lease).processes == ())


def test_the_memory_of_a_process_is_given_back_at_its_exec(node: Node) -> None:
    lease = node.lease()
    script = f"exec {PROBE} hold 1MiB --seconds 0"
    assert Tenant(lease).run("bash", "-c", script).returncode == 0
    code = (
        "import ctypes, os, sys\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "cuda = ctypes.CDLL(None)\n"
        "context = ctypes.c_void_p()\n"
        "assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "print('in', flush=True); sys.stdin.readline()\n"
        "os.execvp('sleep', ['sleep', '60'])\n"
    )
    process = node.tenant(lease, "python3", "-c", code)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "in\n"
    assert lease_used(lease) == CONTEXT_BYTES
    process.stdin.write("go\n")
    process.stdin.flush()
    eventually(lambda: lease_used(lease) == 0)
    assert process.poll() is None


def test_a_restarted_arbiter_finds_all_processes(node: Node) -> None:
    lease = node.lease()
    first, second = (node.tenant(lease, *HOLD) for _ in range(2))
    held_by(first)
    held_by(second)
    node.kill_arbiter()
    first.kill()
    first.wait()
    node.start_arbiter()
    # the new arbiter adopts the process before it registers again
    eventually(lambda: node.client.list("a1") == (second.pid,))
    eventually(lambda: lease_used(lease) == HELD)
    eventually(lambda: [p.registered for p in read_usage(lease).processes] == [True])
    second.kill()
    second.wait()
    eventually(lambda: lease_used(lease) == 0)


def test_tenants_run_and_keep_their_memory_without_the_arbiter(node: Node) -> None:
    node.kill_arbiter()
    lease = node.lease(serve=False)
    process = node.tenant(lease, *HOLD)
    line = held_by(process)
    assert line["total_bytes"] == GIB
    filled = Tenant(lease).run(PROBE, "fill", "--piece", "32MiB")
    assert json.loads(filled.stdout)["total_bytes"] == GIB - HELD - CONTEXT_BYTES
    node.start_arbiter()
    eventually(lambda: node.client.list("a1") == (process.pid,))
    # a process that filled the lease has ended: its memory is given back
    eventually(lambda: lease_used(lease) == HELD)
    process.kill()
    process.wait()
    eventually(lambda: lease_used(lease) == 0)


def test_memory_of_an_ended_process_is_usable_again_without_the_arbiter(node: Node) -> None:
    lease = node.lease()
    process = node.tenant(lease, PROBE, "hold", "800MiB", "--then-wait-on-stdin")
    held_by(process)
    node.kill_arbiter()
    process.kill()
    process.wait()
    filled = Tenant(lease).run(PROBE, "fill", "--piece", "32MiB")
    assert json.loads(filled.stdout)["total_bytes"] == GIB - CONTEXT_BYTES


def test_a_silent_arbiter_blocks_no_tenant(node: Node) -> None:
    lease = node.lease()
    assert node.arbiter is not None
    node.arbiter.send_signal(signal.SIGSTOP)
    process = node.tenant(lease, *HOLD)
    held_by(process)
    node.arbiter.send_signal(signal.SIGCONT)
    eventually(lambda: node.client.list("a1") == (process.pid,))


def test_a_second_arbiter_on_the_same_run_folder_exits(node: Node) -> None:
    command = [str(ARBITER), "--run-dir", str(node.run_dir), "--foreground"]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 3
    assert "another arbiter" in second.stderr


def test_the_arbiter_tells_systemd_that_it_is_ready_and_that_its_loop_works(tmp_path: Path) -> None:
    notify = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(notify))
        inbox.settimeout(300)
        env = {"NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "20000"}
        started = subprocess.run([ARBITER, "--run-dir", tmp_path], env=env, check=False)
        assert started.returncode == 0
        assert [inbox.recv(64) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    (pid,) = [p for p in Path("/proc").glob("[0-9]*") if str(tmp_path).encode() in cmdline(p)]
    os.kill(int(pid.name), signal.SIGTERM)


def cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_the_arbiter_refuses_a_wrong_command_line() -> None:
    for arguments in ([], ["--run-dir"], ["--nonsense"], ["--run-dir", "/tmp", "more"]):
        done = subprocess.run([ARBITER, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2


def test_the_arbiter_sleeps_while_nothing_happens(node: Node) -> None:
    lease = node.lease()
    process = node.tenant(lease, *HOLD)
    held_by(process)
    assert node.arbiter is not None
    status = Path(f"/proc/{node.arbiter.pid}/status")

    def switches() -> list[str]:
        return [line for line in status.read_text().splitlines() if "ctxt_switches" in line]

    def sleeps() -> bool:
        before = switches()
        threading.Event().wait(0.5)
        return switches() == before

    eventually(sleeps)  # the arbiter may still have work from the tenant's start


def test_the_arbiter_serves_a_thousand_leases(node: Node) -> None:
    for i in range(1000):
        write_lease(node.run_dir / "leases", f"m{i}", [DeviceLimits(UUIDS[0], GIB)], UID, GID)
    node.kill_arbiter()
    node.start_arbiter()
    process = node.tenant(node.run_dir / "leases" / "m999", *HOLD)
    held_by(process)
    eventually(lambda: node.client.list("m999") == (process.pid,))


def test_a_running_tenant_gets_its_new_limit(node: Node) -> None:
    lease = node.lease()
    process = node.tenant(lease, *HOLD)
    held_by(process)
    update_limits(lease, [DeviceLimits(UUIDS[0], 300 * MIB)])  # a limit below the memory in use
    seen = Tenant(lease).run(PROBE, "info")
    # the context of a new process does not fit, which is an ordinary out-of-memory error
    assert seen.returncode == 4
    update_limits(lease, [DeviceLimits(UUIDS[0], 2 * GIB)])
    info = json.loads(Tenant(lease).run(PROBE, "info").stdout)
    assert (info["total_bytes"], info["free_bytes"]) == (2 * GIB, 2 * GIB - HELD - CONTEXT_BYTES)


def test_a_closed_lease_refuses_new_memory_and_ends_no_process(node: Node) -> None:
    lease = node.lease()
    process = node.tenant(lease, *HOLD)
    held_by(process)
    close_lease(lease)
    refused = Tenant(lease).run(PROBE, "info")
    assert refused.returncode == 5
    assert "the lease is closed" in refused.stderr
    node.client.remove("a1")
    asyncio.run(remove_lease(node.run_dir / "leases", "a1"))
    out, _ = process.communicate("")
    assert json.loads(out.splitlines()[-1])["result"] == "CUDA_SUCCESS"


def test_adding_a_lease_of_an_unknown_or_unsafe_name_is_refused(node: Node) -> None:
    assert node.client.list("nothing") == ()
    node.client.remove("nothing")
    for name in ("nothing", "../arbiter", ".hidden", "a/b", ""):
        with pytest.raises(VgpuError) as refused:
            node.client.add(name)
        assert refused.value.code is ErrorCode.HELPER_FAILED
    (node.run_dir / "leases" / "link").symlink_to("/etc")
    with pytest.raises(VgpuError):
        node.client.add("link")


# --- hostile tenants, against an arbiter under the sanitizers


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "leases").mkdir()
    node = Node(tmp_path, TEST_BUILD / "arbiter-sanitized")
    node.start_arbiter()
    yield node
    assert node.arbiter is not None
    assert node.arbiter.poll() is None, "the arbiter died"
    node.end()


def talk(path: Path, message: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(300)
        line.connect(str(path))
        line.send(message)
        return line.recv(4096)


def register(slot: int, kind: int = 1, version: int = layout.VERSION) -> bytes:
    return struct.pack("<IIIIq", kind, version, slot, 0, 0).ljust(layout.MESSAGE_SIZE, b"\0")


def test_a_registration_for_an_unlocked_slot_is_refused(checked: Node) -> None:
    sock = checked.lease() / layout.ARBITER_SOCKET
    messages = [register(0), register(layout.MAX_SLOTS), register(0xFFFFFFFF)]
    messages += [register(0, 99), register(0, 1, 99)]
    for message in messages:
        reply = talk(sock, message)
        assert struct.unpack_from("<I", reply)[0] == 3
    other = checked.tenant(sock.parent, *HOLD)
    held_by(other)
    (value,) = struct.unpack_from("<q", talk(sock, register(0)), layout.MESSAGE_VALUE)
    assert value == 1  # EPERM: another process holds the slot
    eventually(lambda: checked.client.list("a1") == (other.pid,))


def test_the_arbiter_survives_random_bytes_on_its_sockets(checked: Node) -> None:
    lease = checked.lease()
    dice = random.Random(11)
    control = checked.run_dir / "arbiter" / "control.sock"
    whole = layout.MESSAGE_SIZE
    for i in range(300):
        path = control if i % 3 == 0 else lease / layout.ARBITER_SOCKET
        size = dice.choice([0, 1, whole - 1, whole, whole + 1, 5000])
        noise = bytearray(dice.randbytes(size))
        if size >= 8 and i % 2:
            noise[:8] = struct.pack("<II", dice.choice([1, 2, 16, 17, 18, 99]), layout.VERSION)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(str(path))
            line.send(noise)
    assert checked.client.ready()


def test_the_arbiter_survives_an_overwritten_or_truncated_usage_page(checked: Node) -> None:
    lease = checked.lease()
    checked.lease("a2")
    neighbour = checked.tenant(checked.run_dir / "leases" / "a2", *HOLD)
    held_by(neighbour)
    dice = random.Random(3)
    for size in (layout.USAGE_SIZE, 5000, 0, 1 << 20):
        with (lease / "usage").open("r+b") as usage:
            usage.truncate(size)
            usage.write(dice.randbytes(min(size, layout.USAGE_SIZE)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            connect_to_arbiter(line, lease)
        assert checked.client.list("a1") == ()
    assert lease_used(lease.parent / "a2") == HELD


def test_a_usage_page_that_grows_is_cut_back(checked: Node) -> None:
    """All tenants share the file system of the page. The arbiter cuts the page back to its size. The tenant's
    figures stay, and its processes keep running.
    """
    lease = checked.lease()
    process = checked.tenant(lease, *HOLD)
    held_by(process)
    usage = lease / "usage"
    with usage.open("r+b") as grown:
        grown.truncate(1 << 40)
        eventually(lambda: usage.stat().st_size == layout.USAGE_FILE_SIZE)
        for _ in range(20):
            grown.seek(0, os.SEEK_END)
            grown.write(bytes(1 << 20))
            grown.flush()
        eventually(lambda: usage.stat().st_size == layout.USAGE_FILE_SIZE)
        os.posix_fallocate(grown.fileno(), 0, 64 << 20)
        eventually(lambda: usage.stat().st_size == layout.USAGE_FILE_SIZE)
    assert lease_used(lease) == HELD
    checked.kill_arbiter()
    with usage.open("r+b") as grown:
        grown.truncate(1 << 30)
    checked.start_arbiter()
    eventually(lambda: usage.stat().st_size == layout.USAGE_FILE_SIZE)
    process.communicate("")
    eventually(lambda: lease_used(lease) == 0)


def test_the_arbiter_serves_tenants_after_twice_the_bounded_number_of_connections(checked: Node) -> None:
    sock = checked.lease() / layout.ARBITER_SOCKET
    lines = []
    for _ in range(2 * layout.MAX_SLOTS + 50):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(str(sock))
        lines.append(line)
    assert checked.client.ready()
    for line in lines:
        line.close()
    process = checked.tenant(sock.parent, *HOLD)
    held_by(process)
    eventually(lambda: checked.client.list("a1") == (process.pid,))


def test_the_arbiter_skips_invalid_lease_folders_at_its_start(checked: Node) -> None:
    checked.kill_arbiter()
    leases = checked.run_dir / "leases"
    (leases / "empty").mkdir()
    (leases / "fifo").mkdir()
    os.mkfifo(leases / "fifo" / "limits")
    (leases / "file").write_text("x")
    good = checked.lease("good", serve=False)
    checked.start_arbiter()
    process = checked.tenant(good, *HOLD)
    held_by(process)
    eventually(lambda: checked.client.list("good") == (process.pid,))
