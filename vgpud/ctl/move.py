"""The verbs that move tenants: `move` moves one, `defrag` as many as a request needs."""

import time
from argparse import Namespace

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import tables, words
from vgpud.ctl.allocations import allocation_id
from vgpud.ctl.connect import connect
from vgpud.ctl.devices import complete_uuids, device_uuid
from vgpud.ctl.document import plain
from vgpud.ctl.progress import of_allocation, of_moves, told
from vgpud.ctl.request import selector_of
from vgpud.ctl.table import Column, Table
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import Exit

_COLUMNS = (
    Column("ALLOCATION"),
    Column("FROM"),
    Column("TO"),
    Column("MEMORY", right=True),
    Column("DONE"),
)


def move(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        devices = client.list_devices().devices
        to = [device_uuid(devices, named) for named in arguments.to]
        source = device_uuid(devices, arguments.source) if arguments.source else ""
        name = allocation_id(client, arguments.allocation)
        with told(arguments, terminal, of_allocation("moving", name, leaves=None)):
            allocation = client.move(name, to, source)
    table = tables.allocations([allocation], time.time_ns())
    terminal.show(View("Allocation", plain(allocation), [allocation.id], [table]))
    return Exit.OK.value


def defrag(arguments: Namespace, terminal: Terminal) -> int:
    share = None if arguments.cores is None else arguments.cores.value
    selector = selector_of(arguments.device or [], "")
    request = pb.DefragRequest(memory_bytes=arguments.memory, share_percent=share, selector=selector)
    with connect(arguments) as client:
        complete_uuids(client, request.selector)
        reply = client.plan_defrag(request)
        if not arguments.dry_run:
            with told(arguments, terminal, of_moves("moving tenants to make room", reply.moves)):
                reply = client.defrag(request)
    rows = [
        (
            one.allocation_id,
            words.short_uuid(one.source),
            words.short_uuid(one.target),
            words.memory(one.memory_bytes),
            "yes" if one.done else "no",
        )
        for one in reply.moves
    ]
    names = [one.allocation_id for one in reply.moves]
    shown = [Table(_COLUMNS, rows)] if rows else []
    terminal.show(View("Defrag", plain(reply), names, shown))
    if terminal.is_text:
        ahead = arguments.dry_run and reply.moves
        if arguments.memory:
            room = f"{'would have' if ahead else 'has'} room for {words.memory(arguments.memory)}"
        else:
            room = "would be free" if ahead else "is free"
        terminal.say(f"{reply.device_uuid} {room}")
    return Exit.OK.value
