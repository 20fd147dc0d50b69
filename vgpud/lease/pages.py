"""The lease: the shared-memory folder through which libvgpu limits and meters an allocation.

`native/common/lease.h` is the contract and the single source of the layout; `lease_layout` is generated from
it. vgpud writes `limits` and reads `usage` (usage.py). In `usage`, once it is made, vgpud writes only the
sizes of contexts, for libvgpu (contexts.py).
"""

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from vgpud import lease_layout as layout
from vgpud.lease.homes import home_for, homes, leftovers, link, place_of
from vgpud.lease.memory import LeaseMemory, LeaseSaves
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import ANYONE
from vgpud.threads import DaemonThreads

# No card has a pebibyte: larger values are invalid, and sums of clamped values cannot overflow.
BYTES_MAX = 1 << 50
_WORD = struct.Struct("<Q")
# the words memory, keep_share, paused and saves, which are adjacent in the page
_WORDS = struct.Struct("<4I")
_GRAVE = ".gone"  # ending of the names of leases that are being removed
_REMOVAL_SECONDS = 1.0
# mode without read permission for others: by getdents(2) another user could hold a folder's lock in the
# kernel as long as that user likes
_NOT_LISTED = 0o711
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SharePolicy(IntEnum):
    """The behaviour of a tenant at the limit of its compute share (enum vgpu_share_policy)."""

    NONE = layout.SHARE_NONE
    HARD = layout.SHARE_HARD
    WORK_CONSERVING = layout.SHARE_WORK_CONSERVING


@dataclass(frozen=True)
class DeviceLimits:
    """The limits on one device of a lease: memory in bytes, contexts included; share in hundredths of a
    percent.
    """

    uuid: str
    memory_bytes: int
    share_hundredths: int = layout.SHARE_ALL
    share_policy: SharePolicy = SharePolicy.NONE
    priority: int = 0


@dataclass(frozen=True)
class Limits:
    """The content of a `limits` file."""

    allocation: str
    generation: int
    closed: bool
    devices: tuple[DeviceLimits, ...]
    away: bool = False  # the tenant is suspended
    memory: LeaseMemory = LeaseMemory.FIXED
    keep_share: int = 0
    paused: bool = False


def lease_failed(what: str, error: OSError) -> VgpuError:
    held = "a process of the tenant holds it in the kernel: try again in a minute, or end that process"
    hints = {
        errno.EAGAIN: held,
        errno.EBUSY: held,
        errno.ENOSPC: "release the allocation whose usage file has extended attributes (getfattr), and end "
        "the programs that keep removed files open (lsof +L1)",
    }
    return VgpuError(
        ErrorCode.LEASE_FAILED,
        f"cannot {what}: {os.strerror(error.errno or 0).lower()}",
        hints.get(error.errno or 0, "check that the run directory is on a writable tmpfs"),
    )


# --- writing


def _pack_device(device: DeviceLimits) -> bytes:
    uuid = device.uuid.encode()
    if not 0 < len(uuid) < layout.UUID_BYTES:
        raise VgpuError(ErrorCode.BUG, f"a uuid of {len(uuid)} bytes does not fit a lease", "report this")
    if not 0 < device.memory_bytes < BYTES_MAX or not 1 <= device.share_hundredths <= layout.SHARE_ALL:
        raise VgpuError(
            ErrorCode.IMPOSSIBLE,
            f"a lease cannot hold {device.memory_bytes} bytes with a share of "
            f"{device.share_hundredths} hundredths of a percent",
            "ask for more memory than 0, and for at most 100 percent",
        )
    body = struct.pack(
        f"<{layout.UUID_BYTES}sQIIi",
        uuid,
        device.memory_bytes,
        device.share_hundredths,
        device.share_policy,
        device.priority,
    )
    return body.ljust(layout.DEVICE_LIMITS_SIZE, b"\0")


def _pack_body(
    allocation: str,
    state: int,
    devices: Sequence[DeviceLimits],
    memory: LeaseMemory = LeaseMemory.FIXED,
    keep_share: int = 0,
    paused: bool = False,
    saves: LeaseSaves = LeaseSaves.NOTHING,
) -> bytes:
    """The bytes of a `limits` page that follow the generation."""
    name = allocation.encode()
    if not 0 < len(name) < layout.ID_BYTES or not 0 < len(devices) <= layout.MAX_DEVICES:
        raise VgpuError(
            ErrorCode.BUG,
            f"allocation {allocation!r} with {len(devices)} devices does not fit a lease",
            "report this",
        )
    head = struct.pack(f"<{layout.ID_BYTES}sII", name, state, len(devices))
    body = head + b"".join(_pack_device(device) for device in devices)
    words = _WORDS.pack(memory, min(keep_share, layout.SHARE_ALL), paused, saves)
    body = body.ljust(layout.LIMITS_MEMORY - layout.LIMITS_ALLOCATION, b"\0") + words
    return body.ljust(layout.LIMITS_SIZE - layout.LIMITS_ALLOCATION, b"\0")


