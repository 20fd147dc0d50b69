"""Builds the entries of a claim's `status.devices`, one for each device (KEP-4817), as plain data. Pure.

Field names and limits: k8s.io/api/resource/v1 (types.go, AllocatedDeviceStatus), meta/v1 (Condition).
"""

from collections.abc import Iterable, Sequence

from vgpud.model.tenancy import Allocation, State
from vgpud.serve.dra.prepared import Answer, Prepared
from vgpud.serve.dra.slices import DRIVER, Json

_MESSAGE_CHARACTERS = 1000


def with_devices(claim: Json, prepared: Prepared, held: Iterable[Allocation], now: str) -> Json:
    """The claim with the entries of this driver in its status. `held` are the claim's allocations; `now` is
    a time in RFC 3339. Entries of other drivers stay. A condition whose status is unchanged keeps its time.
    """
    status = claim.get("status") or {}
    listed: Sequence[Json] = status.get("devices") or ()
    by_name = {allocation.cdi_name: allocation for allocation in held}
    told = {_key(one): one for one in listed if one.get("driver") == DRIVER}
    entries: dict[tuple[str, ...], Json] = {}
    name = ""
    for answer in prepared.answers:
        # later devices of a request have no CDI name of their own
        name = answer.cdi[0] if answer.cdi else name
        entry = _entry(answer, by_name.get(name), now)
        entries[_key(entry)] = _with_time(entry, told.get(_key(entry)))
    others = [one for one in listed if one.get("driver") != DRIVER]
    return {**claim, "status": {**status, "devices": [*others, *entries.values()]}}


def _entry(answer: Answer, allocation: Allocation | None, now: str) -> Json:
    share = {"shareID": answer.share} if answer.share else {}
    device = {"driver": DRIVER, "pool": answer.pool, "device": answer.device, **share}
    if allocation is None:
        return {**device, "conditions": [_ready(True, "Watched", "NVML reads the device", now)]}
    well = allocation.state is not State.FAILED
    words = f"allocation {allocation.id}" + ("" if well else f": {allocation.failure}")
    condition = _ready(well, "Prepared" if well else "Failed", words, now)
    return {**device, "conditions": [condition], "data": {"allocation": allocation.id}}


def _ready(ready: bool, reason: str, message: str, now: str) -> Json:
    return {
        "type": "Ready",
        "status": str(ready),
        "reason": reason,
        "message": message[:_MESSAGE_CHARACTERS],
        "lastTransitionTime": now,
    }


def _with_time(entry: Json, before: Json | None) -> Json:
    """The entry with the condition's earlier time, if the condition's status is unchanged."""
    (ready,) = entry["conditions"]
    for one in (before or {}).get("conditions") or ():
        if (one.get("type"), one.get("status")) == (ready["type"], ready["status"]):
            ready = {**ready, "lastTransitionTime": one["lastTransitionTime"]}
    return {**entry, "conditions": [ready]}


def _key(entry: Json) -> tuple[str, ...]:
    return tuple(str(entry.get(word, "")) for word in ("driver", "pool", "device", "shareID"))
