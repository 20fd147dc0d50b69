"""What vgpud has noticed of an allocation that its limits do not cover."""

from dataclasses import dataclass
from enum import StrEnum


class MarkKind(StrEnum):
    BYPASSED = "bypassed"  # its processes hold device memory that its ledger does not count
    TAMPERED = "tampered"  # its `usage` file was changed as libvgpu never changes it
    GATED = "gated"  # the driver refused to take it off a device: libvgpu's gate keeps its time slices
    UNKNOWN_CALLS = "unknown-calls"  # its driver has functions that libvgpu does not know


@dataclass(frozen=True, slots=True)
class Mark:
    """One of a kind for each allocation.

    `subject` is the device's UUID (bypassed) or the driver's version (unknown calls). `amount` is in bytes
    (bypassed), cuts of the file (tampered), functions (unknown calls) or 0 (gated), as of `since_unix_ns`.
    """

    allocation_id: str
    kind: MarkKind
    subject: str
    amount: int
    sentence: str
    since_unix_ns: int
