"""The last minutes of a figure as a line of block characters."""

from collections import deque
from collections.abc import Hashable, Iterable

CELLS = 12
LOOKS_A_CELL = 5  # at the usual delay of 2 s, all cells are 2 minutes
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class History:
    """Percentages by key, one a look; None where there was no figure."""

    def __init__(self) -> None:
        self._past: dict[Hashable, deque[float | None]] = {}

    def add(self, figures: Iterable[tuple[Hashable, float | None]]) -> None:
        """Adds one look; keys that it lacks are forgotten."""
        kept = {}
        for key, value in figures:
            past = self._past.get(key) or deque(maxlen=CELLS * LOOKS_A_CELL)
            past.append(value)
            kept[key] = past
        self._past = kept

    def line(self, key: Hashable, blocks: str = BLOCKS) -> str:
        """The newest at the right, each cell the mean of its looks."""
        past = list(self._past.get(key, ()))
        ends = range(len(past), 0, -LOOKS_A_CELL)
        return "".join(_cell(past[max(0, end - LOOKS_A_CELL) : end], blocks) for end in reversed(ends))


def _cell(looks: list[float | None], blocks: str) -> str:
    known = [value for value in looks if value is not None]
    if not known:
        return " "
    mean = sum(known) / len(known)
    return blocks[min(len(blocks) - 1, max(0, int(mean / 100 * len(blocks))))]
