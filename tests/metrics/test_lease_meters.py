"""The fast reader of lease meters returns the same figures as the complete one, whatever a tenant has
written.
"""

import os
import struct
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpud import lease_layout as layout
from vgpud.lease import DeviceLimits, read_meters, read_usage, write_lease
from vgpud.model.quantity import GIB
from vgpud.model.view import ComputeTime

DEVICES = 3
WORD = st.one_of(st.integers(0, 2**20), st.integers(2**49, 2**51), st.integers(0, 2**64 - 1))


def lease(folder: Path) -> Path:
    limits = [DeviceLimits(f"GPU-{i}", GIB) for i in range(DEVICES)]
    if not (folder / "a").exists():
        write_lease(folder, "a", limits, os.geteuid(), os.getegid())
    return folder / "a"


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    high=st.sampled_from([0, 1, 2, 3, layout.MAX_SLOTS, 2**32 - 1]),
    owners=st.lists(st.sampled_from([0, 1, layout.OWNER_SELF]), min_size=3, max_size=3),
    words=st.lists(WORD, min_size=4 * DEVICES * 8, max_size=4 * DEVICES * 8),
    compute=st.lists(WORD, min_size=6 * DEVICES, max_size=6 * DEVICES),
    length=st.sampled_from([0, 10, 2000, layout.USAGE_SIZE]),
)
def test_the_quick_reader_of_a_leases_meters_agrees_with_the_full_reader(
    tmp_path: Path, high: int, owners: list[int], words: list[int], compute: list[int], length: int
) -> None:
    folder = lease(tmp_path)
    raw = bytearray(layout.USAGE_SIZE)
    struct.pack_into("<I", raw, layout.USAGE_SLOT_HIGH, high)
    each = DEVICES * 8
    struct.pack_into(f"<{each}Q", raw, layout.USAGE_RETIRED, *words[:each])
    for slot, owner in enumerate(owners):
        at = layout.USAGE_SLOTS + slot * layout.SLOT_SIZE
        struct.pack_into("<I", raw, at, owner)
        struct.pack_into(f"<{each}Q", raw, at + layout.SLOT_DEVICES, *words[(slot + 1) * each :][:each])
    for device in range(DEVICES):
        struct.pack_into(
            "<6Q", raw, layout.USAGE_COMPUTE + device * layout.COMPUTE_SIZE, *compute[device * 6 :][:6]
        )
    (folder / layout.USAGE_FILE).write_bytes(raw[:length])
    thorough, cheap = read_usage(folder), read_meters(folder, DEVICES)
    assert [meter.memory for meter in cheap] == [thorough.device(i) for i in range(DEVICES)]
    assert {meter.processes for meter in cheap} == {len(thorough.processes)}
    for device, meter in enumerate(cheap):
        shown = compute[device * 6 :][:6] if length == layout.USAGE_SIZE else [0] * 6
        granted, used, waited, overrun, _, bypasses = (min(word, 2**62) for word in shown)
        assert meter.compute == ComputeTime(granted, used, waited, overrun, bypasses)
