"""Checks whether a tenant can be suspended, and whether there is room to resume it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Mode, State, SuspendedProcess, Way
from vgpud.planner.places import saved_on
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.planner.words import shown_bytes

SUSPENDABLE = (Mode.PRELOAD, Mode.EXCLUSIVE)

# First driver branch that can suspend a process: CUDA driver API, "CUDA checkpointing".
SUSPEND_BRANCH = 570


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory in bytes: what is available, the reserve that must stay free, and the limit for all
    suspended tenants together (None: no limit).
    """

    available_bytes: int
    reserve_bytes: int
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Evictable:
    """What libvgpu can evict of a tenant's memory, and what would stay on the device. `why_not` says why
    libvgpu does not evict the tenant: a process does not follow orders, or less than half of the memory can
    be evicted. It is empty if libvgpu evicts the tenant.
    """

    bytes: int = 0
    stays_bytes: int = 0
    why_not: str = ""


#: Kinds of memory that libvgpu reports as unevictable, in the order of enum vgpu_stay.
REPORTED_KINDS = ("small allocations", "pools", "managed", "graphs")

#: Memory that NVML counts and that no request to libvgpu names: contexts with their modules, and arrays.
MEASURED_KIND = "contexts and arrays"


def stays_by_kind(
    stays_bytes: int, unevictable_bytes: int, reported_bytes: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    """What `stays_bytes` on a device consist of, the largest first. `unevictable_bytes` are the tenant's
    allocations that libvgpu cannot evict, `reported_bytes` those of REPORTED_KINDS.

    `stays_bytes` come from NVML, which does not count managed memory for a process. Managed memory is listed
    although `stays_bytes` do not contain it.
    """
    kinds = dict(zip(REPORTED_KINDS, reported_bytes, strict=True))
    kinds["physical memory"] = max(unevictable_bytes - sum(reported_bytes), 0)
    counted = sum(kinds.values()) - kinds["managed"]
    kinds[MEASURED_KIND] = max(stays_bytes - counted, 0)
    return tuple(sorted(((kind, size) for kind, size in kinds.items() if size), key=lambda one: -one[1]))


def evictable(movable_bytes: int, used_bytes: int, context_bytes: int, follows: bool) -> Evictable:
    """What libvgpu can evict of a tenant. `used_bytes` are allocations, of which `movable_bytes` can be
    evicted; contexts never can. `follows`: do all processes follow the lease's orders?
    """
    stays = max(used_bytes + context_bytes - movable_bytes, 0)
    why_not = ""
    if not follows:
        why_not = "a process of it has not followed the last order"
    elif movable_bytes <= 0:
        why_not = "it has no memory that libvgpu can evict"
    elif used_bytes > 2 * movable_bytes:
        why_not = f"libvgpu can evict {shown_bytes(movable_bytes)} of its {shown_bytes(used_bytes)} only"
    return Evictable(movable_bytes if follows else 0, stays, why_not)


def unevictable(allocation: Allocation, found: Evictable) -> VgpuError:
    """The error for a suspension that libvgpu cannot make by eviction."""
    return VgpuError(
        ErrorCode.SUSPEND_FAILED,
        f"allocation {allocation.id} cannot be suspended by eviction: {found.why_not}",
        "use 'vgpuctl suspend --deep', by which the driver saves what libvgpu cannot evict",
    )


def deepened(process: SuspendedProcess) -> SuspendedProcess:
    """The record of an evicted process after the driver has saved what libvgpu left on the device."""
    return replace(process, way=Way.DEEP, memory_bytes=process.memory_bytes + process.stays_bytes)


def surfaced(process: SuspendedProcess) -> SuspendedProcess:
    """The record of a process of way DEEP after the driver has restored it."""
    return replace(
        process, way=Way.SWAP, memory_bytes=max(process.memory_bytes - process.stays_bytes, 0), saved_on=""
    )


def check_mode(allocation: Allocation, wanted: str = "suspended") -> None:
    """Checks that the driver can suspend tenants of the allocation's mode. A move needs a suspension too;
    `wanted` is the verb for the error ("suspended" or "moved"). Raises VgpuError(UNSUPPORTED).
    """
    for part in allocation.slices:
        if part.mode not in SUSPENDABLE or part.mig is not None:
            why = (
                "the driver does not suspend MPS clients"
                if part.mode is Mode.MPS
                else "it is in a MIG instance"
            )
            raise VgpuError(
                ErrorCode.UNSUPPORTED,
                f"allocation {allocation.id} in mode {part.mode.value} cannot be {wanted}: {why}",
                f"end its processes, then release it: vgpuctl release {allocation.id}"
                if wanted == "moved"
                else "allocate with isolation quota or device, on a device without MIG",
            )


def check_driver(node: Node) -> None:
    """Checks that the driver can suspend processes. A driver of unknown version passes, because vgpu-suspend
    looks for the driver's functions. Raises VgpuError(UNSUPPORTED).
    """
    branch = node.driver_version.split(".")[0]
    if branch.isdigit() and int(branch) < SUSPEND_BRANCH:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"driver {node.driver_version} cannot suspend a process",
            f"branch {SUSPEND_BRANCH} is the first that can do it",
        )


