"""Formats figures for the planner's sentences. The texts are cached, because formatting costs more than
deciding.
"""

from functools import lru_cache

from vgpud.model.quantity import format_bytes, show_bytes

DRAINED = "it is drained"  # why a device accepts no request
shown_bytes = lru_cache(maxsize=4096)(show_bytes)


def shown_apart(a: int, b: int) -> tuple[str, str]:
    """Two amounts of bytes as text. The texts are exact if rounding would make different amounts look the
    same.
    """
    rounded = shown_bytes(a), shown_bytes(b)
    if a != b and rounded[0] == rounded[1]:
        return format_bytes(a), format_bytes(b)
    return rounded


def shown_share(hundredths: int) -> str:
    return f"{hundredths / 100:g}%"


def listed(items: tuple[str, ...], most: int = 12) -> str:
    """The items separated by commas: at most `most` of them, then the number of the others."""
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"
