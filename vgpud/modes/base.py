"""The protocol that every mode implements.

Every call is idempotent: a plan that a crash interrupted is run again from its start, or undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vgpud.lease import LeaseActivity, Meter, ProcessSwap
from vgpud.model.device import Device
from vgpud.model.rows import Rows
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice
from vgpud.model.view import SliceMeter, SliceUse


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders and files of this node that the modes use."""

    run_dir: Path
    host_root: Path
    libvgpu: Path  # the path of libvgpu.so for tenants on the host
    arbiter: Path  # the path of the program vgpu-arbiter
    mps_control: str = "nvidia-cuda-mps-control"

    @property
    def leases(self) -> Path:
        return self.run_dir / "leases"


async def remember(originals: Rows, device_uuid: str, key: str, value: str) -> None:
    """Records the original value of a device's setting durably, before a mode changes the setting. A value
    that is recorded already stays, because only the first value dates from before vgpud's change.
    """
    if originals.get(device_uuid, key) is None:
        await originals.put((device_uuid, key, value))


class Suspendable(Protocol):
    """A mode whose tenants' memory libvgpu can evict to the host. The methods raise VgpuError(LEASE_FAILED).

    The figures are written by the tenants: callers bound them by the tenants' limits.
    """

    async def look(self, allocation_id: str) -> None:
        """Makes the tenant's processes write the report that `activity` returns. Raises VgpuError."""
        ...

    def activity(self, allocation_id: str) -> LeaseActivity:
        """The last activity reports of the tenant's processes."""
        ...

    def held(self, allocation_id: str) -> Meter:
        """The memory that all processes of the tenant hold on the lease's first device."""
        ...

    def swaps(self, allocation_id: str) -> tuple[ProcessSwap, ...]:
        """The swap states of the tenant's processes."""
        ...

    def stays(self, allocation_id: str) -> tuple[int, ...]:
        """Bytes that the last eviction of the tenant left on the device, by kind (enum vgpu_stay)."""
        ...

    def expect(self, allocation_id: str, soon: bool) -> None:
        """Tells libvgpu to prepare host buffers for an eviction while the tenant runs (`soon`), or to stop
        that. The tenant's processes read the order within 0.1 s.
        """
        ...

    def keep(self, allocation_id: str, share_hundredths: int) -> None:
        """Sets the share of a tenant's movable memory that may stay on its device while the rest is on the
        host. libvgpu in the tenant's processes reads the value when it next looks at the lease.
        """
        ...


class Effector(Protocol):
    """Applies one mode to devices and makes its slices.

    Every method may raise VgpuError; calling it again then repairs the state.
    """

    @property
    def mode(self) -> Mode: ...

    @property
    def suspendable(self) -> Suspendable | None:
        """The interface by which tenants' memory is evicted; None if libvgpu does not manage memory in this
        mode.
        """
        ...

    async def verify(self, device: Device) -> str | None:
        """Returns why this device cannot serve in this mode now, or None. Changes nothing."""
        ...

    async def apply(self, device: Device) -> None:
        """Puts an idle device into this mode."""
        ...

    async def resume(self, device: Device, part: Slice) -> None:
        """Called at the start of vgpud for each slice in this mode. It continues vgpud's work for the slice,
        such as watching an MPS daemon.
        """
        ...

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        """Makes one slice. Returns the slice with what is now known (for example MIG ids), and the edits for
        its tenant.
        """
        ...

    async def resize(self, allocation: Allocation) -> None:
        """Puts the changed limits of a running allocation in force."""
        ...

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        """Removes one slice."""
        ...

    async def tenants(self, allocation: Allocation, part: Slice, soon: bool = False) -> tuple[int, ...]:
        """Pids, on the host, of the processes that run in the slice now. Raises VgpuError(HELPER_TIMEOUT),
        with `soon` after about a second, because a listing must not wait for an arbiter that hangs.
        """
        ...

    async def unapply(self, device_uuid: str) -> None:
        """Restores the state that the device had before `apply`. Precondition: the device has no slices."""
        ...

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        """The slice's present use of the device."""
        ...

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        """The meters of an allocation's slices, in order. `devices` are from a snapshot. Calls neither NVML,
        nor the arbiter, nor an MPS daemon.
        """
        ...
