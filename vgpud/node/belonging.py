"""Whose a process is: compared with the owner of an allocation before anything is done to the process.

The pids of a tenant come from the arbiter, from NVML or from an environment: from lists that other programs
have a part in. What is read here is the kernel's word, and a pidfd says that it is one process's.
"""

from vgpud import proc
from vgpud.model.tenancy import ANYONE, Allocation, SuspendedProcess
from vgpud.modes.preload import CONTAINER_LEASE
from vgpud.node.cgroups import processes_in
from vgpud.node.users import SubordinateUids, namespace_owner
from vgpud.proc import Running, has_exited, open_pidfd

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
        return is_own and not has_exited(pidfd)


def _is_own(pidfd: int, pid: int, allocation: Allocation) -> bool:
    request = allocation.request
    if pid in processes_in(request.lifetime.cgroup) or _has_mounted(pid, allocation.id):
        return True
    if request.owner.uid == ANYONE:
        return not _is_in_host_mounts(pid)
    users = {request.owner.uid, request.counts_for.uid}
    if namespace_owner(pidfd, pid) in users:
        return True
    uids = proc.uids(pid) or ()
    return bool(uids) and all(uid in users or _SUBORDINATE.user_of(uid) in users for uid in uids)


def _has_mounted(pid: int, allocation_id: str) -> bool:
    """Does its mount namespace have the lease at its place?"""
    wanted = f"/leases/{allocation_id}"
    roots = proc.mounts_at(pid, CONTAINER_LEASE)
    return any(root.removesuffix("/anyone").endswith(wanted) for root in roots)


def _is_in_host_mounts(pid: int) -> bool:
    """Of vgpud's own mount namespace or that of pid 1, which differ under systemd."""
    theirs = proc.mount_namespace(pid)
    return theirs is None or theirs in (proc.mount_namespace("self"), proc.mount_namespace(1))
