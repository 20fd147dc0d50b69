"""The run folder is only on mounts where set-user-id and device files have no effect, because root in a
container can make such files in it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conditions import needs
from tests.e2e.conftest import node_maker
from tests.lease.conftest import Node
from vgpud.daemon import check_mount, make_folders
from vgpud.model.errors import Exit, VgpuError
from vgpud.settings import Settings


@needs("root")
@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (0, "nosuid and nodev"),
        (os.ST_NOSUID, "nodev"),
        (os.ST_NODEV, "nosuid"),
        (os.ST_NOSUID | os.ST_NODEV, ""),
    ],
)
def test_a_run_folder_mounted_without_nosuid_or_nodev_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: int, missing: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    if not missing:
        check_mount(Settings(run_dir=tmp_path))
        return
    with pytest.raises(VgpuError, match=f"without {missing} ") as refused:
        check_mount(Settings(run_dir=tmp_path))
    assert "mount -t tmpfs -o nosuid,nodev" in refused.value.hint


def made_by_the_daemon(run_dir: Path) -> None:
    make_folders(Settings(run_dir=run_dir, state_dir=run_dir.parent / "state"))


def made_by_the_arbiter(run_dir: Path) -> None:
    node = Node(run_dir)
    node.start_arbiter()
    node.end()


@pytest.mark.parametrize("make", [made_by_the_daemon, made_by_the_arbiter])
def test_the_run_folder_can_be_entered_and_not_listed_by_users(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """An attack: a user that may list a folder can hold its lock in the kernel, by a getdents(2) into a page
    of a FUSE file system. The start of vgpud would wait for the lock.
    """
    run_dir = tmp_path / "run"
    make(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o711


def test_the_folder_of_leases_can_be_entered_and_not_listed_by_users(tmp_path: Path) -> None:
    made_by_the_daemon(tmp_path / "run")
    assert (tmp_path / "run" / "leases").stat().st_mode & 0o777 == 0o711


@needs("root")
def test_vgpud_does_not_start_in_a_run_folder_that_honours_set_user_id(tmp_path: Path) -> None:
    """An attack: root in a container leaves a set-user-id program where every user can run it."""
    flags = os.statvfs(tmp_path).f_flag
    with node_maker(tmp_path) as make:
        node = make()
        node.environment["VGPUD_ANY_RUN_DIR"] = "false"
        if flags & os.ST_NOSUID and flags & os.ST_NODEV:
            node.start()
            return
        with pytest.raises(RuntimeError):
            node.start()
        assert node.daemon is not None
        assert node.daemon.wait(300) == Exit.CONFIG
        assert "is mounted without nosuid" in node.log.read_text()
