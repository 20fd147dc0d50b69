"""Accounting, limits, slots and table: runs their C tests under the sanitizers."""

import subprocess

import pytest

from tests.native.harness import TEST_BUILD


@pytest.mark.parametrize("program", ["unit-thread", "unit-address-undefined"])
def test_a_native_unit_test_passes(program: str) -> None:
    done = subprocess.run(
        [TEST_BUILD / program], capture_output=True, text=True, check=False, timeout=300, env={}
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
