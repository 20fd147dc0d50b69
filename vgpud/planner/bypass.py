"""Does a preload tenant hold device memory that its ledger does not count, and whose process is it?

Pure: vgpud/node/bypasses.py reads NVML, the leases and /proc, and does what is decided here.

NVML's figure of a tenant's processes is compared with the ledger. Two things make the difference. A process
without libvgpu (a static binary, a removed LD_PRELOAD) is in NVML's figure and not in the ledger. What a
process with libvgpu takes past it (RTLD_DEEPBIND) is learnt as the driver's own memory, so the ledger has it,
and passes the limit; so of the ledger no more counts than the limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vgpud.model.quantity import format_bytes
from vgpud.model.tenancy import ANYONE, Owner

# The ledger is at most 2 MiB from NVML at rest, and 8 MiB while eight processes allocate (docs/libvgpu.md).
# The rest is for a lazily loaded module, which takes its memory at a launch, where nothing can be refused.
# The least that is to be found is one context: 412 MiB on an A100, 526 on an H200.
_BASE_BYTES = 64 << 20
_PROCESS_BYTES = 8 << 20
_MOST_BYTES = 256 << 20
CLEAR_SECONDS = 60.0  # a mark goes after so long without an excess


def tolerance_bytes(processes: int) -> int:
    """How far NVML and the ledger of an honest tenant with so many processes may be apart."""
    return min(_BASE_BYTES + processes * _PROCESS_BYTES, _MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Reading:
    """One slice at one moment: what NVML says that the tenant's processes hold, how many they are, and what
    the ledger counts, claims included: the larger of its figures just before and just after NVML's."""

    held_bytes: int
    counted_bytes: int
    processes: int


@dataclass(frozen=True, slots=True)
class Watched:
    """What is remembered of a slice between two looks.

    `ceiling_bytes` is what it may hold: the limit, or more after the limit was lowered below what it holds;
    then it falls with what it holds, and never rises. `quiet_since` is in monotonic seconds, if marked.
    """

    limit_bytes: int
    ceiling_bytes: int
    suspect: bool = False
    marked: bool = False
    quiet_since: float | None = None


class Verdict(Enum):
    NOTHING = "nothing"
    MARK = "mark"  # it has just become bypassed
    STAYS = "stays"  # it is, and its excess is still there
    CLEAR = "clear"


def first_sight(limit_bytes: int, reading: Reading, is_new: bool, marked: bool) -> Watched:
    """`is_new`: made since vgpud started. Of an older one the limit may have been lowered before."""
    earlier = 0 if is_new or marked else min(reading.held_bytes, reading.counted_bytes)
    return Watched(limit_bytes, max(limit_bytes, earlier), marked=marked)


def excess_bytes(watched: Watched, reading: Reading) -> int:
    """Beyond what is counted and within the ceiling; 0 within the tolerance."""
    covered = min(reading.counted_bytes, watched.ceiling_bytes)
    beyond = reading.held_bytes - covered
    return beyond if beyond > tolerance_bytes(reading.processes) else 0


def under_limit(watched: Watched, limit_bytes: int, held_bytes: int) -> Watched:
    """As `watched`, under the limit of now."""
    return replace(
        watched,
        limit_bytes=limit_bytes,
        ceiling_bytes=max(limit_bytes, min(watched.ceiling_bytes, held_bytes)),
    )


def judge(watched: Watched, excess: int, now: float) -> tuple[Watched, Verdict]:
    """`excess` is the least of all readings of one look: memory on its way in or out is in some of them only.
    Two looks in a row with an excess make a mark."""
    if excess > 0:
        if watched.marked:
            return replace(watched, suspect=True, quiet_since=None), Verdict.STAYS
        if watched.suspect:
            return replace(watched, marked=True, quiet_since=None), Verdict.MARK
        return replace(watched, suspect=True), Verdict.NOTHING
    if not watched.marked:
        return replace(watched, suspect=False), Verdict.NOTHING
    since = now if watched.quiet_since is None else watched.quiet_since
    if now - since >= CLEAR_SECONDS:
        return replace(watched, suspect=False, marked=False, quiet_since=None), Verdict.CLEAR
    return replace(watched, suspect=False, quiet_since=since), Verdict.NOTHING


def sentence_of(excess: int, limit_bytes: int) -> str:
    return (
        f"its processes hold {format_bytes(excess >> 20 << 20)} of device memory that libvgpu does not count "
        f"within its limit of {format_bytes(limit_bytes)}"
    )


# --- whose process is it


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the kernel says of a process. `mounted` is the allocation whose lease lies at a container's place
    in its mount namespace, if that was made by root or by the owner; `named` the one that its environment
    names, which is its own word."""

    pid: int
    start_ticks: int
    uid: int
    mounted: str = ""
    named: str = ""


@dataclass(frozen=True, slots=True)
class Belongings:
    """Which processes are known to be a tenant's: of the arbiter by their connection, of a container by its
    cgroup, and those that an allocation lives as long as (pid, start in ticks)."""

    owners: Mapping[str, Owner]
    registered: Mapping[int, str]
    in_cgroup: Mapping[int, str]
    lifetimes: Mapping[tuple[int, int], str]


def tenant_of(line: Sequence[ProcessFacts], known: Belongings) -> str:
    """The allocation that a process belongs to, "" if that is not certain. `line` is the process, its parent,
    and so on.

    A process's own word, and what its ancestors say, count only where it runs as the allocation's owner: no
    tenant can have its processes taken for another's.
    """
    for distance, process in enumerate(line):
        proven = known.registered.get(process.pid) or known.in_cgroup.get(process.pid) or process.mounted
        if proven in known.owners and (distance == 0 or _may_be(line[0], known.owners[proven], True)):
            return proven
        said = process.named or known.lifetimes.get((process.pid, process.start_ticks), "")
        if said in known.owners and _may_be(line[0], known.owners[said], False):
            return said
    return ""


def _may_be(process: ProcessFacts, owner: Owner, by_kernel: bool) -> bool:
    return process.uid == owner.uid or (by_kernel and owner.uid == ANYONE)
