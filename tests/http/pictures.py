"""`python -m tests.http.pictures`: draws the pictures in docs/images that need a node, a Prometheus and a
browser.

A simulated node with tenants is scraped for a minute; then a browser takes a screenshot of the status page,
and every panel of the Grafana dashboard is drawn from Prometheus' answer to the panel's query.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import plot
from tests.demo.node import BUILD, ROOT, DemoNode, Tenant
from tests.e2e.conftest import node_maker
from tests.ports import free_port

IMAGES = ROOT / "docs" / "images"
SECONDS = float(os.environ.get("VGPU_PICTURE_SECONDS", "75"))
POLICY = """version = 1
[http]
listen = "127.0.0.1:{port}"
[[quota]]
max_memory = "200GiB"
[[device]]
mode = "auto"
"""


def photograph(url: str, path: Path, height: int) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "this needs chromium"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size=1100,{height}",
    ]
    subprocess.run(
        [browser, *options, f"--screenshot={path}", url], check=True, capture_output=True, timeout=90
    )


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"- {{job_name: vgpud, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
    )
    words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    process = subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def query(base: str, expression: str, seconds: float) -> list[dict[str, Any]]:
    now = time.time()
    asked = urllib.parse.urlencode({"query": expression, "start": now - seconds, "end": now, "step": 1})
    with urllib.request.urlopen(f"{base}/api/v1/query_range?{asked}", timeout=300) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def panels(base: str, seconds: float) -> str:
    """Draws every panel of the dashboard from the recorded data, with the panel's own query."""
    dashboard = json.loads((ROOT / "configs" / "grafana" / "vgpud.json").read_text())
    drawn = []
    for panel in dashboard["panels"]:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        series: dict[str, list[tuple[float, float]]] = {}
        for target in panel["targets"]:
            # the recording lasts a minute, so rates are taken over less time than on the dashboard
            expression = (
                target["expr"].replace("$instance", ".*").replace("[5m]", "[20s]").replace("[1m]", "[20s]")
            )
            for found in query(base, expression, seconds):
                name = target["legendFormat"]
                for label, value in found["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                start = time.time() - seconds
                points = [(at - start, float(value)) for at, value in found["values"] if value != "NaN"]
                if points:
                    series[name] = points
        drawn.append(plot.lines(panel["title"], series, "" if unit == "none" else unit, "s", 200))
    cells = "".join(f"<div>{svg}</div>" for svg in drawn)
    style = (
        "body{margin:8px;display:grid;grid-template-columns:1fr 1fr 1fr;gap:6px}svg{width:100%;height:auto}"
    )
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{cells}"


def populate(node: DemoNode) -> list[Tenant]:
    """Starts tenants that hold little memory, because simulated memory is memory of the host."""
    probe = str(BUILD / "bin" / "vgpu-probe")
    tenants = []

    def start(options: list[str], held_mib: int, label: str) -> None:
        hold = [probe, "hold", str(held_mib * 2**20), "--then-wait-on-stdin"]
        tenants.append(node.tenant([*options, "--label", label], hold))
        tenants[-1].line()

    for memory, held, label in (("1GiB", 600, "training"), ("2GiB", 300, "notebook"), ("512MiB", 10, "ci")):
        start(["--isolation", "quota", "--memory", memory, "--device", "0"], held, label)
    for profile in ("3g.71gb", "2g.35gb", "1g.18gb"):
        start(["--profile", profile, "--isolation", "hardware", "--device", "1"], 100, profile)
    for cores in ("30", "50"):
        options = ["--isolation", "compute", "--memory", "20GiB", "--cores", cores, "--device", "2"]
        node.ctl("alloc", *options, "--label", f"service-{cores}")
    node.ctl("alloc", "--isolation", "device", "--device", "3", "--label", "whole-card")
    return tenants


def churn(node: DemoNode, seconds: float) -> None:
    """Starts and ends tenants, some of which are refused."""
    choose = random.Random(1)
    end = time.monotonic() + seconds
    held: list[str] = []
    while time.monotonic() < end:
        gib = choose.choice((4, 8, 30, 90))
        options = ("--isolation", "quota", "--memory", f"{gib}GiB", "--label", "churn")
        done = node.ctl("alloc", *options, check=False)
        if done.returncode == 0:
            held.append(done.stdout.strip())
        node.ctl("alloc", "--memory", "60GiB", "--owner", "2000:2000", "--isolation", "quota", check=False)
        if len(held) > 6:
            node.ctl("release", held.pop(choose.randrange(len(held))))
        time.sleep(0.4)


def main() -> int:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, node_maker(Path(name)) as make:
        port = free_port()
        node = make("h200x8", POLICY.format(port=port))
        node.start()
        tenants = populate(node)
        with prometheus(Path(name), port) as base:
            churn(node, SECONDS)
            page = Path(name) / "dashboard.html"
            page.write_text(panels(base, SECONDS))
        photograph(f"file://{page}", IMAGES / "dashboard.png", 735)
        photograph(f"http://127.0.0.1:{port}/", IMAGES / "status-page.png", 1200)
        for tenant in tenants:
            tenant.end()
        node.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
