"""The last minutes of a figure as a line of block characters."""

from collections import deque
from collections.abc import Hashable, Iterable

CELLS = 12
LOOKS_A_CELL = 5  # samples in one character; at the usual delay of 2 s, the whole line covers 2 minutes
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class History:
    """The past percentages of each figure, one per sample; None if a sample had no figure."""

    def __init__(self) -> None:
        self._past: dict[Hashable, deque[float | None]] = {}

    def add(self, figures: Iterable[tuple[Hashable, float | None]]) -> None:
        """Adds one sample. Keys that are not in the sample are forgotten."""
        kept = {}
        for key, value in figures:
            past = self._past.get(key) or deque(maxlen=CELLS * LOOKS_A_CELL)
            past.append(value)
            kept[key] = past
        self._past = kept

    def line(self, key: Hashable, blocks: str = BLOCKS) -> str:
        """The history as block characters, the newest at the right. Each character is the mean of its
        samples.
        """
        past = list(self._past.get(key, ()))
        ends = range(len(past), 0, -LOOKS_A_CELL)
        return "".join(_cell(past[max(0, end - LOOKS_A_CELL) : end], blocks) for end in reversed(ends))


def _cell(looks: list[float | None], blocks: str) -> str:
    known = [value for value in looks if value is not None]
    if not known:
        return " "
    mean = sum(known) / len(known)
    return blocks[min(len(blocks) - 1, max(0, int(mean / 100 * len(blocks))))]
