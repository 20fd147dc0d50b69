"""Marks record facts about a tenant whose limits are not enforced, or not by the intended means."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.tenancy import PAUSED, Allocation, State


class MarkKind(StrEnum):
    # the tenant's processes hold device memory that its ledger in the lease does not count
    BYPASSED = "bypassed"
    TAMPERED = "tampered"  # the tenant's `usage` file was changed in a way that libvgpu never does
    # the driver refused to preempt the tenant, so libvgpu's gate, inside the program, enforces its time
    # slices
    GATED = "gated"
    NO_WALL = "no-wall"  # the driver can limit the tenant's memory, but setting the limit failed
    UNKNOWN_CALLS = "unknown-calls"  # the tenant's driver has functions that libvgpu does not know


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of an allocation, which has at most one of each kind.

    `subject` is the device's UUID (bypassed) or the driver's version (unknown calls). `amount` was counted at
    `since_unix_ns`: bytes (bypassed), truncations of the usage file (tampered), functions (unknown calls) or
    0 (others).
    """

    allocation_id: str
    kind: MarkKind
    subject: str
    amount: int
    sentence: str
    since_unix_ns: int


def shown_state(allocation: Allocation, marks: Iterable[Mark]) -> str:
    """The allocation's state as listings and metrics show it. A paused allocation is shown as active if the
    driver refuses to keep it off its devices (mark GATED). Marks of other allocations are ignored.
    """
    paused = allocation.paused and allocation.state is State.ACTIVE
    gated = paused and any(m.kind is MarkKind.GATED and m.allocation_id == allocation.id for m in marks)
    return PAUSED if paused and not gated else allocation.state.value
