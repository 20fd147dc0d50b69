"""The inputs of mode mps: the policy's rules, and callbacks to the node."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.quantity import MIB, WHOLE, Percent
from vgpud.model.rows import Rows
from vgpud.model.tenancy import ANYONE, Allocation, Mode, Slice


class Users(StrEnum):
    """What happens to a second user on a device: NVIDIA's daemon serves one uid at a time."""

    SAME = "same"  # the device is refused to the second user
    # the second user is admitted with a notice, and its programs wait until the first user has no clients
    QUEUE = "queue"
    MULTI = "multi"  # one server serves all users if the driver supports that; otherwise as `same`


@dataclass(frozen=True, slots=True)
class MpsRules:
    """The policy's rules for one device, as far as mode mps needs them."""

    users: Users = Users.SAME
    processes_per_tenant: int = 1
    pooled_memory: bool = False  # libvgpu enforces one limit for all processes of a tenant
    exclusive_process: bool = False
    # static SM partitions (driver branch 590 and later): each tenant has multiprocessors of its own
    partitions: bool = False
    below_normal: bool = False  # priority of clients, a hint to the driver (branch 535 and later)
    check_seconds: float = 10.0
    hang_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class MpsLimits:
    """The limits that a daemon grants to every client: those of its largest tenant."""

    memory_mib: int
    share: Percent

    @classmethod
    def largest(cls, slices: Iterable[Slice]) -> "MpsLimits | None":
        """The limits for these slices; None if there are no slices. (A client can only lower the limits that
        the daemon grants.)
        """
        parts = tuple(slices)
        if not parts:
            return None
        return cls(
            max(part.memory_bytes // MIB for part in parts), max(part.share or WHOLE for part in parts)
        )


@dataclass(frozen=True)
class MpsWorld:
    """Callbacks to the node. `died` and `notice` are called in the event loop, with a target and a sentence;
    `notice` also with audited=True if the audit trail says the same.

    A target is the UUID of the device or MIG device that a daemon serves.
    """

    allocations_on: Callable[[str], Iterable[Allocation]]
    rules_for: Callable[[str], MpsRules]
    died: Callable[[str, str], None]
    notice: Callable[..., None]
    originals: Rows

    def users_on(self, target: str) -> frozenset[int]:
        """The uids that have a share on the device. Pods are left out: the uid of their processes is not
        known, and they reach the pipe by their mount.
        """
        owners = (allocation.request.owner.uid for allocation in self.allocations_on(target))
        return frozenset(uid for uid in owners if uid != ANYONE)

    def slices_on(self, target: str) -> tuple[Slice, ...]:
        return tuple(
            part
            for allocation in self.allocations_on(target)
            for part in allocation.slices
            if part.target == target and part.mode is Mode.MPS
        )
