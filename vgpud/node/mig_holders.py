"""Who holds which MIG instance: allocation, pid, user, command. And devices with all that stands on them."""

import pwd
from pathlib import Path

from vgpud.hardware.holders import command, owner_uid
from vgpud.model.device import Device, Placement
from vgpud.model.mig_view import MigDevice, MigFree, MigInstance, MigProcess
from vgpud.node.book import Book
from vgpud.node.mig_pools import Pools
from vgpud.planner import layouts
from vgpud.planner.geometry import SlotKey, table_for
from vgpud.planner.terms import bare_name
from vgpud.planner.transitions import room_for


class Holders:
    def __init__(self, book: Book, pools: Pools, host_root: Path) -> None:
        self._book = book
        self._pools = pools
        self._host_root = host_root

    def sentence(self, device: Device, key: SlotKey) -> str:
        """Who is on one instance, for a person who wants its place."""
        instance = next((i for i in self.instances(device) if (i.profile_id, i.placement) == key), None)
        start = f"memory slice {key[1].start} of device {device.index}"
        if instance is None:
            return f"an instance of profile {key[0]} at {start} is gone"
        what = f"{instance.profile_name} at {start}"
        if instance.processes:
            who = ", ".join(_named(process) for process in instance.processes[:4])
            more = f" and {len(instance.processes) - 4} more" if len(instance.processes) > 4 else ""
            held = f" of allocation {instance.allocation_id}" if instance.allocation_id else ""
            return f"{what}{held} is in use by {who}{more}"
        if instance.allocation_id:
            owners = (self._book.get(name).request.owner.uid for name in instance.allocation_id.split(", "))
            users = ", ".join(dict.fromkeys(map(_user, owners)))
            return f"{what} is held by allocation {instance.allocation_id} of user {users}"
        return f"{what} is idle" if instance.own else f"{what} was made by someone else"

    def device(self, device: Device) -> MigDevice:
        layout = self._pools.layout(device)
        words: tuple[str, ...] | None = None
        if self._pools.is_off(device):
            words = (layouts.OFF,)
        elif layout is not None:
            words = layouts.spell(table_for(device.mig.profiles), layout) or (layouts.NONE,)
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
        table = table_for(device.mig.profiles)
        now = table.layout(device.mig.instances, self._book.use_of(device.uuid).mig)
        counts = ((bare_name(p.name), room_for(table, now, p.id)) for p in table.profiles)
        return tuple(MigFree(name, count) for name, count in counts if count)

    def instances(self, device: Device) -> tuple[MigInstance, ...]:
        """Those that stand, and those of the layout that do not yet; by place."""
        pool = self._pools.pool(device)
        names = {p.id: bare_name(p.name) for p in device.mig.profiles}
        holding = self._holding(device)
        standing = {(i.profile_id, i.placement): i for i in device.mig.instances}
        found = []
        for key in sorted(standing.keys() | (pool.layout or frozenset()), key=lambda key: (key[1], key[0])):
            there = standing.get(key)
            found.append(
                MigInstance(
                    profile_id=key[0],
                    profile_name=names.get(key[0], str(key[0])),
                    placement=key[1],
                    gpu_instance_id=None if there is None else there.id,
                    uuids=() if there is None else tuple(c.uuid for c in there.compute_instances if c.uuid),
                    own=key in pool.own,
                    in_layout=pool.layout is not None and key in pool.layout,
                    allocation_id=", ".join(holding.get(key, ())),
                    processes=() if there is None else self._processes(device, there.id),
                )
            )
        return tuple(found)

    def _holding(self, device: Device) -> dict[tuple[int, Placement], list[str]]:
        """Ids of allocations: several where they share an instance."""
        found: dict[tuple[int, Placement], list[str]] = {}
        for allocation in self._book:
            for part in allocation.slices:
                if part.device_uuid == device.uuid and part.mig is not None:
                    key = (part.mig.profile_id, part.mig.placement)
                    found.setdefault(key, []).append(allocation.id)
        return found

    def _processes(self, device: Device, gpu_instance_id: int) -> tuple[MigProcess, ...]:
        pids = sorted({p.pid for p in device.processes if p.gpu_instance_id == gpu_instance_id})
        return tuple(
            MigProcess(pid, owner_uid(pid, self._host_root), command(pid, self._host_root)) for pid in pids
        )


def _named(process: MigProcess) -> str:
    user = "?" if process.uid is None else _user(process.uid)
    return f"pid {process.pid} ({process.command}, user {user})"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
