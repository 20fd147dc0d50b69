"""The text for Prometheus, made from the same samples by vgpud's renderer and by prometheus_client."""

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tests.bench.common import Report, percentile
from tests.metrics.samples import observation
from vgpud.model.observation import Observation
from vgpud.serve.metrics.render import Renderer

ALLOCATIONS = 256
TURNS = 60
# Prints the growth of the resident memory (proc(5), statm, in pages of 4 KiB) in MiB.
IMPORT = """
def pages(): return int(open("/proc/self/statm").read().split()[1])
before = pages()
import prometheus_client
print((pages() - before) / 256)
"""


def run() -> Report:
    report = Report("exposition")
    seen = _observed()
    text = Renderer().render(seen)
    kept = Renderer()
    kept.render(seen)
    samples = sum(1 for line in text.splitlines() if not line.startswith("#"))
    report.value(f"{ALLOCATIONS} allocations", samples, "samples", f"{len(text) // 1024} KiB")
    _measure(report, "vgpud, each lease has changed", lambda: Renderer().render(seen))
    _measure(report, "vgpud, no lease has changed", lambda: kept.render(seen))
    families = list(text_string_to_metric_families(text))

    registry = CollectorRegistry()
    registry.register(_Source(families))
    _measure(report, "prometheus_client", lambda: generate_latest(registry))
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    report.value("import of prometheus_client", float(done.stdout), "MiB")
    return report


class _Source(Collector):
    """Gives prometheus_client the samples, as a daemon does that keeps them in objects of its own."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            made = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                made.add_sample(sample.name, sample.labels, sample.value)
            yield made


def _observed() -> Observation:
    """An observation with many allocations of one slice, each with its meter."""
    seen = observation()
    one = next(held for held in seen.allocations if len(seen.metered.meters.get(held.id, ())) == 1)
    many = tuple(replace(one, id=f"{number:012x}") for number in range(ALLOCATIONS))
    meters = {held.id: seen.metered.meters[one.id] for held in many}
    return replace(seen, allocations=many, metered=replace(seen.metered, meters=meters))


def _measure(report: Report, what: str, render: Callable[[], object]) -> None:
    """Adds to the report the median processor time that one text takes, and the largest memory it needs."""
    seconds = []
    for _ in range(TURNS):
        began = time.process_time()
        render()
        seconds.append(time.process_time() - began)
    tracemalloc.start()
    render()
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report.value(what, percentile(seconds, 50) * 1000, "ms", f"{most_bytes / 2**20:.1f} MiB at most")
