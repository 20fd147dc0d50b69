"""MIG: the view that callers get, and their requests."""

from dataclasses import dataclass

from vgpud.model.device import Device, Placement
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Selector


@dataclass(frozen=True, slots=True)
class MigTarget:
    """A requested layout, in the form of planner/layouts.py, for every device that the selector allows."""

    selector: Selector
    layout: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MigProcess:
    """A process in an instance; uid is None and command "?" if it has ended."""

    pid: int
    uid: int | None
    command: str


@dataclass(frozen=True, slots=True)
class MigInstance:
    """`gpu_instance_id` is None for an instance of the layout that does not exist yet.

    `allocation_id` has the ids of all allocations in the instance, separated by ", ".
    """

    profile_id: int
    profile_name: str
    placement: Placement
    gpu_instance_id: int | None
    uuids: tuple[str, ...]
    own: bool  # created by vgpud
    in_layout: bool
    allocation_id: str
    processes: tuple[MigProcess, ...]
    compute_placement: Placement | None = None  # for one of several compute instances: its compute slices


@dataclass(frozen=True, slots=True)
class MigFree:
    """How many more instances of a profile fit beside the existing ones."""

    profile_name: str
    count: int


@dataclass(frozen=True, slots=True)
class MigDevice:
    """`layout` is None if none is requested. `origin` is its source: "applied" or "policy", or "" without a
    layout.
    """

    device: Device
    layout: tuple[str, ...] | None
    origin: str
    dynamic: bool
    instances: tuple[MigInstance, ...]
    free: tuple[MigFree, ...]


@dataclass(frozen=True, slots=True)
class MigChange:
    """One step of a plan. `placement` is that of the GPU instance; `compute_placement` is that of the compute
    instance, if only a part of the GPU instance is made or destroyed.
    """

    device_uuid: str
    device_index: int
    do: str
    profile_name: str
    placement: Placement | None
    reason: str
    compute_placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class MigPlan:
    """The steps in order; a plan with a `refusal` has none."""

    changes: tuple[MigChange, ...] = ()
    refusal: VgpuError | None = None
