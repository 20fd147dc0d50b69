"""Accuracy of NVML's figure for the device while memory changes: a part of memory_exact, by which its races
are judged.

Two processes without libvgpu allocate in turns: the second allocates only after the first one's free has
returned, so there is never more than one piece. If NVML's figure for the device is larger, it includes
memory that the driver is still freeing. A reading of that size in a race is then not an overrun.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

from tests.gpu.memory_node import MIB, Bench, go_on, lines, step
from tests.gpu.memory_race import Most, card_used

HANDED = os.environ.get("VGPU_RELAY", "alloc pitch vmm array array3d mipmap").split()
PIECES_MIB = (3.5, 40)
SECONDS = 0.4
_SETTLE_SECONDS = 0.05


def relay(bench: Bench) -> Any:
    """Counts, by family and size, the samples in which the device's use exceeds the larger of the two
    pieces.
    """
    rows = [row for size in PIECES_MIB for row in _sized(bench, size)]
    over = [row for row in rows if row["over"]]
    return {
        "samples": sum(row["samples"] for row in rows),
        "over": sum(row["over"] for row in over),
        "most_over_mib": max((row["most_over_mib"] for row in over), default=0.0),
        "rows": sorted(over, key=lambda row: -float(row["most_over_mib"])),
    }


def _sized(bench: Bench, mib: float) -> Iterator[dict[str, Any]]:
    """Measures pieces of this size for pairs of allocation families: each family before and after plain
    allocations, and each family with itself.
    """
    pairs = dict.fromkeys([*((one, HANDED[0]) for one in HANDED), *((one, one) for one in HANDED)])
    for first, second in [*pairs, *((HANDED[0], one) for one in HANDED[1:])]:
        yield {"first": first, "second": second, "mib": mib, **_handed_on(bench, first, second, mib)}


def _handed_on(bench: Bench, first: str, second: str, mib: float) -> dict[str, Any]:
    words = ["relay", first, second, str(mib), str(SECONDS)]
    process = bench.start(None, bench.program("memory_families"), *words)
    levels = {}
    for _ in range(3):  # takes NVML's figures with no process, with the first process and with both
        said = step(process)
        time.sleep(_SETTLE_SECONDS)
        levels[str(said[-1]["at"])] = card_used(bench.uuid)
        go_on(process)
    step(process)
    figure = Most(max(levels.values()))
    ends = time.monotonic() + SECONDS * 0.9
    while time.monotonic() < ends:
        figure.add(card_used(bench.uuid))
    out, error = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(error)
    return {
        "piece_mib": {name: (level - levels["none"]) / MIB for name, level in levels.items()},
        "rounds": lines(out)[-1]["rounds"],
        "samples": figure.samples,
        "over": figure.over,
        "most_over_mib": (figure.most - figure.limit) / MIB if figure.over else 0.0,
    }
