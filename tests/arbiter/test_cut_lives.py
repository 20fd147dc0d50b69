"""Tenants under engine `cut` with endless kernels, restarts of the arbiter, suspensions and stopped
threads.
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.arbiter.accounts import device_works, divide, done_ns, have_turns, is_cut_to
from tests.arbiter.conftest import LONG, Card, counters
from tests.arbiter.test_cut import CONSERVING, HARD, RawTenant, fault, table
from tests.conditions import needs, unmet
from tests.e2e.support import eventually
from tests.native.harness import TEST_BUILD
from vgpud import lease_layout as layout
from vgpud.lease import read_activity, update_limits

UUID_BYTES = 16


def is_off(lease: Path) -> bool:
    return table(lease)[0] == 1


def repeated_calls(card: Card, pid: int) -> int:
    """Counts how often the driver got an order to disable channels that were already disabled. They must then
    be enabled as often.
    """
    uses = [use for one in card.sim.dump()["processes"] if one["pid"] == pid for use in one["uses"]]
    return sum(use["channels_repeated"] for use in uses)


def put(card: Card, lease: Path, share: float, away: bool) -> None:
    update_limits(lease, card.limits(HARD, share), away=away)
    card.client.look(lease.name)


@contextmanager
def frozen(threads: Sequence[int]) -> Iterator[None]:
    """Stops each of the threads by ptrace(2), and detaches them at the end, because a traced thread that dies
    is not reaped.
    """
    seize, interrupt, detach = 0x4206, 0x4207, 17
    libc = ctypes.CDLL(None, use_errno=True)
    for thread in threads:
        if libc.ptrace(seize, thread, None, None) != 0 or libc.ptrace(interrupt, thread, None, None) != 0:
            unmet("ptrace", os.strerror(ctypes.get_errno()))
        os.waitpid(thread, 0x40000000)  # waits with __WALL until the thread has stopped
    try:
        yield
    finally:
        for thread in threads:
            libc.ptrace(detach, thread, None, None)


def test_an_endless_kernel_leaves_other_tenants_their_share(cut_card: Card) -> None:
    endless, other = (cut_card.lease(name, CONSERVING, 50) for name in "ab")
    stuck = replace(cut_card, kernel_us=int(LONG * 1e6)).spin(endless, LONG)
    eventually(lambda: counters(endless)["turns"] > 0, "it runs")
    cut_card.spin(other, LONG)
    divide(other, endless, least=30, most=70)
    device_works(cut_card, stuck.pid)


def test_preempted_tenants_resume_after_the_arbiter_dies(cut_card: Card) -> None:
    leases = [cut_card.lease(name, HARD, 5) for name in "abc"]
    processes = [cut_card.spin(lease, LONG) for lease in leases]
    eventually(lambda: all(map(is_off, leases)), "all are off")
    cut_card.kill_arbiter()
    eventually(lambda: not any(is_off(lease) for lease in leases), "all are back")
    for process in processes:
        device_works(cut_card, process.pid)


@pytest.mark.parametrize("restarted", [False, True], ids=["puts-itself-back", "is-adopted"])
@pytest.mark.parametrize("moment", ["disables", "disabled", "enables", "enabled"])
def test_a_tenant_resumes_if_the_arbiter_dies_right_before_or_after_disabling_its_channels(
    cut_card: Card, moment: str, restarted: bool
) -> None:
    """The arbiter dies between its record of a driver call and the call, or between the call and the record
    of its result. The next arbiter does not know the state of the channels. The driver counts how often a
    channel is disabled, so the new arbiter must not disable it again.
    """
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: counters(lease)["turns"] > 3, "it has turns")
    late = ["--function", f"FIFO_DISABLE_CHANNELS.{moment}", "--count", "1", "--microseconds", "600000000"]
    fault(cut_card, "slow", *late)
    eventually(lambda: not cut_card.sim.dump()["faults"], "the call waits")
    assert is_off(lease)
    cut_card.kill_arbiter()
    if restarted:
        cut_card.start_arbiter()
    eventually(lambda: not is_off(lease), "it is back")
    device_works(cut_card, process.pid)
    assert repeated_calls(cut_card, process.pid) == 0


def test_a_preempted_process_that_the_restarted_arbiter_finds_late_resumes(
    cut_card: Card, tmp_path: Path
) -> None:
    """A restarted arbiter may fail to find a process when it starts. The process registers later, with its
    channels disabled by the earlier arbiter. They must not be disabled a second time.
    """
    hidden = tmp_path / "hidden"
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: counters(lease)["turns"] > 3, "it has turns")
    late = ["--function", "FIFO_DISABLE_CHANNELS.enables", "--count", "1", "--microseconds", "600000000"]
    fault(cut_card, "slow", *late)
    eventually(lambda: not cut_card.sim.dump()["faults"], "it is off, and stays so")
    cut_card.kill_arbiter()
    hidden.touch()
    preloads = f"{TEST_BUILD / 'libno-file.so'}:{cut_card.sim.environment()['LD_PRELOAD']}"
    cut_card.start_arbiter("env", f"LD_PRELOAD={preloads}", f"NO_PIDFD_WHILE={hidden}")
    hidden.unlink()
    have_turns(lease, turns=3)
    device_works(cut_card, process.pid)
    assert repeated_calls(cut_card, process.pid) == 0


def test_an_arbiter_call_that_hangs_in_the_driver_stops_time_slices_on_its_own_device_only(
    cut_card: Card,
) -> None:
    """While a call hangs, the tenant of the other device starts and gets its slices. After the end of the
    arbiter the tenant of the hanging call runs again.
    """
    hung, other = cut_card.lease("a", HARD, 5), cut_card.lease("b", HARD, 25, first_device=1)
    process = cut_card.spin(hung, LONG)
    eventually(lambda: counters(hung)["turns"] > 3, "it has turns")
    late = ["--function", "FIFO_DISABLE_CHANNELS.enabled", "--count", "1", "--microseconds", "600000000"]
    fault(cut_card, "slow", *late)
    eventually(lambda: not cut_card.sim.dump()["faults"], "a call hangs")
    turns = counters(hung)["turns"]
    cut_card.spin(other, LONG)
    eventually(lambda: counters(other)["turns"] > 20, "the other device has turns")
    assert counters(hung)["turns"] <= turns + 1
    cut_card.kill_arbiter()
    eventually(lambda: not is_off(hung), "it is back")
    device_works(cut_card, process.pid)


def test_a_process_whose_arbiter_is_down_enables_only_channels_that_are_disabled(cut_card: Card) -> None:
    lease = cut_card.lease("a", CONSERVING, 50, devices=2)
    process = cut_card.spin(lease, LONG)
    device_works(cut_card, process.pid)
    cut_card.kill_arbiter()
    # the table now shows the process as preempted on the second device, where it has no channels
    with (lease / layout.USAGE_FILE).open("r+b") as page:
        os.pwrite(page.fileno(), struct.pack("<I", 2), layout.CHANNELS_AT + layout.CHANNELS_OFF)
    eventually(lambda: table(lease)[0] == 0, "it has looked")
    assert repeated_calls(cut_card, process.pid) == 0


def test_a_preempted_tenant_whose_link_thread_waits_in_the_driver_resumes(cut_card: Card) -> None:
    """libvgpu's link thread, which talks to the arbiter, also records CUDA events. While the tenant is
    preempted, the driver may block this thread, so that it does not notice the end of the arbiter.
    """
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: counters(lease)["turns"] > 3, "it has turns")
    fault(cut_card, "hang", "--function", "cuCtxRecordEvent")
    have_turns(lease, turns=3)
    eventually(lambda: is_off(lease), "it is off")
    cut_card.kill_arbiter()
    eventually(lambda: not is_off(lease), "it is back")
    fault(cut_card, "clear")  # the driver answers again, now that the tenant is on the device
    device_works(cut_card, process.pid)


def test_a_tenant_suspended_while_preempted_leaves_the_driver_and_continues_when_resumed(
    cut_card: Card,
) -> None:
    lease = cut_card.lease("a", HARD, 10)
    process = cut_card.spin(lease, LONG)
    for _ in range(3):
        eventually(lambda: is_off(lease), "it is off")
        put(cut_card, lease, 10, away=True)
        eventually(lambda: read_activity(lease).quiet, "nothing of it is in the driver")
        put(cut_card, lease, 10, away=False)
        device_works(cut_card, process.pid)
    is_cut_to(cut_card, lease, 10, process.pid)
    assert process.poll() is None


@needs("ptrace")
def test_a_tenant_whose_libvgpu_threads_are_stopped_is_held_to_its_share(cut_card: Card) -> None:
    """The stopped threads send the arbiter no messages, while the launching thread keeps running."""
    lease, other = cut_card.lease("a", HARD, 25), cut_card.lease("b", CONSERVING, 50)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: counters(lease)["turns"] > 3, "it has turns")
    threads = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
    with frozen([thread for thread in threads if thread != process.pid]):
        is_cut_to(cut_card, lease, 25, process.pid)
        cut_card.spin(other, LONG)
        divide(lease, other, least=10, most=50)


def test_a_group_whose_first_channel_is_freed_while_it_is_off_is_enabled_and_disabled_once(
    cut_card: Card,
) -> None:
    lease = cut_card.lease("a", HARD, 5)
    tenant = RawTenant(cut_card, lease)
    tenant.say("launch 1 600000000")
    eventually(lambda: is_off(lease), "it is off")
    tenant.free(tenant.channels[0])
    have_turns(lease, turns=3)
    device_works(cut_card, tenant.process.pid)
    assert repeated_calls(cut_card, tenant.process.pid) == 0


def test_a_process_whose_control_file_is_absent_for_a_moment_keeps_the_cut_engine(
    cut_card: Card, tmp_path: Path
) -> None:
    """A process has no control file for a moment while it exits, or after an exec that the arbiter has not
    noticed. The arbiter then counts the tenant as preempted.
    """
    hidden = tmp_path / "hidden"
    cut_card.kill_arbiter()
    preloads = f"{TEST_BUILD / 'libno-file.so'}:{cut_card.sim.environment()['LD_PRELOAD']}"
    cut_card.start_arbiter("env", f"LD_PRELOAD={preloads}", f"NO_FILE_WHILE={hidden}")
    lease, other = cut_card.lease("a", HARD, 10), cut_card.lease("b", CONSERVING, 50)
    cut_card.spin(lease, LONG)
    cut_card.spin(other, LONG)
    eventually(lambda: is_off(lease), "it is off")
    hidden.touch()
    have_turns(other, turns=5)
    hidden.unlink()
    assert cut_card.client.registered("a").refusal == ""
    eventually(lambda: is_off(lease), "it is off again")
    have_turns(lease, turns=3)
    assert cut_card.client.registered("a").refusal == ""


def test_a_tenant_whose_control_file_stays_absent_gets_the_gate_engine(cut_card: Card) -> None:
    """The tenant's table names a file descriptor that the tenant does not have, so the arbiter cannot preempt
    it.
    """
    lease = cut_card.lease("a", HARD, 10)
    cut_card.spin(lease, LONG)
    eventually(lambda: is_off(lease), "it is off")
    at = layout.CHANNELS_AT + layout.CHANNELS_GROUPS + UUID_BYTES
    with (lease / layout.USAGE_FILE).open("r+b") as page:
        os.pwrite(page.fileno(), struct.pack("<I", 999), at)
    eventually(
        lambda: cut_card.client.registered("a").refusal == os.strerror(errno.EBADF).lower(), "given up"
    )


CAPTURES = """
import ctypes, signal
from tests.sim.cuda import Driver
PER_THREAD, RELAXED = ctypes.c_void_p(2), 2
driver = Driver()
driver.init()
driver.context()
kernel, graph = driver.function(), ctypes.c_void_p()
driver("cuStreamBeginCapture_v2", PER_THREAD, RELAXED)
driver("cuStreamEndCapture_ptsz", None, ctypes.byref(graph))
driver.kernel_us(KERNEL_MS * 1e3)
driver.launch(kernel)
signal.pause()
"""


def test_a_capture_that_ends_through_another_name_of_its_stream_is_no_longer_counted(cut_card: Card) -> None:
    """In functions with _ptsz, NULL and CU_STREAM_PER_THREAD name the same stream. While libvgpu counts a
    capture as open, it records no event for a kernel. A capture counted for ever would make the tenant seem
    idle, and the arbiter would preempt it before its kernel ends.
    """
    lease, kernel_ms = cut_card.lease("a", HARD, 50), 500
    env = {"LD_PRELOAD": str(cut_card.sim.build / "lib" / "libvgpu.so"), "VGPU_LEASE": str(lease)}
    command = [sys.executable, "-c", f"KERNEL_MS = {kernel_ms}{CAPTURES}"]
    with subprocess.Popen(command, env=cut_card.sim.environment(env)) as process:
        try:
            eventually(lambda: done_ns(cut_card, process.pid) >= 0.9e6 * kernel_ms, "the kernel runs")
        finally:
            process.kill()


CAPTURE_AFTER_PAUSE = """
import ctypes, time
from tests.sim.cuda import Driver
driver = Driver()
driver.init()
driver.context()
kernel, stream, graph = driver.function(), ctypes.c_void_p(), ctypes.c_void_p()
driver("cuStreamCreate", ctypes.byref(stream), 1)
for _ in range(30):
    driver.launch(kernel)
    time.sleep(0.003)  # libvgpu begins to look
    driver("cuStreamBeginCapture_v2", stream, 0)
    time.sleep(0.008)  # the capture is in progress when the look reaches the driver
    driver("cuLaunchKernel", kernel, 1, 1, 1, 32, 1, 1, 0, stream, None, None)
    driver("cuStreamEndCapture", stream, ctypes.byref(graph))
