"""The pages of a lease, overwritten by root in a container or by a failing disk. Reading them returns
figures, or LEASE_FAILED.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud import lease_layout as layout
from vgpud.lease import read_limits, read_meters, read_usage
from vgpud.model.errors import ErrorCode, VgpuError

MOST = (1 << 63) - 1
HEAD = struct.pack("<II", layout.MAGIC, layout.VERSION)
#: Offsets in a page, and the bytes to write there.
CHANGES = st.lists(
    st.tuples(
        st.integers(0, layout.USAGE_SIZE), st.sampled_from([b"\xff" * 8, b"\0" * 8]) | st.binary(max_size=80)
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def lease() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


def page(size: int, changes: list[tuple[int, bytes]]) -> bytes:
    raw = bytearray(HEAD.ljust(size, b"\0"))
    for at, written in changes:
        place = at % max(1, size)
        raw[place : place + len(written)] = written
    return bytes(raw)


@given(
    st.sampled_from([0, 7, 88, layout.LIMITS_SIZE - 1, layout.LIMITS_SIZE, 5000]), CHANGES, st.integers(0, 17)
)
def test_any_limits_page_is_understood_or_refused(
    lease: Path, size: int, changes: list[tuple[int, bytes]], count: int
) -> None:
    told = [(layout.LIMITS_DEVICE_COUNT, struct.pack("<I", count))] if size > layout.LIMITS_DEVICES else []
    (lease / layout.LIMITS_FILE).write_bytes(page(size, [*told, *changes]))
    try:
        limits = read_limits(lease)
    except VgpuError as error:
        assert error.code is ErrorCode.LEASE_FAILED
    else:
        assert 0 < len(limits.devices) <= layout.MAX_DEVICES


@given(
    st.sampled_from([0, 7, 5000, layout.USAGE_SIZE - 1, layout.USAGE_SIZE, layout.USAGE_SIZE + 9]), CHANGES
)
def test_any_usage_page_is_understood_or_refused(
    lease: Path, size: int, changes: list[tuple[int, bytes]]
) -> None:
    (lease / layout.USAGE_FILE).write_bytes(page(size, changes))
    try:
        usage = read_usage(lease)
        meters = read_meters(lease, layout.MAX_DEVICES)
    except VgpuError as error:
        assert error.code is ErrorCode.LEASE_FAILED
    else:
        assert len(usage.processes) <= layout.MAX_SLOTS
        for ordinal in range(layout.MAX_DEVICES):
            assert 0 <= usage.device(ordinal).used_bytes <= MOST
        assert len(meters) == layout.MAX_DEVICES
