"""Computes the legal MIG layouts without the simulator, by brute force over placements.

A layout is a set of (profile id, start). It is legal if no two instances share a memory slice and no profile
has more instances than its count. Sources of the tables: NVIDIA's MIG user guide, and one H200 (data of
driver 580.159.04). A table maps profile id -> (count, size in memory slices, starts).
"""

from __future__ import annotations

Layout = frozenset[tuple[int, int]]
Table = dict[int, tuple[int, int, tuple[int, ...]]]

SEVEN_SLICE_CARD: Table = {
    19: (7, 1, (0, 1, 2, 3, 4, 5, 6)),
    20: (1, 1, (0, 1, 2, 3, 4, 5, 6)),
    15: (4, 2, (0, 2, 4, 6)),
    14: (3, 2, (0, 2, 4)),
    9: (2, 4, (0, 4)),
    5: (1, 4, (0,)),
    0: (1, 8, (0,)),
}

#: Cards with two or four instances, and a profile for the whole card. Variants such as +me and +gfx are
#: profiles of their own.
A30: Table = {
    14: (4, 1, (0, 1, 2, 3)),
    21: (1, 1, (0, 1, 2, 3)),
    5: (2, 2, (0, 2)),
    6: (1, 2, (0, 2)),
    0: (1, 4, (0,)),
}
RTX_PRO_6000: Table = {
    14: (4, 1, (0, 1, 2, 3)),
    21: (1, 1, (0, 1, 2, 3)),
    47: (4, 1, (0, 1, 2, 3)),
    65: (1, 1, (0, 1, 2, 3)),
    67: (4, 1, (0, 1, 2, 3)),
    5: (2, 2, (0, 2)),
    35: (2, 2, (0, 2)),
    64: (1, 2, (0, 2)),
    66: (2, 2, (0, 2)),
    0: (1, 4, (0,)),
    32: (1, 4, (0,)),
}
RTX_PRO_5000: Table = {
    5: (2, 1, (0, 1)),
    6: (1, 1, (0, 1)),
    35: (2, 1, (0, 1)),
    64: (1, 1, (0, 1)),
    66: (2, 1, (0, 1)),
    0: (1, 2, (0,)),
    32: (1, 2, (0,)),
}
RTX_PRO_4500: Table = {profile: row for profile, row in RTX_PRO_5000.items() if profile != 6}
#: Documented figures of 723 layouts leave the +me profile out.
SEVEN_WITHOUT_ME: Table = {profile: row for profile, row in SEVEN_SLICE_CARD.items() if profile != 20}
TABLES = {
    "seven": SEVEN_WITHOUT_ME,
    "seven+me": SEVEN_SLICE_CARD,
    "a30": A30,
    "rtx": RTX_PRO_6000,
    "rtx5000": RTX_PRO_5000,
    "rtx4500": RTX_PRO_4500,
}


def is_legal(table: Table, layout: Layout) -> bool:
    slices = [one for profile, start in layout for one in range(start, start + table[profile][1])]
    profiles = [profile for profile, _ in layout]
    return len(slices) == len(set(slices)) and all(profiles.count(p) <= table[p][0] for p in set(profiles))


def places(table: Table) -> list[tuple[int, int]]:
    return [(profile, start) for profile, (_, _, starts) in table.items() for start in starts]


def layouts(table: Table) -> set[Layout]:
    """Every legal layout, including the empty one."""
    found: set[Layout] = {frozenset()}
    edge = found
    while edge:
        edge = {
            f | {p} for f in edge for p in places(table) if p not in f and is_legal(table, f | {p})
        } - found
        found |= edge
    return found


def remaining(table: Table, layout: Layout, profile: int, after: int = -1) -> int:
    """The most further instances of `profile`, at starts above `after`, that fit into the layout."""
    more = ((start, layout | {(profile, start)}) for start in table[profile][2] if start > after)
    fitting = ((start, grown) for start, grown in more if len(grown) > len(layout) and is_legal(table, grown))
    return max((1 + remaining(table, grown, profile, start) for start, grown in fitting), default=0)
