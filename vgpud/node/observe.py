"""Collects the figures for metrics and the status page. A figure that cannot be read is left out."""

import os
import time
from contextlib import suppress
from pathlib import Path

from vgpud import __version__
from vgpud.model.errors import VgpuError
from vgpud.model.observation import Observation, ProcessFigures
from vgpud.model.view import DeviceView
from vgpud.node.keeper import NodeKeeper

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVENTS = 64


async def observe(keeper: NodeKeeper) -> Observation:
    """Makes one observation. Never raises: without NVML there are no devices, and the description has the
    reason.
    """
    began = time.perf_counter()
    metered = await keeper.meters.read()
    views: tuple[DeviceView, ...] = ()
    with suppress(VgpuError):
        views, _ = await keeper.listings.devices()
    allocations = tuple(keeper.book)
    return Observation(
        version=__version__,
        described=keeper.listings.describe(),
        devices=views,
        allocations=allocations,
        metered=metered,
        tally=keeper.store.account.tally,
        nvml_errors=keeper.meters.nvml_errors,
        process=process_figures(),
        watchers=keeper.store.watchers,
        events=keeper.store.latest(_EVENTS),
        collect_seconds=time.perf_counter() - began,
        waiting=keeper.residency.waiting,
        names_workloads=keeper.policies.policy.metrics.workloads,
        marks=tuple(mark for allocation in allocations for mark in keeper.bypasses.marks(allocation)),
    )


def process_figures() -> ProcessFigures:
    """Figures of this process from proc(5); zeros if proc(5) cannot be read."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
        # one is subtracted for the descriptor of the listing itself
        descriptors = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 (names are enough)
    except (OSError, ValueError, IndexError, StopIteration):
        return ProcessFigures()
    user_ticks, system_ticks, start_ticks = int(fields[11]), int(fields[12]), int(fields[19])
    return ProcessFigures(
        resident_bytes=resident_pages * _PAGE,
        cpu_seconds=(user_ticks + system_ticks) / _TICKS,
        open_descriptors=descriptors,
        start_unix_seconds=boot + start_ticks / _TICKS,
    )
