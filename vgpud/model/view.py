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
