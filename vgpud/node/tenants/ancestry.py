"""Reads from /proc the facts by which `planner.bypass.tenant_of` finds out to which tenant a process
belongs.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from vgpud import proc
from vgpud.lease import ANYONE_FOLDER
from vgpud.model.tenancy import Allocation, Owner
from vgpud.modes.gpu_use import allocation_of
from vgpud.modes.preload import CONTAINER_LEASE
from vgpud.node.tenants.cgroups import processes_in
from vgpud.node.tenants.users import SUBORDINATE, namespace_owner
from vgpud.planner.bypass import Belongings, ProcessFacts, tenant_of

MOST_ANCESTORS = 64
_LEASE = re.compile(rf"/leases/([^/]+)(?:/{ANYONE_FOLDER})?$")


def belongings(everything: tuple[Allocation, ...], registered: Mapping[int, str]) -> Belongings:
    """Facts about all allocations. The facts of all allocations are needed, so that a process of one tenant
    is not charged to another.
    """
    lives = [(a.id, (a.request.lifetime.pid, a.request.lifetime.start_ticks)) for a in everything]
    shared = Counter(life for _, life in lives)
    return Belongings(
        owners={a.id: a.request.owner for a in everything},
        registered=dict(registered),
        in_cgroup={pid: a.id for a in everything for pid in processes_in(a.request.lifetime.cgroup)},
        lifetimes={life: name for name, life in lives if life[0] and shared[life] == 1},
        users={a.id: a.request.counts_for.uid for a in everything},
    )


def owners_of(everything: tuple[Allocation, ...], pids: Iterable[int]) -> dict[int, str]:
    """The allocation of each process, by pid. Only for listings, because a pid may be reused (see
    owner_of).
    """
    known = belongings(everything, {})
    return {pid: name for pid in pids if (name := owner_of(pid, known))}


def owner_of(pid: int, known: Belongings) -> str:
    """The allocation to which the process belongs; "" if there is none, it is not certain, or the process has
    ended.

    The pid can be reused before this function returns. A caller that acts on the answer opens a pidfd first,
    and checks with the pidfd afterwards that the process still runs.
    """
    line: list[ProcessFacts] = []
    while pid > 1 and len(line) < MOST_ANCESTORS:
        found = _facts(pid, known.owners)
        if found is None:
            break
        facts, pid = found
        line.append(facts)
        if tenant := tenant_of(line, known):
            return tenant
    return ""


def _facts(pid: int, owners: Mapping[str, Owner]) -> tuple[ProcessFacts, int] | None:
    """The facts about a process, and its parent's pid; None if the process has ended."""
    stat, uids = proc.read_stat(pid), proc.uids(pid)
    if stat is None or uids is None:
        return None
    name = allocation_of(pid) or ""
    user = SUBORDINATE.user_of(uids[0]) or None  # several containers may use the same uid of root's ranges
    facts = ProcessFacts(pid, stat.start_ticks, uids[0], mounted_lease(pid, owners), name, user)
    return facts, stat.parent


def mounted_lease(pid: int, owners: Mapping[str, Owner]) -> str:
    """The allocation whose lease is mounted at the path that containers have for it; "" if there is none. In
    a user namespace a user can mount anything there. So the user namespace of the process must be root's or
    belong to the allocation's owner.
    """
    places = map(_LEASE.search, proc.mounts_at(pid, CONTAINER_LEASE))
    name = next((place[1] for place in places if place is not None), "")
    if name not in owners:
        return ""
    try:
        with proc.PidFd(os.pidfd_open(pid)):
            made_by = namespace_owner(pid)
    except OSError:
        return ""
    return name if made_by in (None, owners[name].uid) else ""
