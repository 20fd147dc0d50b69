"""Checks whether a MIG instance of the requested size or profile fits on a device."""

from dataclasses import replace
from typing import NamedTuple

from vgpud.model.device import split_name
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import counted
from vgpud.model.tenancy import MigMove, MigSlice, Mode, Slice
from vgpud.planner import fit_compute
from vgpud.planner.geometry import MigGeometry, Place, SlotKey, geometry_for
from vgpud.planner.pool import Stock, stock_of
from vgpud.planner.terms import Offer, Terms, bare_name
from vgpud.planner.transitions import between, make_room
from vgpud.planner.verdict import Fit, Room, Seat, Unfit, Verdict, busy, never
from vgpud.planner.wanted import Wanted
from vgpud.planner.words import listed, shown_bytes

_REMEMBERED = 64
_FITS = 1024
# cost of one move: more than the cost of any place, so that a device that needs no moves is preferred
_MOVE_COST = 1000


class Choice(NamedTuple):
    """The instance for a request: an existing one, or a place for a new one."""

    offer: Offer
    place: Place
    how: str
    moves: tuple[MigMove, ...] = ()
    part: SlotKey | None = None  # the compute instance at `place`; None: the slice is the whole GPU instance
    part_cost: int = 0

    @property
    def mig(self) -> MigSlice:
        compute = (None, None) if self.part is None else self.part
        return MigSlice(
            self.offer.profile.id,
            self.offer.name,
            self.place.placement,
            compute_profile_id=compute[0],
            compute_placement=compute[1],
        )


def fit_mig(seat: Seat, want: Wanted, spread: bool) -> Verdict:
    """Finds the smallest profile that serves the request and has an idle instance or a place for a new one.
    Of several places, the one that blocks the fewest other places is taken.
    """
    serving = serving_offers(seat, want)
    if isinstance(serving, Unfit):
        return serving
    shut = fit_compute.without_memory(seat, serving[0], want) or mode_shut(seat)
    if shut is not None:
        return shut
    device = seat.device
    geometry = geometry_for(device.mig.profiles)
    stock = stock_of(geometry, device, seat.use.mig, seat.pool)
    # this result is not cached, because it also depends on the compute instances of the device
    if serving[0].compute is not None:
        choice = find_instance(seat, geometry, stock, serving, want.start)
        return full(seat, serving, geometry, stock) if choice is None else _fit(seat, choice, spread)
    fits = _fits_of(seat)
    key = (id(serving), want.start, stock, seat.pool.dynamic, seat.use.count == 0, spread)
    known = fits.get(key)
    if known is not None and known[0] is serving:
        return known[1]
    choice = find_instance(seat, geometry, stock, serving, want.start)
    if choice is None:
        return full(seat, serving, geometry, stock)
    fit = _fit(seat, choice, spread)
    fits[key] = serving, fit
    return fit


_Fits = dict[tuple[object, ...], tuple[tuple[Offer, ...], Fit]]
# Cached results by the identity of the device and its terms, because the same snapshots recur (as in
# geometry_for).
_fits_known: dict[int, tuple[Seat, _Fits]] = {}


def _fits_of(seat: Seat) -> _Fits:
    """The cached results for this device and these terms. Results for other snapshots are dropped."""
    known = _fits_known.get(id(seat.device))
    if known is not None and known[0].device is seat.device and known[0].terms is seat.terms:
        if len(known[1]) < _FITS:
            return known[1]
    elif len(_fits_known) >= _REMEMBERED:
        _fits_known.clear()
    fits: _Fits = {}
    _fits_known[id(seat.device)] = seat, fits
    return fits


def find_instance(
    seat: Seat,
    geometry: MigGeometry,
    stock: Stock,
    serving: tuple[Offer, ...],
    start: int | None = None,
    needs_bytes: int = 0,
) -> Choice | None:
    """Finds an idle instance, or a place for a new one, of the first profile that has either. If no profile
    has one, and the request names no `start`, idle instances are moved to make room.

    `needs_bytes` is memory that should be free in the GPU instance of a compute instance, if possible.
    """
    if serving[0].compute is not None:
        part = _find_part(seat, geometry, stock, serving[0], start, needs_bytes)
        return part or (_find_part(seat, geometry, stock, serving[0], start, 0) if needs_bytes else None)
    if start is not None:
        found = (_at(seat, geometry, stock, offer, start) for offer in serving)
        return next((choice for choice in found if choice is not None), None)
    for offer in serving:
        choice = _ready(seat, geometry, stock, offer) or _new(seat, geometry, stock, offer)
        if choice is not None:
            return choice
    for offer in serving:
        choice = _after_moves(seat, geometry, stock, offer)
        if choice is not None:
            return choice
    return None


