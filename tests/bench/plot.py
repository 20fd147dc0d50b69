"""`python -m tests.bench.plot`: draws the benches' JSON (build/bench) as pictures in docs/images.

A soak's samples become line charts. Latencies become bars with their 99th percentile. Colours and text follow
the reader's light or dark preference.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.bench.common import OUTPUT

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH = 760
COLOURS = ("#2f6db5", "#d9822b", "#3c9a5f", "#8e5ab8", "#c0504d", "#4ba3a3", "#a08a28", "#6b6fd0")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:14px}.d{fill:#667}"
    ".g{stroke:#ddd}.bg{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}.d{fill:#99a}.g{stroke:#444}"
    ".bg{fill:#1a1d20}}"
)
Series = Mapping[str, Sequence[tuple[float, float]]]


def _svg(height: float, parts: Sequence[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">'
        f'<style>{STYLE}</style><rect class="bg" width="{WIDTH}" height="{height:.0f}"/>\n{inner}\n</svg>\n'
    )


def ticks(most: float, count: int = 4) -> list[float]:
    """Round values from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def shown(value: float, unit: str) -> str:
    if unit == "bytes":
        for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value >= size:
                return f"{value / size:.3g} {name}"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    return f"{value:.4g} {unit}".strip()


def lines(title: str, series: Series, unit: str, x_unit: str = "", height: float = 230) -> str:
    """A line chart. `series` has (x, y) points by name."""
    left, top, bottom, right = 70, 34, 44, 12
    points = [point for line in series.values() for point in line]
    parts = [f'<text class="t" x="12" y="20">{escape(title)}</text>']
    if not points:
        return _svg(height, [*parts, f'<text class="d" x="{left}" y="{height / 2:.0f}">no data</text>'])
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    marks = ticks(max(y for _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low or 1.0)
        return left + across * (WIDTH - left - right), height - bottom - y / marks[-1] * (
            height - top - bottom
        )

    for mark in marks:
        _, y = at(low, mark)
        parts.append(f'<line class="g" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="d" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{shown(mark, unit)}</text>'
        )
    for x, anchor in ((low, "start"), (high, "end")):
        text = f"{x:.6g} {x_unit}".strip()
        place = f'x="{at(x, 0)[0]:.0f}" y="{height - bottom + 16:.0f}" text-anchor="{anchor}"'
        parts.append(f'<text class="d" {place}>{text}</text>')
    legend = left
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if name and legend < WIDTH - 90:
            parts.append(f'<rect x="{legend}" y="{height - 18:.0f}" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{legend + 14}" y="{height - 9:.0f}">{escape(name)}</text>')
            legend += 26 + 7 * len(name)
    return _svg(height, parts)


def bars(title: str, rows: Sequence[tuple[str, float, float | None]], unit: str) -> str:
    """A bar chart on one scale. Each row is (name, value, a thin mark such as the 99th percentile, or
    None).
    """
    left, row_height, top = 330, 24, 36
    height = top + row_height * len(rows) + 12
    most = max([value for _, value, _ in rows] + [mark for _, _, mark in rows if mark is not None] + [0.0])
    scale = (WIDTH - left - 90) / (most or 1.0)
    parts = [f'<text class="t" x="12" y="20">{escape(title)}</text>']
    for number, (name, value, mark) in enumerate(rows):
        y = top + number * row_height
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y + 3}" width="{value * scale:.1f}" height="14" fill="{COLOURS[0]}"/>'
        )
        end = value
        if mark is not None:
            x = left + mark * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2}" y2="{y + 18}" stroke="{COLOURS[1]}"/>'
            )
            end = max(end, mark)
        said = shown(value, unit) + ("" if mark is None else f" ({shown(mark, unit)})")
        parts.append(f'<text class="d" x="{left + end * scale + 6:.1f}" y="{y + 14}">{said}</text>')
    return _svg(height, parts)


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of one bench; an empty list if it has not been run."""
    path = OUTPUT / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def latencies(title: str, rows: Sequence[dict[str, Any]]) -> str | None:
    found = [(r["what"], r["p50_us"] / 1000, r["p99_us"] / 1000) for r in rows if r["p50_us"] is not None]
    return bars(f"{title}: median, and 99th percentile (ms)", found, "ms") if found else None


def soak(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        match = re.fullmatch(r"after (\d+): (\w+)", row["what"])
        if match:
            series.setdefault(match[2], []).append((float(match[1]), row["value"]))
    units = {"memory": "MiB", "disk": "KiB"}
    return {
        f"soak-{name}": lines(f"Soak: {name}", {"": points}, units.get(name, ""), "cycles", 170)
        for name, points in series.items()
        if name in ("memory", "descriptors", "disk")
    }


def main() -> int:
    pictures = soak(rows_of("soak"))
    for name, title in (
        ("grpc", "Calls by gRPC"),
        ("ledger", "The ledger"),
        ("operate", "Looking"),
        ("containers", "Containers"),
    ):
        drawn = latencies(title, rows_of(name))
        if drawn is not None:
            pictures[name] = drawn
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures.items():
        (IMAGES / f"{name}.svg").write_text(text)
        print(f"docs/images/{name}.svg")
    return 0 if pictures else 1


if __name__ == "__main__":
    sys.exit(main())
