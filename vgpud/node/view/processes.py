"""Lists processes with their allocation and device. The processes come from NVML and from the modes."""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

import structlog

from vgpud import proc
from vgpud.hardware.holders import command
from vgpud.model.device import Device, DeviceProcess
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Mode, Slice
from vgpud.model.view import Metered, NodeProcess
from vgpud.modes.base import Effector
from vgpud.node.devices.inventory import Inventory
from vgpud.node.store.book import Book

log = structlog.get_logger(__name__)


FindOwners = Callable[[tuple[Allocation, ...], Iterable[int]], Mapping[int, str]]


class Processes:
    """Lists processes. `find_owners` returns, by pid, the allocations of processes that no mode counts; it
    runs in a thread. `is_bypassed` says whether the survey of bypasses has marked an allocation.
    """

    def __init__(
        self,
        book: Book,
        inventory: Inventory,
        effectors: Mapping[Mode, Effector],
        find_owners: FindOwners,
        is_bypassed: Callable[[Allocation], bool] = lambda _: False,
    ) -> None:
        self._book = book
        self._inventory = inventory
        self._effectors = effectors
        self._find_owners = find_owners
        self._is_bypassed = is_bypassed

    async def listed(
        self, metered: Metered, standing: Callable[[Allocation], str] = lambda _: ""
    ) -> tuple[NodeProcess, ...]:
        """The processes, sorted by device and pid. Never raises: a process that cannot be read now is left
        out.
        """
        pairs = [
            (allocation, part)
            for allocation in tuple(self._book)
            if self._is_bypassed(allocation)
            or any(meter.processes for meter in metered.meters.get(allocation.id, ()))
            for part in allocation.slices
        ]
        pids = await asyncio.gather(*(self._pids(allocation, part) for allocation, part in pairs))
        everything = tuple(self._book)
        # A process that no mode counts does not always evade the limits: it can be new, or the mode may not
        # have answered.
        answered = {pair[0].id for pair, found in zip(pairs, pids, strict=True) if found is not None}
        past = {one.id for one in everything if one.id in answered and self._is_bypassed(one)}
        found = await asyncio.to_thread(self._described, everything, pairs, pids, past)
        stands = {allocation.id: standing(allocation) for allocation in everything}
        return tuple(replace(one, standing=stands.get(one.allocation_id, "")) for one in found)

    async def _pids(self, allocation: Allocation, part: Slice) -> tuple[int, ...] | None:
        """The pids in a slice; None if the mode does not answer."""
        try:
            return await self._effectors[part.mode].tenants(allocation, part, soon=True)
        except VgpuError as error:
            log.debug(LogEvent.ALLOCATION_PROCESSES_UNREADABLE, allocation=allocation.id, why=str(error))
            return None

    def _described(
        self,
        everything: tuple[Allocation, ...],
        pairs: list[tuple[Allocation, Slice]],
        pids: list[tuple[int, ...] | None],
        bypassed: Container[str],
    ) -> tuple[NodeProcess, ...]:
        devices = self._inventory.node.devices
        silent = {
            part.device_uuid: part.mode.value
            for (_, part), found in zip(pairs, pids, strict=True)
            if found is None
        }
        memory = {(device.uuid, process.pid): process.memory_bytes for device, process in _listed(devices)}
        owners: dict[tuple[str, int], tuple[Allocation, Slice]] = {}
        for pair, found in zip(pairs, pids, strict=True):
            for pid in found or ():
                owners[pair[1].device_uuid, pid] = pair
        strays = self._strays(everything, memory.keys() - owners.keys())
        order = {device.uuid: device.index for device in devices}
        keys = sorted({*memory, *owners}, key=lambda key: (order.get(key[0], -1), key[1]))
        rows = []
        for uuid, pid in keys:
            held = owners.get((uuid, pid)) or strays.get((uuid, pid))
            row = self._process(uuid, pid, order.get(uuid, 0), memory.get((uuid, pid)), held)
            if (uuid, pid) not in owners:
                row = replace(row, silent_mode=silent.get(uuid, ""))
            is_past = (uuid, pid) in strays and row.allocation_id in bypassed
            rows.append(replace(row, limited=not is_past))
        return tuple(rows)

    def _strays(
        self, everything: tuple[Allocation, ...], uncounted: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], tuple[Allocation, Slice | None]]:
        """Returns the processes that no mode counts, but which belong to an allocation."""
        keys = tuple(uncounted)
        held = {allocation.id: allocation for allocation in everything} if keys else {}
        owners = self._find_owners(everything, {pid for _, pid in keys}) if held else {}
        found: dict[tuple[str, int], tuple[Allocation, Slice | None]] = {}
        for uuid, pid in keys:
            allocation = held.get(owners.get(pid, ""))
            if allocation is not None:
                part = next((part for part in allocation.slices if part.device_uuid == uuid), None)
                found[uuid, pid] = allocation, part
        return found

    def _process(
        self,
        uuid: str,
        pid: int,
        index: int,
        memory: int | None,
        held: tuple[Allocation, Slice | None] | None,
    ) -> NodeProcess:
        allocation, part = held or (None, None)
        return NodeProcess(
            pid=pid,
            uid=proc.owner(pid),
            command=command(pid),
            allocation_id="" if allocation is None else allocation.id,
            device_uuid=uuid,
            device_index=index,
            memory_bytes=memory,
            mode="" if part is None else part.mode.value,
            label="" if allocation is None else allocation.request.label,
        )


def _listed(devices: tuple[Device, ...]) -> list[tuple[Device, DeviceProcess]]:
    return [(device, process) for device in devices for process in device.processes]
