"""Runs on a simulated node: visits MIG layouts through NVML and compares every answer with the oracle.

`python -m tests.sim.mig_walk all|random TABLE` prints the number of layouts and of answers compared.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import pynvml as n

from tests.sim.mig_oracle import TABLES, Layout, Table, is_legal, layouts, places, remaining

INSUFFICIENT = n.NVML_ERROR_INSUFFICIENT_RESOURCES
RANDOM_STEPS = 400


class Card:
    """Device 0 in MIG mode, with the instances that the walk has made."""

    def __init__(self, table: Table) -> None:
        n.nvmlInit()
        self.handle = n.nvmlDeviceGetHandleByIndex(0)
        self.table = table
        self.held: dict[tuple[int, int], Any] = {}
        assert n.nvmlDeviceSetMigMode(self.handle, 1) == 0

    def create(self, place: tuple[int, int]) -> bool:
        profile, start = place
        at = n.c_nvmlGpuInstancePlacement_t(start, self.table[profile][1])
        try:
            gi = n.nvmlDeviceCreateGpuInstanceWithPlacement(self.handle, profile, ctypes.byref(at))
        except n.NVMLError as error:
            assert error.value == INSUFFICIENT, error
            return False
        info = n.nvmlGpuInstanceGetInfo(gi)
        assert (info.profileId, info.placement.start, info.placement.size) == (profile, start, at.size)
        self.held[place] = gi
        return True

    def destroy(self, place: tuple[int, int]) -> None:
        n.nvmlGpuInstanceDestroy(self.held.pop(place))

    def go_to(self, layout: Layout) -> None:
        for place in [p for p in self.held if p not in layout]:
            self.destroy(place)
        for place in sorted(layout - self.held.keys()):
            assert self.create(place), (layout, place)

    def compare(self) -> int:
        """Compares every possible creation and every remaining capacity in the current layout with the
        oracle.
        """
        here = frozenset(self.held)
        for profile in self.table:
            told = n.nvmlDeviceGetGpuInstanceRemainingCapacity(self.handle, profile)
            assert told == remaining(self.table, here, profile), (here, profile, told)
        for place in places(self.table):
            if place in here:
                continue
            made = self.create(place)
            assert made == is_legal(self.table, here | {place}), (here, place, made)
            if made:
                self.destroy(place)
        return len(self.table) + len(places(self.table)) - len(here)


def _all(card: Card) -> tuple[int, int]:
    every = sorted(layouts(card.table), key=sorted)
    answers = 0
    for layout in every:
        card.go_to(layout)
        answers += card.compare()
    return len(every), answers


def _random(card: Card) -> tuple[int, int]:
    choose = random.Random(20261120)
    seen, answers = set(), 0
    for _ in range(RANDOM_STEPS):
        place = choose.choice(places(card.table))
        if place in card.held:
            card.destroy(place)
        else:
            card.create(place)
        seen.add(frozenset(card.held))
        answers += card.compare()
    return len(seen), answers


def main() -> None:
    walk = _all if sys.argv[1] == "all" else _random
    print(*walk(Card(TABLES[sys.argv[2]])))


if __name__ == "__main__":
    main()
