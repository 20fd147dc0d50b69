"""The types of tenancy: requests, slices, allocations, decisions and edits."""

from dataclasses import dataclass, field
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

    HARDWARE = "hardware"  # mode mig: memory, faults and bandwidth are separate
    COMPUTE = "compute"  # mode mps: a share of the multiprocessors; faults are shared
    QUOTA = "quota"  # mode preload: a slice of any size, which can change while programs run
    DEVICE = "device"  # mode exclusive: the whole card


MODE_OF: dict[Isolation, Mode] = {
    Isolation.HARDWARE: Mode.MIG,
    Isolation.COMPUTE: Mode.MPS,
    Isolation.QUOTA: Mode.PRELOAD,
    Isolation.DEVICE: Mode.EXCLUSIVE,
}


# The owner of a pod's allocation: (uid_t)-1, which no user has, because a pod's programs may run as any user.
ANYONE = 2**32 - 1

# Prefixes of request ids for Kubernetes: of requests through the device plugin API, and of DRA claims.
KUBELET_PREFIX = "kubelet/"
CLAIM_PREFIX = "claim/"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an allocation, as the kernel identified the caller."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The process whose end releases the allocation. With pid 0, only a call of Release releases it.

    `start_ticks` is field 22 of /proc/PID/stat (proc(5)), which distinguishes the process from a later one
    with the same pid. `cgroup` is set if the process is a container's init: the release then waits for the
    end of all processes of this control group.
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
    """The names of the pod, container and claim in Kubernetes that use an allocation. Each is "" while it is
    not known. Names are for display: no decision depends on them.

    If several containers share an allocation, these are the names of the first.
    """

    namespace: str = ""
    pod: str = ""
    container: str = ""
    claim: str = ""

    @property
    def pod_path(self) -> str:
        """The pod as "namespace/pod/container", without an unknown container; "" if the pod is not known."""
        return "/".join(filter(None, (self.namespace, self.pod, self.container))) if self.pod else ""

    @property
    def claim_path(self) -> str:
        """The claim as "namespace/claim"; "" if it is not known."""
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


# The priorities that a request can have; mode mps has no above-normal.
PRIORITIES = ("above-normal", "normal", "below-normal")


@dataclass(frozen=True, slots=True)
class Request:
    """A tenant's request. Sizes are for each device. `id` makes Allocate idempotent. `lifetime` and
    `workload` may be recorded later, and do not distinguish requests.
    """

    id: str
    owner: Owner
    memory_bytes: int | None = None
    share: Percent | None = None
    count: int = 1
    isolation: Isolation | None = None
    mig_profile: str = ""  # a MIG profile's name or id, for isolation "hardware"
    selector: Selector = field(default_factory=Selector)
    label: str = ""  # free text from the caller, shown in listings
    lifetime: Lifetime = field(default_factory=Lifetime)
    # One of PRIORITIES, for the modes mps and preload. If it is empty, the policy's value counts, or else
    # normal.
    priority: str = ""
    # True if the process of `lifetime` may be moved into a control group that vgpud makes for the allocation.
    own_cgroup: bool = False
    # The user whose quota counts, if the owner's uid is one of this user's subordinate uids (subuid(5)).
    quota_owner: Owner | None = None
    workload: Workload = field(default_factory=Workload)

    @property
    def counts_for(self) -> Owner:
        """The user whose quota counts for this request."""
        return self.quota_owner or self.owner

    @property
    def whole_device(self) -> bool:
        """Does the request ask for a whole device? It does if it has neither a size nor a profile, unless it
        names another isolation.
        """
        if self.isolation is not None:
            return self.isolation is Isolation.DEVICE
        return self.memory_bytes is None and self.share is None and not self.mig_profile

    @property
    def by_kubelet(self) -> bool:
        """Did the kubelet ask for the allocation, for a pod or a claim? Such an allocation must survive a
        reboot, because the kubelet restarts its pods with the same devices and does not ask vgpud again.
        """
        return self.id.startswith((KUBELET_PREFIX, CLAIM_PREFIX))


