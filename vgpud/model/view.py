"""What callers see of devices, slices, processes and MPS daemons, in addition to the snapshots."""

from collections.abc import Mapping
from dataclasses import dataclass

from vgpud.model.device import Device, Node
from vgpud.model.engine import EngineChoice
from vgpud.model.tenancy import Allocation, Mode, State


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device with its allocations. `policy_mode` is "auto" or the name of a mode."""

    device: Device
    policy_mode: str
    mode: Mode | None
    memory_allocated_bytes: int
    share_allocated_hundredths: int
    allocation_count: int
    drained: bool = False
    engine: EngineChoice | None = None  # None if the device has and can get no preload slices


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """The compute time of a tenant since its allocation, on a device whose tenants run in turn."""

    granted_ns: int  # sum of the lengths of the tenant's time slices
    used_ns: int  # time in which the tenant held the device
    waited_ns: int  # time in which the tenant had work and did not hold the device
    overrun_ns: int  # time in which the tenant held the device after the end of its time slice
    # number of time slices that did not end within the drain timeout, so that the next tenant was admitted
    # beside this tenant
    bypasses: int


@dataclass(frozen=True, slots=True)
class SliceUse:
    """The present use of a slice. `memory_driver_bytes` (contexts, modules) is a part of
    `memory_used_bytes`. A value is None if the slice's mode has no such meter.
    """

    device_uuid: str
    memory_used_bytes: int
    pids: tuple[int, ...]
    memory_driver_bytes: int | None = None
    memory_peak_bytes: int | None = None
    refusals_limit: int | None = None
    refusals_card: int | None = None
    compute: ComputeTime | None = None


@dataclass(frozen=True, slots=True)
class Vitals:
    """A device's sensors at one moment. A value is None if NVML has none (MIG devices have no
    utilisation).
    """

    temperature_celsius: int | None = None
    power_milliwatts: int | None = None
    power_limit_milliwatts: int | None = None
    busy_percent: int | None = None  # percent of the last sampling period during which a kernel ran


@dataclass(frozen=True, slots=True)
class SliceMeter:
    """The present use and the counters of a slice, cheap enough to read for every slice each second.

    The counters start with the allocation. A value is None if the slice's mode has no such meter.
    """

    device_uuid: str
    memory_used_bytes: int
    processes: int
    memory_peak_bytes: int | None = None
    refusals_limit: int | None = None
    refusals_card: int | None = None
    throttled_ns: int | None = None  # time during which launches waited
    compute: ComputeTime | None = None


def on_device_bytes(allocation: Allocation, meter: SliceMeter) -> int:
    """Bytes of a slice on its device. libvgpu's meter also counts memory of a suspended tenant that is on the
    host.
    """
    return allocation.stays_bytes if allocation.state is State.SUSPENDED else meter.memory_used_bytes


@dataclass(frozen=True, slots=True)
class Metered:
    """One reading of all meters: sensors by device UUID, and slices' meters by allocation id, in the order of
    the allocation's slices.
    """

    vitals: Mapping[str, Vitals]
    meters: Mapping[str, tuple[SliceMeter, ...]]


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process on a device or in an allocation. `memory_bytes` is None if NVML does not report it."""

    pid: int
    uid: int | None
    command: str
    allocation_id: str
    device_uuid: str
    device_index: int
    memory_bytes: int | None
    mode: str = ""  # mode of the process's allocation
    label: str = ""
    standing: str = ""  # what a suspended allocation waits for, as a sentence
    # False if the allocation is marked as bypassed and libvgpu does not count this process
    limited: bool = True
    silent_mode: str = ""  # a mode on the device that did not list its processes


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """The result of a policy reload: what changed at once, and what waits until a device is drained."""

    changed: bool
    digest: str
    done: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeDescription:
    """A summary of the daemon and its node. `hardware_error` says why the last snapshot failed;
    `arbiter_error` says that the arbiter does not answer. Each is "" if there is no error.
    """

    node: Node
    allocation_count: int
    revision: int
    policy_digest: str
    status: str
    uptime_seconds: float
    hardware_error: str = ""
    arbiter_error: str = ""


@dataclass(frozen=True, slots=True)
class MpsServer:
    """An MPS server. `state` is ACTIVE, FAULT or INITIALIZING, or empty if the driver does not report it."""

    pid: int
    uid: int | None
    state: str


@dataclass(frozen=True, slots=True)
class MpsClient:
    """A process that is an MPS client. Fields that are no longer known are None or ""."""

    pid: int
    server_pid: int
    uid: int | None
    allocation_id: str
    memory_bytes: int | None
    command: str


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """The MPS control daemon of one device. `trouble` is the reason if the daemon does not answer."""

    device_uuid: str
    device_index: int
    pid: int
    # version number as `nvidia-cuda-mps-control -v` prints it (13000 for CUDA 13.0); 0 if unknown
    version: int
    multi_user: bool
    client_limit: int
    servers: tuple[MpsServer, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class DrainView:
    """Whether a device is drained, and the allocations and processes that still prevent a restart of the
    driver or the MPS daemon.
    """

    device_uuid: str
    drained: bool
    allocation_ids: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """True if the driver or the device's MPS daemon can be restarted without ending a tenant's work."""
        return not self.allocation_ids and not self.pids
