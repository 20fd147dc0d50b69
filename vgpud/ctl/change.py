"""The verbs that make, change and release allocations, and plan, which shows what alloc would do."""

import sys
import time
from argparse import Namespace

from vgpud.api import status
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import tables, words
from vgpud.ctl.allocations import allocation_id
from vgpud.ctl.connect import connect
from vgpud.ctl.devices import complete_uuids
from vgpud.ctl.document import plain
from vgpud.ctl.environment import export_lines, initial_environment
from vgpud.ctl.fail import exit_code_of, print_error, worst
from vgpud.ctl.progress import arbiter_told, of_allocation, told
from vgpud.ctl.request import request_of
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.quantity import MAX_BYTES, MIB, counted
from vgpud.model.tenancy import State

_CONTEXT_BYTES = 518 * MIB  # memory of a CUDA context on an H200 (docs/faq.md)
UNCERTAIN = (ErrorCode.DEADLINE, ErrorCode.STOPPING)


def alloc(arguments: Namespace, terminal: Terminal) -> int:
    request = request_of(arguments)
    try:
        with connect(arguments) as client, arbiter_told(arguments, terminal):
            complete_uuids(client, request.selector)
            allocation = client.allocate(request)
    except (VgpuError, KeyboardInterrupt) as error:
        if not isinstance(error, VgpuError) or error.code in UNCERTAIN:
            terminal.say(f"if it was made after all, --request-id {request.request_id} gets it")
        raise
    try:
        if terminal.output == "env":
            print("\n".join(export_lines(allocation, initial_environment())))
        else:
            _show(allocation, terminal)
        sys.stdout.flush()
    except OSError:
        # the id is printed with --quiet too, because the caller has no other name for the allocation
        print(f"allocation {allocation.id} is made; its request id is {request.request_id}", file=sys.stderr)
        raise
    return Exit.OK.value


def release(arguments: Namespace, terminal: Terminal) -> int:
    """Releases every named allocation that can be released. The exit code is that of the first failure."""
    done: list[dict[str, object]] = []
    codes = []
    with connect(arguments) as client:
        for named in arguments.allocation:
            try:
                name = allocation_id(client, named)
                reply = client.release(name, arguments.force)
            except VgpuError as error:
                print_error(error, terminal)
                codes.append(exit_code_of(error))
                continue
            done.append({"allocationId": name, "alreadyReleased": reply.already_released})
            gone = " had been released already" if reply.already_released else " released"
            terminal.say(f"{name}{gone}")
    if not terminal.is_text:
        names = [str(item["allocationId"]) for item in done]
        terminal.show(View("ReleaseList", {"items": done}, names, []))
    return worst(codes)


def resize(arguments: Namespace, terminal: Terminal) -> int:
    if arguments.memory is None and arguments.cores is None:
        raise VgpuError(ErrorCode.BAD_REQUEST, "no new limit is given", "give --memory, --cores or both")
    share = None if arguments.cores is None else arguments.cores.value
    with connect(arguments) as client:
        allocation = client.resize(allocation_id(client, arguments.allocation), arguments.memory, share)
        held = client.get_allocation(allocation.id)
    _show(allocation, terminal)
    for used in _above_limit(held):
        terminal.say(f"it holds {used}, more than its limit: it gets no more until it has freed as much")
    return Exit.OK.value


def _above_limit(held: pb.Allocation) -> list[str]:
    """Memory of the tenant, for each device on which it is above its limit; none while it is suspended."""
    limits = {part.device_uuid: part.memory_bytes for part in held.slices}
    return [
        f"{words.memory(use.memory_used_bytes)} on {words.short_uuid(use.device_uuid)}"
        for use in held.use
        if held.state != State.SUSPENDED and use.memory_used_bytes > limits.get(use.device_uuid, MAX_BYTES)
    ]


def pause(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        allocation = client.pause(allocation_id(client, arguments.allocation))
    _show(allocation, terminal)
    return Exit.OK.value


def unpause(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        allocation = client.unpause(allocation_id(client, arguments.allocation))
    _show(allocation, terminal)
    return Exit.OK.value


def suspend(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        name = allocation_id(client, arguments.allocation)
        with told(arguments, terminal, of_allocation("suspending", name, leaves=True)):
            allocation = client.suspend(name, arguments.deep)
    _show(allocation, terminal)
    if not terminal.is_machine:
        amount = words.memory(allocation.suspended_bytes)
        terminal.say(
            f"suspended with {counted(len(allocation.suspended_pids), 'process')}, "
            f"{amount} of device memory is on the host"
        )
        if allocation.stays_bytes:
            stays = words.memory(allocation.stays_bytes)
            terminal.say(
                f"{stays} stay on the device (--deep takes them off): {words.stays_by_kind(allocation)}"
            )
    return Exit.OK.value


def resume(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        name = allocation_id(client, arguments.allocation)
        with told(arguments, terminal, of_allocation("resuming", name, leaves=False)):
            allocation = client.resume(name)
    _show(allocation, terminal)
    return Exit.OK.value


def plan(arguments: Namespace, terminal: Terminal) -> int:
    """Shows what alloc would do. The exit code is 0, or that of the refusal which alloc would get."""
    with connect(arguments) as client:
        request = request_of(arguments)
        complete_uuids(client, request.selector)
        reply = client.plan(request)
    names = [part.device_uuid for part in reply.slices]
    parts = tables.planned(reply.slices)
    # reasons that only repeat the refusal are left out
    reasons = [one for one in reply.reasons if one.sentence != reply.refusal.sentence]
    shown = [parts, tables.reasons(reasons), tables.steps(reply.steps)]
    document = plain(reply)
    terminal.show(View("Plan", document, names, [table for table in shown if table.rows]))
    least = min((part.memory_bytes for part in reply.slices), default=_CONTEXT_BYTES)
    if least < _CONTEXT_BYTES:
        context = f"a CUDA context takes {words.memory(_CONTEXT_BYTES)} on an H200"
        terminal.say(f"{words.memory(least)} may be too little: {context}")
    if reply.possible:
        return Exit.OK.value
    said = status.error(reply.refusal)
    # the error is printed without its details, because the table of reasons has shown them
    refusal = VgpuError(said.code, said.sentence, said.hint)
    print_error(refusal, terminal)
    return exit_code_of(refusal)


def _show(allocation: pb.Allocation, terminal: Terminal) -> None:
    table = tables.allocations([allocation], time.time_ns())
    terminal.show(View("Allocation", plain(allocation), [allocation.id], [table]))