def _write_locked(fd: int, body: bytes) -> None:
    """Replaces the body of the page under the sequence lock. Each step is a separate system call, so that
    readers of the mapped page see the steps in order. If a crash left the generation odd, the write continues
    from that number.
    """
    (generation,) = _WORD.unpack(os.pread(fd, 8, layout.LIMITS_GENERATION))
    odd = (generation | 1) + (0 if generation % 2 == 0 else 2)
    os.pwrite(fd, _WORD.pack(odd), layout.LIMITS_GENERATION)
    os.pwrite(fd, body, layout.LIMITS_ALLOCATION)
    os.pwrite(fd, _WORD.pack(odd + 1), layout.LIMITS_GENERATION)


def _files(folder: Path) -> Path:
    """The folder that contains the lease's files. If `folder` is closed to other users, the tenant is ANYONE
    and the files are in a subfolder.
    """
    with contextlib.suppress(OSError):
        if folder.stat().st_mode & 0o077 == 0:
            return folder / layout.ANYONE_FOLDER
    return folder


def _state(away: bool) -> int:
    return layout.LEASE_SUSPENDED if away else layout.LEASE_OPEN


def lease_home(root: Path, allocation: str, user: int, links: bool = True) -> Path:
    """The folder in which the lease is, or is to be made: `root`, or one on a file system of the user
    (homes.py). `user` is the uid that the tenant counts as, or ANYONE. `links`: whether the arbiter serves a
    lease that is not in `root`. Raises VgpuError LEASE_FAILED.
    """
    if (root / allocation).exists():
        return place_of(root / allocation).parent
    if not links:
        return root
    try:
        # containers of different people run as root
        return home_for(root, "" if user in (0, ANYONE) else str(user))
    except OSError as error:
        raise lease_failed(f"choose a file system for the lease of {allocation}", error) from error


def write_lease(
    root: Path,
    allocation: str,
    devices: Sequence[DeviceLimits],
    uid: int,
    gid: int,
    away: bool = False,
    memory: LeaseMemory = LeaseMemory.FIXED,
    paused: bool = False,
) -> Path:
    """Creates the lease folder root/allocation atomically. The tenant is uid:gid, or ANYONE. An existing
    lease keeps its files, because a tenant may have them mapped, and gets the new limits. Returns the folder
    with the files. For ANYONE it is below a folder that only root may enter: users of the host cannot reach
    it, but a container into which it is mounted can.

    `root` is a result of lease_home. If it is not the folder of all leases, that folder gets a link.

    Raises VgpuError LEASE_FAILED if the file system refuses, IMPOSSIBLE for limits that a lease cannot hold.
    """
    folder = root / allocation
    body = _pack_body(allocation, _state(away), devices, memory, paused=paused)
    draft = root / f".{allocation}.new"
    try:
        link(root, allocation)  # first, because a removal finds the folder by it
        if folder.exists():
            _rewrite(folder, body)
            return _files(folder)
        shutil.rmtree(draft, ignore_errors=True)
        _make_folder(draft, 0o700 if uid == ANYONE else _NOT_LISTED)
        inner = _files(draft)
        if inner != draft:
            _make_folder(inner, _NOT_LISTED)
        _fill(inner, body, uid, gid)
        draft.rename(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise lease_failed(f"write the lease of {allocation} in {root}", error) from error
    return _files(folder)


async def note_moved(folder: Path, uuids: Sequence[str]) -> None:
    """Records in a lease the devices that its tenant leaves; `uuids` are the devices after the move. The
    environments of its processes may still name the former devices; libvgpu maps each to its slice.

    Raises VgpuError(LEASE_FAILED): also if the tenant holds the lock of the folder for longer than
    _REMOVAL_SECONDS. Root in a container can hold this lock, because it may list the folder that is mounted
    into it.
    """
    try:
        done = await _without_waiting(lambda: _write_moved(folder, uuids))
    except OSError as error:
        raise lease_failed(f"note the move in the lease of {folder.name}", error) from error
    if not done:
        late = OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        raise lease_failed(f"note the move in the lease of {folder.name}", late)


def _write_moved(folder: Path, uuids: Sequence[str]) -> None:
    files = _files(folder)
    note = files / layout.MOVED_FILE
    try:
        former = [device.uuid for device in read_limits(folder).devices]
    except VgpuError:  # an invalid page is written again afterwards
        return
    lines = _read(note).decode().splitlines() if note.exists() else []
    left = [f"{i} {was}" for i, (was, now) in enumerate(zip(former, uuids, strict=False)) if was != now]
    if not left:
        return
    draft = files / f".{layout.MOVED_FILE}.new"
    draft.write_text("".join(f"{line}\n" for line in dict.fromkeys([*left, *lines])))
    draft.chmod(0o644)
    draft.rename(note)


def _make_folder(folder: Path, mode: int) -> None:
    folder.mkdir(mode=mode)
    folder.chmod(mode)  # sets the mode independently of the umask


def _fill(draft: Path, body: bytes, uid: int, gid: int) -> None:
    header = struct.pack("<IIQ", layout.MAGIC, layout.VERSION, 2)
    limits = draft / layout.LIMITS_FILE
    limits.write_bytes(header + body)
    limits.chmod(0o644)
    usage = draft / layout.USAGE_FILE
    fd = os.open(usage, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, layout.USAGE_FILE_SIZE)
        os.pwrite(fd, struct.pack("<II", layout.MAGIC, layout.VERSION), 0)
        if uid == ANYONE:
            # the uid in the container is unknown, so every user there may write the file
            os.fchmod(fd, 0o666)
        elif (uid, gid) != (os.geteuid(), os.getegid()):
            os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    """Reads a file of a lease. If a process has set a file lease on it (F_SETLEASE), raises BlockingIOError.
    Raises OSError.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read()


def open_limits(folder: Path, waits: bool = False) -> int:
    """Opens the limits for writing. If a process has set a file lease on them (F_SETLEASE), waits until the
    kernel breaks it if `waits`, and raises BlockingIOError if not. Raises OSError.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if waits else os.O_NONBLOCK)
    return os.open(_files(folder) / layout.LIMITS_FILE, flags)


