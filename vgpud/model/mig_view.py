"""MIG as callers see it: devices, instances, plans, and requests for layouts."""

from dataclasses import dataclass

from vgpud.model.device import Device, Placement
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Selector


@dataclass(frozen=True, slots=True)
class MigTarget:
    """A requested layout, in the words of planner/layouts.py, for every device that the selector matches."""

    selector: Selector
    layout: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MigProcess:
    """A process in a MIG instance. If it has ended, uid is None and command is "?"."""

    pid: int
    uid: int | None
    command: str


@dataclass(frozen=True, slots=True)
class MigInstance:
    """An instance on a device. `gpu_instance_id` is None for an instance of the layout that does not exist
    yet.

    `allocation_id` has the ids of all allocations in the instance, separated by ", ".
    """

    profile_id: int
    profile_name: str
    placement: Placement
    gpu_instance_id: int | None
    uuids: tuple[str, ...]
    own: bool  # True if vgpud created the instance
    in_layout: bool
    allocation_id: str
    processes: tuple[MigProcess, ...]
    compute_placement: Placement | None = None  # the compute slices of one of several compute instances


@dataclass(frozen=True, slots=True)
class MigFree:
    """How many more instances of a profile fit on a device."""

    profile_name: str
    count: int


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A device with its instances. `layout` is None if no layout is requested. `origin` says where the layout
    comes from: "applied" or "policy", or "" without a layout.
    """

    device: Device
    layout: tuple[str, ...] | None
    origin: str
    dynamic: bool
    instances: tuple[MigInstance, ...]
    free: tuple[MigFree, ...]


@dataclass(frozen=True, slots=True)
class MigChange:
    """One step of a MIG plan. `placement` is that of the GPU instance. `compute_placement` is that of the
    compute instance, if only a part of the GPU instance is created or destroyed.
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
    """The steps of a change of layouts, in order. A plan with a `refusal` has no steps."""

    changes: tuple[MigChange, ...] = ()
    refusal: VgpuError | None = None
