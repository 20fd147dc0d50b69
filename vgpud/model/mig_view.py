"""What callers are shown of MIG, and what they ask for."""

from dataclasses import dataclass

from vgpud.model.device import Device, Placement
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Selector


@dataclass(frozen=True, slots=True)
class MigTarget:
    """`layout` in the words of planner/layouts.py, for every device that the selector allows."""

    selector: Selector
    layout: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MigProcess:
    """A process in an instance; uid is None and command "?" where it is gone."""

    pid: int
    uid: int | None
    command: str


@dataclass(frozen=True, slots=True)
class MigInstance:
    """`gpu_instance_id` is None for one of the layout that does not stand yet.

    `allocation_id` names all that share the instance, separated by ", ".
    """

    profile_id: int
    profile_name: str
    placement: Placement
    gpu_instance_id: int | None
    uuids: tuple[str, ...]
    own: bool  # made by vgpud
    in_layout: bool
    allocation_id: str
    processes: tuple[MigProcess, ...]
    compute_placement: Placement | None = None  # of one compute instance of several: its compute slices


@dataclass(frozen=True, slots=True)
class MigFree:
    """How many more instances of a profile fit beside what stands."""

    profile_name: str
    count: int


@dataclass(frozen=True, slots=True)
class MigDevice:
    """`layout` is None where none is wanted; `origin` is then "", else "applied" or "policy"."""

    device: Device
    layout: tuple[str, ...] | None
    origin: str
    dynamic: bool
    instances: tuple[MigInstance, ...]
    free: tuple[MigFree, ...]


@dataclass(frozen=True, slots=True)
class MigChange:
    """One step of a plan; `placement` is that of the GPU instance, `compute_placement` that of the compute
    instance in it, where not all of it is made or destroyed."""

    device_uuid: str
    device_index: int
    do: str
    profile_name: str
    placement: Placement | None
    reason: str
    compute_placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class MigPlan:
    """Steps in order; with a `refusal` there are none."""

    changes: tuple[MigChange, ...] = ()
    refusal: VgpuError | None = None
