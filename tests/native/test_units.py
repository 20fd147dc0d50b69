"""Runs the C unit tests: accounting, limits, slots and the table under the sanitizers, descriptors of parked
memory, threads that touch a host buffer, reports of the swap thread, and turns of the arbiter's loop.
"""

import subprocess

import pytest

from tests.native.harness import TEST_BUILD

PROGRAMS = [
    "unit-thread",
    "unit-address-undefined",
    "unit-parked",
    "unit-hostbuf",
    "unit-swap",
    "arbiter-turns",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_unit_test_in_c_passes(program: str) -> None:
    done = subprocess.run(
        [TEST_BUILD / program], capture_output=True, text=True, check=False, timeout=300, env={}
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
