"""The processes of a container, found by its control group."""

import os
import subprocess
from pathlib import Path

from tests.cgroups import cgroup  # noqa: F401
from tests.conditions import needs
from vgpud.node.tenants.cgroups import cgroup_of, group_owner, processes_in


@needs("cgroups")
def test_a_container_is_found_by_its_control_group_and_not_by_a_later_one_of_that_name(
    cgroup: Path,  # noqa: F811
) -> None:
    folder = cgroup / "container"
    folder.mkdir()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as init:
        assert cgroup_of(init.pid, os.getpid()) == "", "it is in the group of the process that starts it"
        (folder / "cgroup.procs").write_text(str(init.pid))
        group = cgroup_of(init.pid, os.getpid())
        assert group == f"{folder.stat().st_ino} {folder}"
        assert (processes_in(group), group_owner(group)) == ((init.pid,), os.getuid())
    assert cgroup_of(init.pid, os.getpid()) == "", "the process has ended"
    folder.rmdir()
    assert (processes_in(group), group_owner(group)) == ((), None)
    (cgroup / "other").mkdir()  # takes the inode's number if the kernel gives it again
    folder.mkdir()
    assert (processes_in(group), group_owner(group)) == ((), None)
