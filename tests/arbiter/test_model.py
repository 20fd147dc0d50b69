"""The scheduler against its model: see tests/native/unit/sched_model.c."""

import subprocess

import pytest

from tests.native.harness import TEST_BUILD


def model(*words: str) -> None:
    done = subprocess.run(
        [str(TEST_BUILD / "sched-model"), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(1, 9))
def test_never_two_holders_and_never_none_while_someone_waits(seed: int) -> None:
    model(str(seed), "40000")


def test_tenants_of_one_and_of_several_devices_get_their_weights() -> None:
    """Pairs that share devices with singles, chains and rings of them, caps, lent time, no limit."""
    model("shares")


def test_kernels_that_wait_for_each_other_on_two_devices() -> None:
    """A process on each: alone, beside another such tenant, beside one of one device."""
    model("ranks")
