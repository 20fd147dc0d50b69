"""Resizing in place: room, modes and figures."""

from dataclasses import replace

import pytest

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, MIB, WHOLE, Percent
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Slice, State
from vgpud.planner.resize import resize_slices
from vgpud.planner.use import use_of

from .cards import AUTO, H200_PROFILES, H200_USABLE, h200, h200_node, instance, node_of, policy, request

NODE = h200_node(2)
PIECES = (Slice("GPU-0", Mode.PRELOAD, 4 * GIB), Slice("GPU-1", Mode.PRELOAD, 4 * GIB))
MINE = Allocation("a", request(), State.ACTIVE, PIECES)
OTHER = Allocation("b", request(), State.ACTIVE, (Slice("GPU-1", Mode.PRELOAD, 100 * GIB),))
USE = use_of([MINE, OTHER])


def refused(memory: int | None, share: Percent | None = None, mine: Allocation = MINE) -> VgpuError:
    with pytest.raises(VgpuError) as caught:
        resize_slices(mine, memory, share, NODE, USE, AUTO)
    return caught.value


@pytest.mark.parametrize("memory", [MIB, 4 * GIB, H200_USABLE - 100 * GIB])
def test_a_resize_gives_every_slice_the_new_memory(memory: int) -> None:
    made = resize_slices(MINE, memory, None, NODE, USE, AUTO)
    assert made == tuple(replace(piece, memory_bytes=memory) for piece in PIECES)


def test_in_a_resize_the_fullest_device_bounds_the_new_size_of_all_slices() -> None:
    error = refused(H200_USABLE - 100 * GIB + 1)
    assert error.code is ErrorCode.NO_CAPACITY
    assert error.hint == "ask for at most 39.8GiB"


def test_a_resize_to_a_share_of_100_percent_removes_the_compute_limit() -> None:
    limited = replace(MINE, slices=tuple(replace(p, share=Percent(2500)) for p in PIECES))
    assert all(p.share is None for p in resize_slices(limited, None, WHOLE, NODE, USE, AUTO))


def test_a_resize_may_change_only_the_share() -> None:
    made = resize_slices(MINE, None, Percent(3000), NODE, USE, AUTO)
    assert [piece.share for piece in made] == [Percent(3000)] * 2


def test_a_resize_does_not_let_shares_exceed_the_whole_device() -> None:
    much = tuple(Slice(uuid, Mode.PRELOAD, GIB, Percent(8000)) for uuid in ("GPU-0", "GPU-1"))
    crowded = use_of([MINE, Allocation("b", request(), State.ACTIVE, much)])
    with pytest.raises(VgpuError) as info:
        resize_slices(MINE, None, Percent(3000), NODE, crowded, AUTO)
    assert info.value.code is ErrorCode.NO_CAPACITY
    assert "a share of 30% is more than the 20%" in info.value.sentence
    made = resize_slices(MINE, None, Percent(2000), NODE, crowded, AUTO)
    assert made[0].share == Percent(2000)


@pytest.mark.parametrize("mode", [Mode.MPS, Mode.MIG, Mode.EXCLUSIVE])
def test_slices_of_modes_that_cannot_be_resized_keep_their_size(mode: Mode) -> None:
    fixed = replace(MINE, slices=(Slice("GPU-0", mode, GIB),))
    assert refused(2 * GIB, mine=fixed).code is ErrorCode.UNSUPPORTED


def test_a_resize_to_no_size_or_of_a_slice_on_an_unknown_device_is_an_error() -> None:
    assert refused(None).code is ErrorCode.BAD_REQUEST
    assert refused(0).code is ErrorCode.BAD_QUANTITY
    gone = replace(MINE, slices=(Slice("GPU-9", Mode.PRELOAD, GIB),))
    assert refused(GIB, mine=gone).code is ErrorCode.NO_SUCH_DEVICE


def test_a_resize_counts_the_policys_overcommit() -> None:
    """With an overcommitment of 1.5 the sum of limits may exceed the device by half, but a single tenant gets
    at most the whole device.
    """
    half_more = policy({"mode": "preload", "preload": {"memory_overcommit": 1.5}})
    room = H200_USABLE * 150 // 100 - 100 * GIB
    made = resize_slices(MINE, room, None, NODE, USE, half_more)
    assert {piece.memory_bytes for piece in made} == {room}
    for nbytes, rules in (
        (room + 1, half_more),
        (H200_USABLE + 1, policy({"preload": {"memory_overcommit": 9.0}})),
    ):
        with pytest.raises(VgpuError) as caught:
            resize_slices(MINE, nbytes, None, NODE, USE, rules)
        assert caught.value.code is ErrorCode.NO_CAPACITY


def test_a_resize_to_a_smaller_size_is_always_possible() -> None:
    """Smaller slices fit even if the policy allowed more when the other tenants started."""
    crowded = use_of([MINE, OTHER, replace(OTHER, id="c")])
    made = resize_slices(MINE, 3 * GIB, None, NODE, crowded, AUTO)
    assert {piece.memory_bytes for piece in made} == {3 * GIB}
    with pytest.raises(VgpuError, match=r"leave 0B of 139\.8GiB"):
        resize_slices(MINE, 5 * GIB, None, NODE, crowded, AUTO)


def test_a_resize_of_a_quota_inside_a_mig_instance_is_bounded_by_the_instance() -> None:
    profile = H200_PROFILES[0]
    mig = MigSlice(profile.id, profile.name, profile.placements[0])
    mine = replace(MINE, slices=(Slice("GPU-0", Mode.PRELOAD, 4 * GIB, None, mig),))
    node = node_of(h200(0, mig_on=True, instances=(instance(1, 19, 0),)))
    use = use_of([mine])
    (made,) = resize_slices(mine, profile.memory_bytes, None, node, use, AUTO)
    assert made.memory_bytes == profile.memory_bytes
    with pytest.raises(VgpuError) as caught:
        resize_slices(mine, profile.memory_bytes + 1, None, node, use, AUTO)
    assert caught.value.code is ErrorCode.NO_CAPACITY
