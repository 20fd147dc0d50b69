"""The scheduler against its models: see tests/native/unit/sched_model.c and sched_exact.c."""

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
    """Pairs that share devices with singles, chains and rings of them, caps, lent time, no limit."""
    model("shares")


def test_kernels_that_wait_for_each_other_on_two_devices_make_progress() -> None:
    """A process on each: alone, beside another such tenant, beside one of one device."""
    model("ranks")


def test_each_tenant_gets_its_weight_for_any_length_of_turns_and_kernels() -> None:
    """Within 0.6 % over 40 s, and in windows of 4 s but for the turn or kernel that its edges cut."""
    model("weights", program="sched-exact")


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_tenant_starves_at_any_priority(seed: int) -> None:
    """A second, and the turns that were before it in the order."""
    model("starving", str(seed), program="sched-exact")
