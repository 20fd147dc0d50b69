"""Replay of online packing of MIG instances: arrivals, stays, a policy, and a reference that repacks.

Arrivals are Poisson, stays exponential with mean 1. At load 1.0 the requested compute slices equal, on
average, those of all cards. A request that does not fit is refused and not repeated. Accepted work is compute
slices times stay.

The reference repacks each card freely at every arrival, at no cost: a card takes a request when any layout
holds what is on the card and the request. The fullest such card takes it.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vgpud.planner.geometry import Layout, MigGeometry, Place, bits
from vgpud.planner.transitions import between, make_room

# fractions of the arrivals by profile, smallest first: 1g, 1g with double memory, 2g, 3g, 4g, 7g
MIXES: dict[str, tuple[float, ...]] = {
    "uniform": (1, 1, 1, 1, 1, 1),
    "skew-small": (0.30, 0.25, 0.20, 0.10, 0.10, 0.05),
    "skew-big": (0.05, 0.10, 0.10, 0.20, 0.25, 0.30),
    "bimodal": (0.30, 0.15, 0.05, 0.05, 0.15, 0.30),
}
PROFILES = (19, 15, 14, 9, 5, 0)
Spot = tuple[int, int]  # (card, slot number)
Choose = Callable[["Cards", int], Spot | None]


class Arrival(NamedTuple):
    time: float
    profile_id: int
    stay: float


class Outcome(NamedTuple):
    work: float
    accepted: int
    moved: int


def arrivals(
    geometry: MigGeometry, mix: str, load: float, cards: int, seed: int, count: int
) -> list[Arrival]:
    draw = random.Random(f"{mix} {load} {cards} {seed}")
    parts = MIXES[mix]
    slices = slices_of(geometry)
    mean = sum(part * slices[p] for part, p in zip(parts, PROFILES, strict=True)) / sum(parts)
    rate = load * geometry.compute_slices * cards / mean
    now, made = 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        made.append(Arrival(now, draw.choices(PROFILES, parts)[0], draw.expovariate(1)))
    return made


def slices_of(geometry: MigGeometry) -> dict[int, int]:
    return {profile.id: profile.slice_count for profile in geometry.profiles}


@dataclass
class Cards:
    """The instances on each card, and the place of each tenant."""

    geometry: MigGeometry
    states: list[int]
    tenants: dict[Spot, int] = field(default_factory=dict)
    spots: dict[int, Spot] = field(default_factory=dict)

    def free_spots(self, profile_id: int) -> list[Spot]:
        slots = {
            self.geometry.number[profile_id, p]
            for q in self.geometry.profiles
            if q.id == profile_id
            for p in q.placements
        }
        return [
            (card, slot)
            for card, state in enumerate(self.states)
            for slot in bits(self.geometry.free_after[state])
            if slot in slots
        ]  # fmt: skip

    def put(self, tenant: int, spot: Spot) -> None:
        card, slot = spot
        assert self.geometry.free_after[self.states[card]] >> slot & 1, "the place is not free"
        self.states[card] |= 1 << slot
        self.tenants[spot], self.spots[tenant] = tenant, spot

    def take(self, tenant: int) -> Spot:
        card, slot = spot = self.spots.pop(tenant)
        self.states[card] &= ~(1 << slot)
        del self.tenants[spot]
        return spot


def replay(
    geometry: MigGeometry, trace: Sequence[Arrival], cards: int, choose: Choose, moved_part: float = 0.0
) -> Outcome:
    """Replays a trace. At most `moved_part` of the instances accepted so far may have been moved, each within
    its card.
    """
    node = Cards(geometry, [0] * cards)
    leaving: list[tuple[float, int]] = []
    slices = slices_of(geometry)
    work, accepted, moved = 0.0, 0, 0
    for tenant, (now, profile_id, stay) in enumerate(trace):
        while leaving and leaving[0][0] <= now:
            node.take(heapq.heappop(leaving)[1])
        spot = choose(node, profile_id)
        if spot is None and moved_part:
            spot, cost = _with_moves(node, profile_id, int(accepted * moved_part) - moved)
            moved += cost
        if spot is not None:
            node.put(tenant, spot)
            heapq.heappush(leaving, (now + stay, tenant))
            work += slices[profile_id] * stay
            accepted += 1
    return Outcome(work, accepted, moved)


def _with_moves(node: Cards, profile_id: int, budget: int) -> tuple[Spot | None, int]:
    """Makes room on the card on which the fewest instances move, if that is within the budget. Every instance
    is kept. Returns the free place, or None, and the number of moved instances.
    """
    geometry, best = node.geometry, None
    for card, state in enumerate(node.states):
        target = make_room(geometry, Layout(state), 0, profile_id)
        if target is None or geometry.counts[target] != geometry.counts[state] + geometry.unit(profile_id):
            continue
        cost = (between(state, target).destroy.bit_count(), card, target)
        best = cost if best is None else min(best, cost)
    if best is None or best[0] > budget:
        return None, 0
    return _move(node, best[1], best[2], profile_id), best[0]


def _move(node: Cards, card: int, target: int, profile_id: int) -> Spot:
    geometry = node.geometry
    gone, new = bits(node.states[card] & ~target), bits(target & ~node.states[card])
    tenants = [(node.tenants[card, slot], geometry.slots[slot][0].id) for slot in gone]
    for tenant, _ in tenants:
        node.take(tenant)
    for tenant, kind in tenants:
        slot = next(s for s in new if geometry.slots[s][0].id == kind)
        new.remove(slot)
        node.put(tenant, (card, slot))
    (left,) = new
    assert geometry.slots[left][0].id == profile_id
    return card, left


def reference(geometry: MigGeometry, trace: Sequence[Arrival], cards: int) -> float:
    """Accepted work if each card may repack at any time."""
    counts, load = [0] * cards, [0] * cards
    slices = slices_of(geometry)
    leaving: list[tuple[float, int, int]] = []
    work = 0.0
    for now, profile_id, stay in trace:
        while leaving and leaving[0][0] <= now:
            _, card, gone = heapq.heappop(leaving)
            counts[card] -= geometry.unit(gone)
            load[card] -= slices[gone]
        more = geometry.unit(profile_id)
        fitting = [card for card in range(cards) if counts[card] + more in geometry.with_counts]
        if fitting:
            card = max(fitting, key=lambda c: (load[c], -c))
            counts[card] += more
            load[card] += slices[profile_id]
            heapq.heappush(leaving, (now + stay, card, profile_id))
            work += slices[profile_id] * stay
    return work


# --- policies


def ours(node: Cards, profile_id: int) -> Spot | None:
    """vgpud's policy (fit_mig): takes the place with the lowest cost, and among these the lowest worth."""
    found: list[tuple[int, int, int, Place]] = []
    for card, state in enumerate(node.states):
        place = node.geometry.best_place(Layout(state), profile_id)
        if place is not None:
            found.append((place.cost, place.worth, card, place))
    if not found:
        return None
    _, _, card, place = min(found)
    return card, node.geometry.number[profile_id, place.placement]


