"""Sums of allocated resources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.device import Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Slice, State
from vgpud.planner.use import EMPTY, use_of

from .cards import request

PIECES = st.lists(
    st.builds(
        Slice,
        device_uuid=st.just("GPU-0"),
        mode=st.just(Mode.MPS),
        memory_bytes=st.integers(1, 2**40),
        share=st.none() | st.builds(Percent, st.integers(1, 10000)),
    ),
    max_size=12,
)


@given(PIECES, st.randoms(use_true_random=False))
def test_removing_all_slices_of_a_device_in_any_order_leaves_no_use(
    pieces: list[Slice], random: object
) -> None:
    use = EMPTY
    for piece in pieces:
        use = use.with_slice(piece)
    assert use.memory_bytes == sum(piece.memory_bytes for piece in pieces)
    assert use.count == len(pieces)
    random.shuffle(pieces)  # type: ignore[attr-defined]
    for piece in pieces:
        use = use.without_slice(piece)
    assert use == EMPTY


def test_a_share_that_is_not_limited_adds_nothing() -> None:
    use = EMPTY.with_slice(Slice("GPU-0", Mode.MPS, GIB)).with_slice(
        Slice("GPU-0", Mode.MPS, GIB, Percent(2500))
    )
    assert use.share_hundredths == 2500


def test_a_mig_slice_is_removed_from_the_use_by_its_placement_and_not_by_its_ids() -> None:
    planned = MigSlice(19, "1g.18gb", Placement(6, 1))
    made = MigSlice(19, "1g.18gb", Placement(6, 1), gpu_instance_id=7, compute_instance_id=0, uuid="MIG-1")
    other = MigSlice(19, "1g.18gb", Placement(5, 1))
    use = EMPTY.with_slice(Slice("GPU-0", Mode.MIG, GIB, None, planned)).with_slice(
        Slice("GPU-0", Mode.MIG, GIB, None, other)
    )
    assert use.without_slice(Slice("GPU-0", Mode.MIG, GIB, None, made)).mig == (other,)


def test_a_whole_card_counts_as_free_while_its_tenant_is_suspended_or_released() -> None:
    """The tenant has left the device for a time (suspended) or for good (releasing). A start of vgpud counts
    allocations of both kinds before it finishes the release.
    """
    card, other = Slice("GPU-0", Mode.EXCLUSIVE, GIB), Slice("GPU-0", Mode.PRELOAD, GIB)
    beside = Allocation("b", request(), State.ACTIVE, (other,))
    for state in (State.SUSPENDED, State.RELEASING):
        assert use_of([beside, Allocation("a", request(), state, (card,))])["GPU-0"].count == 1
    with pytest.raises(VgpuError):
        use_of([beside, Allocation("a", request(), State.ACTIVE, (card,))])


def test_slices_of_two_modes_on_one_device_raise_the_error_bug() -> None:
    use = EMPTY.with_slice(Slice("GPU-0", Mode.MPS, GIB))
    with pytest.raises(VgpuError) as caught:
        use.with_slice(Slice("GPU-0", Mode.PRELOAD, GIB))
    assert caught.value.code is ErrorCode.BUG


@pytest.mark.parametrize("mode", [Mode.MPS, Mode.PRELOAD])
def test_removing_an_absent_slice_from_the_use_raises_the_error_bug(mode: Mode) -> None:
    with pytest.raises(VgpuError) as caught:
        EMPTY.without_slice(Slice("GPU-0", mode, GIB))
    assert caught.value.code is ErrorCode.BUG


def test_the_use_of_each_device_sums_slices_of_allocations_in_any_state() -> None:
    allocations = [
        Allocation("a", request(), State.ACTIVE, (Slice("GPU-0", Mode.PRELOAD, GIB),)),
        Allocation("b", request(), State.FAILED, (Slice("GPU-0", Mode.PRELOAD, 2 * GIB),)),
        Allocation("c", request(), State.ALLOCATING, (Slice("GPU-1", Mode.EXCLUSIVE, 9 * GIB),)),
    ]
    use = use_of(allocations)
    assert use["GPU-0"].memory_bytes == 3 * GIB
    assert use["GPU-0"].count == 2
    assert use["GPU-1"].mode is Mode.EXCLUSIVE
