"""What tenants ask for and hold: requests, slices, allocations, decisions and edits."""

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
    """What a tenant needs kept apart; DESIGN's table maps each to a mode."""

    HARDWARE = "hardware"  # memory, faults, bandwidth: mig
    COMPUTE = "compute"  # spatial share, shared faults: mps
    QUOTA = "quota"  # any size, live resize: preload
    DEVICE = "device"  # the whole card: exclusive


MODE_OF: dict[Isolation, Mode] = {
    Isolation.HARDWARE: Mode.MIG,
    Isolation.COMPUTE: Mode.MPS,
    Isolation.QUOTA: Mode.PRELOAD,
    Isolation.DEVICE: Mode.EXCLUSIVE,
}


# (uid_t)-1, which is nobody's: the owner of what a pod holds, whose programs may run as any user
ANYONE = 2**32 - 1

# the request ids of what the kubelet asked for: by its device plugin API, and for a DRA claim
KUBELET_PREFIX = "kubelet/"
CLAIM_PREFIX = "claim/"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds an allocation, as the kernel named the caller."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The process whose end releases the allocation; pid 0 means that only Release does.

    `start_ticks` is field 22 of /proc/PID/stat (proc(5)), which tells a reused pid apart. `cgroup` is the
    group of a container whose init the process is: its other processes are waited for too.
    """

    pid: int = 0
    start_ticks: int = 0
    cgroup: str = ""


@dataclass(frozen=True, slots=True)
class Selector:
    """Which devices may be taken; empty fields allow any."""

    uuids: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    name_glob: str = ""


# what a request may ask; MPS has no above-normal
PRIORITIES = ("above-normal", "normal", "below-normal")


@dataclass(frozen=True, slots=True)
class Request:
    """What a tenant asks for, per device slice; `id` makes Allocate idempotent."""

    id: str
    owner: Owner
    memory_bytes: int | None = None
    share: Percent | None = None
    count: int = 1
    isolation: Isolation | None = None
    mig_profile: str = ""  # a profile's name or id, for isolation "hardware"
    selector: Selector = field(default_factory=Selector)
    label: str = ""  # free text of the caller, shown in listings
    lifetime: Lifetime = field(default_factory=Lifetime)
    priority: str = ""  # one of PRIORITIES, in modes mps and preload; empty: the policy's, or normal
    # whose quota counts, where the owner's uid is one that this user has beside its own (subuid(5))
    quota_owner: Owner | None = None

    @property
    def counts_for(self) -> Owner:
        """The user that quotas go by."""
        return self.quota_owner or self.owner

    @property
    def whole_device(self) -> bool:
        """Nothing that divides a card was asked for."""
        if self.isolation is not None:
            return self.isolation is Isolation.DEVICE
        return self.memory_bytes is None and self.share is None and not self.mig_profile

    @property
    def outlives_reboot(self) -> bool:
        """The kubelet starts its pods again after a reboot with what it was told before, and asks nobody."""
        return self.id.startswith((KUBELET_PREFIX, CLAIM_PREFIX))


@dataclass(frozen=True, slots=True)
class MigSlice:
    """An instance's place; ids and uuid are None/"" until the instance exists.

    `compute_profile_id` and `compute_placement` (compute slices) are set for one of several compute
    instances of a GPU instance, and None for one that takes all of it.
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
        """Where its GPU instance lies."""
        return self.profile_id, self.placement

    @property
    def compute_key(self) -> PlaceKey | None:
        """Where it lies in its GPU instance; None if it is all of that."""
        if self.compute_profile_id is None or self.compute_placement is None:
            return None
        return self.compute_profile_id, self.compute_placement

    @property
    def place(self) -> tuple[PlaceKey, PlaceKey | None]:
        """Both: what tells it from every other instance of the device."""
        return self.key, self.compute_key


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one device that an allocation holds.

    `memory_bytes` is what the slice takes of the device's usable memory (whole card: all of it).
    `share` is None where compute is not limited; on top of a MIG instance it is of the instance.
    `other_uuid` is the other end of a move under way, where it holds as much room: the device that it
    leaves, or, until its bytes are on the host and that is on record, the one that it is to come to.
    """

    device_uuid: str
    mode: Mode
    memory_bytes: int
    share: Percent | None = None
    mig: MigSlice | None = None
    other_uuid: str = ""

    @property
    def device_mode(self) -> Mode:
        """What its device is in: MIG for any part of an instance, however the instance is shared."""
        return self.mode if self.mig is None else Mode.MIG

    @property
    def is_on_top(self) -> bool:
        """Is it a part of a MIG instance, which others may share?"""
        return self.mig is not None and self.mode is not Mode.MIG

    @property
    def target(self) -> str:
        """CUDA's and NVML's name of what it lies on: the device, or its MIG device, "" until there is one."""
        return self.device_uuid if self.mig is None else self.mig.uuid


class State(StrEnum):
    """ALLOCATING, RESIZING, SUSPENDING, RESUMING and RELEASING are intents: a start undoes ALLOCATING and
    SUSPENDING, and finishes the others."""

    ALLOCATING = "allocating"
    ACTIVE = "active"
    RESIZING = "resizing"  # the slices are the new ones; the tenant may still run under the old limits
    SUSPENDING = "suspending"  # any of its processes may be locked or saved
    SUSPENDED = "suspended"  # its processes wait, their device memory is on the host
    RESUMING = "resuming"  # its room is taken again; any of its processes may still wait
    RELEASING = "releasing"
    FAILED = "failed"  # its device or helper is gone; release it


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a device was, or was not, taken."""

    device_uuid: str
    taken: bool
    mode: Mode | None
    sentence: str


