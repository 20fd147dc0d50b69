"""`vgpuctl run`: makes an allocation and starts a command in it. The allocation ends with the command."""

import errno
import fcntl
import os
import signal
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from vgpud.ctl.connect import connect
from vgpud.ctl.devices import complete_uuids
from vgpud.ctl.environment import host_environment, initial_environment, merged
from vgpud.ctl.fail import exec_error
from vgpud.ctl.progress import arbiter_told
from vgpud.ctl.request import request_of
from vgpud.ctl.terminal import Terminal
from vgpud.model.errors import ErrorCode, VgpuError

# The Python interpreter ignores these signals. The command must start with their default actions.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def run(arguments: Namespace, terminal: Terminal) -> NoReturn:
    """Allocates, then executes the command. It returns only by an exception: VgpuError if vgpud refuses,
    CommandFailed if exec fails.
    """
    command: list[str] = arguments.command
    if not command:
        hint = "write it after --, as in 'vgpuctl run --memory 4GiB -- python train.py'"
        raise VgpuError(ErrorCode.BAD_REQUEST, "no command to run", hint)
    inherited = open_descriptors()
    request = request_of(arguments)
    request.bind_to_caller = request.own_cgroup = True
    with connect(arguments) as client, arbiter_told(arguments, terminal):
        complete_uuids(client, request.selector)
        allocation = client.allocate(request)
    if terminal.verbose:
        devices = ", ".join(part.device_uuid for part in allocation.slices)
        terminal.say(f"allocation {allocation.id} on {devices}")
    try:
        become(command, merged(host_environment(allocation), initial_environment()), inherited)
    except OSError as error:
        failure = exec_error(command[0], error)
    # If the daemon does not answer, the daemon releases the allocation later, when it notices the end of this
    # process.
    with suppress(VgpuError), connect(arguments) as client:
        client.release(allocation.id, True)
    raise failure


def open_descriptors() -> frozenset[int]:
    """The file descriptors that this process has open now."""
    return frozenset(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


def become(command: list[str], environment: dict[bytes, bytes], inherited: frozenset[int]) -> NoReturn:
    """Executes the command. If that fails, raises OSError, and the signals have their former actions."""
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in open_descriptors() - inherited:
        close_on_exec(descriptor)
    before = [(number, signal.signal(number, signal.SIG_DFL)) for number in IGNORED_BY_PYTHON]
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is what we want
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def close_on_exec(descriptor: int) -> None:
    """Marks a descriptor close-on-exec. The descriptor stays open until exec succeeds: after a failed exec
    vgpuctl needs it to release the allocation.
    """
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
        fcntl.fcntl(descriptor, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
    except OSError as error:
        # the list contains the descriptor of the directory listing itself, which is closed by now
        if error.errno != errno.EBADF:
            raise
