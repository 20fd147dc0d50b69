"""Finds threads of suspended tenants that wait inside the driver, where libvgpu does not see them.

libvgpu counts the threads that it holds before a driver call. It misses calls that it does not wrap, and
tenants of whole cards have no libvgpu. A scan reads what each thread of a suspended process waits for. If a
thread waits for a lock, the scan also reads its stack, once per wait.
"""

import asyncio
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby

import structlog

from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, State, Way
from vgpud.node.store.book import Book
from vgpud.proc import aside, start_ticks
from vgpud.stacks.blocked import MACHINES, Code, Machine, in_driver, is_drivers_own, lock_wait

log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 1.0
_AGAIN_SECONDS = 0.2  # pause before the next scan, after a blocked thread was seen for the first time
_LOOKS = 2  # number of consecutive scans in which a thread must wait in the same place
_MOST_THREADS = 4096  # maximum of threads in one scan; the next scan reads the others
_LINE_BYTES = 256
_MOST_MAPS = 4 << 20  # maximum size of the memory map that is read, in characters: some 40 000 mappings

Process = tuple[int, int]  # A process: pid and start ticks.


@dataclass(frozen=True, slots=True)
class BlockedThread:
    pid: int
    tid: int
    name: str


class _Files:
    """The files of an open folder /proc/PID, which stays bound to one process. Every method raises
    OSError.
    """

    def __init__(self, pid: int, folder: int) -> None:
        self._pid = pid
        self._open = partial(os.open, dir_fd=folder)
        self._folder = folder
        self._memory = -1

    def threads(self) -> list[int]:
        folder = self._open("task", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(folder) as entries:
                return [int(entry.name) for entry in entries]
        finally:
            os.close(folder)

    def line(self, name: str) -> bytes:
        def read() -> bytes:
            file = self._open(name, os.O_RDONLY)
            try:
                return os.read(file, _LINE_BYTES)
            finally:
                os.close(file)

        return aside(self._pid, read)

    @cached_property
    def code(self) -> Code:
        def read() -> str:
            with open("maps", encoding="utf-8", errors="replace", opener=self._open) as maps:
                return maps.read(_MOST_MAPS)

        return Code(aside(self._pid, read))

    def memory(self, address: int, size: int) -> bytes:
        """Up to `size` bytes of the process's memory from `address`; fewer if the mapping ends before."""
        if self._memory < 0:
            self._memory = aside(self._pid, lambda: self._open("mem", os.O_RDONLY), os.close)
        try:
            return aside(self._pid, lambda: os.pread(self._memory, size, address))
        except (OSError, OverflowError):
            return b""

    def close(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
        os.close(self._folder)


@contextmanager
def _opened(process: Process) -> Iterator[_Files | None]:
    """Yields the files of a process; None if the process has ended, or no descriptor is free. A refused read
    ends the `with` block.
    """
    try:
        files = _Files(process[0], os.open(f"/proc/{process[0]}", os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        yield None
        return
    try:
        is_it = _is(process)
        with suppress(OSError):
            yield files if is_it else None
    finally:
        files.close()


def _is(process: Process) -> bool:
    """True if the pid still belongs to the same process."""
    try:
        return start_ticks(process[0]) == process[1]
    except OSError:
        return False


@dataclass(slots=True)
class _Seen:
    """A thread: the text of its /proc file, and the number of scans in which it has waited in the driver
    since then.
    """

    text: bytes
    name: str = ""
    looks: int = 0


class Looks:
    """Scans processes and keeps the results. Blocking; only one worker thread at a time may call it."""

    def __init__(self, machine: str = os.uname().machine, most_threads: int = _MOST_THREADS) -> None:
        self._machine = MACHINES.get(machine)
        self._most = most_threads
        self._seen: dict[tuple[Process, int], _Seen] = {}
        self._last: tuple[Process, int] = (0, 0), 0

    def look(self, processes: Collection[Process]) -> None:
        """Scans `processes` and forgets all others. Finds nothing if /proc cannot be read, or on an
        unsupported architecture.
        """
        if self._machine is None:
            return
        threads = sorted(self._threads(processes))
        self._seen = {key: self._seen[key] for key in threads if key in self._seen}
        if len(threads) > self._most:
            turn = bisect_right(threads, self._last)
            threads = [*threads[turn:], *threads[:turn]][: self._most]
            self._last = threads[-1]
        for process, group in groupby(threads, lambda key: key[0]):
            with _opened(process) as files:
                if files is not None:
                    for key in group:
                        self._look_at(key, files, self._machine)

    @property
    def is_unsure(self) -> bool:
        return any(0 < seen.looks < _LOOKS for seen in self._seen.values())

    def blocked(self, processes: Iterable[Process]) -> tuple[BlockedThread, ...]:
        wanted = set(processes)
        return tuple(
            BlockedThread(process[0], tid, seen.name)
            for (process, tid), seen in self._seen.items()
            if process in wanted and seen.looks >= _LOOKS
        )

    def _threads(self, processes: Collection[Process]) -> Iterator[tuple[Process, int]]:
        for process in processes:
            with _opened(process) as files:
                if files is not None:
                    yield from ((process, tid) for tid in files.threads())

    def _look_at(self, key: tuple[Process, int], files: _Files, machine: Machine) -> None:
        """Scans one thread. Raises PermissionError if the kernel forbids it."""
        try:
            text = files.line(f"task/{key[1]}/syscall")
            seen = self._seen.get(key)
            if seen is None or seen.text != text:
                seen = self._seen[key] = _Seen(text)
                self._judge(seen, key[1], files, machine)
            elif seen.looks:
                seen.looks += 1
        except (FileNotFoundError, ProcessLookupError):
            self._seen.pop(key, None)

    def _judge(self, seen: _Seen, tid: int, files: _Files, machine: Machine) -> None:
        wait = lock_wait(seen.text, machine)
        if wait is None:
            return
        seen.name = files.line(f"task/{tid}/comm").decode(errors="replace").rstrip("\n")
        if not is_drivers_own(seen.name) and in_driver(wait, files.code, files.memory, machine):
            seen.looks = 1


@dataclass
class Blocked:
    """Finds the suspended tenants with threads that wait inside the driver."""

    book: Book
    _looks: Looks = field(default_factory=Looks)
    # Allocations with a blocked thread, with the allocation's revision at the scan.
    _found: dict[str, int] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)

    async def run(self, is_known: Callable[[Allocation], bool]) -> None:
        """Scans until the daemon stops. Skips tenants of which `is_known` says that they have work."""
        while True:
            away = [a for a in self.book if a.suspended and a.state is State.SUSPENDED]
            processes = {allocation.id: _saved(allocation) for allocation in away}
            every = {one for some in processes.values() for one in some}
            if every:
                await asyncio.to_thread(self._looks.look, every)
            else:
                self._looks.look(())
            threads = {a.id: self._looks.blocked(processes[a.id]) for a in away}
            self._found = {a.id: a.revision for a in away if threads[a.id]}
            self._told = {name: told for name, told in self._told.items() if name in processes}
            for allocation in away:
                if self.holds(allocation) and not is_known(allocation):
                    self._tell(allocation, threads[allocation.id])
            await asyncio.sleep(_AGAIN_SECONDS if self._looks.is_unsure else _PAUSE_SECONDS)

    def holds(self, allocation: Allocation) -> bool:
        """Did the last scan find a blocked thread of the allocation, and did it scan the present
        suspension?
        """
        return self._found.get(allocation.id) == allocation.revision

    def _tell(self, allocation: Allocation, threads: tuple[BlockedThread, ...]) -> None:
        if self._told.get(allocation.id) == allocation.revision:
            return
        self._told[allocation.id] = allocation.revision
        one = threads[0]
        log.info(
            LogEvent.SUSPENDED_THREAD_BLOCKED_IN_DRIVER,
            allocation=allocation.id,
            pid=one.pid,
            tid=one.tid,
            thread=one.name,
            threads=len(threads),
        )


def _saved(allocation: Allocation) -> tuple[Process, ...]:
    """The processes of the allocation that the driver's checkpoint has saved."""
    return tuple((p.pid, p.start_ticks) for p in allocation.suspended if p.way is Way.CHECKPOINT)
