"""The room vgpud/lease alone: files, the sequence lock, hostile figures."""

import asyncio
import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conditions import needs
from tests.examples import examples
from tests.fusefile import locked_in_the_kernel
from tests.lease.conftest import eventually
from tests.native.harness import GIB, GID, UID, UUIDS
from vgpud import lease_layout as layout
from vgpud.lease import (
    ArbiterClient,
    DeviceLimits,
    ProcessSwap,
    SharePolicy,
    SwapPhase,
    close_lease,
    list_leases,
    read_limits,
    read_swaps,
    read_usage,
    remove_graves,
    remove_lease,
    update_limits,
    write_lease,
)
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import ANYONE

DEVICES = (
    DeviceLimits(UUIDS[0], 4 * GIB, 2500, SharePolicy.HARD, 3),
    DeviceLimits(UUIDS[1], GIB, priority=-2),
)


def test_a_written_lease_is_read_back(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    limits = read_limits(folder)
    assert (limits.allocation, limits.closed, limits.devices) == ("a1", False, DEVICES)
    assert read_usage(folder).processes == ()
    assert list_leases(tmp_path) == {"a1"}


@needs("root")
def test_a_leases_files_have_the_tenants_owner_and_modes(tmp_path: Path) -> None:
    os.umask(0o077)
    try:
        folder = write_lease(tmp_path, "a1", DEVICES, 1234, 4321)
    finally:
        os.umask(0o022)

    def mode(path: Path) -> tuple[int, int, int]:
        about = path.stat()
        return stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid

    assert mode(folder) == (0o711, 0, 0)
    assert mode(folder / "limits") == (0o644, 0, 0)
    assert mode(folder / "usage") == (0o600, 1234, 4321)


def test_an_update_of_the_limits_is_in_place_and_ends_with_an_even_sequence_number(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    inode = (folder / "limits").stat().st_ino
    smaller = (DeviceLimits(UUIDS[0], GIB), DEVICES[1])
    update_limits(folder, smaller)
    limits = read_limits(folder)
    assert limits.devices == smaller
    assert (folder / "limits").stat().st_ino == inode
    assert limits.generation % 2 == 0
    assert limits.generation > 2


def test_a_tenant_of_unknown_uid_can_write_its_usage_and_nothing_else(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = write_lease(tmp_path, "a1", DEVICES, ANYONE, ANYONE)
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("limits", "usage", ".", "..")}
    assert modes == {"limits": 0o644, "usage": 0o666, ".": 0o711, "..": 0o700}
    assert list_leases(tmp_path) == {"a1"}


def test_a_lease_of_an_unknown_uid_is_read_changed_and_removed(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, ANYONE, ANYONE)
    smaller = (DeviceLimits(UUIDS[0], GIB), DEVICES[1])
    assert write_lease(tmp_path, "a1", smaller, ANYONE, ANYONE) == folder
    assert read_limits(tmp_path / "a1") == read_limits(folder)
    update_limits(tmp_path / "a1", DEVICES)
    assert read_limits(folder).devices == DEVICES
    assert read_usage(tmp_path / "a1").processes == ()
    close_lease(tmp_path / "a1")
    assert read_limits(folder).closed
    asyncio.run(remove_lease(tmp_path, "a1"))
    assert list(tmp_path.iterdir()) == []


def test_the_next_update_of_the_limits_overwrites_an_interrupted_one(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    with (folder / "limits").open("r+b") as file:
        file.seek(layout.LIMITS_GENERATION)
        file.write(struct.pack("<Q", 7))
    update_limits(folder, DEVICES)
    assert read_limits(folder).generation == 10


def test_a_rewritten_lease_keeps_its_files(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    inodes = [(folder / n).stat().st_ino for n in ("limits", "usage")]
    assert write_lease(tmp_path, "a1", DEVICES, UID, GID) == folder
    assert [(folder / n).stat().st_ino for n in ("limits", "usage")] == inodes


def test_a_lease_is_closed_and_removed_with_its_leftovers(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    close_lease(folder)
    close_lease(folder)
    assert read_limits(folder).closed
    with pytest.raises(VgpuError) as refused:
        update_limits(folder, DEVICES)
    assert refused.value.code is ErrorCode.LEASE_FAILED
    asyncio.run(remove_lease(tmp_path, "a1"))
    asyncio.run(remove_lease(tmp_path, "a1"))
    close_lease(folder)
    (tmp_path / ".a2.new").mkdir()  # a folder that an interrupted write left
    (tmp_path / ".a3.gone").mkdir()  # a folder that an interrupted removal left
    assert list_leases(tmp_path) == frozenset()
    asyncio.run(remove_graves(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert list_leases(tmp_path / "nowhere") == frozenset()


@pytest.mark.parametrize(
    "bad",
    [DeviceLimits(UUIDS[0], 0), DeviceLimits(UUIDS[0], 1 << 60), DeviceLimits(UUIDS[0], GIB, 0)],
    ids=["nothing", "huge", "no-share"],
)
def test_a_lease_with_impossible_limits_is_refused(tmp_path: Path, bad: DeviceLimits) -> None:
    with pytest.raises(VgpuError) as refused:
        write_lease(tmp_path, "a1", [bad], UID, GID)
    assert refused.value.code is ErrorCode.IMPOSSIBLE
    assert list(tmp_path.iterdir()) == []


def test_an_update_of_a_lease_with_other_devices_is_refused(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    with pytest.raises(VgpuError):
        update_limits(folder, DEVICES[::-1])


@needs("root", "fuse")
def test_a_tenant_that_locks_its_usage_file_in_the_kernel_does_not_delay_the_removal(tmp_path: Path) -> None:
    """vgpud renames the lease's folder at once. The folder is removed when the file is no longer locked in
    the kernel.
    """
    (tmp_path / "leases").mkdir()
    folder = write_lease(tmp_path / "leases", "a1", DEVICES, UID, GID)
    with locked_in_the_kernel(folder / "usage", tmp_path / "mount"):
        asyncio.run(remove_lease(tmp_path / "leases", "a1"))
        assert list_leases(tmp_path / "leases") == frozenset()
    eventually(lambda: list((tmp_path / "leases").iterdir()) == [])


def test_a_symbolic_link_in_place_of_a_lease_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "a1").symlink_to(tmp_path / "other")
    with pytest.raises(VgpuError):
        asyncio.run(remove_lease(tmp_path / "leases", "a1"))
    assert (tmp_path / "other" / "file").exists()


def test_the_error_for_a_full_lease_file_system_says_what_may_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("vgpud.lease.pages.os.ftruncate", full)
    with pytest.raises(VgpuError, match=f"lease of a1 in {tmp_path}: no space left on device") as refused:
        write_lease(tmp_path, "a1", DEVICES, UID, GID)
    assert "lsof +L1" in refused.value.hint


@pytest.mark.parametrize("damage", [b"", b"x" * 10, b"\0" * layout.LIMITS_SIZE])
def test_a_damaged_limits_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    (folder / "limits").write_bytes(damage)
    with pytest.raises(VgpuError) as refused:
        read_limits(folder)
    assert refused.value.code is ErrorCode.LEASE_FAILED


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=64), size=st.integers(0, 300_000)
)
def test_an_overwritten_usage_page_is_read_as_bounded_figures(
    tmp_path: Path, words: list[bytes], size: int
) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    noise = b"".join(words)
    (folder / "usage").write_bytes((noise * (size // len(noise) + 1))[:size])
    usage = read_usage(folder)
    for ordinal in range(layout.MAX_DEVICES):
        meter = usage.device(ordinal)
        assert 0 <= meter.used_bytes + meter.context_bytes <= layout.MAX_SLOTS * 2 << 50
        assert 0 <= meter.launches <= 1 << 62
    assert all(process.pid >= 0 for process in usage.processes)


def test_a_usage_file_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    (folder / "usage").unlink()
    (folder / "usage").symlink_to("/etc/passwd")
    with pytest.raises(VgpuError):
        read_usage(folder)


def test_after_a_first_timeout_further_requests_to_a_silent_arbiter_wait_only_briefly(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    client = ArbiterClient(path, timeout_seconds=0.5)

    def waited(order: Callable[[str], object]) -> str:
        with pytest.raises(VgpuError, match="did not answer within") as caught:
            order("a1")
        assert caught.value.code is ErrorCode.HELPER_TIMEOUT
        return caught.value.sentence.rpartition("within ")[2]

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(path))
        silent.listen(10)
        orders = (client.list, client.list, client.look, client.add, client.list)
        assert [waited(order) for order in orders] == [
            "0.5 seconds",
            "0.25 seconds",
            "0.25 seconds",
            "0.5 seconds",
            "0.25 seconds",
        ]


def test_a_missing_arbiter_is_a_numbered_error(tmp_path: Path) -> None:
    client = ArbiterClient(tmp_path / "control.sock")
    assert not client.ready()
    with pytest.raises(VgpuError) as refused:
        client.add("a1")
    assert refused.value.code is ErrorCode.HELPER_FAILED


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, struct.pack("<II", layout.MAGIC, layout.VERSION + 1)])
def test_a_damaged_lease_can_be_closed_and_removed(tmp_path: Path, damage: bytes) -> None:
    """A damaged lease must not prevent the release of its allocation. An upgrade may change the lease's
    version.
    """
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    (folder / layout.LIMITS_FILE).write_bytes(damage)
    close_lease(folder)
    asyncio.run(remove_lease(tmp_path, "a1"))
    assert list_leases(tmp_path) == frozenset()


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("kept_mib", [0, 5, 4096])
def test_a_process_is_ready_for_the_driver_whatever_it_keeps_on_the_device(
    tmp_path: Path, is_ready: bool, kept_mib: int
) -> None:
    folder = write_lease(tmp_path, "a1", DEVICES, UID, GID)
    word = layout.SWAP_OUT | kept_mib << layout.SWAP_KEPT_SHIFT | is_ready * layout.SWAP_READY
    slot = bytearray(layout.SLOT_SIZE)
    struct.pack_into("<I", slot, 0, 1)  # in use
    struct.pack_into("<2I2Q", slot, layout.SLOT_SWAP_PHASE, word, 0, 8 * GIB, 7 * GIB)
    with (folder / layout.USAGE_FILE).open("r+b") as usage:
        usage.seek(layout.USAGE_SLOT_HIGH)
        usage.write(struct.pack("<I", 1))
        usage.seek(layout.USAGE_SLOTS)
        usage.write(slot)
    (swap,) = read_swaps(folder)
    kept_bytes = kept_mib << 20
    assert swap == ProcessSwap(SwapPhase.OUT, 0, 8 * GIB, 7 * GIB, kept_bytes, is_ready=is_ready)
