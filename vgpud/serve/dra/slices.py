"""Builds ResourceSlices of resource.k8s.io/v1, from which the scheduler allocates, as plain data. Pure.

Field names and limits: k8s.io/api/resource/v1 (types.go). MIG placements of a card share counters, one for
each memory slice and one for compute slices (KEP-4815). Memory, cores and tenants of a shared card are
consumable capacity (KEP-5075).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vgpud.model.quantity import MIB
from vgpud.serve.dra.cards import Card, Form, Place, card_name, place_name, profile_label
from vgpud.serve.dra.quantity import show

DRIVER = "gpu.vgpud.io"
GROUP, VERSION = "resource.k8s.io", "v1"

MAX_DEVICES = 128
MAX_DEVICES_WITH_COUNTERS = 64
MAX_COUNTER_SETS = 8
_STRING = 64
_STEP = 2 * MIB  # granularity of memory in libvgpu and in the driver; MPS uses whole MiB

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The API server's features, from its version and from the fields that it stored.

    Up to 1.34, counters are in the slice of the devices that consume them; since 1.35 they are in a separate
    slice. A server without the feature drops the counters silently. If the server does not keep taints, a
    card that gets no new claims is left out.
    """

    separate_counters: bool = True
    keeps_counters: bool = True
    keeps_sharing: bool = True
    keeps_taints: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """The node's facts in slices. `driver_version` and `cuda_version` are in NVML's form."""

    name: str
    driver_version: str = ""
    cuda_version: str = ""


_Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices with their sort keys, and the counters that only these devices consume."""

    devices: tuple[tuple[_Order, Json], ...]
    counters: Json | None = None


def specs(node: Node, cards: Iterable[Card], cluster: Cluster, cores: bool) -> tuple[Json, ...]:
    """The `spec` of each slice of the node's pool, without its generation. `cores`: can claims limit compute?

    The scheduler takes the first device that fits, slice by slice in the order of their names. So the
    smallest devices come first, and a claim leaves the larger ones whole.
    """
    kept = [card for card in cards if cluster.keeps_taints or not card.taints]
    groups = [group for card in kept if (group := _group(node, card, cluster, cores)) is not None]
    bodies = [*_plain(groups), *(_separate(groups) if cluster.separate_counters else _together(groups))]
    # A pool without devices is published as one empty slice, so that the scheduler knows that there are no
    # devices.
    bodies = bodies or [{"devices": []}]
    pool = {"name": node.name, "resourceSliceCount": len(bodies)}
    return tuple({"driver": DRIVER, "nodeName": node.name, "pool": pool, **body} for body in bodies)


def _plain(groups: Sequence[_Group]) -> Iterator[Json]:
    devices = _in_order(group for group in groups if group.counters is None)
    # Slices with taints have the same limit as slices with counters (types.go,
    # ResourceSliceMaxDevicesWithTaints...).
    most = MAX_DEVICES_WITH_COUNTERS if any("taints" in one for one in devices) else MAX_DEVICES
    for chunk in _chunks(devices, most):
        yield {"devices": chunk}


def _separate(groups: Sequence[_Group]) -> Iterator[Json]:
    for sets in _chunks([g.counters for g in groups if g.counters is not None], MAX_COUNTER_SETS):
        yield {"sharedCounters": sets}
    devices = _in_order(group for group in groups if group.counters is not None)
    for chunk in _chunks(devices, MAX_DEVICES_WITH_COUNTERS):
        yield {"devices": chunk}


def _together(groups: Sequence[_Group]) -> Iterator[Json]:
    """The slices for clusters in which a card's devices and counters must be in the same slice."""
    body: Json = {"sharedCounters": [], "devices": []}
    for group in groups:
        if group.counters is None:
            continue
        full = len(body["devices"]) + len(group.devices) > MAX_DEVICES_WITH_COUNTERS
        if body["devices"] and (full or len(body["sharedCounters"]) == MAX_COUNTER_SETS):
            yield body
            body = {"sharedCounters": [], "devices": []}
        body["sharedCounters"].append(group.counters)
        body["devices"] += _in_order([group])
    if body["devices"]:
        yield body


def _in_order(groups: Iterable[_Group]) -> list[Json]:
    listed = sorted((entry for group in groups for entry in group.devices), key=lambda entry: entry[0])
    return [device for _, device in listed]


def _chunks(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])


# --- devices of slices


def _group(node: Node, card: Card, cluster: Cluster, cores: bool) -> _Group | None:
    if card.form is Form.MIG:
        return _mig(node, card, cluster)
    if card.form is Form.CARD:
        capacity = {"memory": {"value": show(card.memory_bytes)}, **_multiprocessors(card.device.sm_count)}
        return _whole(card, _device(node, card, card_name(card.device), capacity))
    device = _device(node, card, card_name(card.device), _sharing(card, cluster, cores))
    if cluster.keeps_sharing:
        device["allowMultipleAllocations"] = True
    return _whole(card, device)


def _whole(card: Card, device: Json) -> _Group:
    return _Group((((card.device.memory_usable_bytes, card.device.index), device),))


