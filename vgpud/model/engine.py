"""The engine that enforces the time slices of a device's tenants in mode preload, and the reason for it.

Engine `cut` preempts a tenant in the middle of a kernel, by a call of the driver. Engine `gate` makes the
kernel launches of a tenant wait inside the tenant's processes (docs/compute.md).
"""

from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    CUT = "cut"
    GATE = "gate"
    UNKNOWN = "unknown"  # the probe has not been run on the device yet


class EngineReason(StrEnum):
    """The reason why a device has its engine. It is a label value of metrics, so the set of reasons
    is fixed.
    """

    PROBED = "probed"  # the probe preempted a test kernel, which then resumed and finished correctly
    NOT_PROBED = "not-probed"  # the probe has not run yet: it runs at the first use of the device
    POLICY = "policy"  # the policy requests the gate
    REFUSED = "refused"  # the probe found that the driver cannot preempt
    PROBE_FAILED = "probe-failed"  # the probe gave no answer
    # the device is in MIG mode, and the engine cut was not tested on MIG instances of a real card
    MIG = "mig"
    VGPU_GUEST = "vgpu-guest"
    TENANTS = "tenants"  # tenants used the device before an engine was chosen


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """The probe's result for a device, under one driver and in one boot. `off_us` and `on_us` are the
    durations of the driver calls that preempt a program and let it run again.
    """

    engine: Engine
    why: str
    boot_id: str
    driver_version: str
    failed: bool = False  # the probe gave no answer
    off_us: float = 0.0
    on_us: float = 0.0
    context_mib: int = 0  # memory of a CUDA context; 0: not known


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine in force on a device and the reason. `why` is one sentence in the style of errors."""

    engine: Engine
    reason: EngineReason
    why: str
