"""A program under a limit whose driver fails at any call, whose libvgpu has no memory, or whose slice is full
(each_failure.c).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arbiter.conftest import Card, made_card
from tests.arbiter.test_edges import WAIT_S
from tests.e2e.support import eventually
from tests.native.harness import BUILD, DRIVER, LIBVGPU, TEST_BUILD, Tenant
from tests.native.test_api import sanitized
from vgpud.lease import (
    DeviceLimits,
    LeaseMemory,
    SharePolicy,
    SwapPhase,
    read_activity,
    read_swaps,
    read_usage,
    update_limits,
)

FAMILIES = 10
OUT_OF_MEMORY, INVALID_DEVICE = "2", "101"
CREATIONS = (
    "cuDevicePrimaryCtxRetain",
    "cuCtxCreate",
    "cuCtxCreate_v2",
    "cuCtxCreate_v3",
    "cuCtxCreate_v4",
    "cuGreenCtxCreate",
)


def failing(card: Card, lease: Path, folder: Path, libraries: tuple[Path, ...]) -> dict[str, str]:
    """The environment of a tenant whose driver is fake/failing.c before the simulated one."""
    driver = folder / "driver.so"  # by another name, because libvgpu answers each look-up in a libcuda.so
    driver.symlink_to(BUILD / "sim" / "lib" / "libcuda.so.1")
    more = {
        **card.tenant_variables(lease),
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "FAILING_DRIVER": str(driver),
        "VGPU_SIM_KERNEL_US": "10",
    }
    env = card.sim.environment(more)
    return env | {"LD_LIBRARY_PATH": f"{TEST_BUILD / 'failing'}:{env['LD_LIBRARY_PATH']}"}


@pytest.mark.parametrize(
    ("flavour", "engine", "program", "memory"),
    [
        ("shipped", "gate", "each-failure", LeaseMemory.FIXED),
        ("shipped", "cut", "each-failure-per-thread", LeaseMemory.HERE),
        ("sanitized", "gate", "each-failure-per-thread", LeaseMemory.HERE),
        ("sanitized", "cut", "each-failure", LeaseMemory.FIXED),
    ],
)
def test_after_any_failure_all_that_the_driver_holds_is_charged_and_the_process_can_be_suspended(
    tmp_path: Path, flavour: str, engine: str, program: str, memory: LeaseMemory
) -> None:
    with made_card(engine) as card:
        lease = card.lease("a", SharePolicy.HARD, 100)
        limits = [DeviceLimits(card.uuids[0], 2 << 30, 10000, SharePolicy.HARD)]
        update_limits(lease, limits, memory=memory)
        env = failing(card, lease, tmp_path, sanitized() if flavour == "sanitized" else (LIBVGPU,))
        command = [str(TEST_BUILD / program), *(["evictable"] if memory is LeaseMemory.HERE else [])]
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        card.processes.append(process)
        assert process.stdout is not None
        counts = [process.stdout.readline() for _ in range(FAMILIES)]
        update_limits(lease, limits, away=True)
        card.client.look(lease.name)
        eventually(lambda: read_activity(lease).quiet, "it is quiet")
        _, said = process.communicate("\n", timeout=WAIT_S)
        assert (process.returncode, said) == (0, "")
        for count in counts:
            family, calls, _, pages = count.split()
            assert int(calls) >= 8 and int(pages) >= 1, family


@pytest.mark.parametrize("flavour", ["shipped", "sanitized"])
def test_every_wrapped_call_returns_the_error_of_the_driver_for_any_arguments(
    tmp_path: Path, lease: Path, flavour: str
) -> None:
    """For null pointers and for zeros, but where libvgpu refuses first: pitched memory beyond the limit, and
    a device that does not exist.
    """
    driver = tmp_path / "driver.so"
    driver.symlink_to(DRIVER / "libcuda.so.1")
    tenant = Tenant(lease, sanitized() if flavour == "sanitized" else (LIBVGPU,))
    path = f"{TEST_BUILD / 'failing'}:{DRIVER}"
    done = tenant.run(TEST_BUILD / "every-call", "failing", LD_LIBRARY_PATH=path, FAILING_DRIVER=str(driver))
    assert (done.returncode, done.stderr) == (0, "")
    refused = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert refused == {
        **dict.fromkeys(("cuMemAllocPitch zeros", "cuMemAllocPitch_v2 zeros"), OUT_OF_MEMORY),
        **dict.fromkeys((f"{call} zeros" for call in CREATIONS), INVALID_DEVICE),
    }


# calls of an eviction and of the way back, in their order
FAILING = (
    "cuMemHostRegister_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventSynchronize",
    "cuMemUnmap",
    "cuMemMap",
    "cuMemcpyHtoDAsync_v2",
)
EVICTED = """
import ctypes as c, os, sys
u, size, context, memory = c.CDLL("libcuda.so.1"), 5 << 20, c.c_void_p(), [c.c_uint64() for _ in range(3)]
def call(name, *words):
    code = u[name](*words)
    assert code == 0, (name, code)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
call("cuCtxSetCurrent", context)
for one in memory:
    call("cuMemAlloc_v2", c.byref(one), c.c_size_t(size))
print("ready", flush=True)
for line in sys.stdin:
    patterns = [os.urandom(size) for _ in memory]
    for at, pattern in zip(memory, patterns):
        call("cuMemcpyHtoD_v2", at, pattern, c.c_size_t(size))
    failing = line.strip().encode()
    u.fail_elsewhere(failing)
    print("filled", flush=True)
    sys.stdin.readline()
    failed = not u.fail_is_due()
    for at, pattern in zip(memory, patterns):
        back = c.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", back, at, c.c_size_t(size))
        assert back.raw == pattern, failing
    print(failed, flush=True)
"""


@pytest.mark.parametrize("call", FAILING)
def test_memory_keeps_its_contents_if_a_driver_call_fails_in_an_eviction(tmp_path: Path, call: str) -> None:
    """The driver fails once on the way to the host or back. The tenant has its memory again at its resume."""
    with made_card() as card:
        lease = card.lease("a", SharePolicy.HARD, 100)
        limits = [DeviceLimits(card.uuids[0], 2 << 30, 10000, SharePolicy.HARD)]
        update_limits(lease, limits, memory=LeaseMemory.HERE)

        def moves(out: bool, *phases: SwapPhase) -> None:
            update_limits(lease, limits, away=out, memory=LeaseMemory.OUT if out else LeaseMemory.HERE)
            card.client.look(lease.name)
            eventually(lambda: read_swaps(lease)[0].phase in phases, f"it is {phases}", WAIT_S)

        command, env = [sys.executable, "-c", EVICTED], failing(card, lease, tmp_path, (LIBVGPU,))
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        card.processes.append(process)
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def ask(word: str) -> str:
            stdin.write(f"{word}\n")
            stdin.flush()
            return stdout.readline().strip()

        assert stdout.readline() == "ready\n"
        used = read_usage(lease).device(0).used_bytes
        assert ask(call) == "filled"
        moves(True, SwapPhase.OUT, SwapPhase.REFUSED)
        moves(False, SwapPhase.HERE)
        assert ask("check") == "True"
        assert read_usage(lease).device(0).used_bytes == used
        process.communicate(timeout=WAIT_S)  # it ends by itself, and writes its coverage
        assert process.returncode == 0
