"""The content of a preload allocation's lease, from the request and the policy."""

from dataclasses import replace

import pytest

from vgpud.lease import SharePolicy
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, Mode, Owner, Request, Slice, State
from vgpud.modes.preload import PreloadRules, limits_of

QUARTER = Percent(2500)
RULES = {
    "GPU-hard": PreloadRules(),
    "GPU-lent": PreloadRules(SharePolicy.WORK_CONSERVING),
}


def held(priority: str = "", share: Percent | None = QUARTER) -> Allocation:
    slices = tuple(Slice(uuid, Mode.PRELOAD, GIB, share) for uuid in RULES)
    return Allocation("a", Request("r", Owner(0, 0), priority=priority), State.ACTIVE, slices)


def test_each_device_has_the_share_policy_of_its_own_rule() -> None:
    hard, lent = limits_of(held(), RULES.__getitem__)
    assert (hard.share_policy, lent.share_policy) == (SharePolicy.HARD, SharePolicy.WORK_CONSERVING)
    assert (hard.share_hundredths, lent.share_hundredths) == (2500, 2500)


def test_a_tenant_without_a_share_has_no_share_policy() -> None:
    for limits in limits_of(held(share=None), RULES.__getitem__):
        assert (limits.share_policy, limits.share_hundredths) == (SharePolicy.NONE, 10000)


@pytest.mark.parametrize(
    ("priority", "in_lease"), [("", 0), ("normal", 0), ("above-normal", 1), ("below-normal", -1)]
)
def test_a_higher_priority_is_a_higher_number(priority: str, in_lease: int) -> None:
    assert [limits.priority for limits in limits_of(held(priority), RULES.__getitem__)] == [in_lease] * 2


def test_under_mps_the_lease_has_no_share_and_no_priority() -> None:
    allocation = held("below-normal")
    mps = replace(allocation, slices=tuple(replace(part, mode=Mode.MPS) for part in allocation.slices))
    for limits in limits_of(mps, RULES.__getitem__):
        assert (limits.share_policy, limits.share_hundredths) == (SharePolicy.NONE, 10000)
        assert limits.priority == 0
