"""Views of devices and slices for callers, in addition to the snapshots."""

from collections.abc import Mapping
from dataclasses import dataclass

from vgpud.model.device import Device, Node
from vgpud.model.engine import EngineChoice
from vgpud.model.tenancy import Mode


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device with its allocations; `policy_mode` is "auto" or a mode's name."""

    device: Device
    policy_mode: str
    mode: Mode | None
    memory_allocated_bytes: int
    share_allocated_hundredths: int
    allocation_count: int
    drained: bool = False
    engine: EngineChoice | None = None  # None if libvgpu does not share the device


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """Time on a device that is shared by time slices, since the allocation began; nanoseconds, and counts."""

    granted_ns: int  # sum of the time slices' lengths
    used_ns: int  # time in which it held the device
    waited_ns: int  # time in which it had work and did not hold the device
    overrun_ns: int  # time in which it held the device after the end of a time slice
    # time slices that did not end within the drain timeout, so that the next tenant was admitted beside it
    bypasses: int


@dataclass(frozen=True, slots=True)
class SliceUse:
    """The present use of a slice; `memory_driver_bytes` (contexts, modules) is a part of
    `memory_used_bytes`.
    """

    device_uuid: str
    memory_used_bytes: int
    memory_driver_bytes: int
    memory_peak_bytes: int
    refusals_limit: int
    refusals_card: int
    pids: tuple[int, ...]
    compute: ComputeTime | None = None


@dataclass(frozen=True, slots=True)
class Vitals:
    """A device's sensors at one moment; None if NVML has no value (MIG devices have no utilisation)."""

    temperature_celsius: int | None = None
    power_milliwatts: int | None = None
    power_limit_milliwatts: int | None = None
    busy_percent: int | None = None  # percent of the last sampling period in which a kernel ran


@dataclass(frozen=True, slots=True)
class SliceMeter:
    """Present use and counters of a slice, cheap enough to read for every slice each second.

    Counters start with the allocation. None means that the slice's mode has no such meter.
    """

    device_uuid: str
    memory_used_bytes: int
    processes: int
    memory_peak_bytes: int | None = None
    refusals_limit: int | None = None
    refusals_card: int | None = None
    throttled_ns: int | None = None  # time in which launches waited
    compute: ComputeTime | None = None


@dataclass(frozen=True, slots=True)
class Metered:
    """Sensors by device uuid, meters by allocation id (in the order of its slices)."""

    vitals: Mapping[str, Vitals]
    meters: Mapping[str, tuple[SliceMeter, ...]]


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process on a device or in an allocation; `memory_bytes` is None if NVML does not list it."""

    pid: int
    uid: int | None
    command: str
    allocation_id: str
    device_uuid: str
    device_index: int
    memory_bytes: int | None
    mode: str = ""  # mode and label of the allocation
    label: str = ""
    standing: str = ""  # what a suspended allocation waits for
    limited: bool = True  # False: its allocation is marked as bypassed, and libvgpu does not count it


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """The result of a policy reload: what changed at once, and what waits until a device is drained."""

    changed: bool
    digest: str
    done: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeDescription:
    """A summary of the daemon; `hardware_error` is the reason if there are no devices."""

    node: Node
    allocation_count: int
    revision: int
    policy_digest: str
    status: str
    uptime_seconds: float
    hardware_error: str = ""


@dataclass(frozen=True, slots=True)
class MpsServer:
    """An MPS server. `state` is ACTIVE, FAULT or INITIALIZING; empty if the driver does not report it."""

    pid: int
    uid: int | None
    state: str


@dataclass(frozen=True, slots=True)
class MpsClient:
    """A process under MPS; fields that are no longer known are None or ""."""

    pid: int
    server_pid: int
    uid: int | None
    allocation_id: str
    memory_bytes: int | None
    command: str


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """The control daemon of one device; `trouble` is the reason if it does not answer."""

    device_uuid: str
    device_index: int
    pid: int
    version: int  # the number that `nvidia-cuda-mps-control -v` prints, 13000 for CUDA 13.0; 0 if unknown
    multi_user: bool
    client_limit: int
    servers: tuple[MpsServer, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class DrainView:
    """A drained device, and what still prevents a restart of it."""

    device_uuid: str
    drained: bool
    allocation_ids: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Can its helper or the driver be restarted without ending a tenant's work?"""
        return not self.allocation_ids and not self.pids
