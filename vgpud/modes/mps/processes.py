"""Reads facts about control daemons, their servers and their clients from /proc."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from vgpud import audit, proc
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.proc import Running, has_exited, open_pidfd

log = structlog.get_logger(__name__)

_SERVER = "nvidia-cuda-mps-server"


def command(pid: int) -> str:
    """The command line of a process as `ps` shows it, at most 80 characters; empty if the process has
    ended.
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
                audit.automatic(
                    "end MPS server",
                    "its control daemon has ended",
                    server=server.pid,
                    command=command(server.pid),
                )
                pidfd.send(signal.SIGKILL)
            ended.append(server.pid)
    return tuple(ended)


def of_lives(folder: DeviceFolder, program: str) -> tuple[Running, ...]:
    """The running daemon of this device and its servers.

    A process counts if it runs NVIDIA's program and has one of the daemon's pipe folders in its environment.
    The environment alone proves nothing: any user can start a program with such an environment, also a
    set-user-id program.
    """
    programs = _programs(program)
    return tuple(p for p in _with_pipe_of_a_life(folder) if proc.executable(p.pid) in programs)


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


def _with_pipe_of_a_life(folder: DeviceFolder) -> Iterator[Running]:
    of_a_life = re.compile(rb"CUDA_MPS_PIPE_DIRECTORY=" + re.escape(os.fsencode(folder.pipes)) + rb"/g[0-9]+")
    for pid in proc.pids():
        if pid != os.getpid() and any(map(of_a_life.fullmatch, proc.environment(pid))):
            stat = proc.read_stat(pid)
            if stat is not None:
                yield Running("", stat.pid, stat.start_ticks)


def _programs(control: str) -> frozenset[Path]:
    found = Path(shutil.which(control) or control).resolve()
    return frozenset({found, found.with_name(_SERVER)})