@dataclass(frozen=True, slots=True)
class MigMove:
    """An idle GPU instance that goes, to make room; `target` is where it is made again, if anywhere."""

    device_uuid: str
    profile_id: int
    profile_name: str
    source: Placement
    target: Placement | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What planner.choose answers: slices, or a refusal; always with a reason per device.

    `moves` are to be done before the slices can be made.
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
    """What puts an allocation into a process or container.

    `env` is for both; `host_env` replaces its entries for a process that runs on the host itself,
    where files lie at their host paths.
    """

    env: tuple[tuple[str, str], ...] = ()
    host_env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()

    def merged(self, other: "Edits") -> "Edits":
        """Both, later env entries winning by name, mounts and nodes without repeats."""
        return Edits(
            env=tuple({**dict(self.env), **dict(other.env)}.items()),
            host_env=tuple({**dict(self.host_env), **dict(other.host_env)}.items()),
            mounts=tuple(dict.fromkeys(self.mounts + other.mounts)),
            device_nodes=tuple(dict.fromkeys(self.device_nodes + other.device_nodes)),
        )


LEASE_VARIABLE = "VGPU_LEASE"  # names a host process's lease folder (native/common/lease.h)


class Way(StrEnum):
    """How a process's memory went to the host."""

    CHECKPOINT = "checkpoint"  # by the driver, all of it
    SWAP = "swap"  # by libvgpu, what is movable of it


@dataclass(frozen=True, slots=True)
class SuspendedProcess:
    """A process that waits. The start time (field 22 of /proc/PID/stat, clock ticks) tells it from
    another one of the same pid; `memory_bytes` of it left devices, or may leave at any time
    (node/tenants/kept.py); `stays_bytes` cannot. `saved_on` has the UUID of each slice's device when the
    driver saved it, between commas, which a restore has to name; empty: they are the devices of now."""

    pid: int
    start_ticks: int
    memory_bytes: int
    way: Way = Way.CHECKPOINT
    stays_bytes: int = 0
    saved_on: str = ""


class Cause(StrEnum):
    """Why a tenant is suspended. By hand: until somebody resumes it; else until it wants to work."""

    HAND = "hand"
    IDLE = "idle"
    TURN = "turn"  # others take their turn on the device


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a tenant holds. `suspended` is empty unless its state has to do with suspending, and `cause` says
    nothing then."""

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

    @property
    def has_lease(self) -> bool:
        """Is it held through a lease folder: in mode preload, or in mps with libvgpu for the memory?"""
        preload = any(part.mode is Mode.PRELOAD for part in self.slices)
        return preload or any(name == LEASE_VARIABLE for name, _ in self.edits.host_env)

    @property
    def is_swapped(self) -> bool:
        """Does libvgpu move its memory, not the driver? All of its processes went the same way."""
        return any(process.way is Way.SWAP for process in self.suspended)

    @property
    def stays_bytes(self) -> int:
        """What a suspended tenant has left on its device."""
        return sum(process.stays_bytes for process in self.suspended)

    @property
    def moves(self) -> bool:
        """Is it on its way from one device to another?"""
        return any(part.other_uuid for part in self.slices)

    @property
    def cdi_name(self) -> str:
        """The fully qualified CDI device of this allocation (CDI specification, "kind=device")."""
        return f"vgpud.io/vgpu={self.id}"
