"""Processes that have ended, or are about to, though NVML still lists them.

Measured on an H200 (driver 580): an MPS server whose main thread had ended stayed in NVML's list for up to a
tenth of a second, until its other threads had given the card back and its parent had collected it.
"""

from pathlib import Path

_THREADS_FIELD = 20 - 3  # counted after the command's closing bracket, proc(5)


def has_ended(pid: int) -> bool:
    """A zombie whose threads have all ended; one that cannot be seen is not called ended: it may be of
    another pid namespace."""
    fields = _stat(pid)
    return fields is not None and fields[0] in (b"Z", b"X") and int(fields[_THREADS_FIELD]) <= 1


def is_ending(pid: int) -> bool:
    """Its main thread has ended; the others may still be at work."""
    fields = _stat(pid)
    return fields is not None and fields[0] in (b"Z", b"X")


def _stat(pid: int) -> list[bytes] | None:
    """The fields of proc(5) from the state on; None where the process cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].split()
