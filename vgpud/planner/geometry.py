"""Legal placements of MIG instances: every legal layout of a card model, enumerated once.

A *slot* is a (profile id, placement) that NVML lists for the card. A *state* is a set of slots that may exist
together, as an int with bit i set for slot i. In a state, placements do not overlap, no profile has more
instances than NVML's instance count (so there is at most one "+me"), and the compute slices together are not
more than those of the card's largest profile (NVML: nvmlGpuInstanceProfileInfo_t and
nvmlGpuInstancePlacement_t). A card with 7 compute slices has 723 states without "+me".

Profiles are identified by id here, because different boards use the same name for different profiles.
"""

from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import NamedTuple

from vgpud.model.device import GpuInstance, MigProfile, PlaceKey, Placement
from vgpud.model.tenancy import MigSlice

SlotKey = PlaceKey
ComputeKey = tuple[SlotKey, SlotKey]  # The key of a compute instance: its GPU instance, and its place in it.
_REMEMBERED = 64
_ANSWERS = 65536
_COUNT_BITS = 6  # bits for the count of one profile: a card has at most 32 memory slices


class Layout(NamedTuple):
    """The instances on one card. `slots` are the occupied slots; `blocked` are slots that an instance outside
    all known slots overlaps.

    `slots` may be an illegal state if the driver allows more than its own list of profiles says. Such a card
    offers no further place.
    """

    slots: int = 0
    blocked: int = 0


class Place(NamedTuple):
    """A free slot. If it is taken, `destroyed` free slots of all profiles become unusable and `left` stay
    free.

    `cost` is `destroyed` and `worth` is `left`, counted in compute slices: a slot of a 4g profile counts
    four. Over all cards of a node, the lowest `cost`, and then the lowest `worth`, keeps most room for later
    requests.
    """

    placement: Placement
    destroyed: int
    left: int
    cost: int
    worth: int


