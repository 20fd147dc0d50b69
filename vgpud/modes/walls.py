"""Memory walls: the driver limits the device memory of a tenant's control group, whatever its programs do.

Drivers from branch 615 on have nvmlDeviceSetMemoryLimits_v1 (NVML API reference, "nvmlSetMemoryLimits_v1_t"):
a soft and a hard limit of a cgroup v2 on a device. Only root may set them, and MIG devices have none. A soft
limit of 0 with the hard limit NVML_DEVICE_MEMORY_LIMIT_MAX clears them, and so does the removal of the group.
This was not run on a card.

The group is the container's, or one that vgpud makes for a program that `vgpuctl run` starts. An allocation
of the kubelet has the groups of all containers that use it. A user cannot leave a group made by vgpud: to
move a process, the kernel asks for write access to the nearest group above both (cgroups(7)).
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.marks import Mark, MarkKind
from vgpud.model.tenancy import Allocation, Mode
from vgpud.proc import members_of, pin

log = structlog.get_logger(__name__)

#: Where cgroup v2 is mounted: as the only version, or beside version 1.
_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_CONTROLLERS = ("controllers", "subtree_control")
#: The modes whose slices can have a memory wall, and what else limits the memory of a slice in each mode.
_WALLED = {Mode.PRELOAD: "libvgpu", Mode.MPS: "MPS"}


class Limiter(Protocol):
    """The two NVML calls for memory limits. Both block. Both raise VgpuError: UNSUPPORTED if the driver or
    the device does not support them.
    """

    def memory_limit(self, uuid: str, group: str) -> int | None:
        """The hard limit of a control group in bytes; None if it has none."""
        ...

    def set_memory_limit(self, uuid: str, group: str, limit_bytes: int | None) -> None: ...


@dataclass(frozen=True, slots=True)
class WallWorld:
    """Callbacks to the node. `wanted` says whether the policy wants memory walls on a device (its UUID).
    `containers` returns the control groups of the containers that a hook reported for an allocation, in the
    form of `Lifetime.cgroup`.
    """

    limiter: Limiter
    allocations: Callable[[], Iterable[Allocation]]
    node: Callable[[], Node]
    wanted: Callable[[str], bool]
    containers: Callable[[Allocation], Iterable[str]] = lambda _: ()


def wall_limits(holders: Sequence[Allocation], devices: Iterable[Device], own: bool) -> Mapping[str, int]:
    """The limit of a control group on each device, in bytes by UUID. `holders` are the allocations whose
    processes are in the group.

    During a move the limit holds on both devices. A tenant that was resized below its use may hold more than
    its limit. While it is suspended, the limit is what it holds, because all of that must come back to the
    device. In a group that vgpud made (`own`), all other devices get a limit of nothing, because a program
    that drops its environment could use them too.
    """
    limits = {}
    for device in devices:
        here = [
            max(part.memory_bytes, allocation.held_bytes)
            for allocation in holders
            for part in allocation.slices
            if part.mode in _WALLED
            and part.mig is None
            and device.uuid in (part.device_uuid, part.other_uuid)
        ]
        if here or own:
            limits[device.uuid] = sum(here)
    return limits


class Walls:
    """The memory walls of all tenants. After a restart vgpud finds them again: its own groups are folders
    named by allocation, and containers' groups are in the records of the allocations.
    """

    def __init__(self, parent: str, world: WallWorld) -> None:
        """`parent` is the name, below the mount of cgroup v2, of the folder for vgpud's own groups."""
        mount = next((path for path in _MOUNTS if (path / "cgroup.procs").exists()), None)
        self._mount = mount
        self._parent = None if mount is None else mount / parent
        self._world = world
        # Whether the driver supports limits, by driver version and device.
        self._able: dict[tuple[str, str], bool] = {}
        self._standing: set[str] = set()
        # for each allocation or device: why the driver refused a limit, and when (in ns)
        self._refused: dict[str, tuple[str, int]] = {}
        self._orphans: set[str] = set()  # allocation ids of groups whose processes outlived their allocation

    def stands(self, allocation_id: str) -> bool:
        """True if the driver enforces the memory limit of this allocation."""
        return allocation_id in self._standing

    def refusal(self, allocation: Allocation) -> Mark | None:
        """A mark with the reason if the driver or the kernel refused the allocation's memory wall; None if
        the wall stands, or none was refused.
        """
        for name in (allocation.id, *(part.device_uuid for part in allocation.slices)):
            if name in self._refused and not self.stands(allocation.id):
                why, since_unix_ns = self._refused[name]
                return Mark(allocation.id, MarkKind.NO_WALL, "", 0, why, since_unix_ns)
        return None

    def own_groups(self) -> frozenset[str]:
        """The allocation ids of all groups that vgpud made; the allocation may no longer exist."""
        if self._parent is None or not self._parent.is_dir():
            return frozenset()
        return frozenset(entry.name for entry in self._parent.iterdir() if entry.is_dir())

    async def build(self, allocation: Allocation) -> None:
        """Makes the tenant's control group if needed, sets its limits, and moves the tenant's process into
        it.

        If the driver or the kernel refuses, only libvgpu or MPS limits the memory, and the log has the
        reason.
        """
        if self._may():
            await asyncio.to_thread(self._build, allocation)

    async def keep(self, allocation: Allocation) -> None:
        """Adjusts the limits of the tenant's control group to the allocation. Raises VgpuError."""
        if self._may():
            await asyncio.to_thread(self._keep, allocation)

    async def drop(self, allocation: Allocation) -> None:
        """Removes the tenant's memory wall. Processes that are left in the group get no more memory."""
        if self._may():
            await asyncio.to_thread(self._drop, allocation)

    async def remove(self, allocation_id: str) -> None:
        """Removes the control group of an allocation that no longer exists."""
        await asyncio.to_thread(self._remove, allocation_id)

    # --- methods that block, for threads

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
                _make(self._own(allocation.id))
            self._keep(allocation)
            if self.stands(allocation.id) and self._own(allocation.id).is_dir():
                self._enter(allocation)
        except (VgpuError, OSError) as error:
            self._standing.discard(allocation.id)
            with suppress(VgpuError):
                self._remove(allocation.id)
            (limiter, *_) = (_WALLED[part.mode] for part in allocation.slices if part.mode in _WALLED)
            why = f"{error}; {limiter} alone enforces the memory limit"
            self._refused[allocation.id] = why, time.time_ns()
            log.warning(LogEvent.CGROUP_DEVICE_MEMORY_LIMIT_NOT_SET, allocation=allocation.id, why=why)

    def _enter(self, allocation: Allocation) -> None:
        """Moves the tenant's process into the group. A pidfd proves that the process with this pid is still
        the right one, up to the line before the write.
        """
        lifetime = allocation.request.lifetime
        pidfd = pin(lifetime.pid, lifetime.start_ticks)
        if pidfd is None:
            return
        with suppress(ProcessLookupError):
            (self._own(allocation.id) / "cgroup.procs").write_text(str(lifetime.pid))
        pidfd.close()

    def _keep(self, allocation: Allocation) -> None:
        groups = self._groups(allocation)
        if not groups or not self._can(allocation):
            self._standing.discard(allocation.id)
            return
        for cgroup, group in groups.items():
            holders = [allocation, *self._others(allocation, cgroup)]
            for uuid, limit_bytes in wall_limits(holders, self._devices(), not cgroup).items():
                self._world.limiter.set_memory_limit(uuid, str(group), limit_bytes)
        self._standing.add(allocation.id)

    def _drop(self, allocation: Allocation) -> None:
        self._standing.discard(allocation.id)
        self._refused.pop(allocation.id, None)
        for cgroup, group in self._groups(allocation).items():
            if not cgroup:
                self._remove(allocation.id)
                continue
            limits = wall_limits(self._others(allocation, cgroup), self._devices(), False)
            full = bool(members_of(group))
            for uuid in wall_limits([allocation], self._devices(), False):
                limit_bytes = limits.get(uuid, 0 if full else None)
                with suppress(VgpuError):  # the device may be lost, or the group removed
                    self._world.limiter.set_memory_limit(uuid, str(group), limit_bytes)

    def _remove(self, allocation_id: str) -> None:
        """Removes an allocation's own group, and so the driver's limits of the group. If processes are left
        in the group, they get no more memory.
        """
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

    def _groups(self, allocation: Allocation) -> dict[str, Path]:
        """The folders of the tenant's control groups in cgroup v2, by container; "" for vgpud's own group."""
        if self._mount is None or self._parent is None:
            return {}
        found = {one: group for one in self._containers(allocation) if (group := self._folder(one))}
        own = self._own(allocation.id)
        return found if found or not own.is_dir() else {"": own}

    def _folder(self, cgroup: str) -> Path | None:
        """The folder of a container's control group; None if it is gone or not in cgroup v2."""
        inode, _, path = cgroup.partition(" ")
        group = Path(path)
        with suppress(OSError):
            if (group / "cgroup.procs").exists() and group.stat().st_dev == self._mount_device():
                return group if group.stat().st_ino == int(inode) else None
        return None

    def _mount_device(self) -> int:
        assert self._mount is not None
        return self._mount.stat().st_dev

    def _containers(self, allocation: Allocation) -> set[str]:
        return {allocation.request.lifetime.cgroup, *self._world.containers(allocation)} - {""}

    def _others(self, allocation: Allocation, cgroup: str) -> list[Allocation]:
        """Returns the other allocations that the same container uses."""
        return [
            one
            for one in self._world.allocations()
            if cgroup and one.id != allocation.id and cgroup in self._containers(one)
        ]

    def _can(self, allocation: Allocation) -> bool:
        """True if policy and driver support a memory wall on the device of every slice."""
        able = {device.uuid for device in self._devices()}
        parts = [part for part in allocation.slices if part.mode in _WALLED]
        return bool(parts) and all(
            part.mig is None and part.device_uuid in able and self._world.wanted(part.device_uuid)
            for part in parts
        )

    def _well(self) -> list[Device]:
        return [d for d in self._world.node().devices if d.health.answers and not d.mig.current]

    def _may(self) -> bool:
        """False if all devices are known to lack memory walls, so that no thread is needed."""
        version = self._world.node().driver_version
        return self._mount is not None and any(self._able.get((version, d.uuid), True) for d in self._well())

    def _devices(self) -> list[Device]:
        """The devices on which the driver can limit the memory of groups. Each device is asked once per
        driver version.
        """
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
            _make(self._parent)
            _enable(mount, self._parent)
            self._world.limiter.memory_limit(uuid, str(self._parent))
        except (VgpuError, OSError) as error:
            why = f"{error}; without it libvgpu or MPS alone enforces memory limits on the device"
            self._refused[uuid] = why, time.time_ns()
            log.warning(LogEvent.CGROUP_DEVICE_MEMORY_LIMIT_NOT_SET, device=uuid, why=why)
            return False
        return True


def _make(group: Path) -> None:
    """Makes a control group that all users can read, because programs look for their limits in it. The umask
    of vgpud would leave it to root.
    """
    with suppress(FileExistsError):
        group.mkdir()
        group.chmod(0o755)


def _enable(*folders: Path) -> None:
    """Enables the kernel's controller of device memory (Linux 6.14) for the groups below these folders, if
    the kernel has it.
    """
    for folder in folders:
        known, enabled = ((folder / f"cgroup.{name}").read_text().split() for name in _CONTROLLERS)
        # an enabled controller is not enabled again: vgpud's unit may not write to the root group
        if "dmem" in known and "dmem" not in enabled:
            (folder / "cgroup.subtree_control").write_text("+dmem")
