"""Checks whether a quota (mode preload) or a spatial share (mode mps) fits on a MIG instance.

An instance is judged like a device (fit_shared), by the capacity of the instance. An instance that already
has slices of the mode is preferred, then an idle instance, then a place for a new one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from vgpud.model.device import Device, DeviceProcess, Mig
from vgpud.model.quantity import counted
from vgpud.model.tenancy import MigMove, MigSlice, Mode
from vgpud.planner.division import given_bytes
from vgpud.planner.fit_mig import find_instance, full, mode_shut, serving_offers
from vgpud.planner.fit_shared import fit_shared
from vgpud.planner.geometry import geometry_for
from vgpud.planner.pool import stock_of
from vgpud.planner.terms import Offer
from vgpud.planner.use import EMPTY, DeviceUse, InstanceUse
from vgpud.planner.verdict import NO_ROOM, Fit, Seat, Unfit, Verdict, busy
from vgpud.planner.wanted import Wanted


class _Instance(NamedTuple):
    offer: Offer
    mig: MigSlice
    use: DeviceUse


def fit_on_top(seat: Seat, mode: Mode, want: Wanted, spread: bool) -> Verdict:
    """The verdict for `mode` (preload or mps) on MIG instances. A share is a part of the instance, not of the
    card.
    """
    serving = serving_offers(seat, want if want.share is None else replace(want, share=None))
    if isinstance(serving, Unfit):
        return serving._replace(mode=mode)
    shared = [_fit(seat, instance, mode, want, spread) for instance in _shared(seat, mode, serving)]
    fits = [verdict for verdict in shared if isinstance(verdict, Fit)]
    if fits:
        return min(fits, key=lambda fit: fit.rank)
    fresh = _fresh(seat, mode, want, serving, spread)
    if isinstance(fresh, Fit) or not fresh.busy or not shared:
        return fresh
    return _full(seat, mode, [v for v in shared if isinstance(v, Unfit)], fresh)


def _shared(seat: Seat, mode: Mode, serving: tuple[Offer, ...]) -> Iterator[_Instance]:
    """The instances that have slices of this mode and are open to the request."""
    offers = {(offer.profile.id, offer.compute and offer.compute.id): offer for offer in serving}
    for mig in seat.use.mig:
        use = seat.use.instance(mig.place)
        offer = offers.get((mig.profile_id, mig.compute_profile_id))
        if use is not None and use.mode is mode and offer is not None and mig.uuid not in seat.shut:
            yield _Instance(offer, mig, _as_use(seat.use, use, offer))


def _as_use(held: DeviceUse, use: InstanceUse, offer: Offer) -> DeviceUse:
    """The use of an instance in the form of a device's use. Memory that compute instances share counts for
    all of them.
    """
    given = given_bytes(held, use.place[0], offer.profile)
    return DeviceUse(use.mode, given, use.share_hundredths, use.count)


def _as_device(device: Device, instance: _Instance) -> Device:
    """The instance in the form of a device, with the processes that run in it."""
    return replace(
        device,
        memory_total_bytes=instance.offer.instance_bytes,
        memory_reserved_bytes=0,
        sm_count=(instance.offer.compute or instance.offer.profile).sm_count,
        mig=Mig(),
        processes=tuple(p for p in device.processes if _is_in(p, device, instance.mig)),
    )


def _is_in(process: DeviceProcess, device: Device, mig: MigSlice) -> bool:
    standing = next((one for one in device.mig.instances if one.key == mig.key), None)
    if standing is None or process.gpu_instance_id != standing.id:
        return False
    place = mig.compute_key
    part = None if place is None else standing.compute(place)
    return place is None or (part is not None and process.compute_instance_id in (None, part.id))


def _fit(
    seat: Seat,
    instance: _Instance,
    mode: Mode,
    want: Wanted,
    spread: bool,
    how: str = "",
    moves: tuple[MigMove, ...] = (),
) -> Verdict:
    asked = seat._replace(device=_as_device(seat.device, instance), use=instance.use)
    verdict = fit_shared(asked, mode, want, spread)
    if isinstance(verdict, Unfit):
        return verdict._replace(device=seat.device)
    place = f"{instance.offer.name} at memory slice {instance.mig.placement.start}"
    beside = how or f"beside {counted(instance.use.count, 'other')}"
    return verdict._replace(
        device=seat.device,
        piece=replace(verdict.piece, mig=instance.mig),
        # An instance that already has slices of the mode is preferred, as with devices.
        rank=verdict.rank if spread else (int(not instance.use.count), *verdict.rank[1:]),
        sentence=f"{verdict.sentence}, on the MIG instance {place}, {beside}",
        moves=moves,
    )


def _fresh(seat: Seat, mode: Mode, want: Wanted, serving: tuple[Offer, ...], spread: bool) -> Fit | Unfit:
    """The verdict on an instance without allocations: an idle one, or a new one."""
    shut = mode_shut(seat)
    if shut is not None:
        return shut._replace(mode=mode)
    geometry = geometry_for(seat.device.mig.profiles)
    stock = stock_of(geometry, seat.device, seat.use.mig, seat.pool)
    able: list[Offer] = []
    never: Unfit | None = None
    # Each profile is judged as an empty instance. A place is searched only for the profiles that fit the
    # request.
    for offer in serving:
        probe = _Instance(offer, MigSlice(offer.profile.id, offer.name, offer.profile.placements[0]), EMPTY)
        verdict = fit_shared(
            seat._replace(device=_as_device(seat.device, probe), use=EMPTY), mode, want, spread
        )
        if isinstance(verdict, Unfit):
            never = never or verdict._replace(device=seat.device)
        else:
            able.append(offer)
    if not able:
        assert never is not None
        return never
    choice = find_instance(seat, geometry, stock, tuple(able), want.start, want.memory_bytes or 0)
    if choice is None:
        return full(seat, tuple(able), geometry, stock)._replace(mode=mode, room=NO_ROOM)
    used = EMPTY
    if choice.offer.compute is not None:  # a compute instance shares the memory of its GPU instance
        given = given_bytes(seat.use, choice.mig.key, choice.offer.profile)
        used = replace(EMPTY, memory_bytes=given)
    instance = _Instance(choice.offer, choice.mig, used)
    verdict = _fit(seat, instance, mode, want, spread, choice.how, choice.moves)
    assert isinstance(verdict, Fit | Unfit)
    return verdict


def _full(seat: Seat, mode: Mode, shared: list[Unfit], fresh: Unfit) -> Unfit:
    """The refusal. Of the shared instances, it reports the one with the most room."""
    best = max(shared, key=lambda unfit: unfit.room[:2])
    sentence = f"on its {counted(len(shared), 'shared MIG instance')}: {best.sentence}; {fresh.sentence}"
    return busy(seat, mode, sentence, best.room)
