"""The scheduler against its models in tests/native/unit: sched_model.c and sched_exact.c."""

import subprocess

import pytest

from tests.native.harness import TEST_BUILD


def model(*words: str, program: str = "sched-model") -> None:
    done = subprocess.run(
        [str(TEST_BUILD / program), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_device_has_one_holder_whenever_a_tenant_waits(seed: int) -> None:
    model(str(seed), "40000")


def test_tenants_of_one_and_of_several_devices_get_their_weights() -> None:
    """Tenants of two devices beside tenants of one, in chains and in rings, with hard shares, with lent time
    and without a limit.
    """
    model("shares")


def test_kernels_that_wait_for_each_other_on_two_devices_make_progress() -> None:
    """The tenant has a process on each device. It runs alone, beside another such tenant, and beside a tenant
    of one device.
    """
    model("ranks")


def test_each_tenant_gets_its_weight_for_any_length_of_turns_and_kernels() -> None:
    """Within 0.6 % over 40 s. In windows of 4 s the error is at most the slice or kernel at the window's
    edges.
    """
    model("weights", program="sched-exact")


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_tenant_starves_at_any_priority(seed: int) -> None:
    """A tenant waits at most a second, and the slices of the tenants before it in the run queue."""
    model("starving", str(seed), program="sched-exact")
