"""The rows of `vgpuctl top` as terminal lines: bars, colours by the fill level, never wider than the
terminal.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vgpud.ctl import words
from vgpud.ctl.table import clean, width
from vgpud.ctl.top_rows import DeviceRow, OutsideRow, TenantRow

BAR = 10
_FULL, _NEARLY = 0.95, 0.8
_MOST_REASON = 48  # characters of a device's reason


class Cell(NamedTuple):
    text: str
    style: str = ""
    right: bool = False


Paint = Callable[[str, str], str]

_RED = ("failed", "bypassed", "tampered")  # states shown in red


def plain(text: str, style: str) -> str:
    return text


def bar(part: int, whole: int, blocks: str) -> Cell:
    """A bar; `blocks` are the characters for filled and empty cells."""
    ratio = min(1.0, part / whole) if whole > 0 else 0.0
    filled = round(ratio * BAR)
    style = "red" if ratio >= _FULL else "yellow" if ratio >= _NEARLY else "green"
    return Cell(blocks[0] * filled + blocks[1] * (BAR - filled), style if filled else "")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


DEVICE_HEADS = (
    "GPU",
    "NAME",
    "MODE",
    "MEMORY",
    "USED / ALL",
    "GIVEN",
    "SHARE",
    "LOAD",
    "BUSY",
    "TEMP",
    "POWER",
    "TENANTS",
)
TENANT_HEADS = (
    *("ALLOCATION", "OWNER", "GPU", "MODE", "MEMORY", "USED / LIMIT", "PEAK", "SHARE", "ASKED"),
    *("HELD BACK", "WAITED", "OVERRUN", "REFUSED", "PROCS", "AGE", "LABEL"),
)
OUTSIDE_HEADS = ("PID", "OWNER", "GPU", "MEMORY", "NO LIMIT HOLDS", "COMMAND")
HISTORY = "LAST MINUTES"
#: The columns that are left out first if the terminal is too narrow for all.
DEVICE_SPARE = (HISTORY, "LOAD", "POWER", "TEMP", "MEMORY", "GIVEN", "BUSY")
TENANT_SPARE = ("OVERRUN", HISTORY, "HELD BACK", "PEAK", "PROCS", "MEMORY", "REFUSED", "AGE", "OWNER")
# The columns by which tenants are sorted, by the name of the order.
SORTED = {
    "memory": "USED / LIMIT",
    "device": "GPU",
    **{name: name.upper() for name in ("share", "waited", "refused", "owner", "age")},
}
_LEFT = {
    HISTORY,
    "LOAD",
    "NO LIMIT HOLDS",
    "COMMAND",
    "NAME",
    "MODE",
    "MEMORY",
    "ALLOCATION",
    "OWNER",
    "LABEL",
    "USED / ALL",
    "USED / LIMIT",
}


def device_cells(row: DeviceRow, blocks: str) -> list[Cell]:
    style = "" if row.health == "ok" else "red"
    used = f"{words.memory(row.memory_used_bytes)} / {words.memory(row.memory_limit_bytes)}"
    power = "-" if row.power_watts is None else f"{row.power_watts:.0f}W"
    heat = "-" if row.temperature_celsius is None else f"{row.temperature_celsius}C"
    mode = row.mode if row.health == "ok" else f"{row.health}: {row.reason}"
    if len(mode) > _MOST_REASON:
        mode = f"{mode[: _MOST_REASON - 3]}..."
    return [
        Cell(str(row.index), style, right=True),
        Cell(clean(row.name), style),
        Cell(clean(mode), style),
        bar(row.memory_used_bytes, row.memory_limit_bytes, blocks),
        Cell(used),
        Cell(words.memory(row.memory_allocated_bytes), right=True),
        Cell(percent(row.share_allocated_percent), right=True),
        bar(row.busy_percent or 0, 100, blocks)._replace(style=""),
        Cell(percent(row.busy_percent), right=True),
        Cell(heat, right=True),
        Cell(power, right=True),
        Cell(str(row.tenants), right=True),
    ]


def tenant_cells(row: TenantRow, blocks: str) -> list[Cell]:
    used = f"{words.memory(row.memory_used_bytes)} / {words.memory(row.memory_limit_bytes)}"
    mode = row.mode if row.state == "active" else f"{row.mode}, {row.state}"
    return [
        Cell(row.allocation),
        Cell(clean(row.owner)),
        Cell(row.device, right=True),
        Cell(mode, "red" if any(word in row.state for word in _RED) else ""),
        bar(row.memory_used_bytes, row.memory_limit_bytes, blocks),
        Cell(used),
        Cell("-" if row.memory_peak_bytes is None else words.memory(row.memory_peak_bytes), right=True),
        Cell(percent(row.share_used_percent), right=True),
        Cell(percent(row.share_asked_percent), right=True),
        Cell(percent(row.throttled_percent), right=True),
        Cell(percent(row.waited_percent), right=True),
        Cell(percent(row.overrun_percent), right=True),
        Cell("-" if row.refused is None else str(row.refused), "red" if row.refused else "", right=True),
        Cell(str(row.processes), right=True),
        Cell(words.duration(row.age_seconds), right=True),
        Cell(clean(row.label)),
    ]


def outside_cells(row: OutsideRow) -> list[Cell]:
    memory = "-" if row.memory_bytes is None else words.memory(row.memory_bytes)
    whose = f"past those of {row.allocation}" if row.allocation else "outside vgpud"
    return [
        Cell(str(row.pid), right=True),
        Cell(clean(row.owner)),
        Cell(row.device, right=True),
        Cell(memory, right=True),
        Cell(whose, "yellow"),
        Cell(clean(row.command)),
    ]


def lines(
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    columns: int,
    paint: Paint,
    spare: Sequence[str] = (),
    marks: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """The rows as aligned lines. `marks` are appended to heads. If `columns` is too small, the columns in
    `spare` are left out one by one, and then the right side is cut; no line is wrapped.
    """
    named = [Cell(head + marks.get(head, ""), "bold", head not in _LEFT) for head in heads]
    table = [named, *rows]
    widths = [max(width(row[at].text) for row in table) for at in range(len(heads))]
    kept = list(range(len(heads)))
    for name in spare:
        if name not in heads:
            continue
        if sum(widths[at] for at in kept) + 2 * (len(kept) - 1) <= columns:
            break
        kept.remove(heads.index(name))
    shown = [widths[at] for at in kept]
    return [_line([row[at] for at in kept], shown, columns, paint) for row in table]


def some(devices: list[str], room: int, columns: int) -> list[str]:
    """The head line and as many lines of devices as fit, then a line with the number of devices left out."""
    if len(devices) <= room:
        return devices
    kept = devices[: room - 1]
    return [*kept, cut(f"and {len(devices) - len(kept)} devices more", columns)]


def _line(row: Sequence[Cell], widths: Sequence[int], columns: int, paint: Paint) -> str:
    left = columns
    shown = []
    for cell, size in zip(row, widths, strict=True):
        if left <= 0:
            break
        blanks = " " * (size - width(cell.text))
        text = cut(cell.text, left)
        room = left - width(text)
        if cell.right:
            pad = blanks[:room]
            shown.append(pad + paint(text, cell.style))
        else:
            pad = blanks[:room]
            shown.append(paint(text, cell.style) + pad)
        left -= width(text) + len(pad)
        gap = "  "[: max(0, left)]
        shown.append(gap)
        left -= len(gap)
    return "".join(shown).rstrip()


def cut(text: str, columns: int) -> str:
    """The longest beginning of `text` that fits into `columns` cells."""
    if width(text) <= columns:
        return text
    kept = ""
    for character in text:
        if width(kept + character) > columns:
            break
        kept += character
    return kept
