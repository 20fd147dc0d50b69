"""Requests, slices, allocations, decisions and edits."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from vgpud.model.device import PlaceKey, Placement
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import Percent


class Mode(StrEnum):
    """How a device is shared."""

    MIG = "mig"
    MPS = "mps"
    PRELOAD = "preload"
    EXCLUSIVE = "exclusive"
    UNMANAGED = "unmanaged"


class Isolation(StrEnum):
    """The isolation that a tenant requests; each value has a mode that provides it."""

    HARDWARE = "hardware"  # memory, faults and bandwidth are separate; mode mig
    COMPUTE = "compute"  # a share of the multiprocessors, and faults are shared; mode mps
    QUOTA = "quota"  # any size, which can change while programs run; mode preload
    DEVICE = "device"  # the whole card; mode exclusive


MODE_OF: dict[Isolation, Mode] = {
    Isolation.HARDWARE: Mode.MIG,
    Isolation.COMPUTE: Mode.MPS,
    Isolation.QUOTA: Mode.PRELOAD,
    Isolation.DEVICE: Mode.EXCLUSIVE,
}


# (uid_t)-1, which no user has: the owner of a pod's allocation, because a pod's programs may run as any user
ANYONE = 2**32 - 1

# prefixes of request ids from the kubelet: of its device plugin API, and of a DRA claim
KUBELET_PREFIX = "kubelet/"
CLAIM_PREFIX = "claim/"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an allocation, as the kernel identified the caller."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The process whose end releases the allocation; with pid 0 only a call of Release does.

    `start_ticks` is field 22 of /proc/PID/stat (proc(5)), which distinguishes the process from a later one
    with its pid. `cgroup` is set if the process is a container's init: the release waits for all processes of
    this group.
    """

    pid: int = 0
    start_ticks: int = 0
    cgroup: str = ""


@dataclass(frozen=True, slots=True)
class Selector:
    """The devices that a request accepts; empty fields accept any."""

    uuids: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    name_glob: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """The names that the cluster has for what runs in an allocation; each is "" while it is unknown. Names
    are for display: no decision depends on them.

    Of several containers that share an allocation it names the first.
    """

    namespace: str = ""
    pod: str = ""
    container: str = ""
    claim: str = ""

    @property
    def pod_path(self) -> str:
        """ "namespace/pod/container", or without the container; "" if the pod is unknown."""
        return "/".join(filter(None, (self.namespace, self.pod, self.container))) if self.pod else ""

    @property
    def claim_path(self) -> str:
        """ "namespace/claim"; "" if no claim is known."""
        return f"{self.namespace}/{self.claim}" if self.claim else ""

    def __str__(self) -> str:
        pod = f"pod {self.pod_path}" if self.pod else ""
        claim = f"claim {self.claim_path}" if self.claim else ""
        return ", ".join(filter(None, (pod, claim)))


def workload_of(pod: str) -> Workload:
    """The workload of "namespace/pod/container"."""
    namespace, _, rest = pod.partition("/")
    name, _, container = rest.partition("/")
    return Workload(namespace, name, container)


# values in requests; MPS has no above-normal
PRIORITIES = ("above-normal", "normal", "below-normal")


@dataclass(frozen=True, slots=True)
class Request:
    """A tenant's request; sizes are for each device. `id` makes Allocate idempotent. `lifetime` and
    `workload` may be recorded later, and are no part of what is asked for.
    """

    id: str
    owner: Owner
    memory_bytes: int | None = None
    share: Percent | None = None
    count: int = 1
    isolation: Isolation | None = None
    mig_profile: str = ""  # a profile's name or id, for isolation "hardware"
    selector: Selector = field(default_factory=Selector)
    label: str = ""  # free text from the caller, shown in listings
    lifetime: Lifetime = field(default_factory=Lifetime)
    # one of PRIORITIES, for the modes mps and preload; if empty, the policy's value or normal counts
    priority: str = ""
    # the process of `lifetime` may be moved into a control group of the allocation
    own_cgroup: bool = False
    # the user whose quota counts, if the owner's uid is one of this user's subordinate uids (subuid(5))
    quota_owner: Owner | None = None
    workload: Workload = field(default_factory=Workload)

    @property
    def counts_for(self) -> Owner:
        """The user whose quota counts."""
        return self.quota_owner or self.owner

    @property
    def whole_device(self) -> bool:
        """Does the request want a whole device, because it has no size or profile?"""
        if self.isolation is not None:
            return self.isolation is Isolation.DEVICE
        return self.memory_bytes is None and self.share is None and not self.mig_profile

    @property
    def outlives_reboot(self) -> bool:
        """Must the allocation survive a reboot? The kubelet restarts its pods with the same devices and does
        not ask again.
        """
        return self.id.startswith((KUBELET_PREFIX, CLAIM_PREFIX))


