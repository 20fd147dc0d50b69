"""Checks that a process belongs to an allocation, before vgpud acts on the process.

The pids of a tenant come from the arbiter, from NVML or from an environment, which other programs can
influence. This check reads facts of the kernel only, and a pidfd guards against a reused pid.
"""

import os
from contextlib import suppress

from vgpud import proc
from vgpud.model.tenancy import ANYONE, Allocation, SuspendedProcess
from vgpud.node.tenants.ancestry import MOST_ANCESTORS, mounted_lease
from vgpud.node.tenants.cgroups import processes_in
from vgpud.node.tenants.users import SUBORDINATE, namespace_owner
from vgpud.proc import Running, has_exited, open_pidfd


def belongs(process: SuspendedProcess, allocation: Allocation) -> bool:
    """Does the process run for the owner of the allocation, or in the allocation's container? False if the
    process has ended.

    A process belongs to an allocation if its uids (real and effective) are the owner's or subordinate uids of
    the owner, if the owner made its user namespace, if it is in the container's control group, or if the
    lease is mounted in its mount namespace by root or the owner. The user for whom the allocation counts is
    as good as the owner. An allocation with owner ANYONE is a pod's: its processes must be in a mount
    namespace of root's that is not the host's.
    """
    pidfd = open_pidfd(Running("", process.pid, process.start_ticks))
    if pidfd is None:
        return False
    with pidfd:
        is_own = _is_own(process.pid, allocation)
        return is_own and not has_exited(pidfd)


def _is_own(pid: int, allocation: Allocation) -> bool:
    request = allocation.request
    if pid in processes_in(request.lifetime.cgroup):
        return True
    if mounted_lease(pid, {allocation.id: request.owner}):
        return True
    if request.owner.uid == ANYONE:
        return _is_in_a_pod(pid)
    users = {request.owner.uid, request.counts_for.uid}
    with suppress(OSError):
        if namespace_owner(pid) in users:
            return True
    uids = proc.uids(pid) or ()
    return bool(uids) and all(uid in users or SUBORDINATE.user_of(uid) in users for uid in uids)


def _is_in_a_pod(pid: int) -> bool:
    """Is the process in a pod's mount namespace, not in the host's? A user can make a mount namespace inside
    a user namespace of its own, which proves nothing. For a process in such a user namespace, the nearest
    ancestor in a user namespace of root's is judged in its place.
    """
    for _ in range(MOST_ANCESTORS):
        try:
            if namespace_owner(pid) is None:
                return not _is_in_host_mounts(pid)
        except OSError:
            return False
        stat = proc.read_stat(pid)
        if stat is None:
            return False
        pid = stat.parent
    return False


def _is_in_host_mounts(pid: int) -> bool:
    """True if the process is in the mount namespace of vgpud or of pid 1 (under systemd these differ), or if
    its namespace cannot be read.
    """
    theirs = proc.mount_namespace(pid)
    return theirs is None or theirs in (proc.mount_namespace(os.getpid()), proc.mount_namespace(1))
