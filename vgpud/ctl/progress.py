"""Prints on a terminal how far a long operation on one allocation has come."""

import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vgpud.api.client import Client
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.terminal import Terminal
from vgpud.ctl.top_draw import cut
from vgpud.model.errors import VgpuError

_FIRST_SECONDS = 1.0  # an operation that takes less time prints nothing
_LOOK_SECONDS = 1.0
_START, _CLEAR = "\r", "\x1b[K"


@contextmanager
def told(arguments: Namespace, terminal: Terminal, allocation: str, doing: str) -> Iterator[None]:
    """While the body runs, shows a line on standard error with the elapsed time and the memory that is on the
    device. After an interrupt, a message says that vgpud continues the operation.
    """
    if terminal.quiet or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(arguments, allocation, f"{doing} {allocation}", ended), daemon=True
    )
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        ended.set()
        thread.join(_LOOK_SECONDS)
        terminal.say(f"{_START}{_CLEAR}vgpud goes on {doing} {allocation}; 'vgpuctl ls' shows its state")
        raise
    finally:
        ended.set()
        thread.join(_LOOK_SECONDS)
        if not thread.is_alive():
            sys.stderr.write(_START + _CLEAR)
            sys.stderr.flush()


def _tell(arguments: Namespace, allocation: str, doing: str, ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_FIRST_SECONDS):
        return
    with suppress(VgpuError), connect(arguments) as client:
        whole = 0
        while True:
            held = client.get_allocation(allocation).suspended_bytes
            on_device = _on_device(client, allocation)
            whole = max(whole, held, on_device)
            line = progress_line(doing, whole, on_device, time.monotonic() - began)
            if ended.is_set():
                return
            # The line is cut to the width of the terminal, because a wrapped line could not be overwritten.
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(_START + cut(line, max(1, columns - 1)) + _CLEAR)
            sys.stderr.flush()
            if ended.wait(_LOOK_SECONDS):
                return


def _on_device(client: Client, allocation: str) -> int:
    """Bytes of device memory that the processes of the allocation hold, as NVML reports them."""
    processes = client.list_processes().processes
    return sum(one.memory_bytes for one in processes if one.allocation_id == allocation)


def progress_line(doing: str, whole_bytes: int, on_device_bytes: int, seconds: float) -> str:
    """The line that shows how far an operation has come. `whole_bytes` is the memory that the operation
    moves. If the driver moves it in one piece, the line shows no part of it.
    """
    text = f"{doing}: {words.duration(seconds)}"
    if whole_bytes:
        text += f", {words.memory(on_device_bytes)} of {words.memory(whole_bytes)} on the device"
    return f"{text}; Ctrl-C leaves it to vgpud"
