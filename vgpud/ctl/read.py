"""The verbs that only read: status, devices, ls, show, explain."""

import os
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import tables, words
from vgpud.ctl.allocations import allocation_id
from vgpud.ctl.connect import connect
from vgpud.ctl.devices import device_uuid
from vgpud.ctl.document import plain
from vgpud.ctl.table import Column, Table, facts
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.device import Health
from vgpud.model.errors import Exit
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode, State

SIMULATED = "SIMULATED: no real GPU is behind this daemon"


def status(arguments: Namespace, terminal: Terminal) -> int:
    """Shows the state of the node. The exit code is Exit.DEGRADED if the hardware, the arbiter, a device or
    an allocation has failed.
    """
    with connect(arguments) as client:
        node = client.get_node()
        # Without NVML the devices cannot be listed. The reply of get_node has the reason.
        devices = [] if node.hardware_error else list(client.list_devices().devices)
        allocations = client.list_allocations().allocations
    wrong = degradations(node, devices, list(allocations))
    notices = [
        f"device {item.index} ({item.uuid}): {item.health_reason}"
        for item in devices
        if item.health == Health.OK and item.health_reason
    ]
    document = {**plain(node), "ok": not wrong, "degraded": wrong, "notices": notices}
    terminal.show(View("Status", document, [node.hostname], _status_tables(node, wrong, notices)))
    return Exit.DEGRADED.value if wrong else Exit.OK.value


def degradations(node: pb.NodeReply, devices: list[pb.Device], allocations: list[pb.Allocation]) -> list[str]:
    """Sentences on what has failed: the hardware, the arbiter, devices and allocations."""
    wrong = [sentence for sentence in (node.hardware_error, node.arbiter_error) if sentence]
    for device in devices:
        if device.health != Health.OK:
            why = device.health_reason or "no reason given"
            wrong.append(f"device {device.index} ({device.uuid}) is {device.health}: {why}")
    for item in allocations:
        if item.state == State.FAILED:
            wrong.append(f"allocation {item.id} has failed: {item.failure or 'no reason given'}")
    return wrong


def _status_tables(node: pb.NodeReply, wrong: list[str], notices: list[str]) -> list[Table]:
    state = "degraded" if wrong else "ok"
    pairs = [
        ("status", state),
        ("daemon", node.status),
        ("host", node.hostname),
        ("vgpud", f"{node.vgpud_version}, up {words.duration(node.uptime_seconds)}"),
        ("driver", node.driver_version),
        ("nvml", node.nvml_version),
        ("cuda", node.cuda_version),
        ("devices", str(node.device_count)),
        ("allocations", str(node.allocation_count)),
        ("policy", node.policy_digest),
        ("revision", str(node.revision)),
    ]
    loud = [Table((Column("", styles={SIMULATED: "yellow"}),), [(SIMULATED,)])]
    styles = {"degraded": "red", "ok": "green"}
    return [
        *(loud if node.simulated else []),
        *([facts([("degraded", sentence) for sentence in wrong])] if wrong else []),
        *([facts([("notice", sentence) for sentence in notices])] if notices else []),
        facts(pairs, styles),
    ]


