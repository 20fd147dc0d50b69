"""Finds the processes of a container by its cgroup.

In a container that shares the host's pid namespace, other processes outlive the init.
"""

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = (_ROOT, _ROOT / "unified")
# controllers of cgroup v1, those first in which every container is sure to have a separate group
_CONTROLLERS = ("pids", "devices", "freezer", "memory")


def cgroup_of(pid: int, starter_pid: int) -> str:
    """The group of a container's init, for `processes_in`.

    Empty if the container has no separate group: the init is in the root group, or in the group of the
    starting process. The inode distinguishes the group from a later one of the same name.
    """
    mine, starters = _groups(pid), _groups(starter_pid)
    for path in mine:
        if path in starters:
            continue
        try:
            return f"{path.stat().st_ino} {path}"
        except OSError:
            continue
    return ""


def processes_in(cgroup: str) -> tuple[int, ...]:
    """Pids in the group and below it; none once it is gone."""
    inode, _, path = cgroup.partition(" ")
    try:
        if not path or Path(path).stat().st_ino != int(inode):
            return ()
        found: list[int] = []
        for folder, _, files in os.walk(path):
            if "cgroup.procs" in files:
                text = (Path(folder) / "cgroup.procs").read_text()
                found += [int(line) for line in text.split() if line != "0"]
    except OSError:  # a group was removed during the walk
        return ()
    return tuple(found)


def _groups(pid: int) -> list[Path]:
    """Folders of the groups of a process (cgroups(7), /proc/PID/cgroup), the most reliable one first."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: dict[str, Path] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if not below or ".." in below.split("/"):
            continue
        if not controllers:
            found[""] = next((root / below for root in _UNIFIED if (root / below).is_dir()), _ROOT / below)
        for name in filter(None, controllers.split(",")):
            found[name] = _ROOT / name / below
    return [found[name] for name in ("", *_CONTROLLERS) if name in found and found[name].is_dir()]