@dataclass(frozen=True, slots=True)
class MigSlice:
    """The MIG instance of a slice; ids and uuid are None/"" until the instance exists.

    `compute_profile_id` and `compute_placement` (compute slices) are set for one of several compute instances
    of a GPU instance, and None for one that takes all of it.
    """

    profile_id: int
    profile_name: str
    placement: Placement
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    uuid: str = ""
    compute_profile_id: int | None = None
    compute_placement: Placement | None = None

    @property
    def key(self) -> PlaceKey:
        """The key of its GPU instance."""
        return self.profile_id, self.placement

    @property
    def compute_key(self) -> PlaceKey | None:
        """The key of its compute instance; None if that is all of the GPU instance."""
        if self.compute_profile_id is None or self.compute_placement is None:
            return None
        return self.compute_profile_id, self.compute_placement

    @property
    def place(self) -> tuple[PlaceKey, PlaceKey | None]:
        """Both keys, which identify the instance on the device."""
        return self.key, self.compute_key


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one device that an allocation holds.

    `memory_bytes` is what the slice takes of the device's usable memory (whole card: all of it). `share` is
    None if compute is not limited; for a slice inside a MIG instance it is a share of the instance. During a
    move, `other_uuid` is the other device, on which the slice holds the same capacity: the target until the
    tenant's memory is on the host and that is recorded, afterwards the source.
    """

    device_uuid: str
    mode: Mode
    memory_bytes: int
    share: Percent | None = None
    mig: MigSlice | None = None
    other_uuid: str = ""

    @property
    def device_mode(self) -> Mode:
        """The mode of its device: MIG for any slice in an instance, whatever mode shares the instance."""
        return self.mode if self.mig is None else Mode.MIG

    @property
    def is_on_top(self) -> bool:
        """Does it share a MIG instance with other slices?"""
        return self.mig is not None and self.mode is not Mode.MIG

    @property
    def target(self) -> str:
        """CUDA's and NVML's name of the device or MIG device of the slice; "" until the MIG device exists."""
        return self.device_uuid if self.mig is None else self.mig.uuid


class State(StrEnum):
    """ALLOCATING, RESIZING, SUSPENDING, RESUMING and RELEASING are intents: a start undoes ALLOCATING and
    SUSPENDING, and finishes the others."""

    ALLOCATING = "allocating"
    ACTIVE = "active"
    RESIZING = "resizing"  # the slices are the new ones; the tenant may still run under the old limits
    SUSPENDING = "suspending"  # any of its processes may be locked or saved
    SUSPENDED = "suspended"  # its processes wait, their device memory is on the host
    RESUMING = "resuming"  # its capacity is taken again; any of its processes may still wait
    RELEASING = "releasing"
    FAILED = "failed"  # its device or helper is gone; release it


PAUSED = "paused"  # an active allocation that is paused, in listings


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a device was chosen or not."""

    device_uuid: str
    taken: bool
    mode: Mode | None
    sentence: str


