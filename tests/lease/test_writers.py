"""Attacks by root in a container on vgpud's writes to the lease that is mounted into the container."""

import asyncio
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.fusefile import locked_in_the_kernel
from tests.lease.conftest import eventually
from tests.native.harness import GIB, GID, UID, UUIDS
from vgpud import lease_layout as layout
from vgpud.lease import (
    DeviceLimits,
    Libraries,
    Writers,
    close_lease,
    note_moved,
    read_limits,
    update_limits,
    write_lease,
)
from vgpud.model.errors import ErrorCode, VgpuError

# Takes a file lease (fcntl F_SETLEASE). The file is opened for reading, because it is mounted read-only. The
# kernel asks for the file lease back by SIGIO, which this program ignores.
SETS = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, int(sys.argv[2]))
except BlockingIOError:
    print("refused", flush=True)
else:
    print("set", flush=True)
    sys.stdin.read()
"""
KINDS = pytest.mark.parametrize("kind", [fcntl.F_RDLCK, fcntl.F_WRLCK], ids=["read", "write"])
MORE = [DeviceLimits(UUIDS[0], 2 * GIB)]


@pytest.fixture
def lease(tmp_path: Path) -> Path:
    return write_lease(tmp_path, "a1", [DeviceLimits(UUIDS[0], GIB)], uid=UID, gid=GID)


@contextmanager
def attacker(lease: Path, kind: int) -> Iterator[str]:
    with setter(lease / layout.LIMITS_FILE, kind) as answer:
        yield answer


@contextmanager
def setter(file: Path, kind: int) -> Iterator[str]:
    words = [sys.executable, "-c", SETS, str(file), str(kind)]
    pipe = subprocess.PIPE
    program = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert program.stdout is not None
    try:
        yield program.stdout.readline().strip()
    finally:
        program.communicate("")


@needs("root")
@KINDS
def test_no_process_can_take_a_file_lease_on_limits_that_vgpud_holds_open(lease: Path, kind: int) -> None:
    writers = Writers(lease.parent)
    writers.hold("a1")
    with attacker(lease, kind) as answer:
        assert answer == "refused"
        update_limits(lease, MORE)
    assert read_limits(lease).devices == tuple(MORE)
    writers.drop("a1")


@needs("root")
@KINDS
def test_a_file_lease_that_was_taken_while_vgpud_was_down_delays_no_call(lease: Path, kind: int) -> None:
    """The file lease would delay each open(2) for writing by 45 s, on vgpud's event loop."""
    writers = Writers(lease.parent)
    with attacker(lease, kind) as answer:
        assert answer == "set"
        writers.hold("a1")
        with pytest.raises(VgpuError) as refused:
            update_limits(lease, MORE)
        with pytest.raises(VgpuError) as not_closed:
            close_lease(lease)
        assert {refused.value.code, not_closed.value.code} == {ErrorCode.LEASE_FAILED}
        assert "try again in a minute" in refused.value.hint
    eventually(lambda: holds(lease))
    update_limits(lease, MORE)
    close_lease(lease)
    assert read_limits(lease).closed
    writers.drop("a1")


@needs("root")
def test_no_process_can_take_a_file_lease_that_delays_programs_loading_libvgpu(tmp_path: Path) -> None:
    library, libraries = tmp_path / "libvgpu.so", Libraries()
    for content in ("of the first package", "of an upgrade"):
        fresh = tmp_path / "new"
        fresh.write_text(content)
        fresh.replace(library)
        with setter(library, fcntl.F_WRLCK) as answer:
            assert answer == "set"
        libraries.hold(library)
        with setter(library, fcntl.F_WRLCK) as answer:
            assert answer == "refused"


@needs("root", "fuse")
def test_a_tenant_that_locks_its_lease_folder_in_the_kernel_delays_no_move(
    lease: Path, tmp_path: Path
) -> None:
    with locked_in_the_kernel(lease, tmp_path / "mount"), pytest.raises(VgpuError) as refused:
        asyncio.run(note_moved(lease, [UUIDS[1]]))
    assert refused.value.code is ErrorCode.LEASE_FAILED
    assert "try again in a minute" in refused.value.hint
    eventually((lease / layout.MOVED_FILE).exists)


def holds(lease: Path) -> bool:
    with attacker(lease, fcntl.F_RDLCK) as answer:
        return answer == "refused"
