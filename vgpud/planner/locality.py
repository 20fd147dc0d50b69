"""Chooses several devices for one allocation, first by their nearness to each other, then by packing."""

from collections.abc import Sequence
from itertools import combinations
from math import comb

from vgpud.model.device import Link, Node
from vgpud.planner.verdict import Fit

# Number of sets up to which all are compared: eight devices have at most 70 sets (8 choose 4). Above it the
# search is greedy.
EXACT_SETS = 70
DISTANCE = {link: distance for distance, link in enumerate(Link)}
_FAR = DISTANCE[Link.UNKNOWN]
_JOINED = DISTANCE[Link.NVLINK]

_Matrix = list[list[int]]
_Key = tuple[int, int, int, int, tuple[int, ...]]


def nearest(node: Node, fits: Sequence[Fit], count: int) -> tuple[Fit, ...]:
    """The best `count` of `fits`, which are on distinct devices and sorted best first.

    The criteria in order: fewest pairs without NVLink, fewest NUMA nodes, nearest links (their sum over all
    pairs), better fits. Exact up to EXACT_SETS sets, otherwise greedy from each device in turn.
    """
    if count == 1 or count == len(fits):
        return tuple(fits[:count])
    distances = _distances(node, fits)
    if comb(len(fits), count) <= EXACT_SETS:
        chosen = min(combinations(range(len(fits)), count), key=lambda s: _key(fits, distances, s))
    else:
        grown = (_grow(fits, distances, seed, count) for seed in range(len(fits)))
        chosen = min(grown, key=lambda s: _key(fits, distances, s))
    return tuple(fits[i] for i in chosen)


def nearest_devices(node: Node, uuids: Sequence[str], must: Sequence[str], count: int) -> tuple[str, ...]:
    """Chooses `count` of `uuids` that are near each other. The search is greedy; it starts from `must`, or
    from the best device.

    The order of `uuids` decides between equals.
    """
    numa = {device.uuid: device.numa_node for device in node.devices}

    def cost(uuid: str, chosen: Sequence[str]) -> tuple[int, int, int]:
        links = [DISTANCE[node.links.get((uuid, other), Link.UNKNOWN)] for other in chosen]
        other_node = bool(chosen) and numa.get(uuid) not in {numa.get(other) for other in chosen}
        return sum(link > _JOINED for link in links), int(other_node), sum(links)

    def grown(seed: Sequence[str]) -> tuple[tuple[int, int, int], tuple[str, ...]]:
        chosen, apart, nodes, distance = list(seed), 0, 0, 0
        while len(chosen) < count:
            left = [uuid for uuid in uuids if uuid not in chosen]
            if not left:
                break
            best = min(left, key=lambda uuid: cost(uuid, chosen))
            unjoined, other_node, far = cost(best, chosen)
            apart, nodes, distance = apart + unjoined, nodes + other_node, distance + far
            chosen.append(best)
        return (apart, nodes, distance), tuple(chosen)

    seeds: list[tuple[str, ...]] = [tuple(must)] if must else [(uuid,) for uuid in uuids]
    return min((grown(seed) for seed in seeds), key=lambda found: found[0], default=((0, 0, 0), ()))[1]


def _key(fits: Sequence[Fit], distances: _Matrix, chosen: tuple[int, ...]) -> _Key:
    """The sort key of a set of devices. The sum of their positions in `fits` says how good the fits are; the
    positions themselves make the order total.
    """
    return (
        sum(distances[a][b] > _JOINED for a, b in combinations(chosen, 2)),
        len({fits[i].device.numa_node for i in chosen}),
        sum(distances[a][b] for a, b in combinations(chosen, 2)),
        sum(chosen),
        chosen,
    )


def _grow(fits: Sequence[Fit], distances: _Matrix, seed: int, count: int) -> tuple[int, ...]:
    chosen = [seed]
    numa = {fits[seed].device.numa_node}
    left = set(range(len(fits))) - {seed}
    while len(chosen) < count:
        best = min(
            left,
            key=lambda i: (
                sum(distances[i][c] > _JOINED for c in chosen),
                fits[i].device.numa_node not in numa,
                sum(distances[i][c] for c in chosen),
                i,
            ),
        )
        left.remove(best)
        chosen.append(best)
        numa.add(fits[best].device.numa_node)
    return tuple(sorted(chosen))


def _distances(node: Node, fits: Sequence[Fit]) -> _Matrix:
    links = node.links
    uuids = [fit.device.uuid for fit in fits]
    return [[DISTANCE[links[a, b]] if (a, b) in links else _FAR for b in uuids] for a in uuids]