def devices(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        reply = client.list_devices()
    names = [item.uuid for item in reply.devices]
    document = listing([plain(item) for item in reply.devices], reply.revision)
    terminal.show(View("DeviceList", document, names, [tables.devices(reply.devices)]))
    if not reply.devices:
        terminal.say("no devices; 'vgpuctl status' says why")
    return Exit.OK.value


def ls(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        uuid = device_uuid(client.list_devices().devices, arguments.device) if arguments.device else ""
        reply = client.list_allocations()
    kept = [item for item in reply.allocations if _is_wanted(item, arguments, uuid)]
    names = [item.id for item in kept]
    document = listing([plain(item) for item in kept], reply.revision)
    table = tables.allocations(kept, time.time_ns())
    terminal.show(View("AllocationList", document, names, [table]))
    if reply.allocations and not kept:
        terminal.say(f"none of the {counted(len(reply.allocations), 'allocation')} matches")
    return Exit.OK.value


def _is_wanted(item: pb.Allocation, arguments: Namespace, uuid: str) -> bool:
    """True if the allocation satisfies all filters of the command line; `uuid` is empty for any device."""
    return (
        (not arguments.mine or item.owner_uid == os.getuid())
        and (arguments.user is None or item.owner_uid == arguments.user)
        and (arguments.label is None or _matches((item.label, words.label(item)), arguments.label))
        and (arguments.pod is None or _matches(words.pods(item.workload), arguments.pod))
        and (not uuid or any(part.device_uuid == uuid for part in item.slices))
    )


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def show(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        item = client.get_allocation(allocation_id(client, arguments.allocation))
        known = {device.uuid: device for device in client.list_devices().devices}
        processes = client.list_processes().processes
    _add_unlimited(item, processes)
    tables_of_it = [allocation_facts(item, _engines(item, known)), tables.slices(item)]
    terminal.show(View("Allocation", plain(item), [item.id], tables_of_it))
    return Exit.OK.value


def _add_unlimited(item: pb.Allocation, processes: Iterable[pb.NodeProcess]) -> None:
    """Adds the processes that evade an allocation's limits to the pids of its slices. The daemon's reply
    lists for a slice only the processes under its limits.
    """
    for process in processes:
        for use in item.use:
            is_past = process.unlimited and process.allocation_id == item.id
            if is_past and use.device_uuid == process.device_uuid:
                use.pids.append(process.pid)


def explain(arguments: Namespace, terminal: Terminal) -> int:
    """Shows the decision at the time of the allocation, with a reason for each device."""
    with connect(arguments) as client:
        item = client.get_allocation(allocation_id(client, arguments.allocation))
    document = {
        "allocationId": item.id,
        "isolation": item.isolation,
        "slices": [plain(part) for part in item.slices],
        "reasons": [plain(reason) for reason in item.reasons],
    }
    names = [reason.device_uuid for reason in item.reasons if reason.taken]
    moved = facts([("moved", words.moved(item))])
    shown = [table for table in (moved, tables.reasons(item.reasons)) if table.rows]
    terminal.show(View("Explanation", document, names, shown))
    return Exit.OK.value


def listing(items: list[dict[str, Any]], revision: int) -> dict[str, Any]:
    return {"revision": revision, "items": items}


def _engines(item: pb.Allocation, known: Mapping[str, pb.Device]) -> str:
    """The engines that enforce the time slices of an allocation's shares, each named once."""
    devices = [
        known[part.device_uuid]
        for part in item.slices
        if part.mode == Mode.PRELOAD and part.device_uuid in known
    ]
    return "; ".join(dict.fromkeys(f"{d.engine}, {d.engine_why}" for d in devices if d.engine))


def allocation_facts(item: pb.Allocation, engines: str = "") -> Table:
    return facts(
        [
            ("id", item.id),
            ("state", item.state),
            ("suspended", item.standing),
            ("memory", words.stays(item)),
            ("paused", words.paused(item)),
            ("failure", item.failure),
            *((mark.kind, mark.sentence) for mark in item.marks),
            ("owner", f"{words.user(item.owner_uid)} (uid {item.owner_uid}, gid {item.owner_gid})"),
            ("label", item.label),
            ("pod", words.pod(item.workload)),
            ("claim", words.claim(item.workload)),
            ("isolation", item.isolation),
            ("priority", item.priority),
            ("memory limit", words.memory_limit(item)),
            ("engine", engines),
            ("created", words.moment(item.created_unix_ns)),
            ("ends with", f"pid {item.bound_pid}" if item.bound_pid else ""),
            ("cdi", item.cdi_name),
            ("request", item.request_id),
            ("revision", str(item.revision)),
        ],
        tables.STATE_STYLES,
    )
