"""The cards that are offered to the cluster: whole, by MIG placement, or as memory to share. Pure.

A device in a ResourceSlice is named after its card's UUID, which does not change when cards are added or
lost.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256

from vgpud.model.device import Device, Health, MigProfile, Placement
from vgpud.model.tenancy import CLAIM_PREFIX, Allocation, Isolation, Mode, Slice
from vgpud.policy.model import Policy

_LABEL = 63  # maximum length of a DNS label


class Form(StrEnum):
    """How a card is published: the values of the attribute `type` of a device."""

    CARD = "card"
    MIG = "mig"
    QUOTA = "quota"
    COMPUTE = "compute"

    @property
    def shared(self) -> bool:
        return self in (Form.QUOTA, Form.COMPUTE)

    @property
    def isolation(self) -> Isolation:
        return _ISOLATION[self]


_ISOLATION = {
    Form.CARD: Isolation.DEVICE,
    Form.MIG: Isolation.HARDWARE,
    Form.QUOTA: Isolation.QUOTA,
    Form.COMPUTE: Isolation.COMPUTE,
}
_OF_MODE = {
    "mig": Form.MIG,
    "mps": Form.COMPUTE,
    "preload": Form.QUOTA,
    "exclusive": Form.CARD,
}
_OF_AUTO = {"quota": Form.QUOTA, "compute": Form.COMPUTE, "hardware": Form.MIG, "device": Form.CARD}
_MODE = {Form.CARD: Mode.EXCLUSIVE, Form.MIG: Mode.MIG, Form.QUOTA: Mode.PRELOAD, Form.COMPUTE: Mode.MPS}


@dataclass(frozen=True, slots=True)
class Place:
    """A MIG profile at one placement of a card. `name` is without NVML's prefix: 1g.18gb."""

    profile: MigProfile
    name: str
    at: Placement


class Taint(StrEnum):
    """The reason why a device gets no new claims. Claims that already have the device keep it."""

    DRAINED = "drained"
    UNWELL = "unwell"


