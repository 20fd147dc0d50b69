"""A program under a limit whose driver fails at any call, whose libvgpu has no memory, or whose slice is full
(each_failure.c).
"""

import subprocess
from pathlib import Path

import pytest

from tests.arbiter.conftest import made_card
from tests.arbiter.test_edges import WAIT_S
from tests.e2e.support import eventually
from tests.native.harness import BUILD, DRIVER, LIBVGPU, TEST_BUILD, Tenant
from tests.native.test_api import sanitized
from vgpud.lease import DeviceLimits, LeaseMemory, SharePolicy, read_activity, update_limits

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
        # by another name, because libvgpu answers each look-up in a libcuda.so
        driver = tmp_path / "driver.so"
        driver.symlink_to(BUILD / "sim" / "lib" / "libcuda.so.1")
        libraries = sanitized() if flavour == "sanitized" else (LIBVGPU,)
        more = {
            **card.tenant_variables(lease),
            "LD_PRELOAD": " ".join(map(str, libraries)),
            "ASAN_OPTIONS": "detect_leaks=0",
            "FAILING_DRIVER": str(driver),
            "VGPU_SIM_KERNEL_US": "10",
        }
        env = card.sim.environment(more)
        env["LD_LIBRARY_PATH"] = f"{TEST_BUILD / 'failing'}:{env['LD_LIBRARY_PATH']}"
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
