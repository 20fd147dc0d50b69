"""Marks: findings about tenants that escape their limits."""

from dataclasses import dataclass
from enum import StrEnum


class MarkKind(StrEnum):
    BYPASSED = "bypassed"  # its processes hold device memory that its ledger does not count
    TAMPERED = "tampered"  # its `usage` file was changed in a way that libvgpu never does
    GATED = "gated"  # the driver refused to preempt it: libvgpu's gate, in the program, enforces its slices
    UNKNOWN_CALLS = "unknown-calls"  # its driver has functions that libvgpu does not know


@dataclass(frozen=True, slots=True)
class Mark:
    """A finding about an allocation, which has at most one of each kind.

    `subject` is the device's UUID (bypassed) or the driver's version (unknown calls). `amount` is in bytes
    (bypassed), cuts of the file (tampered), functions (unknown calls) or 0 (gated), as of `since_unix_ns`.
    """

    allocation_id: str
    kind: MarkKind
    subject: str
    amount: int
    sentence: str
    since_unix_ns: int
