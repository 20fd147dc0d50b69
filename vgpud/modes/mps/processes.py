"""Reads facts about control daemons, their servers and their clients from /proc."""

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from vgpud import audit, proc
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.proc import Running, has_exited, open_pidfd

log = structlog.get_logger(__name__)

_SERVER = "nvidia-cuda-mps-server"
# A process in an exec is asked again for up to 2 s. A user can have an exec that does not end.
_TRIES, _RETRY_SECONDS = 21, 0.1


def command(pid: int) -> str:
    """The command line of a process as `ps` shows it, at most 80 characters; empty if it cannot be read, for
    example if the process has ended.
    """
    return b" ".join(proc.arguments(pid)).decode(errors="replace").strip()[:80]


def end_servers(folder: DeviceFolder, program: str) -> tuple[int, ...]:
    """Ends the servers that earlier daemons of this device left behind. Returns their pids.

    Precondition: no daemon runs. The clients of these servers are lost already, and under EXCLUSIVE_PROCESS
    an old server would keep a new server off the card. `program` is nvidia-cuda-mps-control.
    """
    ended = []
    for server in of_lives(folder, program):
        pidfd = open_pidfd(server)
        if pidfd is not None:
            with pidfd:
                program = command(server.pid)
                pidfd.send(signal.SIGKILL)
                reason = "its control daemon has ended"
                audit.automatic("end MPS server", reason, server=server.pid, command=program)
            ended.append(server.pid)
    return tuple(ended)


def of_lives(folder: DeviceFolder, program: str) -> tuple[Running, ...]:
    """The running daemon of this device and its servers.

    A process counts if it runs NVIDIA's program and has one of the daemon's pipe folders in its environment.
    The environment alone proves nothing: any user can start a program with such an environment, also a
    set-user-id program. A server that is being started is found, too.
    """
    programs = _programs(program)
    of_a_life = re.compile(rb"CUDA_MPS_PIPE_DIRECTORY=" + re.escape(os.fsencode(folder.pipes)) + rb"/g[0-9]+")
    found, asked = [], [pid for pid in proc.pids() if pid != os.getpid()]
    for left in reversed(range(_TRIES)):
        again = []
        for pid in asked:
            try:
                found.append(_running(pid, programs, of_a_life))
            except OSError:
                again.append(pid)
        if not again or not left:
            break
        asked = again
        time.sleep(_RETRY_SECONDS)
    return tuple(process for process in found if process is not None)


def still_there(processes: Iterable[Running], seconds: float) -> tuple[int, ...]:
    """Waits up to `seconds` for the processes to end. Returns the pids of those that still run."""
    until = time.monotonic() + seconds
    left = []
    for process in processes:
        pidfd = open_pidfd(process)
        if pidfd is not None:
            with pidfd:
                if not has_exited(pidfd, max(until - time.monotonic(), 0.0)):
                    left.append(process.pid)
    return tuple(left)


def _running(pid: int, programs: frozenset[Path], entry: re.Pattern[bytes]) -> Running | None:
    """The process if it runs one of the programs with such an entry in its environment, otherwise None.
    Raises OSError with a number of proc.SCARCE if the kernel does not answer.
    """
    if proc.executable(pid) not in programs:
        return None
    entries = proc.environment(pid)
    # The environment is unreadable, or is not stored yet, because an exec changes the executable first.
    if entries == [b""]:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    stat = proc.look(pid) if any(map(entry.fullmatch, entries)) else None
    return None if stat is None else Running("", stat.pid, stat.start_ticks)


def _programs(control: str) -> frozenset[Path]:
    found = Path(shutil.which(control) or control).resolve()
    return frozenset({found, found.with_name(_SERVER)})
