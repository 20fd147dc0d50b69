"""`vgpuctl ps` and `vgpuctl events`: processes with their tenants, and past events."""

import time
from argparse import Namespace

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.document import plain
from vgpud.ctl.table import Column, Table, clean
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import Exit

COLUMNS = (
    Column("PID", right=True),
    Column("USER"),
    Column("COMMAND"),
    Column("ALLOCATION", styles={"outside vgpud": "yellow"}),
    Column("GPU", right=True),
    Column("MEMORY", right=True),
    Column("MODE"),
    Column("LABEL"),
    Column("SUSPENDED"),
    Column("UUID", wide=True),
)
OUTSIDE = "outside vgpud"
UNKNOWN = "unknown"


def ps(arguments: Namespace, terminal: Terminal) -> int:
    """Lists processes with tenant and device, and also processes on devices that belong to no allocation."""
    with connect(arguments) as client:
        found = client.list_processes().processes
    rows = [_row(item) for item in found]
    document = {"items": [plain(item) for item in found]}
    terminal.show(View("ProcessList", document, [str(item.pid) for item in found], [Table(COLUMNS, rows)]))
    if not found and not terminal.is_machine:
        terminal.say("no process runs on a device")
    for mode in sorted({item.silent_mode for item in found if item.silent_mode}):
        terminal.say(f"{words.silent(mode)}: which allocations its processes belong to is not known")
    return Exit.OK.value


def _row(item: pb.NodeProcess) -> tuple[str, ...]:
    return (
        str(item.pid),
        words.user(item.uid) if item.HasField("uid") else "",
        item.command,
        _whose(item),
        str(item.device_index),
        words.memory(item.memory_bytes) if item.HasField("memory_bytes") else "",
        item.mode,
        item.label,
        words.standing(item.standing),
        item.device_uuid,
    )


def _whose(item: pb.NodeProcess) -> str:
    past = " (past its limits)" if item.unlimited else ""
    if item.allocation_id:
        return f"{item.allocation_id}{past}"
    return UNKNOWN if item.silent_mode else OUTSIDE


def events(arguments: Namespace, terminal: Terminal) -> int:
    """The latest events, oldest first; `vgpuctl watch --after REVISION` continues from the last one."""
    with connect(arguments) as client:
        found = list(client.list_events(arguments.last, arguments.user).events)
    if arguments.since is not None:
        begin_ns = time.time_ns() - round(arguments.since * 1e9)
        found = [item for item in found if item.unix_ns >= begin_ns]
    if not terminal.is_text:
        document = {"items": [_document(item) for item in found]}
        terminal.show(View("EventList", document, [str(item.revision) for item in found], []))
        return Exit.OK.value
    if not found:
        terminal.say("no event yet")
    for item in found:
        moment = words.moment(item.unix_ns) or "-"
        print("  ".join(clean(cell) for cell in (str(item.revision), moment, item.kind, item.sentence)))
    return Exit.OK.value


def _document(item: pb.Event) -> dict[str, object]:
    document = plain(item)
    return {"type": document.pop("kind"), **document}
