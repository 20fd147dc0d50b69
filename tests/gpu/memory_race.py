"""Racing processes under one limit, read while they race: parts of memory_exact.

Each process writes its current operation into a word of shared memory, and the words are read with NVML's
figures: a reading over the limit names the operations in flight. They are counted for every reading, so
an operation which is more frequent over the limit stands out.
"""

import mmap
import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from tests.gpu.memory_node import FAMILIES, GIB, MIB, Bench, go_on, ledger_bytes, lines, nvml_bytes, step
from vgpud.lease import read_usage

PROCESSES = 8
SECONDS_MAX = 100
STOPPED_EVERY_SECONDS = 0.04
STOPPED_MOST_SECONDS = 0.5
DETAILS_MAX = 40
EXITING = 4  # PF_EXITING of include/linux/sched.h; the flags are field 9 of /proc/PID/stat
# the value that a process writes while it does an operation (memory_families.c), and the operation's name
OPERATIONS = {0: "nothing", 100: "context", 101: "ended"} | {
    1 + 2 * index + half: f"{verb} {family}"
    for index, family in enumerate(FAMILIES)
    for half, verb in enumerate(("make", "drop"))
}


def card_used(uuid: str) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)


class Most:
    """The highest value of a figure, and how often the figure was above the limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.most, self.samples, self.over = limit, 0, 0, 0

    def add(self, nbytes: int) -> bool:
        self.most = max(self.most, nbytes)
        self.samples += 1
        self.over += nbytes > self.limit
        return nbytes > self.limit

    def said(self) -> dict[str, float]:
        return {"most_mib": self.most / MIB, "samples": self.samples, "over_limit": self.over}


@dataclass
class Racers:
    """Processes of one lease, and the words into which they write their operations."""

    bench: Bench
    lease: Path
    words: mmap.mmap
    family: str | None
    operations: int
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)
    outs: list[tuple[str, str]] = field(default_factory=list)

    def start(self, index: int) -> "subprocess.Popen[str]":
        """Starts a new process for this index. It waits for a line once it has its context."""
        arguments = ["race", str(random.randrange(1 << 30)), str(self.operations)]
        words = {"MEMORY_WORDS": str(self.bench.run_dir / "words"), "MEMORY_WORD": str(index)}
        arguments += [self.family] if self.family is not None else []
        return self.bench.start(self.lease, self.bench.program("memory_families"), *arguments, **words)

    def doing(self) -> list[str]:
        words = struct.unpack(f"<{PROCESSES}I", self.words[: 4 * PROCESSES])
        return [
            OPERATIONS.get(word, str(word)) if process.poll() is None else "gone"
            for process, word in zip(self.processes, words, strict=True)
        ]

    def held(self) -> int:
        listed = nvml_bytes(self.bench.uuid)
        return sum(listed.get(process.pid, 0) for process in self.processes)

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.communicate()


@contextmanager
def racers(
    bench: Bench, name: str, limit: int, operations: int, family: str | None = None
) -> Iterator[Racers]:
    path = bench.run_dir / "words"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as words:
        group = Racers(bench, bench.lease(name, limit), words, family, operations)
        try:
            group.processes = [group.start(index) for index in range(PROCESSES)]
            for process in group.processes:
                step(process)
            yield group
        finally:
            group.end()


def exiting(pid: int) -> bool:
    try:
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[6]) & EXITING)
    except OSError:
        return False


@dataclass
class Readings:
    """Figures read while processes run, and the operations in flight when a figure was over the limit."""

    racers: Racers
    offset: int  # the device's figure minus the sum of the processes' figures while they are idle
    moving: Most
    card: Most
    always: "Counter[str]" = field(default_factory=Counter)
    when_over: "Counter[str]" = field(default_factory=Counter)
    details: list[dict[str, Any]] = field(default_factory=list)
    over: int = 0

    def read(self) -> None:
        before = self.racers.doing()
        held, used = self.racers.held(), card_used(self.racers.bench.uuid) - self.offset
        after = self.racers.doing()
        there = set(before) | set(after)
        self.always.update(there)
        moving_over, card_over = self.moving.add(held), self.card.add(used)
        if moving_over or card_over:
            self.over += 1
            self.when_over.update(there)
            if len(self.details) < DETAILS_MAX:
                self.details.append(self.detail(held, used, before, after))

    def detail(self, held: int, used: int, before: list[str], after: list[str]) -> dict[str, Any]:
        usage = read_usage(self.racers.lease)
        listed = nvml_bytes(self.racers.bench.uuid)
        ledgers = {p.pid: p.devices[0] for p in usage.processes}
        rows = []
        for process, was, now in zip(self.racers.processes, before, after, strict=True):
            own = ledgers.get(process.pid)
            rows.append(
                {
                    "was": was,
                    "is": now,
                    "exiting": exiting(process.pid),
                    "ledger_mib": (own.used_bytes + own.context_bytes) / MIB if own else None,
                    "nvml_mib": listed.get(process.pid, 0) / MIB,
                }
            )
        limit = self.card.limit
        return {
            "processes_over_mib": (held - limit) / MIB,
            "card_over_mib": (used - limit) / MIB,
            "ledger_then_mib": ledger_bytes(usage) / MIB,
            "processes": rows,
        }

    def said(self) -> dict[str, Any]:
        """`culprits`: for each operation its share of the readings over the limit, and of all readings."""
        over, samples = max(self.over, 1), max(self.card.samples, 1)
        shares = {
            name: [round(self.when_over[name] / over, 3), round(count / samples, 3)]
            for name, count in self.always.items()
        }
        return {
            "on_the_fly": self.moving.said(),
            "card": self.card.said(),
            "card_above_processes_mib": self.offset / MIB,
            "culprits": dict(sorted(shares.items(), key=lambda row: row[1][1] - row[1][0])),
            "over": self.details,
        }


def readings(group: Racers, limit: int) -> Readings:
    return Readings(group, card_used(group.bench.uuid) - group.held(), Most(limit), Most(limit))


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "Z")
    except OSError:
        return True


@dataclass
class Stopped:
    """Figures of one instant: all processes are stopped, and none is inside the driver's kernel part. If a
    stopped process holds a lock that the reader needs (the simulator's processes share some), all continue.
    """

    still: Most
    card: Most
    ledger: Most
    due: float = 0.0

    def read(self, group: Racers, offset: int) -> None:
        began = time.monotonic()
        if began < self.due:
            return
        self.due = began + STOPPED_EVERY_SECONDS
        late = threading.Timer(STOPPED_MOST_SECONDS, group.signal, (signal.SIGCONT,))
        late.start()
        group.signal(signal.SIGSTOP)
        while not all(_stopped(process.pid) for process in group.processes) and late.is_alive():
            pass
        held, used = group.held(), card_used(group.bench.uuid) - offset
        ledger = ledger_bytes(read_usage(group.lease))
        if late.is_alive():
            self.still.add(held)
            self.card.add(used)
            self.ledger.add(ledger)
        late.cancel()
        late.join()
        group.signal(signal.SIGCONT)


def _operations(share: int = 1) -> int:
    return int(os.environ.get("VGPU_RACE_OPERATIONS", "125000")) // share


def _limit(beside_contexts: int = GIB) -> int:
    return PROCESSES * 620 * MIB + beside_contexts


def _until_done(group: Racers, look: Callable[[], None]) -> None:
    ends = time.monotonic() + SECONDS_MAX
    for process in group.processes:
        go_on(process)
    while any(process.poll() is None for process in group.processes) and time.monotonic() < ends:
        look()
    group.signal(signal.SIGKILL if time.monotonic() >= ends else signal.SIGCONT)
    group.outs = [process.communicate() for process in group.processes]
    time.sleep(0.2)


def _outcome(group: Racers) -> dict[str, Any]:
    said = [line for out, _ in group.outs for line in lines(out)]
    return {
        "operations": sum(line.get("operations", 0) for line in said),
        "refused": sum(line.get("refused", 0) for line in said),
        "returncodes": [process.returncode for process in group.processes],
        "stderr": [error[-200:] for _, error in group.outs if error],
        "ledger_after": ledger_bytes(read_usage(group.lease)),
    }


def race(bench: Bench) -> Any:
    """Eight processes make a million operations under one limit. NVML does not read all processes at one
    instant, so three figures are taken: their sum while they run; the device's own figure, minus the
    offset that it has while they are idle; and the sum while all eight are stopped, which is of one instant.
    """
    limit = _limit()
    with racers(bench, "race", limit, _operations()) as group:
        flight = readings(group, limit)
        stopped = Stopped(Most(limit), Most(limit), Most(limit))

        def look() -> None:
            flight.read()
            stopped.read(group, flight.offset)

        _until_done(group, look)
        return {
            "limit_mib": limit / MIB,
            "stopped": stopped.still.said(),
            "stopped_card": stopped.card.said(),
            "stopped_ledger": stopped.ledger.said(),
            **flight.said(),
            **_outcome(group),
        }


def each(bench: Bench) -> Any:
    """The race with one family at a time and without stopping: finds the families whose operations use extra
    memory for a moment.
    """
    limit, figures = _limit(0), {}  # a single family needs a smaller limit
    for family in FAMILIES:
        with racers(bench, f"race-{family}", limit, _operations(25), family) as group:
            flight = readings(group, limit)
            _until_done(group, flight.read)
            figures[family] = flight.said() | _outcome(group)
    return figures


def deaths(bench: Bench) -> Any:
    """Half of the processes keep running. The others are killed and replaced: the memory of a dying process
    stays on the device until the process is gone, and must not be granted to another before that.
    """
    limit, rounds, late = _limit(), int(os.environ.get("VGPU_DEATHS", "40")), 0
    with racers(bench, "deaths", limit, 1_000_000_000) as group:
        flight = readings(group, limit)
        dice = random.Random(3)
        for process in group.processes:
            go_on(process)
        for _ in range(rounds):
            index = dice.randrange(PROCESSES // 2)
            ends = time.monotonic() + 0.1 + 0.3 * dice.random()
            while time.monotonic() < ends:
                flight.read()
            victim = group.processes[index]
            victim.kill()
            while victim.poll() is None:
                flight.read()
            victim.communicate()
            group.words[4 * index : 4 * index + 4] = bytes(4)
            group.processes[index] = group.start(index)
            if step(group.processes[index]):
                go_on(group.processes[index])
            else:
                # the other processes have filled the limit, so the new process has no room for its context
                late += 1
        return {"limit_mib": limit / MIB, "kills": rounds, "found_no_room": late, **flight.said()}
