"""The ordered steps that make, release and repair an allocation. Pure; each step is idempotent.

The order makes a crash harmless: the intent is recorded before the first change and dropped after the last,
so that every effect on the node has a record in the ledger.
"""

from collections.abc import Iterator, Mapping, Sequence

from vgpud.model.plan import Plan, Step, StepKind
from vgpud.model.tenancy import Allocation, MigMove, Mode, Slice
from vgpud.planner.use import EMPTY, DeviceUse, is_open_to_others


def allocate_steps(
    slices: Sequence[Slice],
    use: Mapping[str, DeviceUse],
    moves: Sequence[MigMove] = (),
    suspended: bool = False,
) -> Plan:
    """The steps from a decision's slices to a committed allocation, which may start suspended. `use` does not
    count these slices.

    A device without allocations is put into the mode; other devices are already in it.
    """
    idle = tuple(piece for piece in slices if use.get(piece.device_uuid, EMPTY).count == 0)
    effects = (
        *(_apply(piece, "the device holds nothing yet") for piece in _one_per_device(idle)),
        *choose_engines(idle),
        *(_clear(move) for move in moves),
        *_attach(slices),
        Step(StepKind.WRITE_SPEC, "containers get the slices through it"),
    )
    return Plan(
        Step(StepKind.RECORD_INTENT, "a crash from here on is undone at the next start"),
        effects,
        Step(StepKind.COMMIT_SUSPENDED, "the device has no room for all of its tenants, which take turns")
        if suspended
        else Step(StepKind.COMMIT, "the tenant holds the allocation from here on"),
    )


def release_steps(allocation: Allocation, use: Mapping[str, DeviceUse]) -> Plan:
    """The steps that release an allocation; `use` still counts its slices.

    A device that loses its last slices is taken out of its mode.
    """
    pieces = tuple(enumerate(allocation.slices))
    last = tuple(
        piece
        for piece in _one_per_device(allocation.slices)
        if use.get(piece.device_uuid, EMPTY).count
        <= sum(other.device_uuid == piece.device_uuid for other in allocation.slices)
    )
    effects = (
        Step(StepKind.REMOVE_SPEC, "no new container may get the slices"),
        *(
            _step(StepKind.DETACH, piece, f"slice {ordinal} goes back to the device", ordinal)
            for ordinal, piece in reversed(pieces)
        ),
        *(_step(StepKind.UNAPPLY_MODE, piece, "these were the last slices on the device") for piece in last),
    )
    return Plan(
        Step(StepKind.RECORD_INTENT, "a crash from here on is finished at the next start"),
        effects,
        Step(StepKind.FORGET, "nothing of the allocation is left"),
    )


def repair_steps(allocation: Allocation) -> tuple[Step, ...]:
    """The steps that make the missing parts of an allocation again. Existing parts stay.

    The commit records what attach may change: a MIG instance that is made again has other ids.
    """
    held = [piece for piece in allocation.slices if not is_open_to_others(allocation, piece)]
    return (
        *(_apply(piece, "the mode is made sure of before the slice is") for piece in _one_per_device(held)),
        *choose_engines(held),
        *_attach(allocation.slices),
        Step(StepKind.WRITE_SPEC, "containers get the slices through it"),
        Step(StepKind.COMMIT, "an instance that was made again has new ids"),
    )


def choose_engines(slices: Sequence[Slice]) -> Iterator[Step]:
    """The steps that choose the engine of each device that libvgpu shares as a whole. (MIG instances always
    have the gate.)
    """
    for piece in _one_per_device(slices):
        if piece.mode is Mode.PRELOAD and piece.mig is None:
            yield _step(StepKind.CHOOSE_ENGINE, piece, "the arbiter asks for it when the first tenant comes")


def _attach(slices: Sequence[Slice]) -> tuple[Step, ...]:
    return tuple(
        _step(StepKind.ATTACH, piece, f"slice {ordinal} is made real", ordinal)
        for ordinal, piece in enumerate(slices)
    )


def _clear(move: MigMove) -> Step:
    place = "" if move.target is None else f", and comes back at memory slice {move.target.start}"
    return Step(
        StepKind.CLEAR_INSTANCE,
        f"the idle {move.profile_name} at memory slice {move.source.start} makes room{place}",
        device_uuid=move.device_uuid,
        mode=Mode.MIG,
        move=move,
    )


def _one_per_device(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    return tuple({piece.device_uuid: piece for piece in slices}.values())


def _apply(piece: Slice, reason: str) -> Step:
    return _step(StepKind.APPLY_MODE, piece, reason)


def _step(kind: StepKind, piece: Slice, reason: str, ordinal: int | None = None) -> Step:
    of_device = kind in (StepKind.APPLY_MODE, StepKind.UNAPPLY_MODE)
    mode: Mode = piece.device_mode if of_device else piece.mode
    return Step(kind, reason, device_uuid=piece.device_uuid, mode=mode, slice_ordinal=ordinal)
