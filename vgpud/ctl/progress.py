"""Prints on a terminal how far a long operation has come."""

import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.terminal import Terminal
from vgpud.ctl.top_draw import cut
from vgpud.model.errors import VgpuError

_FIRST_SECONDS = 1.0  # an operation that takes less time prints nothing
_LOOK_SECONDS = 1.0
_COLUMNS = 80  # columns of a terminal that does not know its width
_LEAST_PART = 20  # the remaining time is estimated once 1/20 of the memory has moved
_START, _CLEAR = "\r", "\x1b[K"


class Seen(NamedTuple):
    """Memory of an operation in bytes. `on_device` is what is on the device, or what planned moves have still
    to move. `whole` is the total; 0 if it is not known.
    """

    on_device: int = 0
    whole: int = 0


@dataclass(frozen=True)
class Operation:
    """An operation of vgpud. `doing` describes it, as in "suspending a1b2", and `look` reads its progress.
    `leaves` says whether memory leaves the device (True), arrives on it (False), or both (None). `where` is
    printed after the amounts of memory.
    """

    doing: str
    look: Callable[[Client], Seen]
    leaves: bool | None = None
    where: str = "on the device"


def of_allocation(doing: str, allocation: str, leaves: bool | None) -> Operation:
    def look(client: Client) -> Seen:
        processes = client.list_processes().processes
        on_device = sum(one.memory_bytes for one in processes if one.allocation_id == allocation)
        held = client.get_allocation(allocation)
        return Seen(on_device, held.suspended_bytes + held.stays_bytes)

    return Operation(f"{doing} {allocation}", look, leaves)


def of_device(doing: str, device: pb.Device) -> Operation:
    """An operation that empties a device of the tenants that can be moved."""

    def look(client: Client) -> Seen:
        here = (one for one in client.list_processes().processes if one.device_uuid == device.uuid)
        return Seen(sum(one.memory_bytes for one in here if one.allocation_id))

    return Operation(f"{doing} device {device.index}", look, leaves=True)


def of_moves(doing: str, moves: Sequence[pb.TenantMove]) -> Operation:
    whole = sum(one.memory_bytes for one in moves)

    def look(client: Client) -> Seen:
        held = client.list_allocations().allocations
        there = {(one.id, part.device_uuid) for one in held for part in one.slices}
        left = (one.memory_bytes for one in moves if (one.allocation_id, one.target) not in there)
        return Seen(sum(left), whole)

    return Operation(doing, look, leaves=True, where="to be moved")


@contextmanager
def told(arguments: Namespace, terminal: Terminal, operation: Operation) -> Iterator[None]:
    """While the body runs, shows what vgpud does, the elapsed time and the memory that is on the device.
    After an interrupt, a message says that vgpud continues the operation. Shows nothing with --quiet, or if
    standard error is no terminal.
    """
    if terminal.quiet or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(arguments, operation, ended), daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        ended.set()
        thread.join(_LOOK_SECONDS)
        terminal.say(f"{_START}{_CLEAR}vgpud goes on {operation.doing}; 'vgpuctl ls' shows its state")
        raise
    finally:
        ended.set()
        thread.join(_LOOK_SECONDS)
        if not thread.is_alive():
            sys.stderr.write(_START + _CLEAR)
            sys.stderr.flush()


@contextmanager
def arbiter_told(arguments: Namespace, terminal: Terminal) -> Iterator[None]:
    """While the body waits for vgpud, looks every second if vgpud reports an error of the arbiter, and prints
    the first such error.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_tell_arbiter, args=(arguments, terminal, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LOOK_SECONDS)


def _tell_arbiter(arguments: Namespace, terminal: Terminal, ended: threading.Event) -> None:
    if ended.wait(_FIRST_SECONDS):
        return
    with suppress(VgpuError), connect(arguments) as client:
        while not (trouble := client.get_node().arbiter_error):
            if ended.wait(_LOOK_SECONDS):
                return
        terminal.say(trouble)


def _tell(arguments: Namespace, operation: Operation, ended: threading.Event) -> None:
    began = time.monotonic()
    with suppress(VgpuError), connect(arguments) as client:
        first = before = operation.look(client)
        whole = max(first.whole, first.on_device)
        if ended.wait(_FIRST_SECONDS):
            return
        sys.stderr.write(f"{operation.doing}; Ctrl-C leaves it to vgpud\n")
        while True:
            seen = operation.look(client)
            whole = max(whole, seen.on_device)
            seconds = time.monotonic() - began
            line = progress_line(operation, Seen(seen.on_device, whole), before.on_device, seconds)
            before = seen
            if ended.is_set():
                return
            # The line is cut to the width of the terminal, because a wrapped line could not be overwritten.
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
            sys.stderr.write(_START + cut(line, max(1, columns - 1)) + _CLEAR)
            sys.stderr.flush()
            if ended.wait(_LOOK_SECONDS):
                return


def progress_line(operation: Operation, seen: Seen, before_bytes: int, seconds: float) -> str:
    """The line that shows how far an operation has come. `before_bytes` were on the device at the last look.

    The estimated time left assumes that the rest of the memory moves as fast as the part that has moved. It
    is not shown while nothing moves, for example when the driver saves a process in one piece.
    """
    text = words.duration(seconds)
    if seen.whole:
        text += f", {words.memory(seen.on_device)} of {words.memory(seen.whole)} {operation.where}"
        moved = seen.whole - seen.on_device if operation.leaves else seen.on_device
        moves = seen.on_device != before_bytes
        if operation.leaves is not None and moves and moved * _LEAST_PART >= seen.whole:
            left = seconds * (seen.whole - moved) / moved
            text += f", about {words.duration(left)} left" if left >= 1 else ""
    return text
