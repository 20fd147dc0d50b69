"""The protocol that every mode implements.

Every call is idempotent: a plan that was cut by a crash is run again from its start, or undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vgpud.model.device import Device
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice
from vgpud.model.view import SliceMeter, SliceUse


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders and files of this node."""

    run_dir: Path
    host_root: Path
    libvgpu: Path  # libvgpu.so as tenants on the host load it
    arbiter: Path  # the vgpu-arbiter program
    mps_control: str = "nvidia-cuda-mps-control"

    @property
    def leases(self) -> Path:
        return self.run_dir / "leases"


class Originals(Protocol):
    """Where what a mode changes on a device is written down, durably, before it is changed."""

    async def remember(self, device_uuid: str, key: str, value: str) -> None:
        """Keeps `value` unless a value is kept already: the first one is from before vgpud's change."""
        ...

    def recall(self, device_uuid: str, key: str) -> str | None: ...

    def keys(self, device_uuid: str) -> tuple[str, ...]:
        """What is kept of the device."""
        ...

    async def drop(self, device_uuid: str, key: str) -> None: ...


class Effector(Protocol):
    """Makes one mode real on devices and for allocations.

    Every method may raise VgpuError; none leaves a state that calling it again does not mend.
    """

    @property
    def mode(self) -> Mode: ...

    async def verify(self, device: Device) -> str | None:
        """Why this device cannot serve in this mode right now, or None; changes nothing."""
        ...

    async def apply(self, device: Device) -> None:
        """Puts an idle device into this mode."""
        ...

    async def resume(self, device: Device, part: Slice) -> None:
        """At start, for a slice found in this mode: takes up what vgpud does for it while it runs."""
        ...

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        """Makes one slice. Returns it completed, for example with MIG ids, and the edits for its tenant."""
        ...

    async def resize(self, allocation: Allocation) -> None:
        """Puts the changed limits of a running allocation in force."""
        ...

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        """Removes one slice."""
        ...

    async def tenants(self, allocation: Allocation, part: Slice) -> tuple[int, ...]:
        """Host pids of the processes that run in the slice now."""
        ...

    async def unapply(self, device_uuid: str) -> None:
        """Leaves the device, with no slices on it, as it was before `apply`."""
        ...

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        """What the slice uses now."""
        ...

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        """One a slice, in order: `devices` are the snapshot's. Asks neither NVML nor a helper."""
        ...
