"""Quotas: the first rule that covers a user applies, and all its allocations count together."""

from dataclasses import replace

import pytest

from vgpud.model.caller import UNKNOWN, Account
from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, Exit
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import ANYONE, Allocation, Mode, Owner, Request, Slice, State
from vgpud.planner.quota import over_quota
from vgpud.policy.model import DeviceRule, PlannerSettings, Policy, PreloadSettings, QuotaRule

ALICE = Owner(1000, 100)
BOB = Owner(1001, 200)
ROOT = Owner(0, 0)
NODE = Node((Device(uuid="GPU-1", index=0, name="a card", memory_total_bytes=80 * GIB),))


def piece(gib: int = 4, share: str | None = "25") -> Slice:
    return Slice("GPU-1", Mode.PRELOAD, gib * GIB, None if share is None else Percent.parse(share))


def held(number: int, owner: Owner = ALICE, state: State = State.ACTIVE, *parts: Slice) -> Allocation:
    return Allocation(f"a{number}", Request(f"r{number}", owner), state, parts or (piece(),))


def sentence(rule: QuotaRule, *wanted: Slice, owner: Owner = ALICE, instead_of: str = "") -> str | None:
    policy = Policy(quota=(rule,))
    have = [held(1), held(2, ALICE, State.RELEASING), held(3, BOB)]
    refusal = over_quota(policy, NODE, owner, have, wanted or (piece(),), instead_of)
    if refusal is None:
        return None
    assert refusal.code is ErrorCode.OVER_QUOTA
    assert refusal.code.exit_code is Exit.DENIED
    return refusal.sentence


def test_without_a_quota_rule_there_is_no_quota() -> None:
    assert over_quota(Policy(), NODE, ALICE, [held(i) for i in range(9)], (piece(1000),)) is None


def test_a_refusal_by_the_compute_quota_says_that_a_slice_without_cores_counts_as_100_percent() -> None:
    policy = Policy(quota=(QuotaRule(max_cores=50.0),))
    whole = over_quota(policy, NODE, ALICE, [], (piece(share=None),))
    part = over_quota(policy, NODE, ALICE, [], (piece(share="60"),))
    assert whole is not None and whole.hint.startswith("give --cores, without which a slice counts as 100%; ")
    assert part is not None and "--cores" not in part.hint
    beside = replace(held(1), slices=(piece(share=None),))
    small = over_quota(policy, NODE, ALICE, [beside], (piece(share="1"),))
    assert small is not None
    resize = f"vgpuctl resize {beside.id} --cores PERCENT; "
    assert small.hint.startswith(f"{beside.id} has no share and counts as 100%: {resize}")


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
def test_sizes_of_held_and_requested_slices_count_together_in_a_quota(
    rule: QuotaRule, wanted: tuple[Slice, ...], said: str | None
) -> None:
    """Allocations in release and those of other users do not count."""
    assert sentence(rule, *wanted) == said


def test_a_resize_replaces_the_old_size_in_the_quota() -> None:
    assert sentence(QuotaRule(max_memory=8 * GIB), piece(8), instead_of="a1") is None
    assert sentence(QuotaRule(max_memory=8 * GIB), piece(9), instead_of="a1") is not None
    assert sentence(QuotaRule(max_allocations=1), piece(), instead_of="a1") is None


def test_only_the_first_quota_rule_that_covers_the_user_counts() -> None:
    policy = Policy(
        quota=(
            QuotaRule(uids=(1000,), max_allocations=5),
            QuotaRule(gids=(200,), max_allocations=3),
            QuotaRule(max_allocations=1),
        )
    )
    most = [policy.quota_of(uid, gid) for uid, gid in ((1000, 200), (5, 200), (5, 5), (0, 0), (0, 200))]
    assert [None if rule is None else rule.max_allocations for rule in most] == [5, 3, 1, None, 3]


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ((QuotaRule(users=("alice",)), QuotaRule()), ErrorCode.ACCOUNT_UNKNOWN),
        ((QuotaRule(gids=(300,)),), ErrorCode.ACCOUNT_UNKNOWN),
        ((QuotaRule(uids=(1000,), max_devices=9), QuotaRule(groups=("lab",))), None),
        ((QuotaRule(gids=(100,), max_devices=0),), ErrorCode.OVER_QUOTA),
    ],
)
def test_a_request_is_refused_while_the_account_for_its_quota_rule_is_unknown(
    rules: tuple[QuotaRule, ...], code: ErrorCode | None
) -> None:
    over = over_quota(Policy(quota=rules), NODE, Owner(1000, 100), (), (piece(),), account=UNKNOWN)
    assert (over.code if over else None) is code


