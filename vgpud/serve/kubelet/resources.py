"""The node's GPUs as resources of the kubelet: the names, and for each name the ids that the kubelet hands
out. Pure.

An id stands for an amount on a card, not for a position: "GPU-...::5" is any one of the parts of that card,
not the sixth. The protocol limits ids to 63 characters; a card's UUID has 40.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from vgpud.model.device import Device, Health, split_name
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MIB, Percent, counted
from vgpud.model.tenancy import (
    ANYONE,
    KUBELET_PREFIX,
    MODE_OF,
    Isolation,
    Mode,
    Owner,
    Request,
    Selector,
)
from vgpud.policy.kubelet import KubeletResource, KubeletSettings

_STEM = 40  # maximum length of the UUID in an id, which leaves room for the number within 63 characters
_GRAIN_BYTES = 2 * MIB  # the granularity of the planner's memory sizes
_MARK = "::"
_ISOLATION = {"quota": Isolation.QUOTA, "compute": Isolation.COMPUTE}


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that pods can request. `profile` is the MIG profile if the kind is mig."""

    name: str
    rule: KubeletResource
    profile: str = ""

    @property
    def kind(self) -> str:
        return self.rule.kind

    @property
    def mode(self) -> Mode:
        """The mode that cards of the resource must be in."""
        if self.divisible:
            return MODE_OF[_ISOLATION[self.rule.isolation]]
        return Mode.MIG if self.kind == "mig" else Mode.EXCLUSIVE

    @property
    def divisible(self) -> bool:
        """True if several units of the resource make one larger slice, instead of several slices."""
        return self.kind in ("part", "memory")


@dataclass(frozen=True, slots=True)
class Share:
    """One id in the list for the kubelet. `numa_node` is None if the card has none."""

    id: str
    healthy: bool
    numa_node: int | None = None


def resources_of(
    settings: KubeletSettings, devices: Iterable[Device], profiles: Callable[[Device], Collection[str]]
) -> tuple[Resource, ...]:
    """The resources of the policy. A rule of kind mig gives one resource for each profile that it names. If
    it names none, it gives one for each GPU instance profile of the cards that it matches.
    """
    cards = tuple(devices)
    found: dict[str, Resource] = {}
    for rule in settings.resource:
        if rule.kind != "mig":
            found.setdefault(rule.name, Resource(rule.name, rule))
            continue
        names = rule.profiles or dict.fromkeys(
            name
            for card in cards
            if rule.match.covers(card)
            for name in profiles(card)
            # Compute instance profiles become resources only if the policy names them.
            if split_name(name) is None
        )
        for profile in names:
            name = rule.name_of(profile)
            found.setdefault(name, Resource(name, rule, profile))
    return tuple(found.values())


def offered(resource: Resource, device: Device, profiles: Mapping[str, int], memory_bytes: int) -> int:
    """The number of ids that the card offers, whatever is allocated. `memory_bytes` is the memory for
    tenants.
    """
    if not resource.rule.match.covers(device):
        return 0
    match resource.kind:
        case "card":
            return 1
        case "mig":
            return profiles.get(resource.profile, 0)
        case "part":
            return resource.rule.parts or 0
    return memory_bytes // resource.rule.unit_bytes


def share_id(resource: Resource, device_uuid: str, number: int) -> str:
    stem = _stem(device_uuid)
    return stem if resource.kind == "card" else f"{stem}{_MARK}{number}"


def _stem(device_uuid: str) -> str:
    """The UUID of a card, or a digest of it if it is too long for the protocol (no real UUID is)."""
    if len(device_uuid) <= _STEM:
        return device_uuid
    return "GPU-" + sha256(device_uuid.encode()).hexdigest()[: _STEM - 4]


def shares(
    resource: Resource,
    device: Device,
    count: int,
    free: int,
    held: Collection[str],
    failed: Collection[str] = (),
) -> tuple[Share, ...]:
    """The card's ids. Of the ids that are not held, `free` are healthy if the card is.

    A held id is healthy if its card is healthy and the id is not in `failed`.
    """
    well = device.health is Health.OK
    found = []
    for number in range(count):
        name = share_id(resource, device.uuid, number)
        if name in held:
            healthy = well and name not in failed
        else:
            healthy = well and free > 0
            free -= healthy
        found.append(Share(name, healthy, device.numa_node))
    return tuple(found)


def request_id(resource_name: str, ids: Iterable[str]) -> str:
    """A request id that depends only on the set of ids, so that a repeated call finds its allocation."""
    text = "\n".join((resource_name, *sorted(ids)))
    return f"{KUBELET_PREFIX}{sha256(text.encode()).hexdigest()[:40]}"


