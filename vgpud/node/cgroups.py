"""The processes of a container beside its init, by its cgroup.

Where it shares the host's pid namespace they outlive its init.
"""

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = (_ROOT, _ROOT / "unified")
# of cgroup v1, in the order of trust: where each container surely has a group of its own
_CONTROLLERS = ("pids", "devices", "freezer", "memory")


def cgroup_of(pid: int, starter_pid: int) -> str:
    """The group that a container's init is in, to be given to `processes_in` later.

    Empty if it has none of its own: it is in the root, or in the group of who starts it. The inode
    tells it from a later group of the same name.
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
    except OSError:  # it, or one below it, went while we looked
        return ()
    return tuple(found)


def _groups(pid: int) -> list[Path]:
    """Folders of the groups of a process (cgroups(7), /proc/PID/cgroup), the most telling one first."""
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
        for name in controllers.split(","):
            found[name] = _ROOT / name / below
    return [found[name] for name in ("", *_CONTROLLERS) if name in found and found[name].is_dir()]
