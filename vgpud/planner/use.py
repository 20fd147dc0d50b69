"""The allocated memory and shares of each device, as the ledger counts them. Pure; updated slice by slice."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from vgpud.model.device import PlaceKey, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Slice, State

Place = tuple[PlaceKey, PlaceKey | None]  # The place of an instance, as MigSlice.place.
_NOWHERE: Place = ((-1, Placement(0, 0)), None)


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """The sum of the slices that share one MIG instance. `mode` is preload or mps."""

    place: Place
    mode: Mode
    memory_bytes: int = 0
    share_hundredths: int = 0
    count: int = 0

    def changed(self, piece: Slice, by: int) -> "InstanceUse":
        """The use after slice `piece` is added (`by` = 1) or removed (`by` = -1)."""
        return InstanceUse(
            self.place,
            self.mode,
            self.memory_bytes + by * piece.memory_bytes,
            self.share_hundredths + by * _hundredths(piece),
            self.count + by,
        )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The sum of the slices on one device. `mode` is None exactly while `count` is 0.

    `share_hundredths` (hundredths of a percent) is the sum of the shares that were requested; a slice whose
    compute is not limited adds nothing to it. `mig` has at most one entry per compute slice. `shared` says
    which of those instances slices share, and how much of them is in use.
    """

    mode: Mode | None = None
    memory_bytes: int = 0
    share_hundredths: int = 0
    count: int = 0
    mig: tuple[MigSlice, ...] = ()
    shared: tuple[InstanceUse, ...] = ()

    def conflict(self, piece: Slice, index: int, allocation_id: str) -> str:
        """Why the slice of an allocation cannot be on the device (number `index`) together with the slices
        there; empty if their modes allow it.
        """
        if self.mode not in (None, piece.mode):
            held = counted(self.count, "allocation")
            return (
                f"device {index} is in mode {self.mode} with {held}, and {allocation_id} needs it in mode "
                f"{piece.mode}"
            )
        if piece.mode is Mode.EXCLUSIVE and self.count:
            others = "another allocation" if self.count == 1 else f"{self.count} other allocations"
            return f"device {index} has {others}, and {allocation_id} needs the whole device"
        return ""

    def with_slice(self, piece: Slice) -> "DeviceUse":
        """The use with one slice added. Raises VgpuError(BUG) if the device is in another mode."""
        if self.mode not in (None, piece.device_mode):
            raise _bug(f"a slice in mode {piece.mode} was added to device {piece.device_uuid} in {self.mode}")
        return DeviceUse(
            mode=piece.device_mode,
            memory_bytes=self.memory_bytes + piece.memory_bytes,
            share_hundredths=self.share_hundredths + _hundredths(piece),
            count=self.count + 1,
            mig=self.mig if piece.mig is None else (*self._others(piece), piece.mig),
            shared=self._shared(piece, 1) if piece.is_on_top else self.shared,
        )

    def without_slice(self, piece: Slice) -> "DeviceUse":
        """The use with one slice removed. Raises VgpuError(BUG) if the slice cannot be in it."""
        if self.mode is not piece.device_mode or self.count < 1:
            raise _bug(
                f"device {piece.device_uuid} does not hold the slice in mode {piece.mode} taken off it"
            )
        if self.count == 1:
            return EMPTY
        shared = self._shared(piece, -1) if piece.is_on_top else self.shared
        stays = any(one.place == _place(piece) for one in shared)
        return DeviceUse(
            mode=self.mode,
            memory_bytes=self.memory_bytes - piece.memory_bytes,
            share_hundredths=self.share_hundredths - _hundredths(piece),
            count=self.count - 1,
            mig=self.mig if piece.mig is None or stays else _without(self.mig, piece.mig),
            shared=shared,
        )

    def instance(self, place: Place) -> InstanceUse | None:
        """The use of the MIG instance at this place by slices that share it; None if there are none."""
        return next((one for one in self.shared if one.place == place), None)

    def _others(self, piece: Slice) -> tuple[MigSlice, ...]:
        """The allocated instances, without the instance that the slice shares."""
        if piece.mig is None or not piece.is_on_top:
            return self.mig
        return _without(self.mig, piece.mig)

    def _shared(self, piece: Slice, by: int) -> tuple[InstanceUse, ...]:
        place = _place(piece)
        now = self.instance(place) or InstanceUse(place, piece.mode)
        changed = now.changed(piece, by)
        if now.mode is not piece.mode or changed.count < 0:
            raise _bug(f"an instance of {piece.device_uuid} in mode {now.mode} has no slice in {piece.mode}")
        rest = tuple(one for one in self.shared if one.place != place)
        return (*rest, changed) if changed.count else rest


EMPTY = DeviceUse()


def charged(allocation: Allocation) -> tuple[Slice, ...]:
    """The slices as they count on their devices. A slice of a suspended tenant counts no share, and of its
    memory only what libvgpu could not move; the slice still keeps its device in mode preload. A whole device
    of a tenant that is suspended or being released does not count. A slice that moves counts on both devices.
    """
    parts = allocation.slices
    if allocation.moves:
        parts = tuple(end for part in parts for end in _both_ends(part))
    if allocation.state not in _LEFT:
        return parts
    parts = tuple(part for part in parts if not is_open_to_others(allocation, part))
    if allocation.state is State.RELEASING:
        return parts
    return tuple(replace(part, memory_bytes=allocation.stays_bytes, share=None) for part in parts)


_LEFT = (State.SUSPENDED, State.RELEASING)


def is_open_to_others(allocation: Allocation, part: Slice) -> bool:
    """Can other tenants use the slice's device, in any mode? They can if the slice is the whole card of a
    tenant that is suspended or being released.
    """
    return part.mode is Mode.EXCLUSIVE and allocation.state in _LEFT


def _both_ends(part: Slice) -> tuple[Slice, ...]:
    here = replace(part, other_uuid="")
    return (here, replace(here, device_uuid=part.other_uuid)) if part.other_uuid else (here,)


def use_of(allocations: Iterable[Allocation]) -> dict[str, DeviceUse]:
    """The use of every device, by UUID, by these allocations in any state."""
    use: dict[str, DeviceUse] = {}
    for allocation in allocations:
        for piece in charged(allocation):
            use[piece.device_uuid] = use.get(piece.device_uuid, EMPTY).with_slice(piece)
    return use


def _bug(sentence: str) -> VgpuError:
    return VgpuError(ErrorCode.BUG, sentence, "report this with the journal of vgpud")


def _place(piece: Slice) -> Place:
    return _NOWHERE if piece.mig is None else piece.mig.place


def _hundredths(piece: Slice) -> int:
    return 0 if piece.share is None else piece.share.hundredths


def _without(held: tuple[MigSlice, ...], gone: MigSlice) -> tuple[MigSlice, ...]:
    """The instances of `held` except `gone`. Instances are compared by place, because the ids of an instance
    are set only after the instance was counted.
    """
    return tuple(mig for mig in held if mig.place != gone.place)