def _rewrite(folder: Path, body: bytes) -> None:
    fd = open_limits(folder)
    try:
        _write_locked(fd, body)
    finally:
        os.close(fd)


def update_limits(
    folder: Path,
    devices: Sequence[DeviceLimits],
    away: bool | None = None,
    memory: LeaseMemory | None = None,
    keep_share: int | None = None,
    paused: bool | None = None,
    saves: LeaseSaves = LeaseSaves.NOTHING,
) -> None:
    """Changes the limits of a running tenant, in place. The devices and their order cannot change. `away`:
    the tenant is suspended. `memory`: where its movable memory is to be. `keep_share`: how much of that
    memory may stay on the device while it is OUT, in hundredths of a percent. `paused`: the tenant is kept
    off its devices. None leaves a value unchanged. `saves`: what the driver does after an eviction; left out,
    it becomes NOTHING.

    Raises VgpuError LEASE_FAILED if the lease does not exist, is closed or cannot be written, BUG if it is
    for other devices.
    """
    held = read_limits(folder)
    if [d.uuid for d in held.devices] != [d.uuid for d in devices]:
        raise VgpuError(ErrorCode.BUG, f"the lease of {held.allocation} is for other devices", "report this")
    if held.closed:
        raise VgpuError(ErrorCode.LEASE_FAILED, f"the lease of {held.allocation} is closed", "allocate again")
    try:
        state = _state(held.away if away is None else away)
        where = held.memory if memory is None else memory
        keep = held.keep_share if keep_share is None else keep_share
        halted = held.paused if paused is None else paused
        _rewrite(folder, _pack_body(held.allocation, state, devices, where, keep, halted, saves))
    except OSError as error:
        raise lease_failed(f"update the lease of {held.allocation}", error) from error


def close_lease(folder: Path) -> None:
    """Closes a lease: nothing new is granted, and tenants keep their memory until they free it. Succeeds also
    if the lease does not exist or its limits are invalid; an invalid lease can only be removed. Raises
    VgpuError(LEASE_FAILED).
    """
    try:
        held = read_limits(folder)
    except VgpuError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise
        return
    try:
        _rewrite(folder, _pack_body(held.allocation, layout.LEASE_CLOSED, held.devices, held.memory))
    except OSError as error:
        raise lease_failed(f"close the lease of {held.allocation}", error) from error


async def remove_lease(root: Path, allocation: str) -> None:
    """Removes the lease folder. Tenants that have its files mapped keep their closed limits. Idempotent.
    Raises VgpuError(LEASE_FAILED).

    Returns after _REMOVAL_SECONDS at the latest, although a tenant can delay the removal of its `usage`: the
    kernel waits for a write(2) to that file, which waits for its buffer, a page of the tenant's own file
    system (FUSE). The folder has another name then, and a thread removes it when the kernel goes on.
    """
    folder = root / allocation
    place = place_of(folder)
    grave = place.with_name(f".{allocation}{_GRAVE}")
    try:
        with contextlib.suppress(FileNotFoundError):
            place.rename(grave)
        if place != folder:
            folder.unlink()
        await _without_waiting(lambda: _remove_all([grave]))
    except OSError as error:
        raise lease_failed(f"remove the lease of {allocation}", error) from error


