"""The verbs of `vgpuctl mig`."""

import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vgpud.api import status
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import mig_parted, mig_tables
from vgpud.ctl.connect import connect
from vgpud.ctl.devices import complete_uuids
from vgpud.ctl.document import plain
from vgpud.ctl.fail import exit_code_of, print_error
from vgpud.ctl.request import selector_of
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.quantity import counted

# longest time that NVIDIA's drivers were observed to take for creating one instance, with a margin
STEP_SECONDS = 15.0
# maximum wait, after the call returned, for the events of the change that are still on their way
FOLLOW_SECONDS = 20.0


def ls(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        devices = _chosen(client, arguments)
    document = {"items": [plain(device) for device in devices]}
    names = [uuid for device in devices for instance in device.instances for uuid in instance.uuids]
    tables = [mig_tables.devices(devices), mig_tables.instances(devices)]
    terminal.show(View("MigList", document, names, [table for table in tables if table.rows]))
    if not devices:
        terminal.say("no device of this node can be partitioned by MIG")
    return Exit.OK.value


def plan(arguments: Namespace, terminal: Terminal) -> int:
    """Shows the steps of a layout change. The exit code is 0, or that of the refusal which apply
    would get.
    """
    with connect(arguments) as client:
        reply = client.plan_mig(_request(client, arguments))
    return _show_plan(reply, terminal, "MigPlan")


def apply(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        request = _request(client, arguments)
    return _apply(request, arguments, terminal)


def check(arguments: Namespace, terminal: Terminal) -> int:
    """`vgpuctl mig assert`: the exit code is Exit.DIFFERS unless every device has the wanted layout
    already.
    """
    with connect(arguments) as client:
        reply = client.plan_mig(_request(client, arguments))
    differs = bool(reply.changes) or reply.HasField("refusal")
    document = {"holds": not differs, **plain(reply)}
    if terminal.is_machine:
        terminal.show(View("MigAssertion", document, [], []))
    elif differs:
        terminal.say(f"the layout differs: {_difference(reply)}")
    else:
        terminal.say("the layout is as asked")
    return Exit.DIFFERS.value if differs else Exit.OK.value


def _difference(reply: pb.MigPlanReply) -> str:
    if reply.HasField("refusal"):
        return reply.refusal.sentence
    first = mig_tables.change_words(reply.changes[0])
    more = f", and {len(reply.changes) - 1} more" if len(reply.changes) > 1 else ""
    return f"apply would {first} on device {reply.changes[0].device_index}{more}"


def defrag(arguments: Namespace, terminal: Terminal) -> int:
    request = pb.MigRequest(defrag=selector_of(arguments.device or [], ""))
    if not arguments.dry_run:
        return _apply(request, arguments, terminal)
    with connect(arguments) as client:
        complete_uuids(client, request.defrag)
        reply = client.plan_mig(request)
    return _show_plan(reply, terminal, "MigPlan")


def export(arguments: Namespace, terminal: Terminal) -> int:
    import yaml

    with connect(arguments) as client:
        written = mig_parted.written(_chosen(client, arguments), arguments.config or "current")
    if terminal.is_machine:
        terminal.show(View("MigParted", written, [], []))
    else:
        print(yaml.safe_dump(written, sort_keys=False), end="", flush=True)
    return Exit.OK.value


def import_(arguments: Namespace, terminal: Terminal) -> int:
    name, entries = mig_parted.read(arguments.file, arguments.config)
    with connect(arguments) as client:
        devices = list(client.list_mig().devices)
    found = mig_parted.layouts(entries, devices)
    if not found:
        raise VgpuError(
            ErrorCode.NO_SUCH_DEVICE,
            f"configuration {name} of {arguments.file} names no device of this node",
            "see 'vgpuctl mig ls' for what there is",
        )
    if terminal.is_machine:
        items = [{"deviceUuid": uuid, "layout": list(words)} for uuid, words in found.items()]
        terminal.show(View("MigImport", {"config": name, "items": items}, [], []))
    else:
        print(_policy(arguments.file, name, found, devices), end="", flush=True)
    return Exit.OK.value


def _policy(file: str, config: str, found: dict[str, tuple[str, ...]], devices: list[pb.MigDevice]) -> str:
    import json

    index = {device.device_uuid: device.device_index for device in devices}
    lines = [f"# {config} of {json.dumps(file)}", "version = 1"]
    for uuid, words in found.items():
        mode = "auto" if words == (mig_parted.OFF,) else "mig"
        layout = ", ".join(json.dumps(word) for word in words)
        lines += ["", "[[device]]", f'match.uuid = "{uuid}"  # device {index[uuid]}']
        lines += [f'mode = "{mode}"', f"mig.layout = [{layout}]"]
    return "\n".join(lines) + "\n"


def _chosen(client: Client, arguments: Namespace) -> list[pb.MigDevice]:
    """The devices that MIG can partition, or only those of --device. Raises VgpuError(NO_SUCH_DEVICE) if
    a name there does not fit exactly one.
    """
    devices = list(client.list_mig().devices)
    wanted: set[str] = set()
    for named in arguments.device or []:
        found = [
            d.device_uuid for d in devices if named == str(d.device_index) or d.device_uuid.startswith(named)
        ]
        if len(found) != 1:
            raise VgpuError(
                ErrorCode.NO_SUCH_DEVICE,
                f"{len(found) or 'none'} of the {counted(len(devices), 'device')} with MIG match {named!r}",
                "give an index or a UUID of 'vgpuctl mig ls'",
            )
        wanted.add(found[0])
    return [d for d in devices if not wanted or d.device_uuid in wanted]


def _request(client: Client, arguments: Namespace) -> pb.MigRequest:
    """The message for the layouts on the command line or in its file. Raises VgpuError(BAD_REQUEST) if both
    are given, or neither, or the file is wrong.
    """
    if bool(arguments.layout) == bool(arguments.file):
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "give a layout either on the command line or with --file",
            "as in 'vgpuctl mig plan 3g.71gb@4 1g.18gb*2', or 'vgpuctl mig plan all-balanced'",
        )
    if arguments.layout:
        selector = selector_of(arguments.device or [], "")
        complete_uuids(client, selector)
        return pb.MigRequest(targets=[pb.MigTarget(selector=selector, layout=arguments.layout)])
    _, entries = mig_parted.read(arguments.file, arguments.config)
    found = mig_parted.layouts(entries, _chosen(client, arguments))
    targets = [
        pb.MigTarget(selector=pb.Selector(uuids=[uuid]), layout=words) for uuid, words in found.items()
    ]
    return pb.MigRequest(targets=targets)


def _show_plan(reply: pb.MigPlanReply, terminal: Terminal, kind: str) -> int:
    names = [change.device_uuid for change in reply.changes]
    table = mig_tables.changes(reply.changes)
    terminal.show(View(kind, plain(reply), names, [table] if table.rows else []))
    if reply.HasField("refusal"):
        refusal = status.error(reply.refusal)
        print_error(refusal, terminal)
        return exit_code_of(refusal)
    if not reply.changes:
        terminal.say("nothing to change")
    return Exit.OK.value


def _apply(request: pb.MigRequest, arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        steps = len(client.plan_mig(request).changes)
    patient = Namespace(**{**vars(arguments), "timeout": max(arguments.timeout, STEP_SECONDS * (steps + 1))})
    try:
        with _progress(arguments, terminal), connect(patient) as client:
            reply = client.apply_mig(request)
    except (VgpuError, KeyboardInterrupt) as error:
        if not isinstance(error, VgpuError) or error.code in (ErrorCode.DEADLINE, ErrorCode.STOPPING):
            terminal.say("vgpud goes on with it: see 'vgpuctl mig ls'")
        raise
    return _show_plan(reply, terminal, "MigApplied")


@contextmanager
def _progress(arguments: Namespace, terminal: Terminal) -> Iterator[None]:
    """Prints the device events that occur while the body runs. Afterwards it waits for the last of them,
    for at most FOLLOW_SECONDS.
    """
    with connect(arguments) as asking, connect(arguments) as client:
        events = client.watch(_revision(asking))
        seen = 0
        changed = threading.Condition()

        def follow() -> None:
            nonlocal seen
            with suppress(VgpuError, ValueError):
                for event in events:
                    if event.kind == "device_changed":
                        terminal.say(event.sentence)
                    with changed:
                        seen = event.revision
                        changed.notify()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
            last = _revision(asking)
            with changed:
                changed.wait_for(lambda: seen >= last, timeout=FOLLOW_SECONDS)
        finally:
            # closing the client ends its stream of events, and so the thread that reads the stream
            client.close()
            follower.join(timeout=FOLLOW_SECONDS)


def _revision(client: Client) -> int:
    """The revision of the newest event that the daemon keeps; 0 if there is none."""
    return max((event.revision for event in client.list_events(1).events), default=0)