def saved_bytes(allocation: Allocation) -> tuple[int, int]:
    """Bytes of host memory that the suspended processes take: what libvgpu has evicted to its buffers, and
    what the driver has saved.
    """
    evicted = saved = 0
    for process in allocation.suspended:
        by_driver = {Way.CHECKPOINT: process.memory_bytes, Way.DEEP: process.stays_bytes}.get(process.way, 0)
        saved += by_driver
        evicted += max(process.memory_bytes - by_driver, 0)
    return evicted, saved


def check_host(wanted_bytes: int, held: int, host: HostMemory, ordered_bytes: int = 0) -> None:
    """Checks that the host has memory for a suspension. Raises VgpuError(NO_CAPACITY). `held` counts the
    bytes that tenants take or have ordered; `ordered_bytes` of them are not yet taken from the host.
    """
    room = host.available_bytes - host.reserve_bytes - ordered_bytes
    if wanted_bytes > room:
        ordered = f" and {shown_bytes(ordered_bytes)} are ordered for other tenants" if ordered_bytes else ""
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"{shown_bytes(wanted_bytes)} of the tenant's device memory do not fit into host memory: "
            f"{shown_bytes(host.available_bytes)} are available, of which "
            f"{shown_bytes(host.reserve_bytes)} must stay free{ordered}",
            "try again when the other changes have ended"
            if ordered
            else "free memory on the host, or lower pool.host_memory_reserve in the policy",
        )
    if host.limit_bytes is not None and held + wanted_bytes > host.limit_bytes:
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"{shown_bytes(wanted_bytes)} of device memory exceed the host memory for suspended tenants: "
            f"{shown_bytes(held)} of {shown_bytes(host.limit_bytes)} are taken",
            "release an allocation that takes host memory, or raise pool.host_memory in the policy",
        )


def check_room(allocation: Allocation, node: Node, use: Mapping[str, DeviceUse]) -> None:
    """Checks that the allocation can be resumed on its devices. `use` counts the other allocations, and the
    memory that this one left on the device.

    Raises VgpuError: NO_SUCH_DEVICE, NO_CAPACITY, DEVICE_IN_USE.
    """
    _check_places(allocation, node)
    for part in allocation.slices:
        device = node.device(part.device_uuid)
        if device is None:
            raise VgpuError(
                ErrorCode.NO_SUCH_DEVICE,
                f"device {part.device_uuid} of allocation {allocation.id} is no longer on this node",
                "see 'vgpuctl devices'; the allocation stays suspended",
            )
        others = use.get(part.device_uuid, EMPTY)
        conflict = others.conflict(part, device.index, allocation.id)
        if conflict:
            hint = "release what is on the device first; the allocation stays suspended"
            raise VgpuError(ErrorCode.DEVICE_IN_USE, conflict, hint)
        free = device.memory_usable_bytes - others.memory_bytes + allocation.stays_bytes
        if part.mode is Mode.PRELOAD and part.memory_bytes > free:
            raise VgpuError(
                ErrorCode.NO_CAPACITY,
                f"{shown_bytes(part.memory_bytes)} do not fit on device {device.index}: other allocations "
                f"leave {shown_bytes(free)} of {shown_bytes(device.memory_usable_bytes)}",
                "release, shrink or suspend another allocation there; this one stays suspended",
            )


def _check_places(allocation: Allocation, node: Node) -> None:
    """Checks that the devices from which the processes were saved still exist, because the restore names them
    to the driver.
    """
    for process in allocation.suspended:
        gone = [uuid for uuid in saved_on(process, allocation) if node.device(uuid) is None]
        if gone:
            raise VgpuError(
                ErrorCode.NO_SUCH_DEVICE,
                f"process {process.pid} of allocation {allocation.id} was saved on device {gone[0]}, which "
                "is no longer on this node",
                "see 'vgpuctl devices'; the allocation stays suspended",
            )


def check_card(allocation: Allocation, node: Node, kept_bytes: int = 0) -> None:
    """Checks that the cards have free memory for the resume, according to NVML. (If a restore fails for lack
    of memory, the process can never be restored: NVIDIA/cuda-checkpoint issue 44.) `kept_bytes` of the
    tenant's memory are still on the card. Raises VgpuError(NO_CAPACITY).
    """
    uuids = {part.device_uuid for part in allocation.slices}
    wanted = sum(process.memory_bytes for process in allocation.suspended) - kept_bytes
    devices = [device for device in node.devices if device.uuid in uuids]
    free = sum(d.memory_total_bytes - d.memory_reserved_bytes - d.memory_used_bytes for d in devices)
    if wanted > free:
        raise VgpuError(
            ErrorCode.NO_CAPACITY,
            f"{shown_bytes(wanted)} of allocation {allocation.id} do not fit on its "
            f"{'device' if len(devices) == 1 else 'devices'}: {shown_bytes(max(0, free))} are free",
            "see 'vgpuctl devices' for the processes that use them; the allocation stays suspended",
        )


def is_away(allocation: Allocation) -> bool:
    """Is the allocation suspended? It then uses no compute time, and no device memory except what could not
    be moved.
    """
    return allocation.state is State.SUSPENDED
