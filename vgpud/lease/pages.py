"""The lease: the shared-memory folder through which a preload allocation is held and metered.

`native/common/lease.h` is the contract and the single source of the layout; `lease_layout` is
generated from it. vgpud writes `limits` and only ever reads `usage`, which belongs to the tenant and
is hostile input: whatever stands in it, reading it gives bounded numbers and never raises for them.
"""

import contextlib
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from vgpud import lease_layout as layout
from vgpud.lease.memory import LeaseMemory
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import ANYONE
from vgpud.model.view import ComputeTime

# No card has a pebibyte: a figure above is not a measurement, and sums of clamped ones cannot wrap.
_BYTES_MAX = 1 << 50
_COUNT_MAX = 1 << 62
_WORD = struct.Struct("<Q")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SharePolicy(IntEnum):
    """What happens at the compute share's edge (enum vgpu_share_policy)."""

    NONE = layout.SHARE_NONE
    HARD = layout.SHARE_HARD
    WORK_CONSERVING = layout.SHARE_WORK_CONSERVING


@dataclass(frozen=True)
class DeviceLimits:
    """One device of a lease: memory in bytes, contexts included; share in hundredths of a percent."""

    uuid: str
    memory_bytes: int
    share_hundredths: int = layout.SHARE_ALL
    share_policy: SharePolicy = SharePolicy.NONE
    priority: int = 0
    quantum_us: int = 0  # 0: no wish


@dataclass(frozen=True)
class Limits:
    """What a `limits` file says."""

    allocation: str
    generation: int
    closed: bool
    devices: tuple[DeviceLimits, ...]
    away: bool = False  # suspended
    memory: LeaseMemory = LeaseMemory.FIXED


@dataclass(frozen=True)
class Meter:
    """Memory and counters of one device: of one process, or of a whole lease."""

    used_bytes: int = 0
    context_bytes: int = 0
    peak_bytes: int = 0
    refusals_limit: int = 0
    refusals_card: int = 0
    launches: int = 0
    throttled_ns: int = 0


@dataclass(frozen=True)
class ProcessUse:
    """One slot in use. `pid` is the process's own word in its own namespace: for display only."""

    slot: int
    pid: int
    registered: bool
    start_ns: int
    devices: tuple[Meter, ...]


@dataclass(frozen=True)
class Usage:
    """What a `usage` file says: live processes, and the counters of those that ended."""

    processes: tuple[ProcessUse, ...]
    retired: tuple[Meter, ...]

    def device(self, ordinal: int) -> Meter:
        """The whole lease on its device `ordinal` (0 is the first of `limits`). The peak is of the
        largest single process."""
        meters = [process.devices[ordinal] for process in self.processes]
        past = self.retired[ordinal]
        total = {f.name: sum(getattr(m, f.name) for m in meters) for f in fields(Meter)}
        for name in ("refusals_limit", "refusals_card", "launches", "throttled_ns"):
            total[name] = min(total[name] + getattr(past, name), _COUNT_MAX)
        total["peak_bytes"] = max([m.peak_bytes for m in meters] + [past.peak_bytes])
        return Meter(**total)


def _failed(what: str, error: OSError) -> VgpuError:
    return VgpuError(
        ErrorCode.LEASE_FAILED,
        f"cannot {what}: {os.strerror(error.errno or 0).lower()}",
        "check that the run directory is on a writable tmpfs",
    )


# --- writing


def _pack_device(device: DeviceLimits) -> bytes:
    uuid = device.uuid.encode()
    if not 0 < len(uuid) < layout.UUID_BYTES:
        raise VgpuError(ErrorCode.BUG, f"a uuid of {len(uuid)} bytes does not fit a lease", "report this")
    if not 0 < device.memory_bytes < _BYTES_MAX or not 1 <= device.share_hundredths <= layout.SHARE_ALL:
        raise VgpuError(
            ErrorCode.IMPOSSIBLE,
            f"a lease cannot hold {device.memory_bytes} bytes with {device.share_hundredths} hundredths",
            "ask for more than nothing, and at most 100 percent",
        )
    body = struct.pack(
        f"<{layout.UUID_BYTES}sQIIiI",
        uuid,
        device.memory_bytes,
        device.share_hundredths,
        device.share_policy,
        device.priority,
        device.quantum_us,
    )
    return body.ljust(layout.DEVICE_LIMITS_SIZE, b"\0")


