"""Processes under engine `cut`: clients of MPS; fork, exec and eviction while preempted; channels of ended
processes.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.arbiter.accounts import device_works, is_cut_to, is_held_to
from tests.arbiter.conftest import LONG, Card, counters
from tests.arbiter.test_cut import GROUP, HARD, table
from tests.arbiter.test_cut_lives import is_off
from tests.e2e.support import eventually
from vgpud import lease_layout as layout
from vgpud.lease import LeaseMemory, SwapPhase, read_swaps, update_limits

# One thread computes, and waits in the driver while the process is preempted. Another thread follows commands
# from standard input.
PROGRAM = """
import ctypes, os, signal, sys, threading
from tests.sim.cuda import Driver
driver, context, back = Driver(), ctypes.c_void_p(), ctypes.create_string_buffer(1 << 20)
driver.init()
driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
driver("cuCtxSetCurrent", context)
pattern, kernel, memory = os.urandom(1 << 20), driver.function(), driver.alloc(64 << 20)
driver("cuMemcpyHtoD_v2", ctypes.c_uint64(memory), pattern, ctypes.c_size_t(1 << 20))
driver.kernel_us(1000)
def compute():
    driver("cuCtxSetCurrent", context)
    while True:
        driver.launch(kernel, 20)
        driver("cuCtxSynchronize")
threading.Thread(target=compute, daemon=True).start()
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            signal.pause()
        print(child, flush=True)
    elif line == "exec\\n":
        os.execv(sys.argv[1], sys.argv[1:])
    else:
        driver("cuMemcpyDtoH_v2", back, ctypes.c_uint64(memory), ctypes.c_size_t(1 << 20))
        print(back.raw == pattern, flush=True)