def _sharing(card: Card, cluster: Cluster, cores: bool) -> Json:
    """The capacity of a shared card. A claim without amounts gets the most memory that one claim may
    have, and unlimited compute.
    """
    memory = card.memory_bytes // _STEP * _STEP
    most = min(memory, card.device.memory_usable_bytes // _STEP * _STEP)
    if not cluster.keeps_sharing:
        return {"memory": {"value": show(most)}}
    capacity: Json = {
        "memory": {
            "value": show(memory),
            "requestPolicy": {
                "default": show(most),
                "validRange": {"min": show(_STEP), "max": show(most), "step": show(_STEP)},
            },
        },
        "tenants": {
            "value": str(card.tenants),
            "requestPolicy": {"default": "1", "validValues": ["1"]},
        },
    }
    share = card.share_hundredths // 100
    if share and (cores or card.form is Form.COMPUTE):
        capacity["cores"] = {
            "value": str(share),
            "requestPolicy": {
                "default": "0",
                "validRange": {"min": "0", "max": str(min(share, 100)), "step": "1"},
            },
        }
    return capacity


def _mig(node: Node, card: Card, cluster: Cluster) -> _Group | None:
    """The devices of a MIG card. If the placements do not overlap, as in a fixed layout, they need no
    counters.
    """
    apart = not any(
        a.at.start < b.at.start + b.at.size and b.at.start < a.at.start + a.at.size
        for i, a in enumerate(card.places)
        for b in card.places[i + 1 :]
    )
    if apart:
        return _Group(tuple((_order(card, place), _mig_device(node, card, place)) for place in card.places))
    if not cluster.keeps_counters:
        # the card is not published, because without counters the scheduler would allocate the same memory
        # twice
        return None
    name = card_name(card.device)
    slices = range(max(place.at.start + place.at.size for place in card.places))
    counters = {f"memory-slice-{i}": {"value": "1"} for i in slices}
    counters["compute-slices"] = {"value": str(max(place.profile.slice_count for place in card.places))}
    limited = _limited(card.places)
    counters |= {_limit_name(place_name): {"value": str(most)} for place_name, most in limited.items()}
    devices = []
    for place in card.places:
        consumed = {
            f"memory-slice-{i}": {"value": "1"} for i in range(place.at.start, place.at.start + place.at.size)
        }
        consumed["compute-slices"] = {"value": str(place.profile.slice_count)}
        if place.name in limited:
            consumed[_limit_name(place.name)] = {"value": "1"}
        device = _mig_device(node, card, place)
        device["consumesCounters"] = [{"counterSet": name, "counters": consumed}]
        devices.append((_order(card, place), device))
    return _Group(tuple(devices), {"name": name, "counters": counters})


def _order(card: Card, place: Place) -> _Order:
    """The sort key of a MIG placement. Smaller profiles come first; of equal ones, those with fewer media
    engines. Placements at the end of the card come first, because the largest profiles begin at its start.
    """
    profile = place.profile
    engines = 2 if "+" in place.name else 0 if "-" in place.name else 1
    size = (profile.memory_bytes, profile.slice_count, engines, profile.id)
    return (*size, card.device.index, -place.at.start)


def _limited(places: Sequence[Place]) -> dict[str, int]:
    """The profiles that allow fewer instances than they have placements, with the number of instances.
    (Profiles with media engines allow one.)
    """
    found = {}
    for place in places:
        starts = sum(other.name == place.name for other in places)
        if place.profile.instance_count < starts:
            found[place.name] = place.profile.instance_count
    return found


def _limit_name(profile: str) -> str:
    return f"most-{profile_label(profile)}"


def _mig_device(node: Node, card: Card, place: Place) -> Json:
    memory = min(place.profile.memory_bytes, card.device.memory_usable_bytes)
    capacity = {"memory": {"value": show(memory)}, **_multiprocessors(place.profile.sm_count)}
    device = _device(node, card, place_name(card.device, place), capacity)
    device["attributes"]["profile"] = {"string": place.name[:_STRING]}
    return device


def _device(node: Node, card: Card, name: str, capacity: Json) -> Json:
    device: Json = {"name": name, "attributes": _attributes(node, card), "capacity": capacity}
    if card.taints:
        device["taints"] = [{"key": f"{DRIVER}/{taint}", "effect": "NoSchedule"} for taint in card.taints]
    return device


def _multiprocessors(count: int | None) -> Json:
    return {} if count is None else {"multiprocessors": {"value": str(count)}}


def _attributes(node: Node, card: Card) -> Json:
    device = card.device
    found: Json = {
        "type": {"string": card.form.value},
        "uuid": {"string": device.uuid[:_STRING]},
        "index": {"int": device.index},
        "productName": {"string": device.name[:_STRING]},
    }
    if device.compute_capability is not None:
        major, minor = device.compute_capability
        found["cudaComputeCapability"] = {"version": f"{major}.{minor}.0"}
    if device.numa_node is not None and device.numa_node >= 0:
        found["numaNode"] = {"int": device.numa_node}
    for key, text in (("driverVersion", node.driver_version), ("cudaDriverVersion", node.cuda_version)):
        version = semantic(text)
        if version:
            found[key] = {"version": version}
    bus = re.fullmatch(
        r"(?:[0-9A-Fa-f]{4})?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", device.pci_bus_id
    )
    if bus:
        found["resource.kubernetes.io/pciBusID"] = {"string": bus[1]}
    if device.pcie_root:
        found["resource.kubernetes.io/pcieRoot"] = {"string": device.pcie_root}
    return found


def semantic(text: str) -> str:
    """A version in the form of semver.org: three numbers without leading zeros (580.159.04 is not valid); ""
    if that is impossible.
    """
    numbers = re.fullmatch(r"([0-9]+)(?:\.([0-9]+))?(?:\.([0-9]+))?", text.strip())
    return "" if numbers is None else ".".join(str(int(number or 0)) for number in numbers.groups())
