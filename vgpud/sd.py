"""Talks to systemd: readiness, status, the watchdog, the journal.

systemd-python implements these protocols. If it is not installed (it has no wheel, and needs libsystemd to
build), the daemon logs as without systemd, and sends its notifications itself.
"""

import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

try:
    import systemd.daemon
    import systemd.journal
except ImportError:  # systemd-python is missing: a laptop, or a container without libsystemd
    HAS_SYSTEMD_PYTHON = False
else:
    HAS_SYSTEMD_PYTHON = True


def notify(*assignments: str) -> None:
    """Sends assignments such as "READY=1" (sd_notify(3)); does nothing without systemd."""
    if os.environ.get("NOTIFY_SOCKET"):
        if HAS_SYSTEMD_PYTHON:
            systemd.daemon.notify("\n".join(assignments))
        else:
            _notify_plainly("\n".join(assignments))


def _notify_plainly(text: str) -> None:
    """Sends the assignments without systemd-python. The protocol is one datagram, and a start must not time
    out because the binding is missing.
    """
    address = os.environ["NOTIFY_SOCKET"]
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(text.encode(), address)


def stderr_is_journal() -> bool:
    """Is standard error the journal? JOURNAL_STREAM has the device and inode of the journal's stream
    (systemd.exec(5)).
    """
    stream = os.environ.get("JOURNAL_STREAM")
    if not HAS_SYSTEMD_PYTHON or not stream:
        return False
    status = os.fstat(sys.stderr.fileno())
    return stream == f"{status.st_dev}:{status.st_ino}"


def journal_send(message: str, fields: Iterable[tuple[str, str]]) -> None:
    """Sends one entry to the journal. A field may occur several times (sd_journal_print(3))."""
    systemd.journal.sendv(f"MESSAGE={message}", *(f"{name}={value}" for name, value in fields))


def watchdog_seconds() -> float | None:
    """Half of systemd's watchdog interval, or None without a watchdog."""
    microseconds = os.environ.get("WATCHDOG_USEC")
    if not microseconds or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2_000_000


def boot_id() -> str:
    """The boot's id (random(4)), which is new at each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
