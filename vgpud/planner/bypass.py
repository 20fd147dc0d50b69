"""Decides whether a tenant in mode preload holds device memory that its ledger does not count, and to which
tenant a process belongs.

This module is pure: vgpud/node/tenants/bypasses.py reads NVML, the leases and /proc, and acts on the
decisions.

NVML's figure for a tenant's processes is compared with the tenant's ledger in the lease. They differ for two
reasons. A process without libvgpu (a static binary, a removed LD_PRELOAD) is in NVML's figure only. Memory
that a process allocates past libvgpu (RTLD_DEEPBIND) is measured as the driver's memory, so the ledger counts
it and exceeds the limit. For this reason the ledger is counted here only up to the limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from vgpud.model.quantity import format_bytes
from vgpud.model.tenancy import ANYONE, Owner

# The ledger differs from NVML by at most 2 MiB while nothing is allocated or freed, and by 8 MiB while eight
# processes allocate (docs/libvgpu.md). The tolerance is larger, because a lazily loaded module takes its
# memory at a kernel launch, where libvgpu cannot refuse the memory. The smallest bypass that must be found is
# one context: 412 MiB on an A100, 526 MiB on an H200.
_BASE_BYTES = 64 << 20
_PROCESS_BYTES = 8 << 20
_MOST_BYTES = 256 << 20
CLEAR_SECONDS = 60.0  # a mark is removed after this time without excess memory


def tolerance_bytes(processes: int) -> int:
    """The largest normal difference between NVML and the ledger for this number of processes."""
    return min(_BASE_BYTES + processes * _PROCESS_BYTES, _MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Reading:
    """One slice at one moment: the bytes that NVML reports for the tenant's processes, the number of
    processes, and the bytes that the ledger counts, reservations included. (The ledger is read before and
    after NVML, and the larger figure counts.)
    """

    held_bytes: int
    counted_bytes: int
    processes: int


@dataclass(frozen=True, slots=True)
class Watched:
    """The state of a slice between two surveys.

    `ceiling_bytes` is what the slice may hold: the limit, or more if the limit was lowered below what the
    slice holds. A ceiling above the limit decreases with what the slice holds, and increases only with the
    limit. `quiet_since` is in seconds of the monotonic clock, and is set if the slice is marked.
    """

    limit_bytes: int
    ceiling_bytes: int
    marked: bool = False
    quiet_since: float | None = None


class Verdict(Enum):
    NOTHING = "nothing"
    MARK = "mark"  # the slice has just been found to be bypassed
    STAYS = "stays"  # the slice is bypassed and still has an excess
    CLEAR = "clear"


def first_sight(limit_bytes: int, reading: Reading, is_new: bool, marked: bool) -> Watched:
    """The state of a slice after its first reading. A slice that is older than this vgpud may hold more than
    its limit, because the limit may have been lowered below its use: what NVML and the ledger both count now
    is allowed, unless the slice is marked. `is_new`: allocated since vgpud started.
    """
    earlier = 0 if is_new or marked else min(reading.held_bytes, reading.counted_bytes)
    return Watched(limit_bytes, max(limit_bytes, earlier), marked=marked)


def excess_bytes(watched: Watched, reading: Reading) -> int:
    """Bytes that the slice holds beyond what libvgpu counts for it; 0 within the tolerance. libvgpu's count
    is taken only up to the slice's ceiling.
    """
    covered = min(reading.counted_bytes, watched.ceiling_bytes)
    beyond = reading.held_bytes - covered
    return beyond if beyond > tolerance_bytes(reading.processes) else 0


def under_limit(watched: Watched, limit_bytes: int, held_bytes: int) -> Watched:
    """Returns the state of a slice with its present limit applied."""
    return replace(
        watched,
        limit_bytes=limit_bytes,
        ceiling_bytes=max(limit_bytes, min(watched.ceiling_bytes, held_bytes)),
    )


def judge(watched: Watched, excess: int, now: float) -> tuple[Watched, Verdict]:
    """Judges a slice after a survey. `excess` is the smallest of all readings of the survey, because memory
    that is being allocated or freed is in some readings only.
    """
    if excess > 0:
        verdict = Verdict.STAYS if watched.marked else Verdict.MARK
        return replace(watched, marked=True, quiet_since=None), verdict
    if not watched.marked:
        return watched, Verdict.NOTHING
    since = now if watched.quiet_since is None else watched.quiet_since
    if now - since >= CLEAR_SECONDS:
        return replace(watched, marked=False, quiet_since=None), Verdict.CLEAR
    return replace(watched, quiet_since=since), Verdict.NOTHING


def sentence_of(excess: int, limit_bytes: int) -> str:
    return (
        f"its processes hold {format_bytes(excess >> 20 << 20)} of device memory that libvgpu does not count "
        f"within its limit of {format_bytes(limit_bytes)}"
    )


# --- the tenant of a process


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts about a process, from the kernel. `mounted`: the allocation whose lease is mounted as in a
    container, if root or the allocation's owner made the namespace. `named`: the allocation in the process's
    environment, which is no proof. `uid`: the real uid, which a set-user-id program leaves as it is. `user`:
    the user to whom `uid` belongs as a subordinate uid, or `uid` itself; None if `uid` belongs to root.
    """

    pid: int
    start_ticks: int
    uid: int
    mounted: str = ""
    named: str = ""
    user: int | None = None


@dataclass(frozen=True, slots=True)
class Belongings:
    """What is known about the processes of tenants: those connected to the arbiter, those in the control
    group of a container, and those to which an allocation is bound (pid, start in ticks). `users`: the user
    for whom each allocation counts.
    """

    owners: Mapping[str, Owner]
    registered: Mapping[int, str]
    in_cgroup: Mapping[int, str]
    lifetimes: Mapping[tuple[int, int], str]
    users: Mapping[str, int] = field(default_factory=dict)


def tenant_of(line: Sequence[ProcessFacts], known: Belongings) -> str:
    """The allocation to which a process belongs; "" if the allocation is not certain. `line` is the process,
    its parent, and so on.

    The environments of the process and its ancestors count only if the process runs as the allocation's
    owner, or under another uid that counts as the same user. For this reason no user can make processes count
    as those of another user's tenant.
    """
    for distance, process in enumerate(line):
        proven = known.registered.get(process.pid) or known.in_cgroup.get(process.pid) or process.mounted
        if proven in known.owners and (distance == 0 or _may_be(line[0], proven, known, True)):
            return proven
        said = process.named or known.lifetimes.get((process.pid, process.start_ticks), "")
        if said in known.owners and _may_be(line[0], said, known, False):
            return said
    return ""


def _may_be(process: ProcessFacts, name: str, known: Belongings, by_kernel: bool) -> bool:
    owner = known.owners[name]
    if process.uid == owner.uid or (by_kernel and owner.uid == ANYONE):
        return True
    return process.user is not None and process.user == known.users.get(name)
