"""Quotas: the first rule that covers a user counts, and all its allocations together."""

import pytest

from vgpud.model.errors import ErrorCode, Exit
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, Mode, Owner, Request, Slice, State
from vgpud.planner.quota import over_quota
from vgpud.policy.model import Policy, QuotaRule

ALICE = Owner(1000, 100)
BOB = Owner(1001, 200)
ROOT = Owner(0, 0)


def piece(gib: int = 4, share: str | None = "25") -> Slice:
    return Slice("GPU-1", Mode.PRELOAD, gib * GIB, None if share is None else Percent.parse(share))


def held(number: int, owner: Owner = ALICE, state: State = State.ACTIVE, *parts: Slice) -> Allocation:
    return Allocation(f"a{number}", Request(f"r{number}", owner), state, parts or (piece(),))


def sentence(rule: QuotaRule, *wanted: Slice, owner: Owner = ALICE, instead_of: str = "") -> str | None:
    policy = Policy(quota=(rule,))
    have = [held(1), held(2, ALICE, State.RELEASING), held(3, BOB)]
    refusal = over_quota(policy, owner, have, wanted or (piece(),), instead_of)
    if refusal is None:
        return None
    assert refusal.code is ErrorCode.OVER_QUOTA
    assert refusal.code.exit_code is Exit.DENIED
    return refusal.sentence


def test_without_a_rule_there_is_no_quota() -> None:
    assert over_quota(Policy(), ALICE, [held(i) for i in range(9)], (piece(1000),)) is None


@pytest.mark.parametrize(
    ("rule", "wanted", "said"),
    [
        (QuotaRule(max_allocations=2), (), None),
        (
            QuotaRule(max_allocations=1),
            (),
            "uid 1000 holds 1 allocation of the 1 that its quota allows",
        ),
        (QuotaRule(max_devices=2), (), None),
        (
            QuotaRule(max_devices=2),
            (piece(), piece()),
            "uid 1000 would hold 3 slices, and its quota is 2",
        ),
        (QuotaRule(max_memory=8 * GIB), (), None),
        (
            QuotaRule(max_memory=8 * GIB),
            (piece(5),),
            "uid 1000 would hold 9GiB, and its quota is 8GiB",
        ),
        (QuotaRule(max_cores=50.0), (), None),
        (
            QuotaRule(max_cores=50.0),
            (piece(share="25.01"),),
            "uid 1000 would hold 50.01% of a device, and its quota is 50%",
        ),
        (
            QuotaRule(max_cores=100.0),
            (piece(share=None),),
            "uid 1000 would hold 125% of a device, and its quota is 100%",
        ),
    ],
)
def test_what_is_held_counts_with_what_is_wanted(
    rule: QuotaRule, wanted: tuple[Slice, ...], said: str | None
) -> None:
    """Neither what is being released nor what others hold counts."""
    assert sentence(rule, *wanted) == said


def test_a_resize_counts_in_the_place_of_what_it_changes() -> None:
    assert sentence(QuotaRule(max_memory=8 * GIB), piece(8), instead_of="a1") is None
    assert sentence(QuotaRule(max_memory=8 * GIB), piece(9), instead_of="a1") is not None
    assert sentence(QuotaRule(max_allocations=1), piece(), instead_of="a1") is None


def test_the_first_matching_quota_rule_counts() -> None:
    policy = Policy(
        quota=(
            QuotaRule(uids=(1000,), max_allocations=5),
            QuotaRule(gids=(200,), max_allocations=3),
            QuotaRule(max_allocations=1),
        )
    )
    most = [policy.quota_of(uid, gid) for uid, gid in ((1000, 200), (5, 200), (5, 5), (0, 0), (0, 200))]
    assert [None if rule is None else rule.max_allocations for rule in most] == [5, 3, 1, None, 3]


def test_root_has_a_quota_where_it_is_named() -> None:
    assert sentence(QuotaRule(max_allocations=0), owner=ROOT) is None
    assert sentence(QuotaRule(uids=(0,), max_allocations=0), owner=ROOT) is not None


def test_all_uids_of_a_user_share_its_quota() -> None:
    """65 536 subordinate uids are no 65 536 quotas; a rule by group sees the group of its account."""
    other = Owner(100_001, 100_001)
    mine = Allocation("a1", Request("r1", other, quota_owner=ALICE), State.ACTIVE, (piece(),))
    for rule in (QuotaRule(max_allocations=1), QuotaRule(gids=(100,), max_allocations=1)):
        refusal = over_quota(Policy(quota=(rule,)), ALICE, [mine], (piece(),))
        assert refusal is not None
        assert refusal.sentence == "uid 1000 holds 1 allocation of the 1 that its quota allows"
