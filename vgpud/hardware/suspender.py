"""Suspends and resumes processes through vgpu-suspend (native/suspend/main.c describes the protocol).

The driver's calls act on another process and may take seconds. A separate program makes them, because a
program can be killed and a thread of vgpud cannot. Source: CUDA driver API manual, "CUDA checkpointing"
(branch 570; a restore on another device: 580). The calls identify the process by its pid. vgpu-suspend holds
a pidfd of the process during a call, so that no order reaches a later process with the same pid.
"""

import asyncio
import socket
import subprocess
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.pace import Pace

_ENDED, _SUCCESS, _INVALID_VALUE, _NOT_FOUND, _NOT_READY, _NOT_SUPPORTED = -1, 0, 1, 500, 600, 801
#: Maximum number of sessions that run at once.
SESSIONS_MAX = 4
# maximum time until vgpu-suspend is ready: it waits for the end of the tenant's earlier vgpu-suspend, and
# cuInit takes long on a node with many devices
_START_SECONDS = 60.0
_STATE_SECONDS = 30.0
_SETTLE_SECONDS = 2.0
_WHY = {
    _ENDED: "it has ended",
    2: "the device has no memory left for it",
    _NOT_READY: "its calls under way did not end in time",
    _NOT_SUPPORTED: "the driver cannot suspend it: MPS clients, and memory shared with other processes "
    "(NCCL; CUDA IPC, but for jobs of cuda-checkpoint) or managed, are beyond it",
    401: "it is in a state that does not allow this",
    999: "it failed while it was suspended before",
}


class ProcessState(IntEnum):
    """The state of a process as the driver reports it: CUprocessState of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    SAVED = 2  # the device memory of the process is copied to the host and freed
    FAILED = 3
    SAVING = 4
    RESTORING = 5


class Process(Protocol):
    """A process to suspend. `start_ticks` is field 22 of /proc/PID/stat (proc(5)); it distinguishes processes
    that get the same pid one after the other.
    """

    @property
    def pid(self) -> int: ...

    @property
    def start_ticks(self) -> int: ...


class Session:
    """One running vgpu-suspend. Every method raises VgpuError HELPER_FAILED or HELPER_TIMEOUT if it is
    unknown whether the order was carried out. If the order failed, every method except `state` and `reach`
    raises SUSPEND_FAILED.
    """

    def __init__(self, answers: asyncio.StreamReader, orders: asyncio.StreamWriter) -> None:
        self._from, self._to = answers, orders
        # number of answers that are still to be read, including those to orders whose caller no longer waits
        self._owed = 0

    async def state(self, process: Process) -> ProcessState | None:
        """The state of a process; None if it has ended or does not use CUDA."""
        _, _, state = await self._ask("state", process, seconds=_STATE_SECONDS)
        return None if state < 0 else ProcessState(state)

    async def lock(self, process: Process, seconds: float) -> None:
        """Blocks the process's further CUDA calls. If its current calls do not end within `seconds`, the
        process stays running.
        """
        await self._do("lock", process, f"{int(seconds * 1000)}", seconds=seconds + _STATE_SECONDS)

    async def save(self, process: Process, seconds: float) -> None:
        await self._do("save", process, seconds=seconds)

    async def restore(self, process: Process, seconds: float, moved: Mapping[str, str] | None = None) -> None:
        """Restores the memory of a process to devices. `moved` maps the UUID of each old device to its new
        one; it is empty or names all devices of the process.
        """
        pairs = [uuid for pair in (moved or {}).items() for uuid in pair]
        await self._do("restore", process, *pairs, seconds=seconds)

    async def unlock(self, process: Process) -> None:
        await self._do("unlock", process, seconds=_STATE_SECONDS)

    async def reach(self, process: Process, old: str, new: str) -> bool:
        """Prepares copies of memory that the process parks on device `old` to device `new`. Returns False if
        the copies cannot be made.
        """
        code, _, _ = await self._ask("reach", process, old, new, seconds=_STATE_SECONDS)
        return code == _SUCCESS

    async def copy(self, process: Process, parked_list: int, seconds: float) -> None:
        """Copies the memory blocks that the process has parked to their new device. `parked_list` is the
        process's file descriptor of the list of these blocks. Does nothing if the process has ended, or if
        this descriptor is no list that waits for a copy.
        """
        code, name, _ = await self._ask("copy", process, str(parked_list), seconds=seconds)
        if code not in (_SUCCESS, _ENDED, _NOT_FOUND):
            raise VgpuError(
                ErrorCode.SUSPEND_FAILED,
                f"cannot copy the memory of process {process.pid} to its new device ({name})",
                "move it again: it then goes by the host",
            )

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
                "look in the kernel log for lines with NVRM or Xid",
            ) from None
        except (OSError, ValueError) as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"vgpu-suspend ended before it could {verb} process {process.pid}",
                "see the journal of vgpud",
            ) from error
        return int(code), name, int(state)

    async def _last_answer(self) -> list[str]:
        """Reads the answer to the last order. Answers to earlier orders come first and are dropped."""
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
        self._turns = Pace(rest_factor=0)
        self._free = asyncio.Semaphore(SESSIONS_MAX)
        self._sessions = 0  # sessions that run or wait
        self._ends: set[asyncio.Task[int]] = set()

    @property
    def is_busy(self) -> bool:
        return self._sessions > 0

    async def settle(self) -> None:
        """Waits until the programs of ended sessions have ended, for some seconds at most. NVML lists them on
        their devices until then.
        """
        if self._ends:
            await asyncio.wait(self._ends, timeout=_SETTLE_SECONDS)

    @asynccontextmanager
    async def session(self, user: int, tenant: str) -> AsyncIterator[Session]:
        """Starts vgpu-suspend for a tenant of `user` and yields its session. At most SESSIONS_MAX run at
        once, one for each tenant, and users take turns: the driver waits up to ten seconds for each tenant
        whose kernel does not end.

        Raises VgpuError: UNSUPPORTED if this node cannot suspend, HELPER_FAILED.
        """
        self._sessions += 1
        try:
            async with self._turns.turn(user):
                await self._free.acquire()
            try:
                async with self._session(tenant) as session:
                    yield session
            finally:
                self._free.release()
        finally:
            self._sessions -= 1

    @asynccontextmanager
    async def _session(self, tenant: str) -> AsyncIterator[Session]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._start(theirs, zlib.crc32(tenant.encode()))
        answers, orders = await asyncio.open_connection(sock=ours)
        try:
            await _ready(answers)
            yield Session(answers, orders)
        finally:
            orders.close()
            # killing the program does not undo its last order, which the driver may already execute
            process.kill()
            # The CUDA contexts of the killed vgpu-suspend take time to end. The tenant's next vgpu-suspend
            # waits for this at the lock file.
            end = asyncio.create_task(asyncio.to_thread(process.wait))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    def _start(self, line: socket.socket, number: int) -> subprocess.Popen[bytes]:
        """Starts vgpu-suspend. `number` is the tenant's: two tenants with one number wait for each other."""
        try:
            # asyncio's subprocess module would fork, which gRPC's threads do not survive; this Popen uses
            # vfork
            return subprocess.Popen(
                [str(self._program), str(self._lock), str(number)],
                stdin=line.fileno(),
                stdout=line.fileno(),
                start_new_session=True,  # a Ctrl-C at vgpud's terminal must not end vgpu-suspend
            )
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"{self._program} does not start: {(error.strerror or str(error)).lower()}",
                "install package vgpud again, or set VGPUD_SUSPENDER",
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