def _find_part(
    seat: Seat, geometry: MigGeometry, stock: Stock, offer: Offer, start: int | None, needs_bytes: int
) -> Choice | None:
    """A place for a compute instance: in a divided GPU instance, or if none has a place, in an idle or a new
    GPU instance.
    """
    part = fit_compute.find_part(seat, geometry, stock, offer, start, needs_bytes)
    if part is not None:
        return Choice(offer, part.at, part.how, part=part.key, part_cost=part.cost)
    place = fit_compute.first_place(offer)
    if place is None or not seat.pool.dynamic:
        return None
    ours = stock.ready & geometry.state(seat.pool.own & geometry.number.keys())
    whole = offer._replace(compute=None)
    choice = find_instance(seat, geometry, stock._replace(ready=ours), (whole,), start)
    if choice is None:
        return None
    return choice._replace(offer=offer, how=f"{choice.how}, the first of its GPU instance", part=place)


def _ready(seat: Seat, geometry: MigGeometry, stock: Stock, offer: Offer) -> Choice | None:
    """An idle instance, or one of the layout that is still to be made."""
    if not stock.ready:
        return None
    keys = [key for key in geometry.keys(stock.ready) if key[0] == offer.profile.id]
    if not keys:
        return None
    left = geometry.free(stock.layout)
    place = Place(keys[0][1], 0, left.bit_count(), 0, geometry.worth(left))
    # an instance of the layout may still have to be made, for example after a reset of the device
    in_layout = keys[0] in (seat.pool.layout or ())
    return Choice(offer, place, "where the layout has one" if in_layout else "where an idle one stands")


def _new(seat: Seat, geometry: MigGeometry, stock: Stock, offer: Offer) -> Choice | None:
    """A free place for a new instance, if the policy lets vgpud add instances to the device's layout."""
    if not seat.pool.dynamic:
        return None
    place = geometry.best_place(stock.layout, offer.profile.id)
    if place is None:
        return None
    return Choice(offer, place, f"which leaves {place.left} of {place.left + place.destroyed} places")


def _at(seat: Seat, geometry: MigGeometry, stock: Stock, offer: Offer, start: int) -> Choice | None:
    """The instance at the start that the request names. Other places are not compared."""
    slots = geometry.keys(stock.ready | (geometry.free(stock.layout) if seat.pool.dynamic else 0))
    key = next((key for key in slots if key[0] == offer.profile.id and key[1].start == start), None)
    if key is None:
        return None
    left = geometry.free(stock.layout)
    place = Place(key[1], 0, left.bit_count(), 0, geometry.worth(left))
    return Choice(offer, place, "as was asked")


def _after_moves(seat: Seat, geometry: MigGeometry, stock: Stock, offer: Offer) -> Choice | None:
    """The place for an instance that becomes free by the fewest moves of idle instances."""
    if not seat.pool.dynamic or stock.pinned == stock.layout.slots:
        return None
    target = make_room(geometry, stock.layout, stock.pinned, offer.profile.id)
    if target is None:
        return None
    change = between(stock.layout.slots, target)
    coming = list(geometry.keys(change.create))
    new = next((key for key in coming if key[0] == offer.profile.id), None)
    # the new instance replaces an idle one of the same profile that cannot be allocated as it is
    if new is None:
        idle = stock.layout.slots & ~stock.pinned & target
        new = next(key for key in geometry.keys(idle) if key[0] == offer.profile.id)
        change = change._replace(destroy=change.destroy | geometry.state([new]))
    else:
        coming.remove(new)
    names = {o.profile.id: o.name for o in seat.terms.offers}
    moves = tuple(_move(seat.device.uuid, key, names, coming) for key in geometry.keys(change.destroy))
    left = geometry.free_after[target]
    cost = _MOVE_COST * len(moves)
    place = Place(new[1], 0, left.bit_count(), cost, geometry.worth(left))
    return Choice(offer, place, f"once {counted(len(moves), 'idle instance')} made room", moves)


