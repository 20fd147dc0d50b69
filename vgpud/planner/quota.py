"""Checks a request against the first quota that covers the user: the priority, and the total of the user's
allocations. Also checks planner.user_places_percent: how many of the node's places for shared slices
(`max_tenants`) one user may hold. Pure.
"""

from collections.abc import Iterable
from itertools import takewhile

from vgpud.model.caller import BARE, Account
from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted, show_bytes
from vgpud.model.tenancy import Allocation, Mode, Owner, Slice, State
from vgpud.planner.terms import all_terms
from vgpud.policy.model import Policy, QuotaRule

_WHOLE_HUNDREDTHS = 10_000
_SHARED = (Mode.PRELOAD, Mode.MPS)


def over_quota(
    policy: Policy,
    node: Node,
    owner: Owner,
    held: Iterable[Allocation],
    wanted: tuple[Slice, ...],
    instead_of: str = "",
    account: Account = BARE,
    priority: str = "",
) -> VgpuError | None:
    """The error if `owner` may not also hold `wanted` (in place of allocation `instead_of`) with this
    priority (as in Request); None if it may.
    """
    if is_undecided(policy, owner, account):
        return VgpuError(
            ErrorCode.ACCOUNT_UNKNOWN,
            f"the account databases of this host give no account of uid {owner.uid}, and a quota needs it",
            f"see 'getent passwd {owner.uid}'; or a [[quota]] with this uid before the others",
        )
    rule = policy.quota_of(owner.uid, owner.gid, account)
    is_bounded = QuotaRule().covers(owner.uid, owner.gid)
    if priority == "above-normal" and (rule or QuotaRule()).max_priority == "normal" and (rule or is_bounded):
        return _over_priority(owner)
    own = [a for a in held if a.request.counts_for.uid == owner.uid and a.state is not State.RELEASING]
    before = [a for a in own if a.id != instead_of]
    slices = [*(part for a in before for part in a.slices), *wanted]
    if rule is not None:
        refusal = _over_rule(rule, owner, before, slices)
        if refusal is not None or rule.max_devices is not None or rule.max_allocations is not None:
            return refusal
    return _over_places(policy, node, owner, slices) if is_bounded and not instead_of else None


def is_undecided(policy: Policy, owner: Owner, account: Account) -> bool:
    """True if a quota that names users or groups could cover this owner, whose account is not known."""
    if account.is_known:
        return False
    rule = policy.quota_of(owner.uid, owner.gid, account)
    return any(one.goes_by_account for one in takewhile(lambda one: one is not rule, policy.quota))


def _over_priority(owner: Owner) -> VgpuError:
    return VgpuError(
        ErrorCode.DENIED_BY_POLICY,
        f"uid {owner.uid} may not have priority above-normal: no [[quota]] gives it to this user",
        'leave the priority out, or set max_priority = "above-normal" in a [[quota]] that covers the user',
    )


def _over_places(policy: Policy, node: Node, owner: Owner, slices: list[Slice]) -> VgpuError | None:
    """The error if the user would hold too many places for shared slices, because one user's many small
    slices could take all places; None if not.
    """
    shared = sum(part.mode in _SHARED and part.mig is None for part in slices)
    percent = policy.planner.user_places_percent
    terms = all_terms(policy, node).values()
    places = sum(one.tenants(one.fixed or Mode.PRELOAD) for one in terms if one.fixed in (None, *_SHARED))
    most = max(places * percent // 100, 1)
    if shared <= most or percent == 100:
        return None
    return VgpuError(
        ErrorCode.OVER_QUOTA,
        f"uid {owner.uid} would hold {shared} of the node's {places} places for shared slices, and a user "
        f"may hold {most}",
        "release what is not needed ('vgpuctl ls'), or set planner.user_places_percent or a [[quota]]",
    )


def _over_rule(
    rule: QuotaRule, owner: Owner, before: list[Allocation], slices: list[Slice]
) -> VgpuError | None:
    if rule.max_allocations is not None and len(before) + 1 > rule.max_allocations:
        have, most = counted(len(before), "allocation"), rule.max_allocations
        return _refusal(owner, f"holds {have} of the {most} that its quota allows")
    if rule.max_devices is not None and len(slices) > rule.max_devices:
        return _refusal(
            owner, f"would hold {counted(len(slices), 'slice')}, and its quota is {rule.max_devices}"
        )
    memory = sum(part.memory_bytes for part in slices)
    if rule.max_memory is not None and memory > rule.max_memory:
        return _refusal(
            owner, f"would hold {show_bytes(memory)}, and its quota is {show_bytes(rule.max_memory)}"
        )
    hundredths = sum(_WHOLE_HUNDREDTHS if s.share is None else s.share.hundredths for s in slices)
    if rule.max_cores is not None and hundredths > rule.max_cores * 100:
        what = f"would hold {hundredths / 100:g}% of a device, and its quota is {rule.max_cores:g}%"
        return _refusal(owner, what, _whole_hint(before, slices))
    return None


def _whole_hint(before: list[Allocation], slices: list[Slice]) -> str:
    """The beginning of the hint if a slice without a share counts as a whole device."""
    if slices[-1].share is None:
        return "give --cores, without which a slice counts as 100%; "
    whole = next((a.id for a in before if any(part.share is None for part in a.slices)), "")
    if not whole:
        return ""
    return f"{whole} has no share and counts as 100%: vgpuctl resize {whole} --cores PERCENT; "


def _refusal(owner: Owner, what: str, first: str = "") -> VgpuError:
    return VgpuError(
        ErrorCode.OVER_QUOTA,
        f"uid {owner.uid} {what}",
        f"{first}release what is not needed ('vgpuctl ls'), or ask for less; "
        "'vgpuctl policy show' has the quotas",
    )
