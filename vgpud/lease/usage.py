"""Reads the `usage` file of a lease: the reports of its processes.

The tenant can write this file, so it is hostile input. Any content gives bounded numbers, and none raises an
error.
"""

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from vgpud import lease_layout as layout
from vgpud.lease.pages import BYTES_MAX, lease_failed
from vgpud.model.view import ComputeTime

_COUNT_MAX = 1 << 62
_UNKNOWN_MAX = 10_000  # maximum of unknown driver functions; no driver has so many
_WORD = struct.Struct("<Q")


@dataclass(frozen=True)
class Meter:
    """Memory and counters on one device, of one process or of a whole lease."""

    used_bytes: int = 0
    context_bytes: int = 0
    peak_bytes: int = 0
    refusals_limit: int = 0
    refusals_card: int = 0
    launches: int = 0
    throttled_ns: int = 0


@dataclass(frozen=True)
class ProcessUse:
    """One slot in use. `pid` is reported by the process, in its own pid namespace, and is for display
    only.
    """

    slot: int
    pid: int
    registered: bool
    start_ns: int
    devices: tuple[Meter, ...]


@dataclass(frozen=True)
class Usage:
    """The content of a `usage` file: the meters of live processes, and the counters of ended ones."""

    processes: tuple[ProcessUse, ...]
    retired: tuple[Meter, ...]

    def device(self, ordinal: int) -> Meter:
        """The meter of the whole lease on its device `ordinal` (0 is the first of `limits`). The peak is that
        of the largest single process.
        """
        meters = [process.devices[ordinal] for process in self.processes]
        past = self.retired[ordinal]
        total = {f.name: sum(getattr(m, f.name) for m in meters) for f in fields(Meter)}
        for name in ("refusals_limit", "refusals_card", "launches", "throttled_ns"):
            total[name] = min(total[name] + getattr(past, name), _COUNT_MAX)
        total["peak_bytes"] = max([m.peak_bytes for m in meters] + [past.peak_bytes])
        return Meter(**total)


def open_usage(folder: Path, access: int = os.O_RDONLY) -> int:
    """Opens the `usage` file of a lease and returns its descriptor. Raises OSError."""
    # The tenant owns the file but not the folder: the file can have any size, but cannot be replaced by a
    # link or a pipe.
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(f"{folder}/{layout.USAGE_FILE}", flags)
    except FileNotFoundError:
        # the files of a lease for ANYONE are in a subfolder; it is tried second, because such leases are rare
        return os.open(f"{folder}/{layout.ANYONE_FOLDER}/{layout.USAGE_FILE}", flags)


