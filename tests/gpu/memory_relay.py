"""How true the card's own figure is on the fly: a part of memory_exact, and the judge of its races.

Two processes hand one piece of memory on: one takes it, gives it back, and only when that free has returned
does the other take its own. So there is never more than one piece, by nobody's limit but their own order; no
libvgpu is in them. Where NVML's figure of the card shows more all the same, it shows memory that the driver
has on its way, and a race's reading of that size is no overrun.
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
    """Counts samples of the card's use above the larger of the two pieces, by families and size."""
    rows = [row for size in PIECES_MIB for row in _sized(bench, size)]
    over = [row for row in rows if row["over"]]
    return {
        "samples": sum(row["samples"] for row in rows),
        "over": sum(row["over"] for row in over),
        "most_over_mib": max((row["most_over_mib"] for row in over), default=0.0),
        "rows": sorted(over, key=lambda row: -float(row["most_over_mib"])),
    }


def _sized(bench: Bench, mib: float) -> Iterator[dict[str, Any]]:
    """Pairs of allocation families: each before and after the plain one, and twice the same."""
    pairs = dict.fromkeys([*((one, HANDED[0]) for one in HANDED), *((one, one) for one in HANDED)])
    for first, second in [*pairs, *((HANDED[0], one) for one in HANDED[1:])]:
        yield {"first": first, "second": second, "mib": mib, **_handed_on(bench, first, second, mib)}


def _handed_on(bench: Bench, first: str, second: str, mib: float) -> dict[str, Any]:
    words = ["relay", first, second, str(mib), str(SECONDS)]
    process = bench.start(None, bench.program("memory_families"), *words)
    levels = {}
    for _ in range(3):  # none, first, second
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
