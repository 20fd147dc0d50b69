"""MIG devices, instances and plans as tables."""

from collections.abc import Iterable

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.table import Column, Table

STATE_STYLES = {"missing": "yellow"}
MODE_STYLES = {"on, off after a reset": "yellow", "off, on after a reset": "yellow"}

DEVICE_COLUMNS = (
    Column("GPU", right=True),
    Column("NAME"),
    Column("MIG", styles=MODE_STYLES),
    Column("INSTANCES", right=True),
    Column("LAYOUT"),
    Column("BY"),
    Column("FITS"),
    Column("UUID", wide=True),
)
INSTANCE_COLUMNS = (
    Column("GPU", right=True),
    Column("PROFILE"),
    Column("AT", right=True),
    Column("SIZE", right=True),
    Column("STATE", styles=STATE_STYLES),
    Column("ALLOCATION"),
    Column("PIDS"),
    Column("MADE-BY"),
    Column("GI", right=True, wide=True),
    Column("USERS", wide=True),
    Column("COMMANDS", wide=True),
    Column("MIG-UUID", wide=True),
)
CHANGE_COLUMNS = (
    Column("STEP", right=True),
    Column("GPU", right=True),
    Column("DO"),
    Column("PROFILE"),
    Column("AT", right=True),
    Column("WHY"),
    Column("UUID", wide=True),
)


def devices(items: Iterable[pb.MigDevice]) -> Table:
    return Table(DEVICE_COLUMNS, [_device_row(item) for item in items])


def _device_row(item: pb.MigDevice) -> tuple[str, ...]:
    mode = "on" if item.current else "off"
    if item.current != item.pending:
        mode += f", {'on' if item.pending else 'off'} after a reset"
    beside = " and more" if item.layout and item.dynamic else ""
    standing = sum(i.HasField("gpu_instance_id") for i in item.instances)
    return (
        str(item.device_index),
        item.name,
        mode,
        str(standing),
        (" ".join(item.layout) or "as requests come") + beside,
        item.origin,
        words.joined(f"{free.profile_name}*{free.count}" for free in item.free),
        item.device_uuid,
    )


def instances(items: Iterable[pb.MigDevice]) -> Table:
    rows = [_instance_row(device, item) for device in items for item in device.instances]
    return Table(INSTANCE_COLUMNS, rows)


def _instance_row(device: pb.MigDevice, item: pb.MigInstance) -> tuple[str, ...]:
    return (
        str(device.device_index),
        item.profile_name,
        _at(item),
        _size(item),
        state(item),
        item.allocation_id,
        words.joined(str(process.pid) for process in item.processes),
        "vgpud" if item.own else "others" if item.HasField("gpu_instance_id") else "",
        words.optional(item.gpu_instance_id, item.HasField("gpu_instance_id")),
        words.joined(words.user(p.uid) for p in item.processes if p.HasField("uid")),
        words.joined(p.command for p in item.processes if p.command),
        words.joined(item.uuids),
    )


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
    """The state of an instance: missing, free, or in use by an allocation or by others."""
    if not item.HasField("gpu_instance_id"):
        return "missing"
    if item.processes:
        return "busy"
    return "held" if item.allocation_id else "idle"


def changes(items: Iterable[pb.MigChange]) -> Table:
    rows = [
        (
            str(number),
            str(item.device_index),
            item.kind,
            item.profile_name or "MIG mode",
            _at(item) if item.HasField("placement") else "",
            item.reason,
            item.device_uuid,
        )
        for number, item in enumerate(items, 1)
    ]
    return Table(CHANGE_COLUMNS, rows)


def change_words(item: pb.MigChange) -> str:
    """One step of a MIG change as a sentence."""
    if not item.profile_name:
        return f"{item.kind} MIG mode"
    inside = f", compute slice {item.compute_placement.start}" if item.HasField("compute_placement") else ""
    return f"{item.kind} {item.profile_name} at memory slice {item.placement.start}{inside}"
