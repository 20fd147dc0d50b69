"""Reads the meters of preload slices from their leases."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vgpud.lease import LeaseMeter, MeterPages, parse_meters, read_meter_pages
from vgpud.model.tenancy import Allocation, Slice
from vgpud.model.view import SliceMeter

_KEPT_MOST = 4096


class _Read(NamedTuple):
    """The pages read from a lease, and the meters computed from them."""

    slices: tuple[Slice, ...]
    pages: MeterPages
    meters: tuple[SliceMeter, ...]


class LeaseMeters:
    """The meters of the leases in one folder. The last reading of each lease is cached until the lease
    changes. A full cache is emptied.
    """

    def __init__(self, leases: Path) -> None:
        self._leases = leases
        self._last: dict[str, _Read] = {}  # last readings by allocation id

    def read(self, allocation: Allocation, card_bytes: Sequence[int]) -> tuple[SliceMeter, ...]:
        """The meters of an allocation. As long as no counter changes, the same object is returned, so that
        callers can cache results derived from it. `card_bytes` is the memory of each slice's device. It
        bounds the figures, because a tenant can write any figure into its lease.

        Raises VgpuError LEASE_FAILED if the lease does not exist.
        """
        pages = read_meter_pages(self._leases / allocation.id, len(allocation.slices))
        last = self._last.get(allocation.id)
        if last is not None and last.slices is allocation.slices and last.pages == pages:
            return last.meters
        read = parse_meters(pages, len(allocation.slices))
        parts = zip(allocation.slices, read, card_bytes, strict=True)
        meters = tuple(_slice_meter(*part) for part in parts)
        # the cache is emptied now and then, because it also has readings of leases that were removed while
        # they were read
        if len(self._last) >= _KEPT_MOST:
            self._last.clear()
        self._last[allocation.id] = _Read(allocation.slices, pages, meters)
        return meters

    def forget(self, allocation_id: str) -> None:
        self._last.pop(allocation_id, None)


def _slice_meter(part: Slice, meter: LeaseMeter, card_bytes: int) -> SliceMeter:
    return SliceMeter(
        device_uuid=part.device_uuid,
        memory_used_bytes=min(meter.memory.used_bytes + meter.memory.context_bytes, card_bytes),
        processes=meter.processes,
        memory_peak_bytes=min(meter.memory.peak_bytes, card_bytes),
        refusals_limit=meter.memory.refusals_limit,
        refusals_card=meter.memory.refusals_card,
        throttled_ns=meter.memory.throttled_ns,
        compute=meter.compute,
    )
