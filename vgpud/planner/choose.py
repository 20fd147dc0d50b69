"""Chooses the devices and the mode for a request, with a reason for every device. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Decision, Mode, Reason, Request, Slice
from vgpud.planner.judge import judge
from vgpud.planner.locality import nearest
from vgpud.planner.memory import Memory
from vgpud.planner.pool import NO_POOL, Pool
from vgpud.planner.refuse import refuse
from vgpud.planner.select import ANY, selector_error, selects
from vgpud.planner.terms import Terms, all_terms
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.planner.verdict import Fit, Unfit, Verdict
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
    """Chooses slices on `request.count` distinct devices, all in one mode; or refuses. Raises nothing.

    `use` has the allocated capacity of each device, by UUID; a device without allocations is missing. `pools`
    says for each device which MIG instances vgpud made; all instances of a device that is missing in `pools`
    count as foreign. `closed` has the devices and MIG devices that do not accept the request now, each with
    the reason. The same arguments always give the same decision. Reasons are in the order of `node.devices`.
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
    judged = tuple(
        [
            verdict_on(
                device,
                terms[device.uuid],
                use.get(device.uuid, EMPTY),
                pools.get(device.uuid, NO_POOL),
                shut,
            )
            for device in selected
        ]
    )
    if closed:
        judged = tuple([_unless_closed(verdict, want, closed.get(verdict.device.uuid)) for verdict in judged])
    decision = _decide(node, want, judged)
    if decision.slices and _starts_suspended(decision.slices, node, terms, use):
        return replace(decision, starts_suspended=True)
    return decision


def _starts_suspended(
    slices: tuple[Slice, ...], node: Node, terms: Mapping[str, Terms], use: Mapping[str, DeviceUse]
) -> bool:
    """Does the tenant take turns on all of its devices, and lack room on one of them?"""
    if any(part.mode is not Mode.PRELOAD or part.mig is not None for part in slices):
        return False
    if not all(terms[part.device_uuid].preload_turns for part in slices):
        return False
    room = {device.uuid: device.memory_usable_bytes for device in node.devices}
    return any(
        use.get(part.device_uuid, EMPTY).memory_bytes + part.memory_bytes > room[part.device_uuid]
        for part in slices
    )


def _decide(node: Node, want: Wanted, judged: tuple[Verdict, ...]) -> Decision:
    """The decision from the verdicts on the selected devices."""
    taken = _take(node, want, judged)
    outdone = _outdone(want, taken)
    chosen = set(map(id, taken))
    reasons = tuple([_reason(verdict, id(verdict) in chosen, outdone) for verdict in judged])
    if len(judged) < len(node.devices):
        known = {reason.device_uuid: reason for reason in reasons}
        reasons = tuple(known.get(d.uuid) or _left_out(d.uuid) for d in node.devices)
    if taken:
        return Decision(
            slices=tuple([fit.piece for fit in taken]),
            reasons=reasons,
            moves=tuple([move for fit in taken for move in fit.moves]),
        )
    return Decision(reasons=reasons, refusal=refuse(want, judged, _details(node, reasons)))


def _unless_closed(verdict: Verdict, want: Wanted, why: str | None) -> Verdict:
    if why is None or (isinstance(verdict, Unfit) and not verdict.busy):
        return verdict
    return Unfit(verdict.device, verdict.mode or want.modes[0], True, ErrorCode.NO_CAPACITY, why, closed=True)


def _take(node: Node, want: Wanted, verdicts: tuple[Verdict, ...]) -> tuple[Fit, ...]:
    """The best devices, in the first mode in which enough devices fit; empty if there is no such mode."""
    for mode in want.modes:
        alike = [verdict for verdict in verdicts if verdict.mode is mode and isinstance(verdict, Fit)]
        if len(alike) < want.count:
            continue
        if want.count == 1:
            return (min(alike, key=_order),)
        return nearest(node, sorted(alike, key=_order), want.count)
    return ()


def _order(fit: Fit) -> tuple[tuple[int, ...], int, str]:
    device = fit[0]
    return fit[3], device.index, device.uuid


def _outdone(want: Wanted, taken: tuple[Fit, ...]) -> str:
    """Returns the reason for a device that would fit but was not chosen."""
    if not taken:
        return f"too few others fit in the same mode: {want.count} devices are requested"
    indices = sorted(fit.device.index for fit in taken)
    if len(indices) == 1:
        return f"device {indices[0]} in mode {taken[0].mode} fits better"
    numbers = listed(tuple(str(index) for index in indices))
    return f"devices {numbers} in mode {taken[0].mode} lie nearer to each other or fit better"


def _left_out(uuid: str) -> Reason:
    return Reason(uuid, False, None, "the request asks for other devices")


def _reason(verdict: Verdict, taken: bool, outdone: str) -> Reason:
    uuid = verdict.device.uuid
    if taken or isinstance(verdict, Unfit):
        return Reason(uuid, taken, verdict.mode, verdict.sentence)
    return Reason(uuid, False, verdict.mode, f"it fits ({verdict.sentence}), but {outdone}")


def _details(node: Node, reasons: tuple[Reason, ...]) -> tuple[str, ...]:
    return tuple(
        f"device {device.index} ({device.uuid}): {reason.sentence}"
        for device, reason in zip(node.devices, reasons, strict=True)
    )


def _refused_unseen(node: Node, error: VgpuError) -> Decision:
    """A refusal without verdicts: the selector matches no device, or the request is invalid."""
    reasons = tuple(Reason(device.uuid, False, None, error.sentence) for device in node.devices)
    return Decision(reasons=reasons, refusal=error)