"""


@pytest.mark.parametrize("looks_by", ["cuCtxRecordEvent", "cuCtxSynchronize"])
def test_a_stream_capture_that_begins_while_libvgpu_looks_for_work_is_not_invalidated(
    cut_card: Card, looks_by: str, tmp_path: Path
) -> None:
    """libvgpu looks for unfinished work by a driver call that is refused while a stream of the context is
    captured, and that invalidates the capture. Drivers before CUDA 12.5 do not have cuCtxRecordEvent.
    """
    lease = cut_card.lease("a", HARD, 50)
    env = {"LD_PRELOAD": str(cut_card.sim.build / "lib" / "libvgpu.so"), "VGPU_LEASE": str(lease)}
    command = [sys.executable, "-c", CAPTURE_AFTER_PAUSE]
    if looks_by == "cuCtxSynchronize":
        old = (
            (cut_card.sim.build / "sim" / "lib" / "libcuda.so.1")
            .read_bytes()
            .replace(b"\0cuCtxRecordEvent\0", b"\0cuCtxRecordEvenX\0")
        )
        (tmp_path / "libcuda.so.1").write_bytes(old)
        env["LD_LIBRARY_PATH"] = str(tmp_path)
    fault(cut_card, "slow", "--function", looks_by, "--microseconds", "5000")
    subprocess.run(command, env=cut_card.sim.environment(env), check=True, timeout=300)
