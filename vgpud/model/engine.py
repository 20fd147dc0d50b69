"""Which engine keeps the time slices of a device's preload tenants, and why.

`cut` takes tenants off the device in the middle of a kernel, by the driver's own control; `gate` holds their
launches back in their own processes (docs/compute.md).
"""

from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    CUT = "cut"
    GATE = "gate"
    UNKNOWN = "unknown"  # the probe has not been run yet


class EngineReason(StrEnum):
    """Why a device has its engine; a label of metrics, so the set is closed."""

    PROBED = "probed"  # the probe stopped a kernel of its own, and it went on and ended whole
    NOT_PROBED = "not-probed"  # the probe runs at the first use of the device
    POLICY = "policy"  # the policy asks for the gate
    REFUSED = "refused"  # the probe found that the driver cannot do it
    PROBE_FAILED = "probe-failed"  # the probe gave no answer
    MIG = "mig"  # not tried on MIG instances of a real card
    VGPU_GUEST = "vgpu-guest"
    TENANTS = "tenants"  # they were there before an engine was chosen


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What the probe says of a device, under one driver and in one boot; times of a single call."""

    engine: Engine
    why: str
    boot_id: str
    driver_version: str
    failed: bool = False  # it gave no answer
    off_us: float = 0.0
    on_us: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`why` is one sentence, as errors have it."""

    engine: Engine
    reason: EngineReason
    why: str
