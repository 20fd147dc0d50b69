"""The folders of MPS daemons and of tenants of mode mps."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.fusefile import locked_in_the_kernel
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import ANYONE, Mode, Slice
from vgpud.modes.mps.folders import DeviceFolder, remove_tenant, write_tenant
from vgpud.modes.mps.rules import MpsRules

PART = Slice("GPU-0", Mode.MPS, GIB, Percent(1000))


@needs("root", "fuse")
def test_a_container_that_locks_its_folder_in_the_kernel_delays_no_release(tmp_path: Path) -> None:
    """Root in a container may list the folder that is mounted into it, and so lock it in the kernel."""
    folder = tmp_path / "t" / "a1"
    folder.mkdir(parents=True)
    (folder / "limits").write_text("50 1024 0 0\n")
    with locked_in_the_kernel(folder, tmp_path / "mount"):
        asyncio.run(remove_tenant(folder))
        assert not folder.exists()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda run: DeviceFolder(run / "file").prepare(),
            "pipe/g1 cannot be made ready for MPS: not a directory",
        ),
        (lambda run: DeviceFolder(run / ("x" * 88)).prepare(), "pipe/g1 is longer than 88 bytes"),
        (lambda run: DeviceFolder(run).open(run / "g1"), "pipe/p cannot be made ready for MPS: no such file"),
        (
            lambda run: DeviceFolder(run).admit(frozenset({7})),
            "cannot be restricted to its tenants: operation not",
        ),
        (
            lambda run: write_tenant(run / "file", PART, MpsRules(), ANYONE),
            "file cannot be made ready for MPS",
        ),
    ],
    ids=["device", "length", "open", "users", "tenant"],
)
def test_a_folder_that_cannot_be_made_for_mps_is_named_with_the_reason(
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], object],
    sentence: str,
) -> None:
    def without_acls(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", without_acls)
    run = short_folder / "run"  # below the test's own folder, because MPS sets the modes of the parents, too
    run.mkdir()
    (run / "file").touch()
    with pytest.raises(VgpuError, match=sentence) as raised:
        make(run)
    assert raised.value.code is ErrorCode.HELPER_FAILED
    assert "VGPUD_RUN_DIR" in raised.value.hint