def read_usage(folder: Path) -> Usage:
    """The figures that the tenant reports, clamped to plausible ranges. A short file reads as if zeros
    followed.

    Raises VgpuError LEASE_FAILED if the lease does not exist.
    """
    try:
        fd = open_usage(folder)
        try:
            raw = os.pread(fd, layout.USAGE_SIZE, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise lease_failed(f"read the use of lease {folder.name}", error) from error
    raw = raw.ljust(layout.USAGE_SIZE, b"\0")
    (high,) = struct.unpack_from("<I", raw, layout.USAGE_SLOT_HIGH)
    slots = (_read_slot(raw, i) for i in range(min(high, layout.MAX_SLOTS)))
    return Usage(
        processes=tuple(process for process in slots if process is not None),
        retired=_read_meters(raw, layout.USAGE_RETIRED),
    )


def _read_slot(raw: bytes, index: int) -> ProcessUse | None:
    at = layout.USAGE_SLOTS + index * layout.SLOT_SIZE
    owner, pid = struct.unpack_from("<Ii", raw, at)
    if owner == 0:
        return None
    (start_ns,) = _WORD.unpack_from(raw, at + layout.SLOT_START_NS)
    meters = _read_meters(raw, at + layout.SLOT_DEVICES)
    return ProcessUse(index, max(pid, 0), owner < layout.OWNER_SELF, min(start_ns, _COUNT_MAX), meters)


def _read_meters(raw: bytes, at: int) -> tuple[Meter, ...]:
    return tuple(_read_meter(raw, at + i * layout.SLOT_DEVICE_SIZE) for i in range(layout.MAX_DEVICES))


def _read_meter(raw: bytes, at: int) -> Meter:
    def word(offset: int, most: int) -> int:
        return min(int(_WORD.unpack_from(raw, at + offset)[0]), most)

    return Meter(
        used_bytes=word(layout.SLOT_DEVICE_USED_BYTES, BYTES_MAX),
        context_bytes=word(layout.SLOT_DEVICE_CONTEXT_BYTES, BYTES_MAX),
        peak_bytes=word(layout.SLOT_DEVICE_PEAK_BYTES, BYTES_MAX),
        refusals_limit=word(layout.SLOT_DEVICE_REFUSALS_LIMIT, _COUNT_MAX),
        refusals_card=word(layout.SLOT_DEVICE_REFUSALS_CARD, _COUNT_MAX),
        launches=word(layout.SLOT_DEVICE_LAUNCHES, _COUNT_MAX),
        throttled_ns=word(layout.SLOT_DEVICE_THROTTLED_NS, _COUNT_MAX),
    )


@dataclass(frozen=True, slots=True)
class LeaseMeter:
    """The figures of one device of a lease: memory of the live processes, counters of live and ended
    processes.
    """

    processes: int
    memory: Meter
    compute: ComputeTime


_METER = struct.Struct("<8Q")
_HELD = struct.Struct("<3Q")  # the words used, claim and context, with which a meter begins
# upper bounds of a meter's figures: of used, claim, context and peak, then of the counters
_METER_MOST = (*(BYTES_MAX,) * 4, *(_COUNT_MAX,) * 4)
_COMPUTE = struct.Struct("<6Q")
# the words start_ns, calls, looks, busy, quiet and wants, which are adjacent in a slot
_ACTIVITY = struct.Struct("<2Q4I")


class MeterPages(NamedTuple):
    """The parts of a `usage` file from which meters are read. Two of them are equal if no counter has changed
    in between.
    """

    head: bytes
    slots: bytes
    compute: bytes


def read_meter_pages(folder: Path, device_count: int) -> MeterPages:
    """Reads the parts of a `usage` file for `parse_meters`. Raises VgpuError LEASE_FAILED if the lease does
    not exist.
    """
    with usage_of(folder) as fd:
        head, slots = read_slots(fd)
        compute = read_at(fd, layout.USAGE_COMPUTE, device_count * layout.COMPUTE_SIZE)
    return MeterPages(head, slots, compute)


def parse_meters(pages: MeterPages, device_count: int) -> tuple[LeaseMeter, ...]:
    """The figures of the first devices, and their compute time. It costs a hundredth of `read_usage` with
    `Usage.device`, because only slots in use are read. Clamped as in `read_usage`.
    """
    head, slots, compute = pages
    held = in_use(slots)
    return tuple(_lease_meter(head, slots, compute, held, device) for device in range(device_count))


def read_meters(folder: Path, device_count: int) -> tuple[LeaseMeter, ...]:
    """The meters of the first devices. Raises VgpuError LEASE_FAILED if the lease does not exist."""
    return parse_meters(read_meter_pages(folder, device_count), device_count)


@contextlib.contextmanager
def usage_of(folder: Path) -> Iterator[int]:
    """Yields the descriptor of a usage file. Raises VgpuError LEASE_FAILED if it cannot be opened."""
    try:
        fd = open_usage(folder)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise lease_failed(f"read the use of lease {folder.name}", error) from error


def read_at(fd: int, at: int, length: int) -> bytes:
    """Reads exactly `length` bytes. If the tenant has truncated the file, zeros are added."""
    return os.pread(fd, length, at).ljust(length, b"\0") if length else b""


def read_slots(fd: int) -> tuple[bytes, bytes]:
    """The header of the file, and the slots that were ever in use."""
    head = read_at(fd, 0, layout.USAGE_SLOTS)
    (high,) = struct.unpack_from("<I", head, layout.USAGE_SLOT_HIGH)
    return head, read_at(fd, layout.USAGE_SLOTS, min(high, layout.MAX_SLOTS) * layout.SLOT_SIZE)


def in_use(slots: bytes) -> list[int]:
    """The offsets of the slots that processes use now."""
    starts = range(0, len(slots), layout.SLOT_SIZE)
    return [at for at in starts if slots[at : at + 4] != b"\0\0\0\0"]


def _lease_meter(head: bytes, slots: bytes, compute: bytes, held: list[int], device: int) -> LeaseMeter:
    at = device * layout.SLOT_DEVICE_SIZE
    retired = _METER.unpack_from(head, layout.USAGE_RETIRED + at)
    _, _, _, peak, *counters = map(min, retired, _METER_MOST)
    used = context = 0
    for slot in held:
        words = _METER.unpack_from(slots, slot + layout.SLOT_DEVICES + at)
        one_used, _, one_context, one_peak, *counts = map(min, words, _METER_MOST)
        used, context, peak = used + one_used, context + one_context, max(peak, one_peak)
        counters = [ours + theirs for ours, theirs in zip(counters, counts, strict=True)]
    limit, card, launches, throttled_ns = (min(count, _COUNT_MAX) for count in counters)
    memory = Meter(used, context, peak, limit, card, launches, throttled_ns)
    times = _COMPUTE.unpack_from(compute, device * layout.COMPUTE_SIZE)
    granted, had, waited, overrun, _turns, bypasses = (min(time, _COUNT_MAX) for time in times)
    return LeaseMeter(len(held), memory, ComputeTime(granted, had, waited, overrun, bypasses))


def read_counted(folder: Path, device_count: int) -> tuple[int, ...]:
    """Bytes that the live processes count on each device: used, claimed, and of contexts. Clamped as in
    `read_usage`.

    Raises VgpuError LEASE_FAILED if the lease does not exist.
    """
    with usage_of(folder) as fd:
        _, slots = read_slots(fd)
    held = in_use(slots)
    return tuple(
        sum(
            min(word, BYTES_MAX)
            for slot in held
            for word in _HELD.unpack_from(
                slots, slot + layout.SLOT_DEVICES + device * layout.SLOT_DEVICE_SIZE
            )
        )
        for device in range(device_count)
    )


@dataclass(frozen=True, slots=True)
class LeaseActivity:
    """The last activity reports of the live processes of a lease (ArbiterClient.look requests them), and the
    number of their threads that wait for the resume. `answers`: the number of reports by process (slot,
    start).
    """

    calls: int = 0
    busy: bool = False  # kernels that the tenant launched have not all finished
    quiet: bool = True  # the tenant is suspended, and libvgpu itself has no call in the driver
    wants: int = 0
    answers: tuple[tuple[tuple[int, int], int], ...] = ()


def read_activity(folder: Path) -> LeaseActivity:
    """The activity reports of the live processes. Clamped as in `read_usage`. Raises VgpuError LEASE_FAILED
    if the lease does not exist.
    """
    with usage_of(folder) as fd:
        _, slots = read_slots(fd)
    figures = [(at, *_ACTIVITY.unpack_from(slots, at + layout.SLOT_START_NS)) for at in in_use(slots)]
    return LeaseActivity(
        calls=min(sum(calls for _, _, calls, *_ in figures), _COUNT_MAX),
        busy=any(busy for *_, busy, _, _ in figures),
        quiet=all(quiet for *_, quiet, _ in figures),
        wants=sum(wants for *_, wants in figures),
        answers=tuple(((at // layout.SLOT_SIZE, start), looks) for at, start, _, looks, *_ in figures),
    )


@dataclass(frozen=True, slots=True)
class UnknownCalls:
    """The functions of a tenant's driver that libvgpu does not know, because the driver is newer. No limit
    holds for these functions. `example` is one of them.
    """

    count: int
    example: str


_NO_UNKNOWN = UnknownCalls(0, "")
_NAME = re.compile(rb"cu\w{1,45}", re.ASCII)


def read_unknown_calls(folder: Path) -> UnknownCalls:
    """The driver calls that libvgpu does not know, as the tenant reports them: bounded and checked. A name
    that no CUDA call can have is left out.

    Raises VgpuError LEASE_FAILED if the lease does not exist.
    """
    with usage_of(folder) as fd:
        raw = read_at(fd, layout.USAGE_UNKNOWN_CALLS, 4 + layout.CALL_BYTES)
    count = int.from_bytes(raw[:4], "little")
    if count == 0:
        return _NO_UNKNOWN
    name = raw[4:].split(b"\0", 1)[0]
    return UnknownCalls(min(count, _UNKNOWN_MAX), name.decode() if _NAME.fullmatch(name) else "")