@dataclass(frozen=True, slots=True)
class MigMove:
    """An idle GPU instance that is removed to make room; `target` is where it is created again, if
    anywhere.
    """

    device_uuid: str
    profile_id: int
    profile_name: str
    source: Placement
    target: Placement | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of planner.choose: slices or a refusal, always with a reason for each device.

    `moves` must be done before the slices can be made.
    """

    slices: tuple[Slice, ...] = ()
    reasons: tuple[Reason, ...] = ()
    refusal: VgpuError | None = None
    moves: tuple[MigMove, ...] = ()

    def refused(self, refusal: VgpuError) -> "Decision":
        """The same judgement, with no device taken."""
        reasons = tuple(replace(reason, taken=False) for reason in self.reasons)
        return Decision(reasons=reasons, refusal=refusal)


@dataclass(frozen=True, slots=True)
class Mount:
    host_path: str
    container_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device; major and minor are None where the host node could not be read."""

    path: str
    major: int | None = None
    minor: int | None = None
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes that put a process or container into an allocation.

    `env` is for both; `host_env` replaces its entries for a process that runs on the host itself, where files
    have their host paths.
    """

    env: tuple[tuple[str, str], ...] = ()
    host_env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()

    def merged(self, other: "Edits") -> "Edits":
        """Both edits together: of two env entries with one name the later counts; mounts and nodes appear
        once.
        """
        return Edits(
            env=tuple({**dict(self.env), **dict(other.env)}.items()),
            host_env=tuple({**dict(self.host_env), **dict(other.host_env)}.items()),
            mounts=tuple(dict.fromkeys(self.mounts + other.mounts)),
            device_nodes=tuple(dict.fromkeys(self.device_nodes + other.device_nodes)),
        )


# the path of the lease folder, for processes on the host (native/common/lease.h)
LEASE_VARIABLE = "VGPU_LEASE"


class Way(StrEnum):
    """How the memory of a process was moved to the host."""

    CHECKPOINT = "checkpoint"  # by the driver, all of it
    SWAP = "swap"  # by libvgpu, the evictable part of it
    DEEP = "deep"  # by libvgpu the evictable part of it, then by the driver the rest


@dataclass(frozen=True, slots=True)
class SuspendedProcess:
    """A suspended process. `start_ticks` (field 22 of /proc/PID/stat) distinguishes it from a later process
    with its pid. `memory_bytes` have left the device or may leave at any time (node/tenants/kept.py);
    `stays_bytes` cannot be evicted: they are on the device, or (way DEEP) among `memory_bytes`. `saved_on`
    has the UUIDs of the slices' devices at the time of the driver's save, separated by commas, because a
    restore must name them; empty: they are the present devices.
    """

    pid: int
    start_ticks: int
    memory_bytes: int
    way: Way = Way.CHECKPOINT
    stays_bytes: int = 0
    saved_on: str = ""


class Cause(StrEnum):
    """Why a tenant is suspended. HAND: until an operator or its owner resumes it. Other causes: until it has
    work.
    """

    HAND = "hand"
    IDLE = "idle"
    TURN = "turn"  # other tenants have their turn on the device


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of a tenant. `suspended` and `cause` have a meaning only in states of suspension."""

    id: str
    request: Request
    state: State
    slices: tuple[Slice, ...]
    reasons: tuple[Reason, ...] = ()
    edits: Edits = field(default_factory=Edits)
    created_unix_ns: int = 0
    revision: int = 0
    failure: str = ""
    suspended: tuple[SuspendedProcess, ...] = ()
    cause: Cause = Cause.HAND
    # kept off its devices by the engine cut, with its memory there; without effect while it is suspended
    paused: bool = False

    @property
    def has_lease(self) -> bool:
        """Has it a lease folder? True in mode preload, and in mode mps if libvgpu limits the memory."""
        preload = any(part.mode is Mode.PRELOAD for part in self.slices)
        return preload or any(name == LEASE_VARIABLE for name, _ in self.edits.host_env)

    @property
    def is_swapped(self) -> bool:
        """Was its memory evicted by libvgpu, and none of it saved by the driver? All of its processes are
        suspended in the same way.
        """
        return any(process.way is Way.SWAP for process in self.suspended)

    @property
    def is_deep(self) -> bool:
        """Has libvgpu what it can evict, and the driver the rest?"""
        return any(process.way is Way.DEEP for process in self.suspended)

    @property
    def stays_bytes(self) -> int:
        """The memory of a suspended tenant that is still on its device."""
        return sum(process.stays_bytes for process in self.suspended if process.way is Way.SWAP)

    @property
    def moves(self) -> bool:
        """Is it being moved from one device to another?"""
        return any(part.other_uuid for part in self.slices)

    @property
    def shown_state(self) -> str:
        """Its state for listings."""
        return PAUSED if self.paused and self.state is State.ACTIVE else self.state.value

    @property
    def cdi_name(self) -> str:
        """The fully qualified CDI device of this allocation (CDI specification, "kind=device")."""
        return f"vgpud.io/vgpu={self.id}"