@dataclass(frozen=True, slots=True)
class Card:
    """A card as it is offered to claims. `places` are the placements of a MIG card on which no other
    allocation is; `tenants` is the number of claims that may share the card.

    `memory_bytes` and `share_hundredths` are the totals for claims, without the capacity that other
    allocations hold.
    """

    device: Device
    form: Form
    memory_bytes: int = 0
    share_hundredths: int = 0
    tenants: int = 0
    places: tuple[Place, ...] = field(default=())
    taints: tuple[Taint, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Target:
    """The card, or the part of it, for which a published name stands."""

    device: Device
    form: Form
    place: Place | None = None


Places = Callable[[Device], Iterable[tuple[MigProfile, str, tuple[Placement, ...]]]]


def form_of(device: Device, policy: Policy) -> Form | None:
    """The form in which the card is published; None if it is not published."""
    mode = policy.rule_for(device).mode
    if mode == "auto":
        # While MIG mode is on, a card can only be published as MIG.
        return Form.MIG if device.mig.current else _OF_AUTO[policy.dra.auto]
    return _OF_MODE.get(mode)


def cards_of(
    devices: Iterable[Device],
    policy: Policy,
    places: Places,
    allocations: Collection[Allocation],
    closed: Collection[str] = (),
) -> tuple[Card, ...]:
    """The cards that are offered to claims. A card that gets no new claims has a taint with the reason.
    `closed` are the UUIDs of drained cards.

    Capacity that was not allocated by claims is subtracted, because the scheduler knows claims only.
    """
    held = [a for a in allocations if not a.request.id.startswith(CLAIM_PREFIX)]
    found = []
    for device in devices:
        form = form_of(device, policy)
        if form is None:
            continue
        others = [part for a in held for part in a.slices if part.device_uuid == device.uuid]
        card = _card(device, form, policy, places, others)
        if card is not None:
            found.append(replace(card, taints=_taints(device, device.uuid in closed)))
    return tuple(found)


def _taints(device: Device, drained: bool) -> tuple[Taint, ...]:
    unwell = device.health is not Health.OK
    return tuple(taint for taint, on in ((Taint.DRAINED, drained), (Taint.UNWELL, unwell)) if on)


def _card(device: Device, form: Form, policy: Policy, places: Places, others: Sequence[Slice]) -> Card | None:
    if any(part.mode is not _MODE[form] for part in others):
        return None
    rule = policy.rule_for(device)
    if form is Form.CARD:
        return None if others else Card(device, form, device.memory_usable_bytes)
    if form is Form.MIG:
        taken = [part.mig.placement for part in others if part.mig is not None]
        free = tuple(place for place in all_places(device, places) if not _overlaps(place.at, taken))
        return Card(device, form, places=free) if free else None
    memory, preload = device.memory_usable_bytes, rule.settings_preload()
    # the memory that tenants may get together, which overcommit can make larger than the card's memory
    if form is Form.QUOTA:
        memory = memory * round(preload.memory_overcommit * 100) // 100
    memory -= sum(part.memory_bytes for part in others)
    share = 10000 - sum(part.share.hundredths for part in others if part.share is not None)
    tenants = preload.max_tenants
    if form is Form.COMPUTE:
        tenants = rule.settings_mps().max_tenants
        share += round(rule.settings_mps().overcommit_percent * 100) - 10000
    tenants -= len(others)
    if memory <= 0 or tenants <= 0:
        return None
    return Card(device, form, memory, max(share, 0), tenants)


def all_places(device: Device, places: Places) -> tuple[Place, ...]:
    return tuple(Place(profile, name, at) for profile, name, starts in places(device) for at in starts)


def _overlaps(at: Placement, taken: Iterable[Placement]) -> bool:
    return any(at.start < other.start + other.size and other.start < at.start + at.size for other in taken)


def card_name(device: Device) -> str:
    """The published name of a card, a DNS label: gpu- and the UUID."""
    bare = re.sub(r"[^a-z0-9-]", "-", device.uuid.lower().removeprefix("gpu-")).strip("-")
    if len(bare) > 36:
        bare = sha256(bare.encode()).hexdigest()[:36]
    return f"gpu-{bare}"


def profile_label(profile: str) -> str:
    """A MIG profile's name as part of a DNS label. Different profiles of a card have different labels
    (1g.24gb+me and 1g.24gb-me).
    """
    return re.sub(r"[^a-z0-9]+", "-", profile.lower().replace("+", "-plus-")).strip("-")


def place_name(device: Device, place: Place) -> str:
    """The published name of a MIG placement, a DNS label: the card's name, the profile (its digest if the
    name were too long), and the first memory slice.
    """
    profile = profile_label(place.name)
    name = f"{card_name(device)}-mig-{profile}-{place.at.start}"
    if len(name) <= _LABEL:
        return name
    digest = sha256(profile.encode()).hexdigest()[:8]
    return f"{card_name(device)}-mig-{digest}-{place.at.start}"


def names_of(device: Device, policy: Policy, places: Places) -> tuple[str, ...]:
    """All names that are published for the device. They do not depend on present allocations."""
    form = form_of(device, policy)
    if form is None:
        return ()
    if form is Form.MIG:
        return tuple(place_name(device, place) for place in all_places(device, places))
    return (card_name(device),)


def target_of(name: str, devices: Iterable[Device], policy: Policy, places: Places) -> Target | None:
    """The card or part of a card for which a published name stands; None if there is none. It does not depend
    on present allocations.
    """
    for device in devices:
        own = card_name(device)
        if not name.startswith(own):
            continue
        form = form_of(device, policy)
        if name == own and form is not None and form is not Form.MIG:
            return Target(device, form)
        for profile in device.mig.profiles if form is Form.MIG else ():
            bare = next((n for p, n, _ in places(device) if p.id == profile.id), None)
            for at in profile.placements if bare is not None else ():
                place = Place(profile, bare or "", at)
                if place_name(device, place) == name:
                    return Target(device, form or Form.MIG, place)
    return None
