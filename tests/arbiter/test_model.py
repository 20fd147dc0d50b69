"""The scheduler against its model: see tests/native/unit/sched_model.c."""

import subprocess

import pytest

from tests.native.harness import TEST_BUILD


@pytest.mark.parametrize("seed", range(1, 9))
def test_never_two_holders_and_never_none_while_someone_waits(seed: int) -> None:
    done = subprocess.run(
        [str(TEST_BUILD / "sched-model"), str(seed), "40000"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