def on_fullest_card(pick: Callable[[list[int]], int]) -> Choose:
    """A policy that takes the fullest card with a free place, and there the slot that `pick` chooses."""

    def choose(node: Cards, profile_id: int) -> Spot | None:
        spots = node.free_spots(profile_id)
        if not spots:
            return None
        card = max({card for card, _ in spots}, key=lambda c: (node.geometry.worth(node.states[c]), -c))
        return card, pick([slot for at, slot in spots if at == card])

    return choose


def baselines(geometry: MigGeometry, seed: int = 0) -> dict[str, Choose]:
    draw = random.Random(seed)

    def start(slot: int) -> int:
        return geometry.slots[slot][1].start

    return {
        "random place": on_fullest_card(draw.choice),
        "lowest place": on_fullest_card(lambda slots: min(slots, key=start)),
        "the driver's order": on_fullest_card(lambda slots: max(slots, key=start)),
    }


def best_on_one_card(
    geometry: MigGeometry, mix: str, load: float, may_refuse: bool = False, sweeps: int = 3000
) -> Choose:
    """The best long-run policy for one card without moves. It accepts every request that fits. With
    `may_refuse` it may refuse smaller requests to keep room for larger ones.

    Relative value iteration over all layouts of the uniformised chain (Puterman, Markov Decision Processes,
    8.5), for the mix and load of the replay, which a real planner does not know.
    """
    parts, slices = MIXES[mix], slices_of(geometry)
    total = sum(parts)
    mean = sum(part * slices[p] for part, p in zip(parts, PROFILES, strict=True)) / total
    rate = load * geometry.compute_slices / mean
    numbers = {state: n for n, state in enumerate(geometry.free_after)}
    slots = {p: [i for i, (q, _) in enumerate(geometry.slots) if q.id == p] for p in PROFILES}
    chances = [rate * part / total for part in parts]
    moves = [
        (
            [
                (chance, slices[p], [numbers[state | 1 << i] for i in slots[p] if free >> i & 1])
                for chance, p in zip(chances, PROFILES, strict=True)
            ],
            [numbers[state & ~(1 << i)] for i in bits(state)],
        )
        for state, free in geometry.free_after.items()
    ]
    events = rate + geometry.compute_slices
    value = [0.0] * len(numbers)
    for _ in range(sweeps):
        fresh = []
        for n, (coming, leaving) in enumerate(moves):
            worth, rest = 0.0, events - len(leaving)
            for chance, gain, places in coming:
                if places:
                    taken = gain + max(value[m] for m in places)
                    worth += chance * (max(taken, value[n]) if may_refuse else taken)
                    rest -= chance
            fresh.append((worth + sum(value[m] for m in leaving) + rest * value[n]) / events)
        base = fresh[numbers[0]]
        change = max(abs(a - base - b) for a, b in zip(fresh, value, strict=True))
        value = [worth - base for worth in fresh]
        if change < 1e-5:
            break

    def choose(node: Cards, profile_id: int) -> Spot | None:
        spots = node.free_spots(profile_id)
        if not spots:
            return None
        after = {spot: value[numbers[node.states[spot[0]] | 1 << spot[1]]] for spot in spots}
        best = max(spots, key=after.__getitem__)
        kept = value[numbers[node.states[best[0]]]]
        return None if may_refuse and slices[profile_id] + after[best] < kept else best

    return choose
