"""MIG devices, instances and plans as tables."""

from collections.abc import Iterable

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.table import Column, Table

STATE_STYLES = {"missing": "yellow"}
MODE_STYLES = {"on, off after a reset": "yellow", "off, on after a reset": "yellow"}


def devices(items: Iterable[pb.MigDevice]) -> Table:
    return Table.of(
        (
            Column("GPU", lambda d: str(d.device_index), right=True),
            Column("NAME", lambda d: d.name),
            Column("MIG", mig_mode, styles=MODE_STYLES),
            Column("INSTANCES", lambda d: str(sum(map(_is_there, d.instances))), right=True),
            Column("LAYOUT", _layout),
            Column("BY", lambda d: d.origin),
            Column("FITS", lambda d: words.joined(f"{one.profile_name}*{one.count}" for one in d.free)),
            Column("UUID", lambda d: d.device_uuid, wide=True),
        ),
        items,
    )


def mig_mode(item: pb.MigDevice | pb.Mig) -> str:
    """MIG mode as text, and the mode after a reset if that is another."""
    mode = "on" if item.current else "off"
    return (
        mode if item.current == item.pending else f"{mode}, {'on' if item.pending else 'off'} after a reset"
    )


def _layout(item: pb.MigDevice) -> str:
    beside = " and more" if item.layout and item.dynamic else ""
    return (" ".join(item.layout) or "as requests come") + beside


def _is_there(item: pb.MigInstance) -> bool:
    return item.HasField("gpu_instance_id")


def instances(items: Iterable[pb.MigDevice]) -> Table:
    columns = (
        Column("PROFILE", lambda i: i.profile_name),
        Column("AT", _at, right=True),
        Column("SIZE", _size, right=True),
        Column("STATE", state, styles=STATE_STYLES),
        Column("ALLOCATION", lambda i: i.allocation_id),
        Column("PIDS", lambda i: words.joined(str(process.pid) for process in i.processes)),
        Column("MADE-BY", lambda i: "vgpud" if i.own else "others" if _is_there(i) else ""),
        Column("GI", lambda i: words.optional(i, "gpu_instance_id"), right=True, wide=True),
        Column(
            "USERS",
            lambda i: words.joined(words.user(p.uid) for p in i.processes if p.HasField("uid")),
            wide=True,
        ),
        Column("COMMANDS", lambda i: words.joined(p.command for p in i.processes if p.command), wide=True),
        Column("MIG-UUID", lambda i: words.joined(i.uuids), wide=True),
    )
    rows = [
        (str(device.device_index), *row)
        for device in items
        for row in Table.of(columns, device.instances).rows
    ]
    return Table((Column("GPU", right=True), *columns), rows)


def _at(item: pb.MigInstance | pb.MigChange) -> str:
    """The place of an instance as text: its first memory slice. If it is one of several compute instances,
    its first compute slice follows.
    """
    inside = f"/{item.compute_placement.start}" if item.HasField("compute_placement") else ""
    return f"{item.placement.start}{inside}"


def _size(item: pb.MigInstance) -> str:
    inside = f"/{item.compute_placement.size}" if item.HasField("compute_placement") else ""
    return f"{item.placement.size}{inside}"


def state(item: pb.MigInstance) -> str:
    """The state of an instance: missing, busy (processes run in it), held by an allocation, or idle."""
    if not _is_there(item):
        return "missing"
    if item.processes:
        return "busy"
    return "held" if item.allocation_id else "idle"


def changes(items: Iterable[pb.MigChange]) -> Table:
    columns = (
        Column("GPU", lambda c: str(c.device_index), right=True),
        Column("DO", lambda c: c.kind),
        Column("PROFILE", lambda c: c.profile_name or "MIG mode"),
        Column("AT", lambda c: _at(c) if c.HasField("placement") else "", right=True),
        Column("WHY", lambda c: c.reason),
        Column("UUID", lambda c: c.device_uuid, wide=True),
    )
    rows = [(str(number), *row) for number, row in enumerate(Table.of(columns, items).rows, 1)]
    return Table((Column("STEP", right=True), *columns), rows)


def change_words(item: pb.MigChange) -> str:
    """One step of a MIG change in words."""
    if not item.profile_name:
        return f"{item.kind} MIG mode"
    inside = f", compute slice {item.compute_placement.start}" if item.HasField("compute_placement") else ""
    return f"{item.kind} {item.profile_name} at memory slice {item.placement.start}{inside}"
