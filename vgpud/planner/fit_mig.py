"""Does a MIG instance of the size, or the profile, asked fit on a device?"""

from typing import NamedTuple

from vgpud.model.errors import ErrorCode
from vgpud.model.tenancy import MigSlice, Mode, Slice
from vgpud.planner.geometry import Layout, Place, Table, table_for
from vgpud.planner.terms import Offer, bare_name
from vgpud.planner.verdict import Fit, Room, Seat, Unfit, Verdict, busy, never
from vgpud.planner.wanted import Wanted
from vgpud.planner.words import counted, listed, shown_bytes


class _Choice(NamedTuple):
    offer: Offer
    place: Place
    table: Table
    layout: Layout


def fit_mig(seat: Seat, want: Wanted, spread: bool) -> Verdict:
    """The smallest profile that serves and has a place, where it spoils the fewest other places."""
    serving = _serving(seat, want)
    if isinstance(serving, Unfit):
        return serving
    shut = _mode_shut(seat)
    if shut is not None:
        return shut
    device = seat.device
    table = table_for(device.mig.profiles)
    layout = table.layout(device.mig.instances, seat.use.mig)
    for offer in serving:
        place = table.best_place(layout, offer.profile.id)
        if place is not None:
            return _fit(seat, _Choice(offer, place, table, layout), spread)
    return _full(seat, serving, table, layout)


def _fit(seat: Seat, choice: _Choice, spread: bool) -> Fit:
    device, offer, place = seat.device, choice.offer, choice.place
    mig = MigSlice(offer.profile.id, offer.name, place.placement)
    return Fit(
        device=device,
        mode=Mode.MIG,
        piece=Slice(device.uuid, Mode.MIG, offer.memory_bytes, offer.share, mig),
        rank=_rank(seat, choice, spread),
        sentence=(
            f"mode mig, profile {offer.name} with {shown_bytes(offer.memory_bytes)} at memory slice "
            f"{place.placement.start}, which leaves {place.left} of {place.left + place.destroyed} places"
        ),
    )


def _rank(seat: Seat, choice: _Choice, spread: bool) -> tuple[int, ...]:
    """Pack: a device already given to MIG, the least waste, the fewest places spoilt, the fullest."""
    memory, place = choice.offer.memory_bytes, choice.place
    if spread:
        return (memory, -place.worth, place.cost)
    return (int(seat.claims_free_card), memory, place.cost, place.worth)


def _serving(seat: Seat, want: Wanted) -> tuple[Offer, ...] | Unfit:
    """The profiles that the policy allows and that are large enough, smallest first."""
    offers = seat.terms.offers
    if not seat.device.mig.capable:
        return never(seat, Mode.MIG, ErrorCode.UNSUPPORTED, "the device has no MIG")
    if not offers:
        return never(seat, Mode.MIG, ErrorCode.UNSUPPORTED, "the driver lists no MIG profiles for it")
    enough = tuple(offer for offer in offers if offer.allowed and _serves(offer, want))
    return enough or _none_serves(seat, want)


def _serves(offer: Offer, want: Wanted) -> bool:
    return (
        (not want.profile or _is_named(offer, want.profile))
        and (want.memory_bytes is None or offer.memory_bytes >= want.memory_bytes)
        and (want.share is None or offer.share >= want.share)
    )


def _is_named(offer: Offer, text: str) -> bool:
    return offer.name == bare_name(text) or str(offer.profile.id) == text.strip()


def _none_serves(seat: Seat, want: Wanted) -> Unfit:
    allowed = tuple(offer for offer in seat.terms.offers if offer.allowed)
    if not allowed:
        names = listed(tuple(offer.name for offer in seat.terms.offers))
        return never(
            seat, Mode.MIG, ErrorCode.DENIED_BY_POLICY, f"the policy allows none of its profiles ({names})"
        )
    if want.profile:
        named = tuple(offer for offer in allowed if _is_named(offer, want.profile))
        return _too_small(seat, want, named) if named else _not_named(seat, want, allowed)
    return _too_small(seat, want, allowed)


def _not_named(seat: Seat, want: Wanted, allowed: tuple[Offer, ...]) -> Unfit:
    names = tuple(offer.name for offer in allowed)
    if any(_is_named(offer, want.profile) for offer in seat.terms.offers):
        sentence = f"the policy does not allow profile {want.profile!r}, only {listed(names)}"
        return never(seat, Mode.MIG, ErrorCode.DENIED_BY_POLICY, sentence)
    sentence = f"it has no profile {want.profile!r}, only {listed(names)}"
    return never(seat, Mode.MIG, ErrorCode.IMPOSSIBLE, sentence, Room(profiles=names))


def _too_small(seat: Seat, want: Wanted, offers: tuple[Offer, ...]) -> Unfit:
    largest = max(offers, key=lambda offer: (offer.memory_bytes, offer.share))
    asked = []
    if want.memory_bytes is not None:
        asked.append(shown_bytes(want.memory_bytes))
    if want.share is not None:
        asked.append(f"a share of {want.share}")
    return never(
        seat,
        Mode.MIG,
        ErrorCode.IMPOSSIBLE,
        f"no profile has {' and '.join(asked)}: {largest.name} has {shown_bytes(largest.memory_bytes)} "
        f"and {largest.share} of the multiprocessors",
        Room(largest.memory_bytes, largest.share.hundredths, (largest.name,)),
    )


def _mode_shut(seat: Seat) -> Unfit | None:
    """Why MIG mode can not be had now, where it is off."""
    device = seat.device
    if device.mig.current:
        return None
    if not seat.terms.mig_change_mode:
        return never(
            seat,
            Mode.MIG,
            ErrorCode.DENIED_BY_POLICY,
            "MIG mode is off and the policy does not let it be switched (mig.change_mode)",
        )
    if device.processes:
        pids = listed(tuple(str(process.pid) for process in device.processes))
        who = counted(len(device.processes), "process")
        return busy(seat, Mode.MIG, f"MIG mode is off, and can not be switched beside {who} (pid {pids})")
    return None


def _full(seat: Seat, serving: tuple[Offer, ...], table: Table, layout: Layout) -> Unfit:
    free_ids = {profile.id for profile in table.free_profiles(layout)}
    free = tuple(o.name for o in seat.terms.offers if o.allowed and o.profile.id in free_ids)
    there = {(instance.profile_id, instance.placement) for instance in seat.device.mig.instances}
    there |= {(held.profile_id, held.placement) for held in seat.use.mig}
    left = f"free are {listed(free)}" if free else "it is full"
    return busy(
        seat,
        Mode.MIG,
        f"no place for {serving[0].name} beside {counted(len(there), 'instance')}: {left}",
        Room(profiles=free),
    )
