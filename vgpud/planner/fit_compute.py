"""Checks whether a compute instance (1c.3g.71gb) fits: in a divided GPU instance, or in a new one."""

from typing import NamedTuple

from vgpud.model.device import split_name
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode
from vgpud.planner.division import divisions, given_bytes, part_of, seats
from vgpud.planner.geometry import Layout, MigGeometry, Place, SlotKey, geometry_for
from vgpud.planner.pool import Stock
from vgpud.planner.terms import Offer, bare_name
from vgpud.planner.verdict import Room, Seat, Unfit, never
from vgpud.planner.wanted import Wanted
from vgpud.planner.words import listed


class Part(NamedTuple):
    """A place for a compute instance; `at` is the place of its GPU instance on the card."""

    at: Place
    key: SlotKey
    cost: int
    how: str


def whole_name(seat: Seat, text: str) -> str:
    """Returns 3g.71gb for 3c.3g.71gb, because that compute instance takes all of the GPU instance. Any other
    name is returned unchanged.
    """
    named = split_name(text)
    if named is None:
        return text
    slices = {o.profile.slice_count for o in seat.terms.offers if o.name == bare_name(named[1])}
    return named[1] if slices == {named[0]} else text


def offer_of(seat: Seat, want: Wanted) -> Offer | Unfit:
    """The offer that matches a name such as 1c.3g.71gb, or such as 1c.9 with the id of the GPU instance
    profile.
    """
    named = split_name(want.profile)
    assert named is not None
    slices, text = named
    offers = [o for o in seat.terms.offers if bare_name(text) in (o.name, str(o.profile.id))]
    parts = ((offer, part_of(offer.profile, slices)) for offer in offers)
    offer, part = next(((o, p) for o, p in parts if p is not None), (None, None))
    if offer is None or part is None:
        names = tuple(o.name for o in seat.terms.offers if o.profile.slice_count > 1)
        sentence = f"it has no profile {want.profile!r}: what can be divided is {listed(names)}"
        return never(seat, Mode.MIG, ErrorCode.IMPOSSIBLE, sentence, Room(profiles=names))
    most = max(o.profile.sm_count for o in seat.terms.offers) or 1
    found = offer._replace(
        name=f"{slices}c.{offer.name}",
        memory_bytes=offer.memory_bytes * slices // offer.profile.slice_count,
        share=type(offer.share)(min(max(part.sm_count * 10000 // most, 1), 10000)),
        allowed=offer.allowed or f"{slices}c.{offer.name}" in (seat.terms.mig_profiles or ()),
        compute=part,
    )
    return found if found.allowed else _denied(seat, found)


def _denied(seat: Seat, offer: Offer) -> Unfit:
    allowed = listed(tuple(sorted(seat.terms.mig_profiles or ())))
    sentence = f"the policy does not allow profile {offer.name!r}, only {allowed}"
    return never(seat, Mode.MIG, ErrorCode.DENIED_BY_POLICY, sentence)


def serving(seat: Seat, want: Wanted) -> tuple[Offer, ...] | Unfit:
    """Returns the offer that serves a request for a compute instance, or the reason why none does. The memory
    of the offer is the memory of the GPU instance, which its compute instances share.
    """
    offer = offer_of(seat, want)
    if isinstance(offer, Unfit):
        return offer
    largest = Room(offer.instance_bytes, offer.share.hundredths, (offer.name,))
    if want.share is not None and offer.share < want.share:
        sentence = (
            f"{offer.name} has {offer.share} of the multiprocessors, and a share of {want.share} is asked"
        )
        return never(seat, Mode.MIG, ErrorCode.IMPOSSIBLE, sentence, largest)
    if want.memory_bytes is not None and offer.instance_bytes < want.memory_bytes:
        sentence = f"the GPU instance of a {offer.name} has less memory than is asked"
        return never(seat, Mode.MIG, ErrorCode.IMPOSSIBLE, sentence, largest)
    return (offer,)


def without_memory(seat: Seat, offer: Offer, want: Wanted) -> Unfit | None:
    """The refusal of a request for memory: compute instances of a GPU instance share the memory. None if the
    request has no amount, or the offer is not a compute instance.
    """
    if offer.compute is None or want.memory_bytes is None:
        return None
    return never(
        seat,
        Mode.MIG,
        ErrorCode.UNSUPPORTED,
        f"a {offer.name} shares the memory of its GPU instance, so it has no memory limit: leave memory "
        "out, or ask for isolation quota, which limits it",
    )


def find_part(
    seat: Seat, geometry: MigGeometry, stock: Stock, offer: Offer, start: int | None, needs_bytes: int
) -> Part | None:
    """The place for a compute instance in a GPU instance that is already divided. An idle compute instance
    comes first, then the place that makes the fewest other places unusable.

    `needs_bytes` is memory that must be free in the GPU instance.
    """
    assert offer.compute is not None
    free = geometry.keys(geometry.free(stock.layout))
    found = []
    for one in seats(divisions(seat.device, seat.use.mig, seat.pool, offer.profile), offer.compute):
        division = one.division
        known = geometry.number.get(division.key)
        if start not in (None, division.key[1].start) or known is None:
            continue
        if not stock.layout.slots >> known & 1 and division.key not in free:
            continue  # the layout plans an instance at this place, but another instance is there now
        given = given_bytes(seat.use, division.key, offer.profile) if needs_bytes else 0
        if needs_bytes > offer.instance_bytes - given:
            continue
        left = geometry.free(stock.layout)
        at = Place(division.key[1], 0, left.bit_count(), 0, geometry.worth(left))
        beside = counted(division.layout.slots.bit_count(), "other")
        how = "where an idle one stands" if one.stands else f"beside {beside}"
        room = division.geometry.worth(division.geometry.free(division.layout))
        rank = (not one.stands, one.cost, room, division.key)
        found.append((rank, Part(at, one.place, one.cost, f"{how} in the GPU instance")))
    return min(found)[1] if found else None


def first_place(offer: Offer) -> SlotKey | None:
    """The place of the first compute instance in a new GPU instance; None if the driver lists no places."""
    assert offer.compute is not None
    place = geometry_for(offer.profile.compute).best_place(Layout(), offer.compute.id)
    return None if place is None else (offer.compute.id, place.placement)
