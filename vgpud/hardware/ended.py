"""Processes that have ended, though NVML still lists them.

Measured on an H200 (driver 580): an MPS server that had exited stayed in NVML's list for up to a tenth of a
second, as long as its parent had not collected it.
"""

from pathlib import Path

_THREADS_FIELD = 20 - 3  # counted after the command's closing bracket, proc(5)


def has_ended(pid: int) -> bool:
    """A zombie whose threads have all ended; one that cannot be seen is not called ended: it may be of
    another pid namespace."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0] in (b"Z", b"X") and int(fields[_THREADS_FIELD]) <= 1
