"""vgpud copies the measured size of a context from lease to lease, so later processes need not wait for
NVML to start.
"""

import asyncio
import os
import struct
import subprocess
from pathlib import Path

import pytest

from tests.native.harness import CONTEXT_BYTES, GIB, GID, MIB, PROBE, UID, UUIDS, Tenant
from vgpud import lease_layout as layout
from vgpud.lease import ContextCosts, DeviceLimits, remove_lease, write_lease
from vgpud.model.tenancy import ANYONE

BOTH = [DeviceLimits(uuid, GIB) for uuid in UUIDS]


def say(usage: Path, *mib: int) -> None:
    with usage.open("r+b") as page:
        page.seek(layout.USAGE_CONTEXT_MIB)
        page.write(struct.pack(f"<{len(mib)}I", *mib))


def said(usage: Path) -> tuple[int, ...]:
    return struct.unpack_from("<3I", usage.read_bytes(), layout.USAGE_CONTEXT_MIB)


def test_the_known_context_size_of_a_device_is_the_smallest_that_was_measured_on_it(tmp_path: Path) -> None:
    costs = ContextCosts()
    # the 1 MiB in lease c is too small for a context and is ignored
    for name, found in (("a", (518, 0)), ("b", (64, 300)), ("c", (600, 1))):
        write_lease(tmp_path, name, BOTH, UID, GID)
        say(tmp_path / name / "usage", *found)
        costs.learn(tmp_path / name)
    assert UUIDS[0] in costs
    turned = write_lease(tmp_path, "d", BOTH[::-1], UID, GID)
    costs.seed(tmp_path / "d")
    assert said(turned / "usage") == (300, 64, 0)
    pod = write_lease(tmp_path, "e", BOTH[:1], ANYONE, ANYONE)
    say(pod / "usage", 700)
    costs.seed(tmp_path / "e")
    # vgpud does not overwrite a figure that the lease's own processes measured
    assert said(pod / "usage") == (700, 0, 0)


def test_missing_or_damaged_leases_give_no_context_size(tmp_path: Path) -> None:
    costs = ContextCosts()
    folder = write_lease(tmp_path, "a", BOTH, UID, GID)
    os.truncate(folder / "usage", 5)
    costs.learn(folder)
    costs.seed(folder)
    (folder / "limits").write_bytes(b"x")
    costs.learn(folder)
    asyncio.run(remove_lease(tmp_path, "a"))
    costs.learn(folder)
    costs.seed(folder)
    assert UUIDS[0] not in costs


@pytest.mark.parametrize("known", [True, False])
def test_the_first_process_of_a_lease_waits_for_nvml_only_if_the_context_size_is_unknown(
    tmp_path: Path, known: bool
) -> None:
    """NVML never starts in this test. A process waits for NVML only if the size of a context is unknown."""
    folder = write_lease(tmp_path, "a", BOTH[:1], UID, GID)
    say(folder / "usage", CONTEXT_BYTES // MIB if known else 0)
    process = Tenant(folder).start(PROBE, "hold", "16MiB", "--seconds", "0", FAKE_NVML_NEVER_STARTS="1")
    try:
        process.communicate(timeout=300 if known else 1)
        assert process.returncode == 0
        waited = False
    except subprocess.TimeoutExpired:
        waited = True
    process.kill()
    process.communicate()
    assert waited == (not known)
