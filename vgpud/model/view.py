"""What callers are shown of devices and slices beside the snapshots themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from vgpud.model.device import Device, Node
from vgpud.model.engine import EngineChoice
from vgpud.model.tenancy import Mode


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device with what is allocated on it; `policy_mode` is "auto" or a mode's name."""

    device: Device
    policy_mode: str
    mode: Mode | None
    memory_allocated_bytes: int
    share_allocated_hundredths: int
    allocation_count: int
    drained: bool = False
    engine: EngineChoice | None = None  # None where libvgpu does not share the device


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """Time of a device that is given in turns, since the allocation began; nanoseconds, and counts."""

    granted_ns: int  # length of the turns
    used_ns: int  # held the device
    waited_ns: int  # wanted the device and did not have it
    overrun_ns: int  # held it after the end of a turn
    bypasses: int  # turns that did not end within the bound: the next was let in beside


@dataclass(frozen=True, slots=True)
class SliceUse:
    """What a slice uses now; `memory_driver_bytes` (contexts, modules) is within `memory_used_bytes`."""

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
    """A device's sensors at one moment; None where NVML does not say (MIG devices have no utilisation)."""

    temperature_celsius: int | None = None
    power_milliwatts: int | None = None
    power_limit_milliwatts: int | None = None
    busy_percent: int | None = None  # of the last sampling period, some kernel ran


@dataclass(frozen=True, slots=True)
class SliceMeter:
    """What a slice uses and has used, cheap enough to be read for every slice each second.

    Counters start with the allocation. None means that the slice's mode has no such meter.
    """

    device_uuid: str
    memory_used_bytes: int
    processes: int
    memory_peak_bytes: int | None = None
    refusals_limit: int | None = None
    refusals_card: int | None = None
    throttled_ns: int | None = None  # launches held back
    compute: ComputeTime | None = None


@dataclass(frozen=True, slots=True)
class Metered:
    """Sensors by device uuid, meters by allocation id (in the order of its slices)."""

    vitals: Mapping[str, Vitals]
    meters: Mapping[str, tuple[SliceMeter, ...]]


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process on a device or in an allocation; `memory_bytes` is None where NVML lists none for it."""

    pid: int
    uid: int | None
    command: str
    allocation_id: str
    device_uuid: str
    device_index: int
    memory_bytes: int | None
    mode: str = ""  # of the allocation, as is the label
    label: str = ""
    standing: str = ""  # what a suspended allocation waits for
    limited: bool = True  # False: it is the allocation's, and past what limits the allocation


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """What a policy reload did at once, and what waits until a device is drained."""

    changed: bool
    digest: str
    done: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeDescription:
    """The daemon in a few words; `hardware_error` says why there are no devices, if so."""

    node: Node
    allocation_count: int
    revision: int
    policy_digest: str
    status: str
    uptime_seconds: float
    hardware_error: str = ""


@dataclass(frozen=True, slots=True)
class MpsServer:
    """`state` is ACTIVE, FAULT or INITIALIZING; empty where the driver does not say."""

    pid: int
    uid: int | None
    state: str


@dataclass(frozen=True, slots=True)
class MpsClient:
    """A process that runs under MPS; None and "" where it cannot be known any more."""

    pid: int
    server_pid: int
    uid: int | None
    allocation_id: str
    memory_bytes: int | None
    command: str


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """The control daemon of one device; `trouble` says why it does not answer, if so."""

    device_uuid: str
    device_index: int
    pid: int
    version: int  # as `nvidia-cuda-mps-control -v` says it, 13000 for CUDA 13.0; 0 where it does not
    multi_user: bool
    client_limit: int
    servers: tuple[MpsServer, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class DrainView:
    """A device that takes no new tenants, and what still stands against restarting it."""

    device_uuid: str
    drained: bool
    allocation_ids: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Its helper, or the driver, can be restarted without ending anybody's work."""
        return not self.allocation_ids and not self.pids