def _pack_body(
    allocation: str, state: int, devices: Sequence[DeviceLimits], memory: LeaseMemory = LeaseMemory.FIXED
) -> bytes:
    """Everything behind `generation`."""
    name = allocation.encode()
    if not 0 < len(name) < layout.ID_BYTES or not 0 < len(devices) <= layout.MAX_DEVICES:
        raise VgpuError(
            ErrorCode.BUG,
            f"allocation {allocation!r} with {len(devices)} devices does not fit a lease",
            "report this",
        )
    head = struct.pack(f"<{layout.ID_BYTES}sII", name, state, len(devices))
    body = head + b"".join(_pack_device(device) for device in devices)
    body = body.ljust(layout.LIMITS_MEMORY - layout.LIMITS_ALLOCATION, b"\0") + struct.pack("<I", memory)
    return body.ljust(layout.LIMITS_SIZE - layout.LIMITS_ALLOCATION, b"\0")


def _write_locked(fd: int, body: bytes) -> None:
    """Replaces the body under the sequence lock. Each step is a system call of its own, which keeps
    their order for readers of the mapped page; a generation left odd by a crash is taken further."""
    (generation,) = _WORD.unpack(os.pread(fd, 8, layout.LIMITS_GENERATION))
    odd = (generation | 1) + (0 if generation % 2 == 0 else 2)
    os.pwrite(fd, _WORD.pack(odd), layout.LIMITS_GENERATION)
    os.pwrite(fd, body, layout.LIMITS_ALLOCATION)
    os.pwrite(fd, _WORD.pack(odd + 1), layout.LIMITS_GENERATION)


def _files(folder: Path) -> Path:
    """Where the entries of the lease `folder` are; a folder closed to others is ANYONE's."""
    with contextlib.suppress(OSError):
        if folder.lstat().st_mode & 0o077 == 0:
            return folder / layout.ANYONE_FOLDER
    return folder


def _state(away: bool) -> int:
    return layout.LEASE_AWAY if away else layout.LEASE_OPEN


def write_lease(
    root: Path,
    allocation: str,
    devices: Sequence[DeviceLimits],
    uid: int,
    gid: int,
    away: bool = False,
    memory: LeaseMemory = LeaseMemory.FIXED,
) -> Path:
    """Makes the folder root/allocation, whole or not at all; the tenant is uid:gid, or ANYONE. A lease
    that is there already keeps its files (a tenant may have them mapped) and gets these limits.
    Answers the folder with its entries, for the tenant. ANYONE's is below one that only root may enter:
    no user of the host gets to it, but a container that it is mounted into does.

    Raises VgpuError LEASE_FAILED if the file system refuses.
    """
    folder = root / allocation
    body = _pack_body(allocation, _state(away), devices, memory)
    try:
        if folder.exists():
            _note_moved(folder, [device.uuid for device in devices])
            _rewrite(folder, body)
            return _files(folder)
        draft = root / f".{allocation}.new"
        shutil.rmtree(draft, ignore_errors=True)
        _make_folder(draft, 0o700 if uid == ANYONE else 0o755)
        inner = _files(draft)
        if inner != draft:
            _make_folder(inner, 0o755)
        _fill(inner, body, uid, gid)
        draft.rename(folder)
    except OSError as error:
        raise _failed(f"write the lease of {allocation}", error) from error
    return _files(folder)


def _note_moved(folder: Path, uuids: Sequence[str]) -> None:
    """What the environment of its processes may name, each with the slice that it was: libvgpu reads it."""
    files = _files(folder)
    note = files / layout.MOVED_FILE
    try:
        former = [device.uuid for device in read_limits(folder).devices]
    except VgpuError:  # a page that is not valid is about to be written anew
        return
    lines = note.read_text().splitlines() if note.exists() else []
    left = [f"{i} {was}" for i, (was, now) in enumerate(zip(former, uuids, strict=False)) if was != now]
    if not left:
        return
    draft = files / f".{layout.MOVED_FILE}.new"
    draft.write_text("".join(f"{line}\n" for line in dict.fromkeys([*left, *lines])))
    draft.chmod(0o644)
    draft.rename(note)


