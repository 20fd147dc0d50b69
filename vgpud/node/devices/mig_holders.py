"""Names what uses MIG instances (allocation, pid, user, command), and lists devices with their instances."""

import pwd
from collections.abc import Mapping

from vgpud import proc
from vgpud.hardware.holders import command
from vgpud.model.device import Device, GpuInstance
from vgpud.model.mig_view import MigDevice, MigFree, MigInstance, MigProcess
from vgpud.node.devices.mig_pools import Pools
from vgpud.node.store.book import Book
from vgpud.planner import layouts
from vgpud.planner.geometry import SlotKey, geometry_for
from vgpud.planner.mig_parts import part_name
from vgpud.planner.pool import Pool
from vgpud.planner.terms import bare_name
from vgpud.planner.transitions import room_for
from vgpud.planner.use import Place


class Holders:
    def __init__(self, book: Book, pools: Pools) -> None:
        self._book = book
        self._pools = pools

    def sentence(self, device: Device, key: SlotKey) -> str:
        """A sentence on what uses a GPU instance, or its first compute instance in use. The sentence becomes
        part of a refusal.
        """
        found = [i for i in self.instances(device) if (i.profile_id, i.placement) == key]
        found.sort(key=lambda i: (not i.processes, not i.allocation_id, i.own))
        start = f"memory slice {key[1].start} of device {device.index}"
        if not found:
            return f"an instance of profile {key[0]} at {start} is gone"
        return self.sentence_of(device, found[0])

    def sentence_of(self, device: Device, instance: MigInstance) -> str:
        what = f"{instance.profile_name} at memory slice {instance.placement.start} of device {device.index}"
        if instance.processes:
            who = ", ".join(_named(process) for process in instance.processes[:4])
            more = f" and {len(instance.processes) - 4} more" if len(instance.processes) > 4 else ""
            held = f" of allocation {instance.allocation_id}" if instance.allocation_id else ""
            return f"{what}{held} is in use by {who}{more}"
        if instance.allocation_id:
            owners = (self._book.get(name).request.owner.uid for name in instance.allocation_id.split(", "))
            users = ", ".join(dict.fromkeys(map(_user, owners)))
            return f"{what} is held by allocation {instance.allocation_id} of user {users}"
        if instance.gpu_instance_id is None:
            return f"{what} belongs to a layout that is applied when device {device.index} is idle"
        return f"{what} is idle" if instance.own else f"{what} was not made by vgpud"

    def device(self, device: Device) -> MigDevice:
        layout = self._pools.layout(device)
        words: tuple[str, ...] | None = None
        if self._pools.is_off(device):
            words = (layouts.OFF,)
        elif layout is not None:
            geometry, computes = geometry_for(device.mig.profiles), self._pools.computes(device)
            words = layouts.spell(geometry, layout, computes) or (layouts.NONE,)
        return MigDevice(
            device=device,
            layout=words,
            origin=self._pools.origin(device),
            dynamic=self._pools.pool(device).dynamic,
            instances=self.instances(device),
            free=self._free(device),
        )

    def _free(self, device: Device) -> tuple[MigFree, ...]:
        if not device.mig.profiles:
            return ()
        geometry = geometry_for(device.mig.profiles)
        now = geometry.layout(device.mig.instances, self._book.use_of(device.uuid).mig)
        counts = ((bare_name(p.name), room_for(geometry, now, p.id)) for p in geometry.profiles)
        return tuple(MigFree(name, count) for name, count in counts if count)

    def instances(self, device: Device) -> tuple[MigInstance, ...]:
        """The existing instances, and those of the layout that are still missing, by place. For a divided GPU
        instance, its compute instances are listed.
        """
        pool = self._pools.pool(device)
        holding = self._holding(device)
        standing = {i.key: i for i in device.mig.instances}
        found: list[MigInstance] = []
        for key in sorted(standing.keys() | (pool.layout or frozenset()), key=lambda key: (key[1], key[0])):
            there = standing.get(key)
            parts = {part for at, part in pool.computes if at == key}
            if there is not None and there.is_divided:
                parts |= {one.key for one in there.compute_instances if one.key is not None}
            elif there is not None and there.compute_instances:
                parts = set()  # the GPU instance exists and is not divided, whatever the layout says
            places: list[SlotKey | None] = [*sorted(parts, key=lambda part: (part[1], part[0]))]
            found += [self._instance(device, pool, key, there, part, holding) for part in places or [None]]
        return tuple(found)

    def _instance(
        self,
        device: Device,
        pool: Pool,
        key: SlotKey,
        there: GpuInstance | None,
        part: SlotKey | None,
        holding: Mapping[Place, list[str]],
    ) -> MigInstance:
        computes = () if there is None else there.compute_instances
        own, wanted = key in pool.own, pool.layout is not None and key in pool.layout
        if part is not None:
            computes = tuple(one for one in computes if one.key == part)
            there = there if computes else None
            own, wanted = (key, part) in pool.own_computes, (key, part) in pool.computes
        profile = device.mig.profile(key[0])
        name = str(key[0]) if profile is None else bare_name(profile.name)
        ids = None if part is None else {one.id for one in computes}
        return MigInstance(
            profile_id=key[0],
            profile_name=name if part is None else part_name(device, key, part),
            placement=key[1],
            gpu_instance_id=None if there is None else there.id,
            uuids=tuple(one.uuid for one in computes if one.uuid),
            own=own,
            in_layout=wanted,
            allocation_id=", ".join(holding.get((key, part), ())),
            processes=() if there is None else self._processes(device, there.id, ids),
            compute_placement=None if part is None else part[1],
        )

    def _holding(self, device: Device) -> dict[Place, list[str]]:
        """Ids of the allocations by place. There are several ids if allocations share an instance."""
        found: dict[Place, list[str]] = {}
        for allocation in self._book:
            for part in allocation.slices:
                if part.device_uuid == device.uuid and part.mig is not None:
                    found.setdefault(part.mig.place, []).append(allocation.id)
        return found

    def _processes(self, device: Device, number: int, computes: set[int] | None) -> tuple[MigProcess, ...]:
        """The processes in a GPU instance, or in the given compute instances of it."""
        pids = sorted(
            {
                p.pid
                for p in device.processes
                if p.gpu_instance_id == number and (computes is None or p.compute_instance_id in computes)
            }
        )
        return tuple(MigProcess(pid, proc.owner(pid), command(pid)) for pid in pids)


def _named(process: MigProcess) -> str:
    user = "?" if process.uid is None else _user(process.uid)
    return f"pid {process.pid} ({process.command}, user {user})"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
