"""Meters of leases: the files of a lease are read each time, and the meter is rebuilt only if a file has
changed.
"""

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from vgpud import lease_layout as layout
from vgpud.lease import DeviceLimits, write_lease
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import ANYONE, Allocation, Mode, Owner, Request, Slice, State
from vgpud.modes.lease_meters import LeaseMeters


def lease(leases: Path, uid: int) -> tuple[Allocation, Path]:
    slices = (Slice("GPU-0", Mode.PRELOAD, GIB, None),)
    limits = [DeviceLimits("GPU-0", GIB)]
    files = write_lease(leases, "a", limits, uid, os.getegid())
    return Allocation("a", Request("r", Owner(0, 0)), State.ACTIVE, slices), files / "usage"


CARD = (2 * GIB,)


def count(usage: Path, nanoseconds: int) -> None:
    with usage.open("r+b") as file:
        file.seek(layout.USAGE_COMPUTE)
        file.write(struct.pack("<Q", nanoseconds))


@pytest.mark.parametrize("uid", [os.geteuid(), ANYONE])
def test_meters_of_a_lease_are_read_again_only_after_a_change(tmp_path: Path, uid: int) -> None:
    allocation, usage = lease(tmp_path, uid)
    meters = LeaseMeters(tmp_path)
    first = meters.read(allocation, CARD)
    assert meters.read(allocation, CARD) is first
    count(usage, 7)
    (now,) = meters.read(allocation, CARD)
    assert now.compute is not None and now.compute.granted_ns == 7
    moved = replace(allocation, slices=(replace(allocation.slices[0], device_uuid="GPU-1"),))
    assert meters.read(moved, CARD)[0].device_uuid == "GPU-1"


def test_false_figures_in_a_lease_count_at_most_as_the_memory_of_the_card(tmp_path: Path) -> None:
    allocation, usage = lease(tmp_path, os.geteuid())
    with usage.open("r+b") as file:
        file.seek(layout.USAGE_SLOT_HIGH)
        file.write(struct.pack("<I", layout.MAX_SLOTS))
        file.seek(layout.USAGE_SLOTS)
        file.write(b"\xff" * layout.MAX_SLOTS * layout.SLOT_SIZE)
    (meter,) = LeaseMeters(tmp_path).read(allocation, CARD)
    assert (meter.memory_used_bytes, meter.memory_peak_bytes) == (2 * GIB, 2 * GIB)


def test_a_read_of_a_removed_lease_fails_even_if_an_earlier_read_succeeded(tmp_path: Path) -> None:
    allocation, usage = lease(tmp_path, os.geteuid())
    meters = LeaseMeters(tmp_path)
    meters.read(allocation, CARD)
    usage.unlink()
    with pytest.raises(VgpuError) as caught:
        meters.read(allocation, CARD)
    assert caught.value.code is ErrorCode.LEASE_FAILED