@dataclass(frozen=True, slots=True)
class MigSlice:
    """The MIG instance of a slice. Ids are None and `uuid` is "" until the instance exists.

    `compute_profile_id` and `compute_placement` (compute slices) are set for one of several compute instances
    of a GPU instance. They are None for a compute instance that takes all of it.
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
        """The profile id and placement of the GPU instance."""
        return self.profile_id, self.placement

    @property
    def compute_key(self) -> PlaceKey | None:
        """The profile id and placement of the compute instance; None if it takes the whole GPU instance."""
        if self.compute_profile_id is None or self.compute_placement is None:
            return None
        return self.compute_profile_id, self.compute_placement

    @property
    def place(self) -> tuple[PlaceKey, PlaceKey | None]:
        """The keys of GPU instance and compute instance, which together identify the instance on the
        device.
        """
        return self.key, self.compute_key


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one device that an allocation holds.

    `memory_bytes` is what the slice takes of the device's usable memory (for a whole card: all of it).
    `share` is None if compute is not limited; for a slice inside a MIG instance it is a share of the
    instance. During a move, the slice also holds its capacity on the device `other_uuid`. `other_uuid` is the
    move's target until the ledger has the step RECORD_MOVE (planner/move.py), and the move's source
    afterwards.
    """

    device_uuid: str
    mode: Mode
    memory_bytes: int
    share: Percent | None = None
    mig: MigSlice | None = None
    other_uuid: str = ""

    @property
    def device_mode(self) -> Mode:
        """The mode of the slice's device: MIG for any slice in a MIG instance, also if another mode shares
        the instance.
        """
        return self.mode if self.mig is None else Mode.MIG

    @property
    def is_on_top(self) -> bool:
        """True if the slice is in a MIG instance that slices of mode preload or mps can share."""
        return self.mig is not None and self.mode is not Mode.MIG

    @property
    def target(self) -> str:
        """The name that CUDA and NVML have for the slice's device or MIG device; "" until the MIG device
        exists.
        """
        return self.device_uuid if self.mig is None else self.mig.uuid


class State(StrEnum):
    """The state of an allocation. ALLOCATING, RESIZING, SUSPENDING, RESUMING and RELEASING are intents: a
    start of vgpud undoes ALLOCATING and a suspension by the driver, and finishes the others.
    """

    ALLOCATING = "allocating"
    ACTIVE = "active"
    RESIZING = "resizing"  # the record has the new slices; the tenant may still run under the old limits
    SUSPENDING = "suspending"  # any of the tenant's processes may be locked or saved
    SUSPENDED = "suspended"  # the tenant's processes wait, and their device memory is on the host
    RESUMING = "resuming"  # the capacity is taken again; any of the tenant's processes may still wait
    RELEASING = "releasing"
    FAILED = "failed"  # the device or the MPS daemon was lost; the allocation can only be released


PAUSED = "paused"  # how listings show the state of an active allocation that is paused


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a device was chosen for a request, or not."""

    device_uuid: str
    taken: bool
    mode: Mode | None
    sentence: str


@dataclass(frozen=True, slots=True)
class MigMove:
    """An idle GPU instance that is removed to make room. `target` is the place where it is created again, or
    None.
    """

    device_uuid: str
    profile_id: int
    profile_name: str
    source: Placement
    target: Placement | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of planner.choose: slices or a refusal, always with a reason for each device.

    `moves` must be done before the slices can be made. If the tenant `starts_suspended`, its memory does not
    fit beside that of the device's other tenants, with which it takes turns.
    """

    slices: tuple[Slice, ...] = ()
    reasons: tuple[Reason, ...] = ()
    refusal: VgpuError | None = None
    moves: tuple[MigMove, ...] = ()
    starts_suspended: bool = False

    def refused(self, refusal: VgpuError) -> "Decision":
        """A decision with `refusal` in place of the slices. The refusal becomes the reason of every device,
        because another device would be refused too.
        """
        reasons = tuple(Reason(one.device_uuid, False, None, refusal.sentence) for one in self.reasons)
        return Decision(reasons=reasons, refusal=refusal)


