"""Inputs of the mode: the policy's rules, and callbacks to the node."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.quantity import MIB, WHOLE, Percent
from vgpud.model.tenancy import ANYONE, Allocation, Mode, Slice
from vgpud.modes.base import Originals


class Users(StrEnum):
    """What happens to a second uid on a device: NVIDIA's daemon serves one uid at a time."""

    SAME = "same"  # it is refused the device
    QUEUE = "queue"  # it is admitted with a notice, and waits until the first has no clients
    MULTI = "multi"  # one server for all users if the driver supports it; otherwise as `same`


@dataclass(frozen=True, slots=True)
class MpsRules:
    """The policy of one device, as this mode needs it."""

    users: Users = Users.SAME
    processes_per_tenant: int = 1
    pooled_memory: bool = False  # libvgpu holds all processes of a tenant to one limit
    exclusive_process: bool = False
    below_normal: bool = False  # client priority (a hint to the driver, 535 and later)
    check_seconds: float = 10.0
    hang_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What every client of a daemon is held to at least: that of the largest tenant."""

    memory_mib: int
    share: Percent

    @classmethod
    def largest(cls, slices: Iterable[Slice]) -> "Limits | None":
        """None without slices. A client may only lower what the daemon grants."""
        parts = tuple(slices)
        if not parts:
            return None
        return cls(
            max(part.memory_bytes // MIB for part in parts), max(part.share or WHOLE for part in parts)
        )


@dataclass(frozen=True)
class MpsWorld:
    """`died` and `notice` are called in the event loop, with a target and a sentence.

    A target is the uuid of what a daemon serves: a device, or a MIG device.
    """

    allocations_on: Callable[[str], Iterable[Allocation]]
    rules_for: Callable[[str], MpsRules]
    died: Callable[[str, str], None]
    notice: Callable[[str, str], None]
    originals: Originals

    def users_on(self, target: str) -> frozenset[int]:
        """The uids that hold a share on the device. Pods have no known uid and reach the pipe by their
        mount."""
        owners = (allocation.request.owner.uid for allocation in self.allocations_on(target))
        return frozenset(uid for uid in owners if uid != ANYONE)

    def slices_on(self, target: str) -> tuple[Slice, ...]:
        return tuple(
            part
            for allocation in self.allocations_on(target)
            for part in allocation.slices
            if part.target == target and part.mode is Mode.MPS
        )