async def remove_graves(root: Path) -> None:
    """Removes what interrupted removals left. Returns after _REMOVAL_SECONDS at the latest."""
    with contextlib.suppress(OSError):
        graves = [grave for home in (root, *homes(root)) for grave in home.glob(f".*{_GRAVE}")]
        await _without_waiting(lambda: _remove_all(graves))


async def _without_waiting(work: Callable[[], None]) -> bool:
    """Runs `work` on a thread, and waits for _REMOVAL_SECONDS at most. Returns whether it is done. Raises
    OSError.
    """
    removal = asyncio.get_running_loop().run_in_executor(DaemonThreads("vgpud-lease"), work)
    # retrieves a late exception, which asyncio would otherwise log
    removal.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    done, _ = await asyncio.wait((removal,), timeout=_REMOVAL_SECONDS)
    for ended in done:
        ended.result()
    return bool(done)


def _remove_all(graves: Iterable[Path]) -> None:
    for grave in graves:
        with contextlib.suppress(FileNotFoundError):
            _remove_tree(grave)


def _remove_tree(folder: Path) -> None:
    """Removes a folder tree of any depth that a container's root may have built and may still be changing. It
    follows no link, and moves each subfolder to the top before it empties the subfolder.
    """
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
    """Removes the files in the folder `here` and moves its subfolders to `top`. Returns the subfolders' names
    in `top`.
    """
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
    """The ids of allocations that have a lease. Leftovers of interrupted writes are removed."""
    if not root.is_dir():
        return frozenset()
    names = set()
    for entry in (*root.iterdir(), *leftovers(root)):
        if entry.parent != root or entry.name.startswith("."):
            if not entry.name.endswith(_GRAVE):
                with contextlib.suppress(OSError):
                    _remove_tree(entry)
        elif place_of(entry).is_dir() and not place_of(entry).is_symlink():
            names.add(entry.name)
        elif place_of(entry) != entry:
            entry.unlink()  # of a lease whose removal was interrupted
    return frozenset(names)


# --- reading


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def read_limits(folder: Path) -> Limits:
    """The current limits. vgpud is their only writer, so no lock is needed.

    Raises VgpuError LEASE_FAILED if there is no valid `limits` file.
    """
    try:
        raw = _read(_files(folder) / layout.LIMITS_FILE)
    except OSError as error:
        raise lease_failed(f"read the lease {folder.name}", error) from error
    try:
        return _parse_limits(raw)
    except (struct.error, ValueError) as error:
        raise VgpuError(
            ErrorCode.LEASE_FAILED,
            f"the limits of lease {folder.name} are not valid ({len(raw)} bytes)",
            "release the allocation and allocate again",
        ) from error


def _parse_limits(raw: bytes) -> Limits:
    """Parses a limits page. Raises struct.error or ValueError if it is no limits page of this version."""
    if struct.unpack_from("<II", raw) != (layout.MAGIC, layout.VERSION):
        raise ValueError("not a limits page")
    (count,) = struct.unpack_from("<I", raw, layout.LIMITS_DEVICE_COUNT)
    if not 0 < count <= layout.MAX_DEVICES:
        raise ValueError("bad device count")
    (state,) = struct.unpack_from("<I", raw, layout.LIMITS_STATE)
    # The page of an older vgpud ends before these words, so it is padded with zeros.
    memory, keep, paused, _ = _WORDS.unpack_from(raw.ljust(layout.LIMITS_SIZE, b"\0"), layout.LIMITS_MEMORY)
    return Limits(
        allocation=_text(raw[layout.LIMITS_ALLOCATION : layout.LIMITS_ALLOCATION + layout.ID_BYTES]),
        generation=_WORD.unpack_from(raw, layout.LIMITS_GENERATION)[0],
        closed=state == layout.LEASE_CLOSED,
        away=state == layout.LEASE_SUSPENDED,
        memory=LeaseMemory(memory),
        keep_share=keep,
        paused=paused == 1,
        devices=tuple(_read_device(raw, i) for i in range(count)),
    )


def _read_device(raw: bytes, index: int) -> DeviceLimits:
    at = layout.LIMITS_DEVICES + index * layout.DEVICE_LIMITS_SIZE
    memory, share, policy, priority = struct.unpack_from("<QIIi", raw, at + layout.DEVICE_LIMITS_MEMORY_BYTES)
    return DeviceLimits(_text(raw[at : at + layout.UUID_BYTES]), memory, share, SharePolicy(policy), priority)
