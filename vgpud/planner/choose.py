"""Which devices, and in which mode, serve a request: pure, with a reason for every device."""

from collections.abc import Mapping
from types import MappingProxyType

from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Decision, Reason, Request
from vgpud.planner.judge import judge
from vgpud.planner.locality import nearest
from vgpud.planner.memory import Memory, Reasons
from vgpud.planner.pool import NO_POOL, Pool
from vgpud.planner.refuse import refuse
from vgpud.planner.select import ANY, selector_error, selects
from vgpud.planner.terms import all_terms
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.planner.verdict import Fit, Seat, Unfit, Verdict
from vgpud.planner.wanted import Wanted, wanted
from vgpud.planner.words import listed
from vgpud.policy.model import Policy

_memory = Memory(judge)


def choose(
    request: Request,
    node: Node,
    policy: Policy,
    use: Mapping[str, DeviceUse],
    pools: Mapping[str, Pool] = MappingProxyType({}),
    closed: Mapping[str, str] = MappingProxyType({}),
) -> Decision:
    """Slices on `request.count` distinct devices, all in one mode; or a refusal. Raises nothing.

    `use` is what is allocated on each device, by uuid; a device that is not in it holds nothing.
    `pools` is what is known of its MIG instances; without it they are all someone else's.
    `closed` are devices, and MIG devices, that take no request like this one now, each with the reason.
    The same arguments always give the same decision. Reasons are in the order of `node.devices`.
    """
    try:
        want = wanted(request)
    except VgpuError as bad:
        return _refused_unseen(node, bad)
    selected = node.devices
    if request.selector != ANY or not selected:
        selected = tuple(device for device in node.devices if selects(request.selector, device))
        error = selector_error(request.selector, node, selected)
        if error is not None:
            return _refused_unseen(node, error)
    spread = policy.planner.strategy == "spread"
    terms = all_terms(policy, node)
    verdict_on = _memory.of(want, spread)
    shut = frozenset(uuid for uuid in closed if uuid not in terms) if closed else frozenset()
    verdicts = {
        device.uuid: _unless_closed(
            verdict_on(
                Seat(
                    device,
                    terms[device.uuid],
                    use.get(device.uuid, EMPTY),
                    pools.get(device.uuid, NO_POOL),
                    shut,
                )
            ),
            want,
            closed.get(device.uuid),
        )
        for device in selected
    }
    taken = _take(node, want, tuple(verdicts.values()))
    outdone = _outdone(want, taken)
    uuids = {fit.device.uuid for fit in taken}
    reasons = tuple(
        [_reason_for(d.uuid, verdicts.get(d.uuid), d.uuid in uuids, outdone) for d in node.devices]
    )
    if taken:
        return Decision(
            slices=tuple(fit.piece for fit in taken),
            reasons=reasons,
            moves=tuple(move for fit in taken for move in fit.moves),
        )
    return Decision(reasons=reasons, refusal=refuse(want, tuple(verdicts.values()), _details(node, reasons)))


def _unless_closed(verdict: Verdict, want: Wanted, why: str | None) -> Verdict:
    if why is None or (isinstance(verdict, Unfit) and not verdict.busy):
        return verdict
    return Unfit(verdict.device, verdict.mode or want.modes[0], True, ErrorCode.NO_CAPACITY, why)


def _take(node: Node, want: Wanted, verdicts: tuple[Verdict, ...]) -> tuple[Fit, ...]:
    """In the best mode in which enough devices fit, the best of them; nothing if there is none."""
    fits = [verdict for verdict in verdicts if isinstance(verdict, Fit)]
    for mode in want.modes:
        alike = [fit for fit in fits if fit.mode is mode]
        if len(alike) >= want.count:
            alike.sort(key=_order)
            return nearest(node, alike, want.count)
    return ()


def _order(fit: Fit) -> tuple[tuple[int, ...], int, str]:
    return fit.rank, fit.device.index, fit.device.uuid


def _outdone(want: Wanted, taken: tuple[Fit, ...]) -> str:
    """What a device that fits, and was not taken, is told."""
    if not taken:
        return f"{want.count} devices in one mode were asked and too few fit"
    indices = sorted(fit.device.index for fit in taken)
    if len(indices) == 1:
        return f"device {indices[0]} in mode {taken[0].mode} fits better"
    numbers = listed(tuple(str(index) for index in indices))
    return f"devices {numbers} in mode {taken[0].mode} lie nearer to each other or fit better"


def _reason_for(uuid: str, verdict: Verdict | None, taken: bool, outdone: str) -> Reason:
    if verdict is None:
        return Reason(uuid, False, None, "the request's selector leaves it out")
    return _reasons.of(uuid, verdict, taken, outdone)


def _reason(uuid: str, verdict: Verdict, taken: bool, outdone: str) -> Reason:
    if taken or isinstance(verdict, Unfit):
        return Reason(uuid, taken, verdict.mode, verdict.sentence)
    return Reason(uuid, False, verdict.mode, f"it fits ({verdict.sentence}), but {outdone}")


_reasons = Reasons(_reason)


def _details(node: Node, reasons: tuple[Reason, ...]) -> tuple[str, ...]:
    return tuple(
        f"device {device.index} ({device.uuid}): {reason.sentence}"
        for device, reason in zip(node.devices, reasons, strict=True)
    )


def _refused_unseen(node: Node, error: VgpuError) -> Decision:
    """For a request that names no device of this node, or that no device could be judged by."""
    reasons = tuple(Reason(device.uuid, False, None, error.sentence) for device in node.devices)
    return Decision(reasons=reasons, refusal=error)
