"""systemd's side: readiness, status, the journal, passed sockets.

systemd-python speaks these protocols; where it is not installed (it has no wheel, and needs
libsystemd to build) the daemon runs as it does without systemd, and says so if it was notified.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

try:
    import systemd.daemon
    import systemd.journal
except ImportError:  # a laptop or a container without libsystemd
    HAS_SYSTEMD_PYTHON = False
else:
    HAS_SYSTEMD_PYTHON = True


def notify(*assignments: str) -> None:
    """Sends assignments such as "READY=1" (sd_notify(3)); nothing happens without systemd."""
    if os.environ.get("NOTIFY_SOCKET"):
        if HAS_SYSTEMD_PYTHON:
            systemd.daemon.notify("\n".join(assignments))
        else:
            _notify_plainly("\n".join(assignments))


def _notify_plainly(text: str) -> None:
    """The protocol is one datagram; a start must not hang because a binding is missing."""
    address = os.environ["NOTIFY_SOCKET"]
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(text.encode(), address)


def stderr_is_journal() -> bool:
    """JOURNAL_STREAM names the device and inode of the stream to the journal (systemd.exec(5))."""
    stream = os.environ.get("JOURNAL_STREAM")
    if not HAS_SYSTEMD_PYTHON or not stream:
        return False
    status = os.fstat(sys.stderr.fileno())
    return stream == f"{status.st_dev}:{status.st_ino}"


def journal_send(message: str, fields: Mapping[str, str]) -> None:
    systemd.journal.send(message, **fields)


def watchdog_seconds() -> float | None:
    """Half the time within which systemd wants a sign of life, or None."""
    microseconds = os.environ.get("WATCHDOG_USEC")
    if not microseconds or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2_000_000


def boot_id() -> str:
    """random(4): a new value at each boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