def test_a_rule_by_name_or_group_covers_all_members() -> None:
    """A process runs with only one of its user's groups, but a rule by group covers all members of the
    group.
    """
    account = Account("alice", frozenset({100, 300}), frozenset({"users", "students"}))
    for rule in (
        QuotaRule(users=("alice",), max_allocations=0),
        QuotaRule(groups=("students",), max_allocations=0),
        QuotaRule(gids=(300,), max_allocations=0),
    ):
        policy = Policy(quota=(rule,))
        assert over_quota(policy, NODE, ALICE, [], (piece(),), account=account) is not None
        assert over_quota(policy, NODE, BOB, [], (piece(),), account=Account("bob")) is None


OF_BOB = QuotaRule(uids=(1001,), max_priority="above-normal")
OF_LAB = QuotaRule(groups=("lab",), max_priority="above-normal")


@pytest.mark.parametrize(
    ("rules", "owner", "priority", "code"),
    [
        ((), ALICE, "above-normal", ErrorCode.DENIED_BY_POLICY),
        ((), ALICE, "normal", None),
        ((), ALICE, "below-normal", None),
        ((), ROOT, "above-normal", None),
        ((QuotaRule(max_priority="above-normal"),), ALICE, "above-normal", None),
        ((QuotaRule(max_devices=9),), ALICE, "above-normal", ErrorCode.DENIED_BY_POLICY),
        ((OF_BOB,), ALICE, "above-normal", ErrorCode.DENIED_BY_POLICY),
        ((OF_BOB,), BOB, "above-normal", None),
        ((OF_LAB,), ALICE, "above-normal", None),
        ((QuotaRule(uids=(0,)),), ROOT, "above-normal", ErrorCode.DENIED_BY_POLICY),
    ],
)
def test_a_priority_is_refused_unless_the_users_quota_rule_allows_it(
    rules: tuple[QuotaRule, ...], owner: Owner, priority: str, code: ErrorCode | None
) -> None:
    account = Account("alice", frozenset({300}), frozenset({"lab"}))
    policy = Policy(quota=rules)
    over = over_quota(policy, NODE, owner, [], (piece(),), account=account, priority=priority)
    assert (over.code if over else None) is code
    assert over is None or 'max_priority = "above-normal"' in over.hint


def test_root_has_a_quota_only_if_a_rule_names_it() -> None:
    assert sentence(QuotaRule(max_allocations=0), owner=ROOT) is None
    assert sentence(QuotaRule(uids=(0,), max_allocations=0), owner=ROOT) is not None


def test_all_subordinate_uids_of_a_user_share_its_quota() -> None:
    """65 536 subordinate uids do not have 65 536 quotas. A rule by group uses the groups of the user's
    account.
    """
    other = Owner(100_001, 100_001)
    mine = Allocation("a1", Request("r1", other, quota_owner=ALICE), State.ACTIVE, (piece(),))
    for rule in (QuotaRule(max_allocations=1), QuotaRule(gids=(100,), max_allocations=1)):
        refusal = over_quota(Policy(quota=(rule,)), NODE, ALICE, [mine], (piece(),))
        assert refusal is not None
        assert refusal.sentence == "uid 1000 holds 1 allocation of the 1 that its quota allows"


def small(number: int, owner: Owner = ALICE, mode: Mode = Mode.PRELOAD) -> Allocation:
    """Returns an allocation of the smallest size of slice. A device takes 64 of them."""
    return held(number, owner, State.ACTIVE, Slice("GPU-1", mode, 2 << 20))


@pytest.mark.parametrize(
    ("policy", "owner", "most"),
    [
        (Policy(), ALICE, 48),
        (Policy(), Owner(ANYONE, ANYONE), 64),
        (Policy(), ROOT, 64),
        (Policy(planner=PlannerSettings(user_places_percent=100)), ALICE, 64),
        (Policy(planner=PlannerSettings(user_places_percent=1)), ALICE, 1),
        (Policy(quota=(QuotaRule(max_memory=GIB),)), ALICE, 48),
        (Policy(quota=(QuotaRule(max_devices=60),)), ALICE, 60),
        (Policy(quota=(QuotaRule(uids=(1001,), max_devices=60),)), ALICE, 48),
        (Policy(device=(DeviceRule(mode="preload", preload=PreloadSettings(max_tenants=8)),)), ALICE, 6),
    ],
)
def test_small_slices_of_one_user_leave_places_on_a_device_to_others(
    policy: Policy, owner: Owner, most: int
) -> None:
    have: list[Allocation] = []
    while len(have) < 64 and over_quota(policy, NODE, owner, have, small(0).slices) is None:
        have.append(small(len(have), owner))
    assert len(have) == most
    assert over_quota(policy, NODE, BOB, have, small(0).slices) is None


def test_the_bound_of_one_users_slices_on_a_device_applies_to_new_shared_slices_only() -> None:
    have = [small(number) for number in range(60)]
    assert over_quota(Policy(), NODE, ALICE, have, small(0).slices, instead_of="a7") is None
    whole = [small(number, mode=Mode.EXCLUSIVE) for number in range(60)]
    assert over_quota(Policy(), NODE, ALICE, whole, small(0).slices) is None
