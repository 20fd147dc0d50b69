"""Programs with rare behaviour (tests/gpu/edges.c) run inside a compute share as they do without one."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arbiter.conftest import Card
from tests.e2e.support import eventually
from tests.native.harness import GIB, LIBVGPU, MIB, PROBE, TEST_BUILD
from vgpud import lease_layout as layout
from vgpud.lease import DeviceLimits, SharePolicy, read_usage, write_lease

OPERATING_SYSTEM = 304  # CUDA_ERROR_OPERATING_SYSTEM
WAIT_S = 300  # seconds; a program that takes longer hangs


def lease_of(card: Card, served: bool = True) -> Path:
    devices = [DeviceLimits(card.uuids[0], 2 * GIB, 2000, SharePolicy.HARD)]
    lease = write_lease(card.run_dir / "leases", "a", devices, uid=os.getuid(), gid=os.getgid())
    if served:
        card.client.add("a")
    return lease


def environment(card: Card, lease: Path) -> dict[str, str]:
    more = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease), "VGPU_SIM_KERNEL_US": "200"}
    return card.sim.environment(more)


def run(
    card: Card, lease: Path, program: str, *words: str, preload: str = ""
) -> "subprocess.CompletedProcess[str]":
    env = environment(card, lease)
    return subprocess.run(
        [str(TEST_BUILD / program), *words],
        env=env | {"LD_PRELOAD": f"{preload} {env['LD_PRELOAD']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def locked_slots(lease: Path) -> int:
    """Number of the lease's slots that other processes have locked by fcntl(2)."""
    count = 0
    with (lease / layout.USAGE_FILE).open("r+b") as usage:
        for slot in range(layout.MAX_SLOTS):
            at = layout.USAGE_SLOTS + slot * layout.SLOT_SIZE
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
            answer = fcntl.fcntl(usage, fcntl.F_GETLK, asked)
            count += struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK
    return count


@pytest.mark.parametrize("program", ["edges", "edges120000", "edges1048576"])
def test_a_program_with_much_thread_local_storage_launches(card: Card, program: str) -> None:
    done = run(card, lease_of(card), program, "launch")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_in_which_libvgpu_cannot_start_its_thread_is_refused_at_its_first_call(card: Card) -> None:
    """libvgpu's own thread reads the messages about time slices. Without it each launch would wait for
    ever.
    """
    done = run(card, lease_of(card), "edges", "launch", preload=str(TEST_BUILD / "libnothreads.so"))
    assert done.returncode == 1
    assert "libvgpu: no thread" in done.stderr
    assert f"cuInit(0): {OPERATING_SYSTEM}" in done.stderr


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_program_without_standard_streams_writes_to_no_descriptor_of_libvgpu(
    card: Card, tmp_path: Path, closed: str
) -> None:
    lease, verdict = lease_of(card), tmp_path / "verdict"
    command = f"exec {TEST_BUILD / 'edges'} stdio {verdict} {closed}"
    subprocess.run(["bash", "-c", command], env=environment(card, lease), check=False, timeout=WAIT_S)
    assert verdict.read_text() == "right\n"
    head = (lease / layout.USAGE_FILE).read_bytes()[:8]
    assert head == layout.MAGIC.to_bytes(4, "little") + layout.VERSION.to_bytes(4, "little")


