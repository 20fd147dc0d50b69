"""Everything that metrics and the status page show, at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from vgpud.model.event import Event
from vgpud.model.marks import Mark
from vgpud.model.tally import Tally
from vgpud.model.tenancy import Allocation
from vgpud.model.view import DeviceView, Metered, NodeDescription


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """The daemon's own resource use, from /proc."""

    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    open_descriptors: int = 0
    start_unix_seconds: float = 0.0


@dataclass(frozen=True)
class Observation:
    """One observation. `nvml_errors` counts refused calls by NVML's status number. `events` are the latest
    events, oldest first.
    """

    version: str
    described: NodeDescription
    devices: tuple[DeviceView, ...]
    allocations: tuple[Allocation, ...]
    metered: Metered
    tally: Tally
    nvml_errors: Mapping[int, int]
    process: ProcessFigures
    watchers: int
    events: tuple[Event, ...] = ()
    collect_seconds: float = 0.0
    waiting: int = 0  # number of suspended tenants in the queue to be resumed
    marks: tuple[Mark, ...] = ()
    names_workloads: bool = True  # metrics show namespaces, pods, containers and claims
