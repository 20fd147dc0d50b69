"""The interface through which the daemon's servers use the node."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vgpud.model.caller import Caller
from vgpud.model.event import Event
from vgpud.model.marks import Mark
from vgpud.model.mig_view import MigDevice, MigPlan, MigTarget
from vgpud.model.move_view import DefragView, Evacuation, RoomWanted
from vgpud.model.plan import Step
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Allocation, Decision, Request, Selector, Workload
from vgpud.model.view import (
    DeviceView,
    DrainView,
    Metered,
    MpsDaemon,
    NodeDescription,
    NodeProcess,
    ReloadReport,
    SliceUse,
)
from vgpud.policy.model import Policy


class PolicyInForce(Protocol):
    """The effective policy. `origins` are shown as text, "file:line" for each key path."""

    @property
    def policy(self) -> Policy: ...
    @property
    def origins(self) -> Mapping[str, object]: ...
    @property
    def files(self) -> Sequence[Path]: ...
    @property
    def digest(self) -> str: ...


class Operations(Protocol):
    """Operations of administrators on devices. All raise VgpuError."""

    async def mps(self) -> tuple[MpsDaemon, ...]: ...

    async def terminate(self, device_uuid: str, pid: int) -> None: ...

    async def drain(self, device_uuid: str, drained: bool) -> DrainView: ...


class MigOperations(Protocol):
    """Operations on MIG layouts. All raise VgpuError."""

    async def devices(self) -> tuple[MigDevice, ...]: ...

    async def preview(self, targets: Sequence[MigTarget]) -> MigPlan: ...

    async def preview_defrag(self, selector: Selector) -> MigPlan: ...

    async def apply(self, targets: Sequence[MigTarget]) -> MigPlan: ...

    async def defrag(self, selector: Selector) -> MigPlan: ...


class Moves(Protocol):
    """Moves tenants to other devices. All methods raise VgpuError."""

    async def move(
        self, allocation_id: str, caller: Caller, to: Sequence[str], source: str
    ) -> Allocation: ...


class Relocations(Protocol):
    """Makes room by moves of tenants. All methods raise VgpuError."""

    async def plan(self, wanted: RoomWanted) -> DefragView: ...

    async def defrag(self, wanted: RoomWanted, caller: Caller) -> DefragView: ...

    async def evacuate(self, device_uuid: str, caller: Caller) -> Evacuation: ...


class Keeper(Protocol):
    """The node. All methods raise VgpuError. A change continues to its end even if the caller disconnects."""

    async def allocate(self, request: Request, allocation_id: str | None = None) -> Allocation:
        """Makes an allocation. `allocation_id` is the id of a released one that it takes the place of."""
        ...

    async def release(self, allocation_id: str, caller: Caller, force: bool) -> bool:
        """Releases an allocation. Returns True if it was released before."""
        ...

    async def name(self, allocation_id: str, workload: Workload) -> None:
        """Records the names that Kubernetes has for the program in the allocation. Does nothing if they are
        recorded already.
        """
        ...

    async def resize(
        self, allocation_id: str, caller: Caller, memory_bytes: int | None, share: Percent | None
    ) -> Allocation: ...

    async def pause(self, allocation_id: str, caller: Caller) -> Allocation: ...

    async def unpause(self, allocation_id: str, caller: Caller) -> Allocation: ...

    async def suspend(self, allocation_id: str, caller: Caller, deep: bool = False) -> Allocation: ...

    async def resume(self, allocation_id: str, caller: Caller) -> Allocation: ...

    def get(self, allocation_id: str) -> Allocation: ...

    def list(self) -> tuple[tuple[Allocation, ...], int]:
        """The allocations, and the revision at which they were listed."""
        ...

    def standing(self, allocation: Allocation) -> str:
        """What a suspended allocation waits for; empty for other allocations."""
        ...

    def stays(self, allocation: Allocation) -> tuple[tuple[str, int], ...]:
        """Bytes that an eviction left on the allocation's device, by kind; empty for other allocations."""
        ...

    def marks(self, allocation: Allocation) -> tuple[Mark, ...]:
        """The marks of an allocation: use of a device that its limits do not cover."""
        ...

    def memory_limit(self, allocation: Allocation) -> str:
        """What enforces the memory limit of an allocation in mode preload: "driver" or "libvgpu"; empty for
        other modes.
        """
        ...

    async def slice_use(self, allocation: Allocation) -> tuple[SliceUse, ...]: ...

    async def plan(self, request: Request) -> tuple[Decision, tuple[Step, ...]]: ...

    async def devices(self) -> tuple[tuple[DeviceView, ...], int]:
        """The devices, and the revision at which they were listed."""
        ...

    async def look(self) -> None:
        """Refreshes the snapshot for `describe` and `plan`. Never raises."""
        ...

    def describe(self) -> NodeDescription: ...

    def subscribe(self, after_revision: int | None) -> AsyncIterator[tuple[Event, Allocation | None]]:
        """Yields events. The iterator subscribes at its first step, which can raise BAD_REVISION."""
        ...

    async def metered(self) -> Metered: ...

    async def processes(self) -> tuple[NodeProcess, ...]: ...

    async def last_events(self, count: int, user: int | None = None) -> tuple[Event, ...]:
        """The last events, of one user or of all (None), oldest first."""
        ...

    def policy(self) -> PolicyInForce: ...

    async def reload_policy(self, dry_run: bool) -> ReloadReport: ...

    @property
    def mig(self) -> MigOperations | None: ...

    @property
    def operations(self) -> Operations: ...

    @property
    def moves(self) -> Moves: ...

    @property
    def relocations(self) -> Relocations: ...
