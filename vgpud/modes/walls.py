"""Memory walls: the driver limits the memory of a tenant's control group, whatever its programs do.

Drivers from branch 615 on have nvmlDeviceSetMemoryLimits_v1 (NVML API reference, "nvmlSetMemoryLimits_v1_t"):
a soft and a hard limit of a cgroup v2 on a device; only root may set them; MIG devices have none; 0 and
NVML_DEVICE_MEMORY_LIMIT_MAX clear them, and so does the removal of the group. Not run on a card.

The group is the container's, or one that vgpud makes for a program that `vgpuctl run` starts. A user cannot
leave that one: to move a process, the kernel asks for write access to the nearest group above both
(cgroups(7)).
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Mode
from vgpud.proc import pin

log = structlog.get_logger(__name__)

#: Where cgroup v2 is mounted: alone, or beside version 1.
_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


class Limiter(Protocol):
    """The two calls of NVML. Both block, and raise VgpuError: UNSUPPORTED if driver or device lack them."""

    def memory_limit(self, uuid: str, group: str) -> int | None:
        """The hard limit of a group in bytes; None if it has none."""
        ...

    def set_memory_limit(self, uuid: str, group: str, limit_bytes: int | None) -> None: ...


@dataclass(frozen=True, slots=True)
class WallWorld:
    """Callbacks to the node. `wanted`: does the policy want walls on a device (its UUID)?"""

    limiter: Limiter
    allocations: Callable[[], Iterable[Allocation]]
    node: Callable[[], Node]
    wanted: Callable[[str], bool]


def wall_limits(holders: Sequence[Allocation], devices: Iterable[Device], own: bool) -> Mapping[str, int]:
    """The limit in bytes of a group on each device, by UUID. `holders` are the allocations of its processes.

    During a move both devices count. In a group that vgpud made (`own`), devices of other allocations
    are closed: a program that drops its environment sees them too.
    """
    limits = {}
    for device in devices:
        here = [
            part.memory_bytes
            for allocation in holders
            for part in allocation.slices
            if part.mode is Mode.PRELOAD
            and part.mig is None
            and device.uuid in (part.device_uuid, part.other_uuid)
        ]
        if here or own:
            limits[device.uuid] = sum(here)
    return limits


class Walls:
    """The walls of all tenants. A start finds them again: vgpud's own groups are folders named by allocation,
    and containers' groups are in the records of the allocations.
    """

    def __init__(self, parent: str, world: WallWorld) -> None:
        """`parent` is the name, below the mount of cgroup v2, of the folder for vgpud's own groups."""
        mount = next((path for path in _MOUNTS if (path / "cgroup.procs").exists()), None)
        self._mount = mount
        self._parent = None if mount is None else mount / parent
        self._world = world
        self._able: dict[tuple[str, str], bool] = {}  # the driver's answer, by its version and device
        self._standing: set[str] = set()
        self._orphans: set[str] = set()  # groups whose processes outlived their allocation

    def stands(self, allocation_id: str) -> bool:
        """Does the driver enforce the memory limit of this allocation?"""
        return allocation_id in self._standing

    def own_groups(self) -> frozenset[str]:
        """The ids of allocations that have, or had, a group that vgpud made."""
        if self._parent is None or not self._parent.is_dir():
            return frozenset()
        return frozenset(entry.name for entry in self._parent.iterdir() if entry.is_dir())

    async def build(self, allocation: Allocation) -> None:
        """Makes the tenant's group, if it wants one, sets its limits, and moves the tenant's process into it.

        If the driver or the kernel refuse, libvgpu alone limits the memory; the log has the reason.
        """
        if self._may():
            await asyncio.to_thread(self._build, allocation)

    async def keep(self, allocation: Allocation) -> None:
        """Brings the limits of the tenant's group in step with the allocation. Raises VgpuError."""
        if self._may():
            await asyncio.to_thread(self._keep, allocation)

    async def drop(self, allocation: Allocation) -> None:
        """Removes the tenant's wall. If processes are left in the group, they get no more memory."""
        if self._may():
            await asyncio.to_thread(self._drop, allocation)

    async def remove(self, allocation_id: str) -> None:
        """Removes a group that vgpud made for an allocation that does not exist any more."""
        await asyncio.to_thread(self._remove, allocation_id)

    # --- in threads

    def _build(self, allocation: Allocation) -> None:
        lifetime = allocation.request.lifetime
        for orphan in tuple(self._orphans):
            self._remove(orphan)
        try:
            if (
                allocation.request.own_cgroup
                and lifetime.pid
                and not lifetime.cgroup
                and self._can(allocation)
            ):
                self._own(allocation.id).mkdir(exist_ok=True)
            self._keep(allocation)
            if self.stands(allocation.id) and self._own(allocation.id).is_dir():
                self._enter(allocation)
        except (VgpuError, OSError) as error:
            self._standing.discard(allocation.id)
            with suppress(VgpuError):
                self._remove(allocation.id)
            why = f"{error}; libvgpu alone enforces the memory limit"
            log.warning(LogEvent.MEMORY_WALL_REFUSED, allocation=allocation.id, why=why)

    def _enter(self, allocation: Allocation) -> None:
        """Moves the tenant's process. The pidfd proves that it runs, up to the line before the write."""
        lifetime = allocation.request.lifetime
        pidfd = pin(lifetime.pid, lifetime.start_ticks)
        if pidfd is None:
            return
        with suppress(ProcessLookupError):
            (self._own(allocation.id) / "cgroup.procs").write_text(str(lifetime.pid))
        pidfd.close()

    def _keep(self, allocation: Allocation) -> None:
        group = self._group(allocation)
        if group is None or not self._can(allocation):
            self._standing.discard(allocation.id)
            return
        own = not allocation.request.lifetime.cgroup
        holders = [allocation, *self._others(allocation, own)]
        for uuid, limit_bytes in wall_limits(holders, self._devices(), own).items():
            self._world.limiter.set_memory_limit(uuid, str(group), limit_bytes)
        self._standing.add(allocation.id)

    def _drop(self, allocation: Allocation) -> None:
        self._standing.discard(allocation.id)
        group = self._group(allocation)
        if group is None:
            return
        own = not allocation.request.lifetime.cgroup
        if own:
            self._remove(allocation.id)
            return
        limits = wall_limits(self._others(allocation, own), self._devices(), own)
        full = bool(_members(group))
        for uuid in wall_limits([allocation], self._devices(), own):
            limit_bytes = limits.get(uuid, 0 if full else None)
            with suppress(VgpuError):  # the device may be lost, the group gone
                self._world.limiter.set_memory_limit(uuid, str(group), limit_bytes)

    def _remove(self, allocation_id: str) -> None:
        """Without its processes the group goes; the driver drops the limits of a group with the group."""
        group = self._own(allocation_id)
        self._orphans.discard(allocation_id)
        if not group.is_dir():
            return
        with suppress(OSError):
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
            return
        self._orphans.add(allocation_id)
        for device in self._devices():
            with suppress(VgpuError):
                self._world.limiter.set_memory_limit(device.uuid, str(group), 0)

    # --- facts

    def _own(self, allocation_id: str) -> Path:
        assert self._parent is not None
        return self._parent / allocation_id

    def _group(self, allocation: Allocation) -> Path | None:
        """The tenant's group; None if it has none, or none in cgroup v2."""
        if self._mount is None or self._parent is None:
            return None
        inode, _, path = allocation.request.lifetime.cgroup.partition(" ")
        if not path:
            own = self._own(allocation.id)
            return own if own.is_dir() else None
        group = Path(path)
        with suppress(OSError):
            if (group / "cgroup.procs").exists() and group.stat().st_dev == self._mount.stat().st_dev:
                return group if group.stat().st_ino == int(inode) else None
        return None

    def _others(self, allocation: Allocation, own: bool) -> list[Allocation]:
        """Other allocations of the same container."""
        cgroup = allocation.request.lifetime.cgroup
        if own or not cgroup:
            return []
        return [
            one
            for one in self._world.allocations()
            if one.id != allocation.id and one.request.lifetime.cgroup == cgroup
        ]

    def _can(self, allocation: Allocation) -> bool:
        """Has every slice a device on which policy and driver give walls?"""
        able = {device.uuid for device in self._devices()}
        parts = [part for part in allocation.slices if part.mode is Mode.PRELOAD]
        return bool(parts) and all(
            part.mig is None and part.device_uuid in able and self._world.wanted(part.device_uuid)
            for part in parts
        )

    def _well(self) -> list[Device]:
        return [d for d in self._world.node().devices if d.health.answers and not d.mig.current]

    def _may(self) -> bool:
        """False if no device has walls, which needs no call."""
        version = self._world.node().driver_version
        return self._mount is not None and any(self._able.get((version, d.uuid), True) for d in self._well())

    def _devices(self) -> list[Device]:
        """The devices on which the driver limits the memory of groups. Each is asked once."""
        found = []
        for device in self._well():
            key = (self._world.node().driver_version, device.uuid)
            if key not in self._able:
                self._able[key] = self._mount is not None and self._ask(device.uuid, self._mount)
            if self._able[key]:
                found.append(device)
        return found

    def _ask(self, uuid: str, mount: Path) -> bool:
        assert self._parent is not None
        try:
            self._world.limiter.memory_limit(uuid, str(mount))
        except VgpuError as error:
            if error.code is ErrorCode.UNSUPPORTED:
                return False
        try:
            self._parent.mkdir(exist_ok=True)
            _enable(mount, self._parent)
            self._world.limiter.memory_limit(uuid, str(self._parent))
        except (VgpuError, OSError) as error:
            why = f"{error}; libvgpu alone enforces memory limits on the device"
            log.warning(LogEvent.MEMORY_WALL_REFUSED, device=uuid, why=why)
            return False
        return True


def _enable(*folders: Path) -> None:
    """Lets groups below have the kernel's controller of device memory (Linux 6.14), where there is one."""
    for folder in folders:
        if "dmem" in (folder / "cgroup.controllers").read_text().split():
            (folder / "cgroup.subtree_control").write_text("+dmem")


def _members(group: Path) -> list[str]:
    found: list[str] = []
    for folder, _, _ in os.walk(group):
        with suppress(OSError):
            found += (Path(folder) / "cgroup.procs").read_text().split()
    return found
