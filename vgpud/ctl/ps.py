"""`vgpuctl ps` and `vgpuctl events`: processes with their tenants, and past events."""

import time
from argparse import Namespace
from collections.abc import Sequence

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.document import plain
from vgpud.ctl.table import Column, Table, clean
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import Exit

OUTSIDE = "outside vgpud"
UNKNOWN = "unknown"


def ps(arguments: Namespace, terminal: Terminal) -> int:
    """Lists processes with tenant and device, and also processes on devices that belong to no allocation."""
    with connect(arguments) as client:
        found = client.list_processes().processes
    document = {"items": [plain(item) for item in found]}
    terminal.show(View("ProcessList", document, [str(item.pid) for item in found], [_table(found)]))
    if not found and not terminal.is_machine:
        terminal.say("no process runs on a device")
    for mode in sorted({item.silent_mode for item in found if item.silent_mode}):
        terminal.say(f"{words.silent(mode)}: which allocations its processes belong to is not known")
    return Exit.OK.value


def _table(found: Sequence[pb.NodeProcess]) -> Table:
    return Table.of(
        (
            Column("PID", lambda p: str(p.pid), right=True),
            Column("USER", lambda p: words.user(p.uid) if p.HasField("uid") else ""),
            Column("COMMAND", lambda p: p.command),
            Column("ALLOCATION", _whose, styles={OUTSIDE: "yellow"}),
            Column("GPU", lambda p: str(p.device_index), right=True),
            Column("MEMORY", words.used_memory, right=True),
            Column("MODE", lambda p: p.mode),
            Column("LABEL", lambda p: p.label),
            Column("SUSPENDED", lambda p: words.standing(p.standing)),
            Column("UUID", lambda p: p.device_uuid, wide=True),
        ),
        found,
    )


def _whose(item: pb.NodeProcess) -> str:
    past = " (not counted by libvgpu)" if item.unlimited else ""
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
