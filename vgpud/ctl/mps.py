"""`vgpuctl mps ls` and `mps terminate` (list MPS clients, end one), and `vgpuctl drain` and `undrain`."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.devices import device_uuid
from vgpud.ctl.document import plain
from vgpud.ctl.progress import of_device, told
from vgpud.ctl.table import Column, Table
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.quantity import counted

STATE_STYLES = {"FAULT": "red", "no answer": "red"}


def ls(arguments: Namespace, terminal: Terminal) -> int:
    """Lists the MPS daemons. The exit code is Exit.DEGRADED if one does not answer or a server is in state
    FAULT.
    """
    with connect(arguments) as client:
        reply = client.list_mps()
    document = {"items": [plain(item) for item in reply.daemons]}
    names = [item.device_uuid for item in reply.daemons]
    tables = [daemons(reply), clients(reply)]
    terminal.show(View("MpsList", document, names, [table for table in tables if table.rows]))
    if not reply.daemons:
        terminal.say("no device is in mode mps")
    well = all(state(item) not in STATE_STYLES for item in reply.daemons)
    return Exit.OK.value if well else Exit.DEGRADED.value


def terminate(arguments: Namespace, terminal: Terminal) -> int:
    """Ends the work of one MPS client. Its calls then fail with CUDA error 810; other clients continue."""
    with connect(arguments) as client:
        item = _daemon_of(client.list_mps(), arguments.client, arguments.device)
        client.terminate_mps_client(item, arguments.client)
    if not terminal.is_text:
        document = {"deviceUuid": item, "pid": arguments.client}
        terminal.show(View("MpsTermination", document, [str(arguments.client)], []))
    else:
        terminal.say(f"client {arguments.client} is ended")
    return Exit.OK.value


def _daemon_of(reply: pb.ListMpsReply, pid: int, device: str | None) -> str:
    """The UUID of the device on which the MPS client runs. If the client runs on several devices, `device`
    (index or UUID) names one.
    """
    found = [
        item
        for item in reply.daemons
        if any(client.pid == pid for client in item.clients)
        and (device is None or device in (str(item.device_index), item.device_uuid))
    ]
    if len(found) == 1:
        return found[0].device_uuid
    if not found:
        count = sum(len(item.clients) for item in reply.daemons)
        raise VgpuError(
            ErrorCode.NO_SUCH_CLIENT,
            f"no MPS client with pid {pid} among the {count} on this node",
            "see 'vgpuctl mps ls'",
        )
    raise VgpuError(
        ErrorCode.BAD_REQUEST, f"process {pid} is a client on {len(found)} devices", "name one with --device"
    )


def state(item: pb.MpsDaemon) -> str:
    if item.trouble:
        return "no answer"
    states = {server.state for server in item.servers}
    return "FAULT" if "FAULT" in states else next(iter(sorted(filter(None, states))), "idle")


def daemons(reply: pb.ListMpsReply) -> Table:
    return Table.of(
        (
            Column("GPU", lambda d: str(d.device_index), right=True),
            Column("PID", lambda d: str(d.pid), right=True),
            Column("STATE", state, styles=STATE_STYLES),
            Column("SERVERS", lambda d: words.joined(str(server.pid) for server in d.servers)),
            Column("CLIENTS", lambda d: f"{len(d.clients)} of {d.client_limit}", right=True),
            Column("USERS", lambda d: "all at once" if d.multi_user else "one at a time"),
            Column("UUID", lambda d: d.device_uuid, wide=True),
            Column("VERSION", lambda d: str(d.version or ""), right=True, wide=True),
            Column("TROUBLE", lambda d: d.trouble),
        ),
        reply.daemons,
    )


def clients(reply: pb.ListMpsReply) -> Table:
    columns = (
        Column("CLIENT", lambda c: str(c.pid), right=True),
        Column("USER", lambda c: words.user(c.uid) if c.HasField("uid") else ""),
        Column("ALLOCATION", lambda c: c.allocation_id),
        Column("MEMORY", words.used_memory, right=True),
        Column("COMMAND", lambda c: c.command),
        Column("SERVER", lambda c: str(c.server_pid), right=True, wide=True),
    )
    rows = [
        (str(item.device_index), *row)
        for item in reply.daemons
        for row in Table.of(columns, item.clients).rows
    ]
    return Table((Column("GPU", right=True), *columns), rows)


def drain(arguments: Namespace, terminal: Terminal) -> int:
    """Drains devices. The exit code is Exit.DIFFERS until all are idle."""
    replies, others = _drain(arguments, terminal, undrain=False)
    all_idle = all(reply.idle for reply in replies)
    for reply in replies if terminal.is_text else ():
        for one in reply.moved:
            terminal.say(f"{one.allocation_id} went to {one.target}")
        for stays in reply.staying:
            terminal.say(f"{stays.allocation_id} stays: {stays.why}")
        terminal.say(_left(reply, others, all_idle))
    return Exit.OK.value if all_idle else Exit.DIFFERS.value


def undrain(arguments: Namespace, terminal: Terminal) -> int:
    _drain(arguments, terminal, undrain=True)
    for device in arguments.device if terminal.is_text else ():
        terminal.say(f"device {device} takes tenants again")
    return Exit.OK.value


def _drain(
    arguments: Namespace, terminal: Terminal, undrain: bool
) -> tuple[list[pb.DrainDeviceReply], list[pb.Device]]:
    """Drains or undrains the devices that the command line names; none if a name is wrong. Returns the
    replies, and the other devices that are not both drained and idle.
    """
    with connect(arguments) as client:
        devices = client.list_devices().devices
        uuids = [device_uuid(devices, named) for named in arguments.device]
        move = not undrain and arguments.move
        replies = []
        for uuid in uuids:
            device = next(item for item in devices if item.uuid == uuid)
            with told(arguments, terminal, of_device("emptying", device)) if move else nullcontext():
                replies.append(client.drain_device(uuid, undrain, move))
    busy = (d for d in devices if not d.drained or d.allocation_count or d.processes)
    if not terminal.is_text:
        first, *more = documents = [plain(reply) for reply in replies]
        terminal.show(View("Drain", {"items": documents} if more else first, uuids, []))
    return replies, [device for device in busy if device.uuid not in uuids]


def _left(reply: pb.DrainDeviceReply, others: list[pb.Device], all_idle: bool) -> str:
    """A sentence on what a drained device still waits for. All devices share the driver, so it can be
    replaced only when each is drained and idle.
    """
    if reply.idle:
        idle = f"{reply.device_uuid} is drained and idle: its helper"
        if others:
            named = _named("device", [str(one.index) for one in others])
            return f"{idle} can be restarted; for the driver, drain {named} too"
        driver = " and, as all devices are drained, the driver" if all_idle else ""
        return f"{idle}{driver} can be restarted"
    left = []
    if reply.allocation_ids:
        left.append(_named("allocation", reply.allocation_ids))
    if reply.pids:
        left.append(_named("process", [str(pid) for pid in reply.pids]))
    return f"{reply.device_uuid} is drained and takes no new tenants; still there: {'; '.join(left)}"


def _named(noun: str, names: Sequence[str]) -> str:
    """The noun in the right form and the names, as in "devices 1, 2"."""
    return f"{counted(len(names), noun).partition(' ')[2]} {', '.join(names)}"
