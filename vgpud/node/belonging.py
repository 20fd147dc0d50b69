"""Whose a process is: compared with the owner of an allocation before anything is done to the process.

The pids of a tenant come from the arbiter, from NVML or from an environment: from lists that other programs
have a part in. What is read here is the kernel's word, and a pidfd says that it is one process's.
"""

from itertools import islice
from pathlib import Path

from vgpud.model.tenancy import ANYONE, Allocation, SuspendedProcess
from vgpud.modes.preload import CONTAINER_LEASE
from vgpud.node.cgroups import processes_in
from vgpud.node.users import SubordinateUids, namespace_owner
from vgpud.units.process import Running, has_exited, open_pidfd

_MOST_MOUNTS = 2000
_SUBORDINATE = SubordinateUids()


def belongs(process: SuspendedProcess, allocation: Allocation) -> bool:
    """Does the process run for the owner of the allocation, or in its container? False once it has ended.

    It does with the owner's uid (real and effective) or one that counts as that user's, in the control group
    of the container, or with the lease at its place. ANYONE's allocations are pods': the process must not be
    one of the host's own mount namespace.
    """
    pidfd = open_pidfd(Running("", process.pid, process.start_ticks))
    if pidfd is None:
        return False
    with pidfd:
        is_own = _is_own(pidfd.fileno(), process.pid, allocation)
        return is_own and not has_exited(pidfd, 0)


def _is_own(pidfd: int, pid: int, allocation: Allocation) -> bool:
    request = allocation.request
    if pid in processes_in(request.lifetime.cgroup) or _has_mounted(pid, allocation.id):
        return True
    if request.owner.uid == ANYONE:
        return not _is_in_host_mounts(pid)
    users = {request.owner.uid, request.counts_for.uid}
    if namespace_owner(pidfd, pid) in users:
        return True
    uids = _uids(pid)
    return bool(uids) and all(uid in users or _SUBORDINATE.user_of(uid) in users for uid in uids)


def _uids(pid: int) -> tuple[int, ...]:
    """Real and effective (proc_pid_status(5)); none where they cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    words = next((line.split() for line in lines if line.startswith("Uid:")), [])
    return tuple(int(word) for word in words[1:3])


def _has_mounted(pid: int, allocation_id: str) -> bool:
    """Does its mount namespace have the lease at its place? Rows: ID PARENT DEVICE ROOT PLACE (proc(5))."""
    wanted = f"/leases/{allocation_id}"
    try:
        with Path(f"/proc/{pid}/mountinfo").open(errors="replace") as mounts:
            rows = [line.split(None, 5) for line in islice(mounts, _MOST_MOUNTS)]
    except OSError:
        return False
    return any(
        len(row) > 4 and row[4] == CONTAINER_LEASE and row[3].removesuffix("/anyone").endswith(wanted)
        for row in rows
    )


def _is_in_host_mounts(pid: int) -> bool:
    """Of vgpud's own mount namespace or that of pid 1, which differ under systemd."""
    own = _mounts("self")
    theirs = _mounts(str(pid))
    return theirs is None or theirs in (own, _mounts("1"))


def _mounts(process: str) -> Path | None:
    """None where it cannot be read: the process has ended, or vgpud may not look at it."""
    try:
        return Path(f"/proc/{process}/ns/mnt").readlink()
    except OSError:
        return None
