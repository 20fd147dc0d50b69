"""What callers are shown of devices and slices beside the snapshots themselves."""

from dataclasses import dataclass

from vgpud.model.device import Device, Node
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