@dataclass(frozen=True, slots=True)
class Mount:
    host_path: str
    container_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device. Major and minor are None if they are not known."""

    path: str
    major: int | None = None
    minor: int | None = None
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes that put a process or container into an allocation.

    `env` is for processes on the host and in containers. For a process on the host, entries of `host_env`
    replace those of `env`, because `host_env` has the paths of files on the host.
    """

    env: tuple[tuple[str, str], ...] = ()
    host_env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()

    def merged(self, other: "Edits") -> "Edits":
        """Both edits combined. If both have an env entry of the same name, that of `other` counts. Each mount
        and device node appears once.
        """
        return Edits(
            env=tuple({**dict(self.env), **dict(other.env)}.items()),
            host_env=tuple({**dict(self.host_env), **dict(other.host_env)}.items()),
            mounts=tuple(dict.fromkeys(self.mounts + other.mounts)),
            device_nodes=tuple(dict.fromkeys(self.device_nodes + other.device_nodes)),
        )


# The environment variable with the path of the lease folder, for processes on the host
# (native/common/lease.h).
LEASE_VARIABLE = "VGPU_LEASE"


class Way(StrEnum):
    """How the memory of a process was moved to the host."""

    CHECKPOINT = "checkpoint"  # the driver moved all of the memory
    SWAP = "swap"  # libvgpu moved the part that can be evicted
    DEEP = "deep"  # libvgpu moved the part that can be evicted, then the driver the rest


@dataclass(frozen=True, slots=True)
class SuspendedProcess:
    """A suspended process. `start_ticks` (field 22 of /proc/PID/stat) distinguishes it from a later process
    with the same pid. `memory_bytes` have left the device, or may leave it at any time
    (node/tenants/kept.py). `stays_bytes` cannot be evicted by libvgpu: they are on the device, or (way DEEP)
    among `memory_bytes`. `saved_on` has the UUIDs of the slices' devices at the time of the driver's save,
    separated by commas, because a restore must name these devices. If `saved_on` is empty, these are the
    current devices.
    """

    pid: int
    start_ticks: int
    memory_bytes: int
    way: Way = Way.CHECKPOINT
    stays_bytes: int = 0
    saved_on: str = ""


class Cause(StrEnum):
    """Why a tenant is suspended. With cause HAND, the tenant waits until an operator or its owner resumes it.
    With any other cause, the tenant waits until it has work and the device has room.
    """

    HAND = "hand"
    IDLE = "idle"
    TURN = "turn"  # the tenants of the device take turns, and it is the turn of others


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of a tenant. `suspended` and `cause` have a meaning only in states of suspension or
    resumption; in state ALLOCATING, the cause TURN says that the tenant starts suspended.
    """

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
    # True if the engine cut keeps the tenant off its devices while its memory stays there. A pause has no
    # effect while the tenant is suspended.
    paused: bool = False

    @property
    def has_lease(self) -> bool:
        """Does the allocation have a lease folder? It does in mode preload, and in mode mps if libvgpu limits
        the memory.
        """
        preload = any(part.mode is Mode.PRELOAD for part in self.slices)
        return preload or any(name == LEASE_VARIABLE for name, _ in self.edits.host_env)

    @property
    def starts_suspended(self) -> bool:
        return self.state is State.ALLOCATING and self.cause is Cause.TURN

    @property
    def is_swapped(self) -> bool:
        """Did libvgpu evict the tenant's memory, while the driver saved none? (All processes of a tenant are
        suspended in the same way.)
        """
        return any(process.way is Way.SWAP for process in self.suspended)

    @property
    def is_deep(self) -> bool:
        """True if the tenant was suspended by both ways: libvgpu evicted what it can, and the driver saved
        the rest.
        """
        return any(process.way is Way.DEEP for process in self.suspended)

    @property
    def stays_bytes(self) -> int:
        """Bytes of a suspended tenant that stay on its device because libvgpu cannot evict them."""
        return sum(process.stays_bytes for process in self.suspended if process.way is Way.SWAP)

    @property
    def held_bytes(self) -> int:
        """Bytes that a suspended tenant has on its devices and on the host together."""
        return self.stays_bytes + sum(process.memory_bytes for process in self.suspended)

    @property
    def moves(self) -> bool:
        """True while the allocation is being moved from one device to another."""
        return any(part.other_uuid for part in self.slices)

    @property
    def cdi_name(self) -> str:
        """The fully qualified CDI device name of this allocation (CDI specification, "kind=device")."""
        return f"vgpud.io/vgpu={self.id}"
