"""Draws docs/images/top.svg: `vgpuctl top` with four kinds of tenants on a simulated node.

./dev shell -- python -m tests.demo.picture
"""

import html
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "top.svg"
COLUMNS = 160
CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 18, 16
# (options of `vgpuctl run`, GiB that the tenant holds while it computes)
TENANTS = (
    ("--memory 24GiB --cores 25 --device 0 --label notebook", 17),
    ("--memory 80GiB --cores 75 --device 0 --label fine-tuning", 71),
    ("--isolation mps --memory 40GiB --cores 30 --device 1 --label llm-api", 36),
    ("--isolation mps --memory 24GiB --cores 20 --device 1 --label embeddings", 11),
    ("--profile 3g.71gb --device 2 --label customer-a", 52),
    ("--profile 1g.18gb --device 2 --label customer-b", 9),
    ("--isolation device --device 3 --label pretraining", 118),
)
HOLD = "sleep 100 | vgpu-probe hold {bytes} --then-wait-on-stdin"
SPIN = "exec vgpu-spin --kernel-us 1000 --seconds 90"
SETTLE_SECONDS = 10
# SGR codes of ECMA-48 that vgpuctl uses -> CSS classes of the picture
CLASSES = {"1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "34": "blue", "36": "cyan"}
STYLE = """
  text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: #d4d4d4; white-space: pre; }
  .bold { font-weight: bold; fill: #ffffff; } .dim { fill: #8a8a8a; }
  .red { fill: #f47067; } .green { fill: #6bc46d; }
  .yellow { fill: #daaa3f; } .blue { fill: #6cb6ff; } .cyan { fill: #76e3ea; }
"""


def program(options: str, held_bytes: int) -> str:
    """The tenant's shell command. An MPS tenant has one process, because a second one would be refused."""
    hold = HOLD.format(bytes=held_bytes)
    return hold if "mps" in options else f"{hold} & {SPIN}"


def lines_of(screen: str) -> list[str]:
    """Each line of a terminal's text as SVG tspans, with colours as classes."""
    drawn = []
    for line in screen.splitlines():
        classes: list[str] = []
        spans = []
        for part in re.split(r"(\x1b\[[0-9;]*m)", line):
            codes = re.fullmatch(r"\x1b\[([0-9;]*)m", part)
            if codes is None:
                if part:
                    spans.append(f'<tspan class="{" ".join(classes)}">{html.escape(part)}</tspan>')
            elif codes[1] in ("", "0"):
                classes = []
            else:
                classes += [CLASSES[code] for code in codes[1].split(";") if code in CLASSES]
        drawn.append("".join(spans))
    return drawn


def picture(screen: str) -> str:
    lines = lines_of(screen)
    columns = max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in screen.splitlines())
    width, height = round(columns * CELL_WIDTH) + 2 * MARGIN, (len(lines) + 1) * LINE_HEIGHT + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + (number + 1) * LINE_HEIGHT}" xml:space="preserve">{line}</text>'
        for number, line in enumerate(lines)
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>vgpuctl top on a node of eight GPUs with seven tenants</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1e1e1e"/>',
            *rows,
            "</svg>\n",
        )
    )


def main() -> int:
    if "VGPU_SIM_STATE" not in os.environ:
        print("run: ./dev shell -- python -m tests.demo.picture", file=sys.stderr)
        return 2
    tenants = [
        subprocess.Popen(
            ("vgpuctl", "run", *options.split(), "--", "sh", "-c", program(options, held << 30)),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for options, held in TENANTS
    ]
    try:
        time.sleep(SETTLE_SECONDS)
        screen = subprocess.run(
            ("vgpuctl", "top", "--once", "--color", "always"),
            env={**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        for tenant in tenants:
            os.killpg(tenant.pid, signal.SIGKILL)
            tenant.wait()
    PICTURE.write_text(picture(screen))
    print(screen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
