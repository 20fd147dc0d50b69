"""Suspends and resumes processes, through vgpu-suspend (native/suspend/main.c has its words).

The driver's calls act on another process and may take seconds, so a program of its own makes them: it
can be waited for, and killed, where a thread of vgpud could not. Source: CUDA driver API manual,
"CUDA checkpointing" (branch 570; a restore on another device: 580). They name it by its pid; vgpu-suspend
holds a pidfd meanwhile, so an order never reaches a later process of that pid.
"""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from vgpud.model.errors import ErrorCode, VgpuError

_ENDED, _SUCCESS, _INVALID_VALUE, _NOT_READY, _NOT_SUPPORTED = -1, 0, 1, 600, 801
_START_SECONDS = 60.0  # cuInit on a node of many devices, and another vgpu-suspend that has to end first
_STATE_SECONDS = 30.0
_WHY = {
    _ENDED: "it has ended",
    2: "the device has no memory left for it",
    _NOT_READY: "its calls under way did not end in time",
    _NOT_SUPPORTED: "the driver cannot suspend it: MPS clients, and memory shared with other processes "
    "(IPC, NCCL) or managed, are beyond it",
    401: "it is in a state that does not allow this",
    999: "it failed while it was suspended before",
}


class ProcessState(IntEnum):
    """CUprocessState of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    SAVED = 2  # its memory is on the host, and the device's is free
    FAILED = 3
    SAVING = 4
    RESTORING = 5


class Process(Protocol):
    """`start_ticks` is field 22 of /proc/PID/stat (proc(5)), which tells a reused pid apart."""

    @property
    def pid(self) -> int: ...

    @property
    def start_ticks(self) -> int: ...


class Session:
    """One vgpu-suspend. Every method but `state` raises VgpuError(SUSPEND_FAILED), or HELPER_FAILED and
    HELPER_TIMEOUT where nothing is known of what was done."""

    def __init__(self, answers: asyncio.StreamReader, orders: asyncio.StreamWriter) -> None:
        self._from, self._to = answers, orders
        self._owed = 0  # answers that are still due, also to abandoned orders

    async def state(self, process: Process) -> ProcessState | None:
        """None: it has ended, or uses no CUDA."""
        _, _, state = await self._ask("state", process, seconds=_STATE_SECONDS)
        return None if state < 0 else ProcessState(state)

    async def lock(self, process: Process, seconds: float) -> None:
        """Its calls wait from now on; it stays running if those under way do not end in `seconds`."""
        await self._do("lock", process, f"{int(seconds * 1000)}", seconds=seconds + _STATE_SECONDS)

    async def save(self, process: Process, seconds: float) -> None:
        await self._do("save", process, seconds=seconds)

    async def restore(self, process: Process, seconds: float, moved: Mapping[str, str] | None = None) -> None:
        """`moved` has the new device's UUID for each old one's; all of the process's, if any."""
        pairs = [uuid for pair in (moved or {}).items() for uuid in pair]
        await self._do("restore", process, *pairs, seconds=seconds)

    async def unlock(self, process: Process) -> None:
        await self._do("unlock", process, seconds=_STATE_SECONDS)

    async def _do(self, verb: str, process: Process, *more: str, seconds: float) -> None:
        code, name, _ = await self._ask(verb, process, *more, seconds=seconds)
        if code != _SUCCESS:
            raise VgpuError(
                ErrorCode.SUSPEND_FAILED,
                f"cannot {verb} process {process.pid}: {_WHY.get(code, 'the driver refuses')} ({name})",
                "see docs/pool.md for what can be suspended",
            )

    async def _ask(self, verb: str, process: Process, *more: str, seconds: float) -> tuple[int, str, int]:
        try:
            self._to.write(" ".join((verb, str(process.pid), str(process.start_ticks), *more, "\n")).encode())
            self._owed += 1
            await self._to.drain()
            async with asyncio.timeout(seconds):
                code, name, state = await self._last_answer()
        except TimeoutError:
            raise VgpuError(
                ErrorCode.HELPER_TIMEOUT,
                f"vgpu-suspend did not {verb} process {process.pid} within {seconds:g} seconds",
                "see the driver's log: dmesg",
            ) from None
        except (OSError, ValueError) as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"vgpu-suspend ended while it was to {verb} process {process.pid}",
                "see the journal of vgpud",
            ) from error
        return int(code), name, int(state)

    async def _last_answer(self) -> list[str]:
        """The answer to the last order; answers to earlier orders are read first and dropped."""
        line = b""
        while self._owed > 0:
            line = await self._from.readline()
            self._owed -= 1
            if not line:
                break
        return line.decode().split()


class Suspender:
    def __init__(self, program: Path, lock: Path) -> None:
        self._program = program
        self._lock = lock

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Raises VgpuError: UNSUPPORTED where this node cannot suspend, HELPER_FAILED."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._start(theirs)
        answers, orders = await asyncio.open_connection(sock=ours)
        try:
            await _ready(answers)
            yield Session(answers, orders)
        finally:
            orders.close()
            process.kill()  # an order that is under way is the driver's by now
            await asyncio.to_thread(process.wait)

    def _start(self, line: socket.socket) -> subprocess.Popen[bytes]:
        try:
            # not asyncio's: that forks, and gRPC's threads do not outlive a fork (this is a vfork)
            return subprocess.Popen(
                [str(self._program), str(self._lock)],
                stdin=line.fileno(),
                stdout=line.fileno(),
                start_new_session=True,  # a Ctrl-C at vgpud's terminal is not for it
            )
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"{self._program} does not start: {(error.strerror or str(error)).lower()}",
                "install package libvgpu again",
            ) from None


async def _ready(answers: asyncio.StreamReader) -> None:
    try:
        async with asyncio.timeout(_START_SECONDS):
            said = (await answers.readline()).decode().strip()
    except TimeoutError:
        said = "it says nothing"
    if said != "ready":
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"this node cannot suspend tenants: {said.removeprefix('error ') or 'vgpu-suspend died at once'}",
            "see 'vgpuctl status' for the driver's branch",
        )
