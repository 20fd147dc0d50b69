"""A control group for a test, in the tree of cgroup v2. Tests that use it need the condition `cgroups`."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Mount points of cgroup v2: alone, or beside version 1.
MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def mount() -> Path | None:
    return next((path for path in MOUNTS if (path / "cgroup.procs").exists()), None)


def clear(folder: Path) -> None:
    """Removes the group and the groups below it, and kills the processes in them."""
    for path, _, _ in os.walk(folder, topdown=False):
        group = Path(path)
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
        group.rmdir()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    top = mount()
    assert top is not None, "the test needs the condition cgroups"
    folder = Path(tempfile.mkdtemp(prefix="vgpu-test-", dir=top))
    yield folder
    clear(folder)