def request_of(resource: Resource, ids: Collection[str], devices: Sequence[Device], name: str) -> Request:
    """The request for a container with these ids. `name` is the request id.

    Raises VgpuError: NO_SUCH_DEVICE for an unknown id, BAD_REQUEST for ids that cannot be one allocation.
    """
    counts = _by_card(resource, ids, devices)
    cards = [device for device in devices if counts[device.uuid]]
    base = Request(
        id=name,
        owner=Owner(ANYONE, ANYONE),
        count=len(cards),
        selector=Selector(uuids=tuple(card.uuid for card in cards)),
        label=f"{resource.name} x{len(ids)}"[:256],
    )
    if resource.kind == "card":
        return replace(base, isolation=Isolation.DEVICE)
    if resource.kind == "mig":
        _refuse_two_on_one_card(resource, counts)
        return replace(base, isolation=Isolation.HARDWARE, mig_profile=resource.profile)
    _refuse_uneven(resource, counts, cards)
    units = counts[cards[0].uuid]
    amounts = {unit_bytes(resource, card) * units for card in cards}
    if len(amounts) > 1:
        raise _bad(
            f"{len(ids)} of {resource.name} lie on {len(cards)} cards of different sizes",
            "restrict the resource to like cards with [kubelet.resource.match]",
        )
    share = _compute_of(resource, cards[0], units)
    return replace(
        base, isolation=_ISOLATION[resource.rule.isolation], memory_bytes=amounts.pop(), share=share
    )


def one_of(resource: Resource, device: Device) -> Request:
    """The request for one unit of the resource on the card."""
    number = share_id(resource, device.uuid, 0)
    return request_of(resource, (number,), (device,), request_id(resource.name, (number,)))


def unit_bytes(resource: Resource, device: Device) -> int:
    """The memory of one part or unit on this card, in bytes."""
    if resource.kind == "memory":
        return resource.rule.unit_bytes
    part = device.memory_usable_bytes // (resource.rule.parts or 1)
    return max(part // _GRAIN_BYTES * _GRAIN_BYTES, _GRAIN_BYTES)


def card_of(resource: Resource, name: str, devices: Iterable[Device]) -> Device | None:
    """The card to which an id belongs; None if the id is invalid."""
    stem, mark, number = name.partition(_MARK)
    if (resource.kind == "card") == bool(mark) or (mark and not number.isdecimal()):
        return None
    return next((device for device in devices if _stem(device.uuid) == stem), None)


def cards_of(resource: Resource, ids: Iterable[str], devices: Sequence[Device]) -> frozenset[str]:
    """The UUIDs of the cards to which these ids belong. Unknown ids are left out."""
    found = (card_of(resource, name, devices) for name in ids)
    return frozenset(card.uuid for card in found if card is not None)


def from_one_card(cards: Sequence[Sequence[Share]], held: Collection[str]) -> tuple[Share, ...]:
    """The ids of all cards, of which only the held ones and those of the card with most free ids are
    healthy.
    """
    free = [sum(share.healthy and share.id not in held for share in shares) for shares in cards]
    best = free.index(max(free, default=0)) if free else 0
    return tuple(
        replace(share, healthy=share.healthy and (number == best or share.id in held))
        for number, shares in enumerate(cards)
        for share in shares
    )


def _by_card(resource: Resource, ids: Collection[str], devices: Sequence[Device]) -> Counter[str]:
    if not ids:
        raise _bad(f"no ids of {resource.name} are named", "the kubelet must name the ids")
    counts: Counter[str] = Counter()
    for name in ids:
        card = card_of(resource, name, devices)
        if card is None:
            raise VgpuError(
                ErrorCode.NO_SUCH_DEVICE,
                f"{name[:80]!r} is not an id of {resource.name} on the {counted(len(devices), 'device')} of "
                "this node",
                "a card or the policy may have changed: see 'vgpuctl devices'",
            )
        counts[card.uuid] += 1
    return counts


def _refuse_two_on_one_card(resource: Resource, counts: Counter[str]) -> None:
    if max(counts.values()) > 1:
        raise _bad(
            f"{max(counts.values())} instances {resource.profile} of one card were given to one container",
            "a CUDA program uses one MIG device: ask for 1, or for a larger profile",
        )


def _refuse_uneven(resource: Resource, counts: Counter[str], cards: Sequence[Device]) -> None:
    if len(cards) == 1:
        return
    taken = ", ".join(f"{counts[card.uuid]} of device {card.index}" for card in cards)
    if resource.rule.across == "refuse":
        raise _bad(
            f"{sum(counts.values())} of {resource.name} came from {len(cards)} cards ({taken}), and a "
            "container's must come from one",
            'ask for less, or set across = "even"; or use DRA, which chooses suitable cards',
        )
    if len(set(counts.values())) > 1:
        raise _bad(
            f"{sum(counts.values())} of {resource.name} came unevenly from {len(cards)} cards ({taken})",
            "ask for a number that the cards can share evenly; or use DRA, which chooses suitable cards",
        )


def _compute_of(resource: Resource, card: Device, units: int) -> Percent | None:
    if not resource.rule.limit_compute:
        return None
    part = unit_bytes(resource, card) * units * 10000 // max(card.memory_usable_bytes, 1)
    if resource.kind == "part":
        part = units * 10000 // (resource.rule.parts or 1)
    return Percent(min(max(part, 1), 10000))


def _bad(sentence: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
