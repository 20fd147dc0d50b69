"""The memory that swapped-out tenants may keep on the device is never more than fits, and not much less."""

from hypothesis import given
from hypothesis import strategies as st

from vgpud.planner.kept import MARGIN_BYTES, SHARE_ALL, keep_share, shrunk

MIB = 1 << 20
CARD = 141 << 30
sizes = st.integers(0, CARD)


@given(charged=sizes, movable=st.integers(0, CARD))
def test_a_suspended_tenant_keeps_as_much_memory_on_the_device_as_there_is_room_for(
    charged: int, movable: int
) -> None:
    share = keep_share(CARD, charged, movable)
    assert 0 <= share <= SHARE_ALL
    kept = movable * share // SHARE_ALL
    room = max(CARD - charged - MARGIN_BYTES, 0)
    assert kept <= room
    assert kept >= min(movable, room) - movable // SHARE_ALL - 1 or share == SHARE_ALL


@given(charged=sizes, kept=st.dictionaries(st.sampled_from("abcdef"), sizes))
def test_suspended_tenants_give_up_no_more_kept_memory_than_a_resumed_tenant_needs(
    charged: int, kept: dict[str, int]
) -> None:
    less = shrunk(CARD, charged, kept)
    after = {**kept, **less}
    assert all(0 <= less[name] < kept[name] for name in less)
    total = charged + sum(after.values()) + MARGIN_BYTES
    assert total <= CARD or not any(after.values())
    if less:
        assert total >= CARD or not any(after.values()), "no more than needed"
        assert min(kept[name] for name in less) >= max(
            (kept[n] for n in kept.keys() - less.keys()), default=0
        )


def test_a_suspended_tenant_keeps_the_memory_that_the_resumed_tenant_leaves_free() -> None:
    assert keep_share(CARD, 106 << 30, 105 << 30) == 3309  # in 1/10000 of 105 GiB: 34.75 GiB
    assert keep_share(CARD, CARD, 105 << 30) == 0
    assert keep_share(CARD, 0, 1 << 30) == SHARE_ALL
    assert keep_share(CARD, 0, 0) == 0
    assert shrunk(CARD, 100 << 30, {"a": 30 << 30, "b": 5 << 30}) == {}
    assert shrunk(CARD, 110 << 30, {"a": 30 << 30, "b": 5 << 30}) == {"a": (26 << 30) - MARGIN_BYTES}
    assert shrunk(CARD, 150 << 30, {"a": 30 * MIB, "b": 0}) == {"a": 0}