def _move(uuid: str, key: SlotKey, names: dict[int, str], coming: list[SlotKey]) -> MigMove:
    """The move of one idle instance. If `coming` has a new place for it, the place is removed from
    `coming`.
    """
    again = next((other for other in coming if other[0] == key[0]), None)
    if again is not None:
        coming.remove(again)
    return MigMove(uuid, key[0], names[key[0]], key[1], None if again is None else again[1])


def _fit(seat: Seat, choice: Choice, spread: bool) -> Fit:
    device, offer, place = seat.device, choice.offer, choice.place
    return Fit(
        device=device,
        mode=Mode.MIG,
        piece=Slice(device.uuid, Mode.MIG, offer.memory_bytes, offer.share, choice.mig),
        rank=_rank(seat, choice, spread),
        sentence=(
            f"mode mig, profile {offer.name} with {_shown_memory(offer)} at memory slice "
            f"{place.placement.start}, {choice.how}"
        ),
        moves=choice.moves,
    )


def _shown_memory(offer: Offer) -> str:
    shared = "" if offer.compute is None else " shared with its GPU instance's others"
    return f"{shown_bytes(offer.instance_bytes)}{shared}"


def _rank(seat: Seat, choice: Choice, spread: bool) -> tuple[int, ...]:
    """The rank of a choice. Strategy pack prefers a device that has allocations or whose mode the policy
    fixes, then the least memory, then the fewest places lost, then the fullest device. Strategy spread
    prefers the least memory, then the emptiest device.
    """
    memory, place = choice.offer.memory_bytes, choice.place
    if spread:
        return (memory, -place.worth, place.cost)
    return (int(seat.claims_free_card), memory, place.cost, choice.part_cost, place.worth)


# Cached by identity as in geometry_for: the offers depend only on the device's terms and the request.
_serving_known: dict[int, tuple[Terms, dict[Wanted, tuple[Offer, ...]]]] = {}


def serving_offers(seat: Seat, want: Wanted) -> tuple[Offer, ...] | Unfit:
    """Profiles that the policy allows and that are large enough, smallest first."""
    known = _serving_known.get(id(seat.terms))
    if known is None or known[0] is not seat.terms or len(known[1]) >= _REMEMBERED:
        if len(_serving_known) >= _REMEMBERED:
            _serving_known.clear()
        known = _serving_known[id(seat.terms)] = (seat.terms, {})
    offers = known[1].get(want)
    if offers is not None:
        return offers
    found = _serving(seat, want)
    # a refusal is not cached, because it contains changing facts of the device
    if not isinstance(found, Unfit):
        known[1][want] = found
    return found


def _serving(seat: Seat, want: Wanted) -> tuple[Offer, ...] | Unfit:
    offers = seat.terms.offers
    if not seat.device.mig.capable:
        return never(seat, Mode.MIG, ErrorCode.UNSUPPORTED, "the device has no MIG")
    if not offers:
        return never(seat, Mode.MIG, ErrorCode.UNSUPPORTED, "the driver lists no MIG profiles for it")
    if split_name(want.profile) is not None:
        plain = fit_compute.whole_name(seat, want.profile)
        if plain == want.profile:
            return fit_compute.serving(seat, want)
        want = replace(want, profile=plain)
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


def mode_shut(seat: Seat) -> Unfit | None:
    """Returns why MIG mode is off and cannot be enabled now; None if it is on or can be enabled."""
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
        return busy(
            seat, Mode.MIG, f"MIG mode is off, and cannot be switched on while it has {who} (pid {pids})"
        )
    return None


def full(seat: Seat, serving: tuple[Offer, ...], geometry: MigGeometry, stock: Stock) -> Unfit:
    free_ids = {key[0] for key in geometry.keys(stock.ready)}
    if seat.pool.dynamic:
        free_ids |= {profile.id for profile in geometry.free_profiles(stock.layout)}
    free = tuple(o.name for o in seat.terms.offers if o.allowed and o.profile.id in free_ids)
    there = {(instance.profile_id, instance.placement) for instance in seat.device.mig.instances}
    there |= {(held.profile_id, held.placement) for held in seat.use.mig}
    left = f"free are {listed(free)}" if free else "it is full"
    if not seat.pool.dynamic:
        left = f"its layout is fixed, {left}"
    return busy(
        seat,
        Mode.MIG,
        f"no place for {serving[0].name} beside {counted(len(there), 'instance')}: {left}",
        Room(profiles=free),
    )
