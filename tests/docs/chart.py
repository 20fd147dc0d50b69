"""Draws docs/images/shares.svg, requested against achieved shares, from docs/data/side-by-side.toml.

python -m tests.docs.chart
"""

import tomllib
from html import escape

from tests.simnode import ROOT

DATA = ROOT / "docs" / "data" / "side-by-side.toml"
PICTURE = ROOT / "docs" / "images" / "shares.svg"
COLOURS = ("#9aa4b2", "#c9a26b", "#1f77b4")
LEFT, TOP, BAR, GAP, PER_PERCENT = 230, 56, 16, 16, 5.0


def chart() -> str:
    """The chart as SVG: a group of bars for each case, and a line at the requested share."""
    data = tomllib.loads(DATA.read_text())
    asked, systems, cases = data["asked"], data["systems"], data["case"]
    group = len(systems) * BAR + GAP
    height = TOP + len(cases) * group + 34
    at = LEFT + asked * PER_PERCENT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        f"<title>One tenant asks for {asked} percent of a GPU: what it gets</title>",
        f'<rect width="820" height="{height}" fill="#ffffff"/>',
    ]
    for number, system in enumerate(systems):
        x = LEFT + number * 150
        parts.append(f'<rect x="{x}" y="18" width="12" height="12" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 18}" y="29" fill="#1f2328">{escape(system)}</text>')
    for row, case in enumerate(cases):
        y = TOP + row * group
        middle = y + len(systems) * BAR / 2 + 4
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" fill="#1f2328">'
            f"{escape(case['name'])}</text>"
        )
        for number, got in enumerate(case["got"]):
            top = y + number * BAR
            width = round(got * PER_PERCENT, 1)
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{width}" height="{BAR - 2}" fill="{COLOURS[number]}"/>'
            )
            parts.append(f'<text x="{LEFT + width + 6}" y="{top + 12}" fill="#57606a">{got:g} %</text>')
    bottom = TOP + len(cases) * group
    parts.append(
        f'<line x1="{at}" x2="{at}" y1="{TOP - 8}" y2="{bottom}" stroke="#d1242f" stroke-dasharray="4 3"/>'
    )
    parts.append(
        f'<text x="{at}" y="{bottom + 18}" text-anchor="middle" fill="#d1242f">asked: {asked} %</text>'
    )
    return "\n".join((*parts, "</svg>\n"))


if __name__ == "__main__":
    PICTURE.write_text(chart())