"""


@contextmanager
def obeying(card: Card, lease: Path) -> Iterator["subprocess.Popen[str]"]:
    env = {
        "LD_PRELOAD": str(card.sim.build / "lib" / "libvgpu.so"),
        "VGPU_LEASE": str(lease),
        "VGPU_SIM_KERNEL_US": "1000",
    }
    spin = (str(card.sim.build / "bin" / "vgpu-spin"), "--kernel-us", "1000", "--seconds", str(LONG))
    command = [sys.executable, "-c", PROGRAM, *spin]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=card.sim.environment(env), stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            eventually(lambda: len(table(lease)[1]) == 1, "its channels are listed")
            eventually(lambda: counters(lease)["turns"] > 3, "it has turns")
            yield process
        finally:
            process.kill()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def ask(process: "subprocess.Popen[str]", line: str) -> str:
    tell(process, line)
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def stays_off(card: Card, lease: Path) -> Iterator[None]:
    """Keeps the tenant preempted by stopping the arbiter."""
    assert card.arbiter is not None
    for _ in range(100):
        eventually(lambda: is_off(lease), "it is off")
        card.arbiter.send_signal(signal.SIGSTOP)
        if is_off(lease):
            break
        card.arbiter.send_signal(signal.SIGCONT)
    try:
        assert is_off(lease)
        yield
    finally:
        card.arbiter.send_signal(signal.SIGCONT)


def clients(lease: Path) -> set[int]:
    """The driver's client handles in the tables of the tenant's processes. The table of an ended process
    stays until the arbiter clears its slot.
    """
    return {row[1] for slot in range(4) for row in table(lease, slot)[1]}


def test_a_client_of_mps_keeps_its_share_by_the_gate(cut_card: Card) -> None:
    """The channels of an MPS client belong to the server, so the arbiter cannot disable them."""
    pipe = cut_card.run_dir / "p"
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(cut_card.run_dir / "l")}
    cut_card.sim.run(["nvidia-cuda-mps-control", "-d"], env)
    try:
        lease = cut_card.lease("a", HARD, 25)
        words = [f"{name}={value}" for name, value in env.items()]
        cut_card.spin(lease, LONG, around=("env", *words))
        is_held_to(lease, 25)
        assert table(lease) == (0, [])
    finally:
        os.kill(int((pipe / "nvidia-cuda-mps-control.pid").read_text()), signal.SIGKILL)


def test_a_tenant_that_forks_while_preempted_goes_on(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 10)
    with obeying(cut_card, lease) as process:
        with stays_off(cut_card, lease):
            children = [int(ask(process, "fork")) for _ in range(3)]
            assert is_off(lease)
        device_works(cut_card, process.pid)
        is_cut_to(cut_card, lease, 10, process.pid)
        assert ask(process, "check") == "True"
        for child in children:
            os.kill(child, signal.SIGKILL)
        device_works(cut_card, process.pid)


def test_a_program_that_a_preempted_process_executes_has_the_tenants_share(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 10)
    with obeying(cut_card, lease) as process:
        ((_, before, *_),) = table(lease)[1]
        with stays_off(cut_card, lease):
            tell(process, "exec")
            eventually(lambda: b"vgpu-spin" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "it execs")
        eventually(lambda: clients(lease) - {before}, "it has channels of its own")
        device_works(cut_card, process.pid)
        is_cut_to(cut_card, lease, 10, process.pid)


def test_a_tenant_evicted_while_preempted_keeps_its_memory(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 10)
    limits = cut_card.limits(HARD, 10)

    def moves(out: bool) -> None:
        memory, wanted = (LeaseMemory.OUT, SwapPhase.OUT) if out else (LeaseMemory.HERE, SwapPhase.HERE)
        update_limits(lease, limits, away=out, memory=memory)
        cut_card.client.look(lease.name)
        eventually(lambda: {swap.phase for swap in read_swaps(lease)} == {wanted}, f"all is {wanted.name}")

    update_limits(lease, limits, memory=LeaseMemory.HERE)
    with obeying(cut_card, lease) as process:
        for _ in range(3):
            eventually(lambda: is_off(lease), "it is off")
            moves(out=True)
            moves(out=False)
            device_works(cut_card, process.pid)
            assert ask(process, "check") == "True"
        is_cut_to(cut_card, lease, 10, process.pid)


def test_channels_of_an_ended_process_that_a_tenant_still_lists_are_refused(cut_card: Card) -> None:
    """A tenant lists the channels of its ended process beside those of its running one."""
    lease, other = cut_card.lease("a", HARD, 10), cut_card.lease("b", HARD, 50)
    first = cut_card.spin(lease, LONG)
    eventually(lambda: len(table(lease)[1]) == 1, "its channels are listed")
    (stale,) = table(lease)[1]
    first.kill()
    first.wait()
    honest = cut_card.spin(other, LONG)
    process = cut_card.spin(lease, LONG)

    def new_slots() -> list[int]:
        """Slots that list groups of the second process. The second process gets another slot than the first
        if the arbiter has not yet cleared the first one's slot.
        """
        clients = {slot: [row[1] for row in table(lease, slot)[1]] for slot in range(2)}
        return [slot for slot, found in clients.items() if found not in ([], [stale[1]])]

    eventually(new_slots, "so are the new ones")
    head = layout.CHANNELS_AT + new_slots()[0] * layout.CHANNELS_SIZE
    at = head + layout.CHANNELS_GROUPS
    uuid = (lease / layout.USAGE_FILE).read_bytes()[at:][:16]
    with (lease / layout.USAGE_FILE).open("r+b") as page:
        os.pwrite(page.fileno(), GROUP.pack(uuid, *stale), at + GROUP.size)
        os.pwrite(page.fileno(), struct.pack("<I", 2), head + layout.CHANNELS_COUNT)
    eventually(lambda: cut_card.client.registered("a").refusal != "", "calls with them were refused")
    assert cut_card.client.registered("b").refusal == ""
    device_works(cut_card, honest.pid)
    device_works(cut_card, process.pid)