class MigGeometry:
    """All slots and states of one card model. Immutable once built, and shared by equal cards."""

    def __init__(self, profiles: tuple[MigProfile, ...]) -> None:
        self.profiles = profiles
        self.slots: tuple[tuple[MigProfile, Placement], ...] = tuple(
            (profile, placement) for profile in profiles for placement in profile.placements
        )
        self.number: dict[SlotKey, int] = {
            (profile.id, placement): i for i, (profile, placement) in enumerate(self.slots)
        }
        self.compute_slices = max((profile.slice_count for profile in profiles), default=0)
        self._order = {profile.id: at for at, profile in enumerate(profiles)}
        self._of_profile: dict[int, int] = {
            profile.id: mask_of(self.number[profile.id, place] for place in profile.placements)
            for profile in profiles
        }
        self._overlapping = tuple(self.overlapping(placement) for _, placement in self.slots)
        self.free_after: dict[int, int] = self._enumerate()
        self._weights = tuple(profile.slice_count for profile, _ in self.slots)
        self._best: dict[tuple[Layout, int], Place | None] = {}

    @cached_property
    def counts(self) -> dict[int, int]:
        """For each legal state the number of instances of each profile, packed into one int: see `packed`."""
        unit = [self.unit(profile.id) for profile, _ in self.slots]
        return {state: sum(unit[i] for i in bits(state)) for state in self.free_after}

    @cached_property
    def with_counts(self) -> dict[int, tuple[int, ...]]:
        """The legal states, in ascending order, for each packed number of instances."""
        found: dict[int, list[int]] = {}
        for state, counts in self.counts.items():
            found.setdefault(counts, []).append(state)
        return {counts: tuple(sorted(states)) for counts, states in found.items()}

    def unit(self, profile_id: int) -> int:
        """The packed count for one instance of a profile. Raises KeyError for a profile that the card does
        not list.
        """
        return 1 << (_COUNT_BITS * self._order[profile_id])

    def packed(self, profile_ids: Iterable[int]) -> int:
        """Packs the number of instances of each profile into one int, with a few bits for each profile.
        Packed counts can be added.
        """
        return sum(self.unit(profile_id) for profile_id in profile_ids)

    def state(self, keys: Iterable[SlotKey]) -> int:
        """The mask of these slots. Raises KeyError for a slot that the card does not list."""
        return mask_of(self.number[key] for key in keys)

    def keys(self, state: int) -> tuple[SlotKey, ...]:
        """The slots of a mask, sorted by placement."""
        found = (self.slots[i] for i in bits(state))
        return tuple(sorted(((p.id, place) for p, place in found), key=lambda key: (key[1], key[0])))

    def worth(self, mask: int) -> int:
        """The number of compute slices of all slots in a mask."""
        return sum(self._weights[i] for i in bits(mask))

    def overlapping(self, place: Placement) -> int:
        """The slots that share a memory slice with `place`."""
        return mask_of(i for i, (_, placement) in enumerate(self.slots) if overlap(placement, place))

    def _enumerate(self) -> dict[int, int]:
        """Each legal state, with the slots that may still be added to it.

        A larger state has fewer free slots, so each state starts from the free slots of its parent. Slots are
        added in ascending order, so that each state is reached once.
        """
        too_wide = tuple(
            mask_of(i for i, (profile, _) in enumerate(self.slots) if profile.slice_count > left)
            for left in range(self.compute_slices + 1)
        )
        everything = (1 << len(self.slots)) - 1
        states = {0: everything}
        todo = [(0, everything, self.compute_slices, 0)]
        while todo:
            state, free, left, first = todo.pop()
            for i in bits(free >> first << first):
                profile = self.slots[i][0]
                child = state | 1 << i
                still = left - profile.slice_count
                remaining = free & ~self._overlapping[i] & ~too_wide[still]
                siblings = self._of_profile[profile.id]
                if (child & siblings).bit_count() >= profile.instance_count:
                    remaining &= ~siblings
                states[child] = remaining
                todo.append((child, remaining, still, i + 1))
        return states

    def layout(self, instances: Iterable[GpuInstance], held: Iterable[MigSlice]) -> Layout:
        """The layout of the instances that NVML lists, foreign ones included, and of the allocated slices.

        An instance that NVML lists and that is allocated counts once. An instance that matches no slot of the
        geometry blocks every slot that it overlaps.
        """
        slots = blocked = 0
        lying: tuple[GpuInstance | MigSlice, ...] = (*instances, *held)
        for one in lying:
            i = self.number.get((one.profile_id, one.placement))
            if i is None:
                blocked |= self.overlapping(one.placement)
            else:
                slots |= 1 << i
        return Layout(slots, blocked)

    def free(self, layout: Layout) -> int:
        """The slots that may be added to a layout; none if the layout is not a legal state."""
        return self.free_after.get(layout.slots, 0) & ~layout.blocked

    def free_profiles(self, layout: Layout) -> tuple[MigProfile, ...]:
        """The profiles of which one more instance fits beside the layout."""
        free = self.free(layout)
        return tuple(p for p in self.profiles if free & self._of_profile[p.id])

    def best_place(self, layout: Layout, profile_id: int) -> Place | None:
        """The free place for an instance of the profile that costs later requests least, counted in compute
        slices.

        With these weights, online packing is better than with equal weights or the driver's own order
        (tests/bench/mig_packing.py). Among equal places, the lowest start wins.
        """
        key = (layout, profile_id)
        if key not in self._best:
            if len(self._best) >= _ANSWERS:
                self._best.clear()
            self._best[key] = self._search(layout, profile_id)
        return self._best[key]

    def _search(self, layout: Layout, profile_id: int) -> Place | None:
        free = self.free(layout)
        places = []
        for i in bits(free & self._of_profile.get(profile_id, 0)):
            left = free & self.free_after[layout.slots | 1 << i]
            gone = free & ~left
            places.append(
                Place(
                    self.slots[i][1], gone.bit_count(), left.bit_count(), self.worth(gone), self.worth(left)
                )
            )
        return min(places, key=lambda place: (place.cost, place.placement), default=None)


@lru_cache(maxsize=_REMEMBERED)
def _geometry(profiles: tuple[MigProfile, ...]) -> MigGeometry:
    return MigGeometry(profiles)


# Hashing a card's profiles takes longer than placing an instance, so geometries are cached by the identity of
# the snapshot's tuple. The cache holds the tuple, so that its id is not reused.
_seen: dict[int, tuple[tuple[MigProfile, ...], MigGeometry]] = {}


def geometry_for(profiles: tuple[MigProfile, ...]) -> MigGeometry:
    """The geometry of a card with these profiles. The first call for them builds it in some milliseconds."""
    known = _seen.get(id(profiles))
    if known is not None and known[0] is profiles:
        return known[1]
    geometry = _geometry(profiles)
    if len(_seen) >= _REMEMBERED:
        _seen.clear()
    _seen[id(profiles)] = (profiles, geometry)
    return geometry


def overlap(a: Placement, b: Placement) -> bool:
    """True if the two placements share a slice."""
    return a.start < b.start + b.size and b.start < a.start + a.size


def mask_of(numbers: Iterable[int]) -> int:
    """An int with these bits set."""
    mask = 0
    for i in numbers:
        mask |= 1 << i
    return mask


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set in `mask`, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
