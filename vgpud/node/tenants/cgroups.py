"""Finds the processes of a container by its control group.

If a container shares the host's pid namespace, its other processes can outlive its init process.
"""

from pathlib import Path

from vgpud.proc import members_of

_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = (_ROOT, _ROOT / "unified")
# Controllers of cgroup v1. Those in which every container surely has a separate group come first.
_CONTROLLERS = ("pids", "devices", "freezer", "memory")


def cgroup_of(pid: int, starter_pid: int) -> str:
    """The control group of a container's init process, in the form that `processes_in` reads.

    Empty if the container has no separate group: the init process is in the root group, or in the group of
    the process that starts it. The inode distinguishes the group from a later one with the same name.
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
    """The pids in the control group and below it (members_of); none if the group no longer exists."""
    inode, _, path = cgroup.partition(" ")
    try:
        if not path or Path(path).stat().st_ino != int(inode):
            return ()
    except OSError:
        return ()
    return tuple(members_of(Path(path)))


def group_owner(cgroup: str) -> int | None:
    """The uid to which the control group is delegated (cgroups(7)): the owner of its folder. None if the
    group no longer exists. Only this uid and root can put processes into the group.
    """
    inode, _, path = cgroup.partition(" ")
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_uid if path and found.st_ino == int(inode) else None


def _groups(pid: int) -> list[Path]:
    """Folders of the control groups of a process (cgroups(7), /proc/PID/cgroup), the most reliable
    one first.
    """
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
