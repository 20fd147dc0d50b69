"""What /proc says of control daemons, their servers and their clients."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from vgpud import audit
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.units.process import Running, has_exited, open_pidfd, read_stat

log = structlog.get_logger(__name__)

_SERVER = "nvidia-cuda-mps-server"


def command(pid: int) -> str:
    """As `ps` shows it, at most 80 characters; empty for one that is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:80]


def user(pid: int) -> int | None:
    """The uid that owns the process."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def was_started_with(pid: int, option: str) -> bool:
    try:
        return option.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def end_servers(folder: DeviceFolder, program: str) -> tuple[int, ...]:
    """Ends the servers that daemons of this device left behind, and answers their pids.

    Only while no daemon runs: their clients are lost already, and under EXCLUSIVE_PROCESS a server would
    keep the card from the next one. `program` is nvidia-cuda-mps-control.
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
    """The daemon of this device and its servers, now.

    A server runs NVIDIA's program, and has its daemon's environment: the name of one life's folder. The
    environment alone says nothing: any program can be started with it, one with set-user-id too.
    """
    programs = _programs(program)
    return tuple(p for p in _with_pipe_of_a_life(folder) if _executable(p.pid) in programs)


def still_there(processes: Iterable[Running], seconds: float) -> tuple[int, ...]:
    """Waits for their ends, at most so long; the pids of those that have not ended."""
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
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        stat = read_stat(int(entry.name))
        with suppress(OSError):
            environ = (entry / "environ").read_bytes().split(b"\0")
            if stat is not None and any(map(of_a_life.fullmatch, environ)):
                yield Running("", stat.pid, stat.start_ticks)


def _programs(control: str) -> frozenset[Path]:
    found = Path(shutil.which(control) or control).resolve()
    return frozenset({found, found.with_name(_SERVER)})


def _executable(pid: int) -> Path | None:
    """An upgrade removes the file of a program that runs (proc(5): " (deleted)" is put behind the name)."""
    try:
        return Path(str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)"))
    except OSError:
        return None