def test_a_fork_during_the_first_call_of_another_thread_succeeds(card: Card) -> None:
    """The stand-in arbiter accepts the connection and does not reply, so the first cuInit is waiting
    during the fork.
    """
    lease = lease_of(card, served=False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(lease / layout.ARBITER_SOCKET))
    listener.listen()
    program = subprocess.Popen(
        [str(TEST_BUILD / "edges"), "fork"],
        env=environment(card, lease),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with listener, listener.accept()[0] as connection:
            connection.recv(4096)
            _, error = program.communicate(b"x", timeout=WAIT_S)
        assert (program.returncode, error) == (0, b"")
    finally:
        program.kill()


def test_cancelled_threads_leave_the_gate_unchanged(card: Card) -> None:
    done = run(card, lease_of(card), "edges", "cancel")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_single_unmap_of_an_imported_and_a_charged_mapping_returns_the_charge(card: Card) -> None:
    done = run(card, lease_of(card), "edges", "unmap")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_memory_pool_on_a_device_outside_the_lease_is_refused(card: Card) -> None:
    done = run(card, lease_of(card), "edges", "outside")
    assert (done.returncode, done.stderr) == (0, "")


def closes_its_files(card: Card, lease: Path) -> "subprocess.Popen[str]":
    """Starts a program that has closed all its files by closefrom(3), and that ends with its standard
    input.
    """
    program = subprocess.Popen(
        [str(TEST_BUILD / "edges"), "close"],
        env=environment(card, lease),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "closed\n"
    return program


def test_a_program_that_closed_all_its_files_keeps_its_slot(card: Card) -> None:
    """The program's memory stays counted and the program stays registered while other processes of the lease
    start and end.
    """
    lease = lease_of(card)
    program = closes_its_files(card, lease)
    try:
        # each of these processes registers after the arbiter has seen the end of the program's connection
        for _ in range(3):
            assert run(card, lease, "edges", "unmap").returncode == 0
            held = [process for process in read_usage(lease).processes if process.pid == program.pid]
            assert [process.devices[0].used_bytes for process in held] == [64 * MIB]
            eventually(lambda: card.client.list("a") == (program.pid,), "the other process is forgotten")
    finally:
        program.communicate("", timeout=WAIT_S)
    assert program.returncode == 0
    eventually(lambda: read_usage(lease).processes == (), "its slot goes with it")


def test_a_program_that_closed_all_its_files_keeps_its_slot_when_the_arbiter_restarts(card: Card) -> None:
    """A new arbiter finds processes by the file locks of their slots, and closefrom(3) releases this lock."""
    lease = lease_of(card)
    program = closes_its_files(card, lease)
    try:
        card.kill_arbiter()
        eventually(lambda: locked_slots(lease) == 1, "libvgpu locks the slot again")
        card.start_arbiter()
        card.client.add("a")
        assert [p.devices[0].used_bytes for p in read_usage(lease).processes] == [64 * MIB]
        eventually(lambda: card.client.list("a") == (program.pid,), "the arbiter knows the process")
        assert run(card, lease, "edges", "unmap").returncode == 0
        held = [p for p in read_usage(lease).processes if p.pid == program.pid]
        assert [p.devices[0].used_bytes for p in held] == [64 * MIB]
    finally:
        program.communicate("", timeout=WAIT_S)
    eventually(lambda: read_usage(lease).processes == (), "its slot goes with it")


def test_a_program_that_closes_all_its_files_while_the_arbiter_is_down_locks_its_slot_again(
    card: Card,
) -> None:
    lease = lease_of(card)
    card.kill_arbiter()
    program = closes_its_files(card, lease)
    try:
        eventually(lambda: locked_slots(lease) == 1, "libvgpu locks the slot again")
        card.start_arbiter()
        card.client.add("a")
        eventually(lambda: card.client.list("a") == (program.pid,), "the arbiter knows the process")
        assert [p.devices[0].used_bytes for p in read_usage(lease).processes] == [64 * MIB]
    finally:
        program.communicate("", timeout=WAIT_S)


def test_a_process_that_calls_exec_gives_its_slot_back(card: Card) -> None:
    lease = lease_of(card)
    probe = [str(PROBE), "hold", "64MiB", "--then-wait-on-stdin"]
    driver = "print(ctypes.CDLL('libcuda.so.1').cuInit(0), flush=True)"
    script = f"import ctypes, os, sys; {driver}; os.execv(sys.argv[1], sys.argv[1:])"
    program = subprocess.Popen(
        [sys.executable, "-c", script, *probe],
        env=environment(card, lease),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "0\n"
        assert program.stdout.readline(), "the probe holds its memory"
        eventually(lambda: card.client.list("a") == (program.pid,), "it is registered once")
        eventually(lambda: len(read_usage(lease).processes) == 1, "it has one slot")
    finally:
        program.communicate("", timeout=WAIT_S)