def _make_folder(folder: Path, mode: int) -> None:
    folder.mkdir(mode=mode)
    folder.chmod(mode)  # whatever the umask


def _fill(draft: Path, body: bytes, uid: int, gid: int) -> None:
    header = struct.pack("<IIQ", layout.MAGIC, layout.VERSION, 2)
    limits = draft / layout.LIMITS_FILE
    limits.write_bytes(header + body)
    limits.chmod(0o644)
    usage = draft / layout.USAGE_FILE
    fd = os.open(usage, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, layout.USAGE_SIZE)
        os.pwrite(fd, struct.pack("<II", layout.MAGIC, layout.VERSION), 0)
        if uid == ANYONE:
            os.fchmod(fd, 0o666)  # those whom the container lets see it
        elif (uid, gid) != (os.geteuid(), os.getegid()):
            os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def _rewrite(folder: Path, body: bytes) -> None:
    fd = os.open(_files(folder) / layout.LIMITS_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write_locked(fd, body)
    finally:
        os.close(fd)


def update_limits(
    folder: Path,
    devices: Sequence[DeviceLimits],
    away: bool | None = None,
    memory: LeaseMemory | None = None,
) -> None:
    """Resizes a running tenant, in place. The devices and their order cannot change; `away` says whether
    it is suspended, None: as before; so with `memory`.

    Raises VgpuError LEASE_FAILED if the lease is gone or closed, BUG if it is for other devices.
    """
    held = read_limits(folder)
    if [d.uuid for d in held.devices] != [d.uuid for d in devices]:
        raise VgpuError(ErrorCode.BUG, f"the lease of {held.allocation} is for other devices", "report this")
    if held.closed:
        raise VgpuError(ErrorCode.LEASE_FAILED, f"the lease of {held.allocation} is closed", "allocate anew")
    try:
        state = _state(held.away if away is None else away)
        where = held.memory if memory is None else memory
        _rewrite(folder, _pack_body(held.allocation, state, devices, where))
    except OSError as error:
        raise _failed(f"update the lease of {held.allocation}", error) from error


def close_lease(folder: Path) -> None:
    """From now on nothing new is granted; what tenants hold stays until they free it. A lease that is
    gone is closed already, and one whose limits are not valid can only be removed."""
    try:
        held = read_limits(folder)
    except VgpuError:
        return
    try:
        _rewrite(folder, _pack_body(held.allocation, layout.LEASE_CLOSED, held.devices, held.memory))
    except OSError as error:
        raise _failed(f"close the lease of {held.allocation}", error) from error


def remove_lease(root: Path, allocation: str) -> None:
    """Removes the folder; tenants that have it mapped keep their closed limits. Idempotent."""
    folder = root / allocation
    grave = root / f".{allocation}.gone"
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(grave)
        with contextlib.suppress(FileNotFoundError):
            _remove_tree(grave)
    except OSError as error:
        raise _failed(f"remove the lease of {allocation}", error) from error


def _remove_tree(folder: Path) -> None:
    """Root in a container may have built anything in its lease, of any depth, and may still be at it:
    no link is followed, and every folder within is moved up to the top before it is emptied."""
    top = os.open(folder, _FOLDER)
    try:
        waiting = ["."]
        while waiting:
            name = waiting.pop()
            here = os.open(name, _FOLDER, dir_fd=top)
            try:
                waiting += _empty(here, top)
            finally:
                os.close(here)
            if name != ".":
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


def _empty(here: int, top: int) -> list[str]:
    """Removes the files in the folder `here`; the names that its folders have got in `top`."""
    moved = []
    with os.scandir(here) as entries:
        for entry in tuple(entries):
            if entry.is_dir(follow_symlinks=False):
                moved.append(secrets.token_hex(16))
                os.rename(entry.name, moved[-1], src_dir_fd=here, dst_dir_fd=top)
            else:
                os.unlink(entry.name, dir_fd=here)
    return moved


def list_leases(root: Path) -> frozenset[str]:
    """Allocations that have a lease. Leftovers of an interrupted write or removal are cleared here."""
    if not root.is_dir():
        return frozenset()
    names = set()
    for entry in root.iterdir():
        if entry.name.startswith("."):
            with contextlib.suppress(OSError):
                _remove_tree(entry)
        elif entry.is_dir() and not entry.is_symlink():
            names.add(entry.name)
    return frozenset(names)


# --- reading


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def read_limits(folder: Path) -> Limits:
    """The limits as they stand. vgpud is their only writer, so no lock is taken.

    Raises VgpuError LEASE_FAILED if there is no valid `limits` file.
    """
    try:
        raw = (_files(folder) / layout.LIMITS_FILE).read_bytes()
    except OSError as error:
        raise _failed(f"read the lease {folder.name}", error) from error
    try:
        return _parse_limits(raw)
    except (struct.error, ValueError) as error:
        raise VgpuError(
            ErrorCode.LEASE_FAILED,
            f"the limits of lease {folder.name} are not valid ({len(raw)} bytes)",
            "release the allocation and allocate anew",
        ) from error


def _parse_limits(raw: bytes) -> Limits:
    """Raises struct.error or ValueError for anything but a limits page of this version."""
    if struct.unpack_from("<II", raw) != (layout.MAGIC, layout.VERSION):
        raise ValueError("not a limits page")
    (count,) = struct.unpack_from("<I", raw, layout.LIMITS_DEVICE_COUNT)
    if not 0 < count <= layout.MAX_DEVICES:
        raise ValueError("bad device count")
    (state,) = struct.unpack_from("<I", raw, layout.LIMITS_STATE)
    # a page that was made before there was this word ends in front of it
    (memory,) = struct.unpack_from("<I", raw.ljust(layout.LIMITS_SIZE, b"\0"), layout.LIMITS_MEMORY)
    return Limits(
        allocation=_text(raw[layout.LIMITS_ALLOCATION : layout.LIMITS_ALLOCATION + layout.ID_BYTES]),
        generation=_WORD.unpack_from(raw, layout.LIMITS_GENERATION)[0],
        closed=state == layout.LEASE_CLOSED,
        away=state == layout.LEASE_AWAY,
        memory=LeaseMemory(memory),
        devices=tuple(_read_device(raw, i) for i in range(count)),
    )


def _read_device(raw: bytes, index: int) -> DeviceLimits:
    at = layout.LIMITS_DEVICES + index * layout.DEVICE_LIMITS_SIZE
    memory, share, policy, priority, quantum = struct.unpack_from(
        "<QIIiI", raw, at + layout.DEVICE_LIMITS_MEMORY_BYTES
    )
    return DeviceLimits(
        _text(raw[at : at + layout.UUID_BYTES]), memory, share, SharePolicy(policy), priority, quantum
    )


def open_usage(folder: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of the lease's `usage`. Raises OSError."""
    # the tenant owns the file, not the folder: it can be short or long, but no link and no pipe
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(f"{folder}/{layout.USAGE_FILE}", flags)
    except FileNotFoundError:  # ANYONE's is further down; asked second, since meters read hundreds a second
        return os.open(f"{folder}/{layout.ANYONE_FOLDER}/{layout.USAGE_FILE}", flags)


def read_usage(folder: Path) -> Usage:
    """The tenant's own figures, clamped: see the module's text. A short or missing file reads as zeros.

    Raises VgpuError LEASE_FAILED if the lease itself is gone.
    """
    try:
        fd = open_usage(folder)
        try:
            raw = os.pread(fd, layout.USAGE_SIZE, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise _failed(f"read the use of lease {folder.name}", error) from error
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
        used_bytes=word(layout.SLOT_DEVICE_USED_BYTES, _BYTES_MAX),
        context_bytes=word(layout.SLOT_DEVICE_CONTEXT_BYTES, _BYTES_MAX),
        peak_bytes=word(layout.SLOT_DEVICE_PEAK_BYTES, _BYTES_MAX),
        refusals_limit=word(layout.SLOT_DEVICE_REFUSALS_LIMIT, _COUNT_MAX),
        refusals_card=word(layout.SLOT_DEVICE_REFUSALS_CARD, _COUNT_MAX),
        launches=word(layout.SLOT_DEVICE_LAUNCHES, _COUNT_MAX),
        throttled_ns=word(layout.SLOT_DEVICE_THROTTLED_NS, _COUNT_MAX),
    )


@dataclass(frozen=True, slots=True)
class LeaseMeter:
    """One device of a whole lease: memory of the live processes, counters of all there ever were."""

    processes: int
    memory: Meter
    compute: ComputeTime


_METER = struct.Struct("<8Q")
_METER_MOST = (*(_BYTES_MAX,) * 4, *(_COUNT_MAX,) * 4)  # used, claim, context, peak; counters
_COMPUTE = struct.Struct("<6Q")
_ACTIVITY = struct.Struct("<2Q4I")  # start_ns, calls, looks, busy, quiet, wants: side by side in a slot


class MeterPages(NamedTuple):
    """The parts of a `usage` file that meters are read from; equal while nothing has been counted."""

    head: bytes
    slots: bytes
    compute: bytes


def read_meter_pages(folder: Path, device_count: int) -> MeterPages:
    """Raises VgpuError LEASE_FAILED if the lease itself is gone."""
    with _usage_of(folder) as fd:
        head, slots = _read_slots(fd)
        compute = _read(fd, layout.USAGE_COMPUTE, device_count * layout.COMPUTE_SIZE)
    return MeterPages(head, slots, compute)


def parse_meters(pages: MeterPages, device_count: int) -> tuple[LeaseMeter, ...]:
    """What `read_usage` and `Usage.device` tell of the first devices, and their compute time, for a
    hundredth of the work: only what is in use is read. Clamped as there."""
    head, slots, compute = pages
    held = _in_use(slots)
    return tuple(_lease_meter(head, slots, compute, held, device) for device in range(device_count))


def read_meters(folder: Path, device_count: int) -> tuple[LeaseMeter, ...]:
    """Raises VgpuError LEASE_FAILED if the lease itself is gone."""
    return parse_meters(read_meter_pages(folder, device_count), device_count)


@contextlib.contextmanager
def _usage_of(folder: Path) -> Iterator[int]:
    """The descriptor of a usage file; raises VgpuError LEASE_FAILED where it cannot be read."""
    try:
        fd = open_usage(folder)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise _failed(f"read the use of lease {folder.name}", error) from error


def _read(fd: int, at: int, length: int) -> bytes:
    """So many bytes, whatever the tenant has made of its file."""
    return os.pread(fd, length, at).ljust(length, b"\0") if length else b""


def _read_slots(fd: int) -> tuple[bytes, bytes]:
    """What lies before the slots, and the slots that were ever in use."""
    head = _read(fd, 0, layout.USAGE_SLOTS)
    (high,) = struct.unpack_from("<I", head, layout.USAGE_SLOT_HIGH)
    return head, _read(fd, layout.USAGE_SLOTS, min(high, layout.MAX_SLOTS) * layout.SLOT_SIZE)


def _in_use(slots: bytes) -> list[int]:
    """Where the slots begin that somebody has now."""
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


# --- the arbiter


@dataclass(frozen=True, slots=True)
class LeaseActivity:
    """What the live processes of a lease wrote when they were last asked (ArbiterClient.look), and how
    many of their threads wait for it to come back. `answers`: per process (slot, start), how often it has."""

    calls: int = 0
    busy: bool = False  # work that they launched has not all run
    quiet: bool = True  # it is away, and nothing of libvgpu's own is in the driver
    wants: int = 0
    answers: tuple[tuple[tuple[int, int], int], ...] = ()


def read_activity(folder: Path) -> LeaseActivity:
    """Clamped as in `read_usage`. Raises VgpuError LEASE_FAILED if the lease itself is gone."""
    with _usage_of(folder) as fd:
        _, slots = _read_slots(fd)
    figures = [(at, *_ACTIVITY.unpack_from(slots, at + layout.SLOT_START_NS)) for at in _in_use(slots)]
    return LeaseActivity(
        calls=min(sum(calls for _, _, calls, *_ in figures), _COUNT_MAX),
        busy=any(busy for *_, busy, _, _ in figures),
        quiet=all(quiet for *_, quiet, _ in figures),
        wants=sum(wants for *_, wants in figures),
        answers=tuple(((at // layout.SLOT_SIZE, start), looks) for at, start, _, looks, *_ in figures),
    )
