"""Converts a ResourceClaim that the scheduler has allocated into requests. Pure.

Each request of a claim becomes one allocation, on one or several cards; a request with admin access becomes a
monitor. An allocation's request id has the claim's uid, and the request's name if the claim has several
requests. A container uses only one request of a claim, because the environments of two requests would
contradict each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import Percent, format_bytes, show_bytes
from vgpud.model.tenancy import ANYONE, CLAIM_PREFIX, Owner, Request, Selector, Workload
from vgpud.serve.dra.cards import Form, Target
from vgpud.serve.dra.parameters import Parameters, parameters_for
from vgpud.serve.dra.prepared import Monitor
from vgpud.serve.dra.quantity import parse
from vgpud.serve.dra.slices import DRIVER

Find = Callable[[str], Target | None]


@dataclass(frozen=True, slots=True)
class Result:
    """One device that the scheduler gave to a request. `consumed` and `share` are empty if the request gets
    the whole device.
    """

    request: str
    pool: str
    device: str
    consumed: Mapping[str, int] = field(default_factory=dict)
    share: str = ""
    admin: bool = False  # access to watch the device, which consumes nothing of it


@dataclass(frozen=True, slots=True)
class Part:
    """One allocation to make for a claim, and the results of the claim that it serves."""

    request: Request
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Watched:
    """The cards that a request with admin access may watch."""

    monitor: Monitor
    results: tuple[Result, ...]


def parts_of(
    claim: Mapping[str, Any], uid: str, pool: str, find: Find
) -> tuple[tuple[Part, ...], tuple[Watched, ...]]:
    """The allocations to make for a claim's devices in this node's pool, and the monitors; both are empty if
    the claim has no device of this driver.

    Raises VgpuError: BAD_REQUEST, UNSUPPORTED, or NO_SUCH_DEVICE for a device that is no longer published.
    """
    try:
        return _parts_of(claim, uid, pool, find)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _bad(
            f"claim {uid} is not of the form of resource.k8s.io: {type(error).__name__} {str(error)[:80]}",
            "see the version of the cluster's API server",
        ) from None


def _parts_of(
    claim: Mapping[str, Any], uid: str, pool: str, find: Find
) -> tuple[tuple[Part, ...], tuple[Watched, ...]]:
    metadata = claim.get("metadata") or {}
    name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    if metadata.get("uid") != uid:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"claim {name} has uid {metadata.get('uid')} and not {uid}",
            "the claim was deleted and created again: delete and create its pod, too",
        )
    allocation = (claim.get("status") or {}).get("allocation")
    if not allocation:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"claim {name} is not allocated",
            "wait until the scheduler has allocated it",
        )
    devices = allocation.get("devices") or {}
    results = [_result(entry) for entry in devices.get("results") or () if entry.get("driver") == DRIVER]
    workload = Workload(str(metadata.get("namespace", "")), _pod_of(claim), "", str(metadata.get("name", "")))
    by_request: dict[str, list[Result]] = {}
    for result in results:
        if result.pool != pool:
            raise _bad(
                f"claim {name} has devices of pool {result.pool}, and this node is {pool}",
                "set VGPUD_NODE_NAME to the node's name in the cluster",
            )
        by_request.setdefault(result.request, []).append(result)
    shares = {key: own for key, own in by_request.items() if not own[0].admin}
    parts = tuple(
        _part(
            uid,
            name,
            workload,
            own,
            find,
            parameters_for(devices.get("config") or (), key, DRIVER),
            len(shares),
        )
        for key, own in shares.items()
    )
    watched = (_watched(uid, key, own, find) for key, own in by_request.items() if own[0].admin)
    return parts, tuple(watched)


def _watched(uid: str, key: str, results: Sequence[Result], find: Find) -> Watched:
    uuids = dict.fromkeys(_target(result, find).device.uuid for result in results)
    return Watched(Monitor(f"{uid}-{_short(key).replace('/', '.')}", tuple(uuids)), tuple(results))


def _pod_of(claim: Mapping[str, Any]) -> str:
    """The first pod for which the claim is reserved; "" if there is none."""
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    return next((str(one["name"]) for one in reserved if one.get("resource") == "pods"), "")


def _result(entry: Mapping[str, Any]) -> Result:
    consumed = {
        str(key).rpartition("/")[2]: parse(str(value))
        for key, value in (entry.get("consumedCapacity") or {}).items()
        if str(key).rpartition("/")[0] in ("", DRIVER)
    }
    return Result(
        str(entry["request"]),
        str(entry["pool"]),
        str(entry["device"]),
        consumed,
        str(entry.get("shareID") or ""),
        bool(entry.get("adminAccess")),
    )


def _part(
    uid: str,
    claim: str,
    workload: Workload,
    results: Sequence[Result],
    find: Find,
    parameters: Parameters,
    requests: int,
) -> Part:
    key = results[0].request
    targets = [_target(result, find) for result in results]
    forms = {target.form for target in targets}
    if len(forms) > 1:
        kinds = " and ".join(sorted(forms))
        raise _bad(f"request {key} was given devices of type {kinds}", "use a DeviceClass of one type")
    (form,) = forms
    uuids = tuple(dict.fromkeys(target.device.uuid for target in targets))
    if not form.shared and (parameters.memory_bytes is not None or parameters.share is not None):
        raise _bad(
            f"request {key} sets memory or cores, which devices of type {form} have fixed",
            "leave them out, or use a class of shared cards",
        )
    name = f"{CLAIM_PREFIX}{uid}" if requests == 1 else f"{CLAIM_PREFIX}{uid}/{_short(key)}"
    return Part(
        Request(
            id=name,
            owner=Owner(ANYONE, ANYONE),
            memory_bytes=_memory(key, results, targets, parameters) if form.shared else None,
            share=_share(key, results, targets, parameters) if form.shared else None,
            count=len(uuids),
            isolation=form.isolation,
            mig_profile=_profile(key, targets, uuids) if form is Form.MIG else "",
            selector=Selector(uuids=uuids),
            label=f"{claim} {key}"[:256],
            workload=workload,
        ),
        tuple(results),
    )


def _short(request: str) -> str:
    """A short form of a request's name: ids have at most 128 characters, of which a claim's uid takes 43."""
    return request if len(request) <= 64 else sha256(request.encode()).hexdigest()[:40]


def _target(result: Result, find: Find) -> Target:
    target = find(result.device)
    if target is None:
        raise VgpuError(
            ErrorCode.NO_SUCH_DEVICE,
            f"device {result.device} of request {result.request} is no longer published by this node",
            "a card or the policy changed since: delete the pod, so that it is scheduled anew",
        )
    return target


def _profile(key: str, targets: Sequence[Target], uuids: Sequence[str]) -> str:
    names = {f"{t.place.name}@{t.place.at.start}" for t in targets if t.place is not None}
    if len(names) > 1 or len(uuids) < len(targets):
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"request {key} was given {len(targets)} MIG instances, and a CUDA program uses one",
            "ask for one instance in a request",
        )
    return names.pop()


def _per_card(results: Sequence[Result], targets: Sequence[Target], capacity: str, missing: int) -> set[int]:
    """Returns the different amounts that cards have in the results. The shares of one card are added."""
    sums: dict[str, int] = {}
    for result, target in zip(results, targets, strict=True):
        amount = result.consumed.get(capacity, missing)
        sums[target.device.uuid] = sums.get(target.device.uuid, 0) + amount
    return set(sums.values())


def _memory(key: str, results: Sequence[Result], targets: Sequence[Target], parameters: Parameters) -> int:
    """The memory that the scheduler assigned, or less if the claim's parameters say so. A cluster without
    consumable capacity assigns all of the memory.
    """
    whole = min(target.device.memory_usable_bytes for target in targets)
    if any("memory" not in result.consumed for result in results) and len(targets) > 1:
        amounts = {parameters.memory_bytes or whole}
    else:
        amounts = _per_card(results, targets, "memory", whole)
    if len(amounts) > 1:
        listed = " and ".join(show_bytes(amount) for amount in sorted(amounts))
        raise _bad(
            f"request {key} has different amounts of memory ({listed}) on its cards",
            "ask for the same of each",
        )
    allocated = amounts.pop()
    wanted = parameters.memory_bytes
    if wanted is not None and wanted > allocated:
        raise _bad(
            f"request {key} sets memory to {format_bytes(wanted)}, allocated were {show_bytes(allocated)}",
            "request that amount in capacity.requests too",
        )
    return wanted or allocated


def _share(
    key: str, results: Sequence[Result], targets: Sequence[Target], parameters: Parameters
) -> Percent | None:
    counted = _per_card(results, targets, "cores", 0)
    if len(counted) > 1:
        raise _bad(f"request {key} has different shares of cores on its cards", "ask for the same of each")
    cores = min(counted.pop(), 100)
    if parameters.share is None:
        return Percent(cores * 100) if cores else None
    if cores and parameters.share.hundredths > cores * 100:
        raise _bad(
            f"request {key} sets cores to {parameters.share}, and {cores}% were allocated to it",
            "request that amount in capacity.requests too",
        )
    return parameters.share


def _bad(sentence: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
