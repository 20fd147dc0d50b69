"""Parses the output of nvidia-cuda-mps-control. Pure.

Measured on 535.309.01 and 550.163.01, and on 580 where a GPU was needed: every refusal is a sentence with
exit status 0, which `refusal` recognises.
"""

import re
from dataclasses import dataclass

_REFUSALS = re.compile(
    r"Unknown command|Unrecognized command|Insufficient privileges|Not enough privilege"
    r"|Server \S* ?not found|Invalid |Failed|[Ee]rror"
)
# pattern of a pid; str.isdigit would also accept digits that int() refuses
_NUMBER = re.compile(r"[0-9]{1,10}")
_STATES = ("ACTIVE", "FAULT", "INITIALIZING")


@dataclass(frozen=True, slots=True)
class Partitions:
    """What `lspart` says of a daemon's only device: its chunks, and the partitions' ids."""

    chunks: int
    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class ListedClient:
    """One row of `ps`: a client process and its server, as pids of the daemon's namespace."""

    pid: int
    server_pid: int
    command: str


def refusal(answer: str) -> str | None:
    """Returns the line of the daemon's answer that refuses a command; None if there is none."""
    return next((line.strip() for line in answer.splitlines() if _REFUSALS.search(line)), None)


def pids(answer: str) -> tuple[int, ...]:
    """The pids in an answer of get_server_list or get_client_list, one per line. Other lines are remarks."""
    lines = (line.strip() for line in answer.splitlines())
    return tuple(int(line) for line in lines if _NUMBER.fullmatch(line))


def clients(answer: str) -> tuple[ListedClient, ...]:
    """The rows of `ps`. A header names the columns; then each client has one row, with COMMAND last."""
    lines = [line.split() for line in answer.splitlines() if line.strip()]
    header = next((words for words in lines if words[:1] == ["PID"] and "SERVER" in words), None)
    if header is None:
        return ()
    server, width = header.index("SERVER"), len(header)
    rows = (words for words in lines if _NUMBER.fullmatch(words[0]) and len(words) > server)
    return tuple(
        ListedClient(int(words[0]), int(words[server]), " ".join(words[width - 1 :]))
        for words in rows
        if _NUMBER.fullmatch(words[server])
    )


def share(answer: str) -> float | None:
    """The share in percent in an answer. The control daemon prints one decimal: 33.33 is printed as 33.3."""
    match = re.search(r"[0-9]+(\.[0-9]+)?", answer)
    return float(match.group()) if match else None


def memory(answer: str) -> str:
    """The memory limit in an answer, which is its last word: "2G", "1023M", or empty if no limit is set."""
    words = answer.split()
    return words[-1] if words else ""


def is_memory(word: str) -> bool:
    return re.fullmatch(r"[0-9]+[KMG]", word) is not None


def memory_as_printed(mebibytes: int) -> str:
    """A memory limit as the control daemon prints it: whole GiB, rounded down, from 1 GiB up, and MiB
    below.
    """
    return f"{mebibytes // 1024}G" if mebibytes >= 1024 else f"{mebibytes}M"


def share_agrees(wanted: float, printed: float | None) -> bool:
    """True if the control daemon prints `printed` for the percentage `wanted`. It prints one decimal."""
    return printed is not None and abs(printed - wanted) < 0.0501


def server_state(answer: str) -> str:
    """The state of a server: ACTIVE, FAULT or INITIALIZING; empty if this driver branch does not print it."""
    return next((state for state in _STATES if state in answer.upper().split()), "")


def partitions(answer: str) -> Partitions | None:
    """What an answer of `lspart` says; None if it has no row of the device, whose partition is "-". The first
    columns are device, partition, free and used chunks (MPS guide, "Legacy MPS v2 Interface").
    """
    rows = [
        words
        for line in answer.splitlines()
        if len(words := line.split()) > 3 and words[0].startswith("GPU-")
    ]
    device = next((row for row in rows if row[1] == "-" and all(map(_NUMBER.fullmatch, row[2:4]))), None)
    if device is None:
        return None
    ids = frozenset(row[1] for row in rows if row[1] != "-")
    return Partitions(int(device[2]) + int(device[3]), ids)


def partition_name(answer: str) -> str | None:
    """The name of a new partition in an answer of `sm_partition add`: the device's UUID and the id."""
    found = re.search(r"\bGPU-[0-9a-fA-F-]+/[A-Za-z0-9+/=_-]+", answer)
    return found.group() if found else None
