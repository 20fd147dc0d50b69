"""What is allocated on each device, as the ledger counts it: pure sums, kept up slice by slice."""

from collections.abc import Iterable
from dataclasses import dataclass

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Slice


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The slices on one device, summed. `mode` is None exactly while `count` is 0.

    `share_hundredths` (hundredths of a percent) sums the shares that were asked for; a slice whose
    compute is not limited adds nothing to it. `mig` holds at most one entry per compute slice.
    """

    mode: Mode | None = None
    memory_bytes: int = 0
    share_hundredths: int = 0
    count: int = 0
    mig: tuple[MigSlice, ...] = ()

    def with_slice(self, piece: Slice) -> "DeviceUse":
        """This and one slice more; raises VgpuError(BUG) if the device is in another mode."""
        if self.mode not in (None, piece.mode):
            raise VgpuError(
                ErrorCode.BUG,
                f"a slice in mode {piece.mode} was added to device {piece.device_uuid} in mode {self.mode}",
                "report this with the journal of vgpud",
            )
        return DeviceUse(
            mode=piece.mode,
            memory_bytes=self.memory_bytes + piece.memory_bytes,
            share_hundredths=self.share_hundredths + _hundredths(piece),
            count=self.count + 1,
            mig=self.mig if piece.mig is None else (*self.mig, piece.mig),
        )

    def without_slice(self, piece: Slice) -> "DeviceUse":
        """This less one slice that is in it; raises VgpuError(BUG) if it cannot be in it."""
        if self.mode is not piece.mode or self.count < 1:
            raise VgpuError(
                ErrorCode.BUG,
                f"device {piece.device_uuid} does not hold the slice in mode {piece.mode} taken off it",
                "report this with the journal of vgpud",
            )
        if self.count == 1:
            return EMPTY
        return DeviceUse(
            mode=self.mode,
            memory_bytes=self.memory_bytes - piece.memory_bytes,
            share_hundredths=self.share_hundredths - _hundredths(piece),
            count=self.count - 1,
            mig=self.mig if piece.mig is None else _without(self.mig, piece.mig),
        )


EMPTY = DeviceUse()


def use_of(allocations: Iterable[Allocation]) -> dict[str, DeviceUse]:
    """The use of every device, by uuid, that these allocations hold slices on, whatever their state."""
    use: dict[str, DeviceUse] = {}
    for allocation in allocations:
        for piece in allocation.slices:
            use[piece.device_uuid] = use.get(piece.device_uuid, EMPTY).with_slice(piece)
    return use


def _hundredths(piece: Slice) -> int:
    return 0 if piece.share is None else piece.share.hundredths


def _without(held: tuple[MigSlice, ...], gone: MigSlice) -> tuple[MigSlice, ...]:
    """By place, not by value: the ids of an instance are filled in after it was counted."""
    return tuple(mig for mig in held if (mig.profile_id, mig.placement) != (gone.profile_id, gone.placement))
