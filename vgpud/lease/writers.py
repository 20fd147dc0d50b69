"""Keeps files open that containers have mounted: the `limits` of leases for writing, libraries for reading.

Root in a container has the uid of the file's owner. So it may set a lease on the file (fcntl(2), F_SETLEASE),
although the mount is read-only, and the next open waits until the kernel breaks that lease, by default after
45 s (/proc/sys/fs/lease-break-time). No process can set a lease on a file that another process has open for
writing. On a file that another process has open for reading, it can set only a lease that does not delay
readers.
"""

import os
import threading
from pathlib import Path

from vgpud.lease.pages import open_limits


class Writers:
    """One descriptor for each allocation in the folder `leases`. Thread-safe."""

    def __init__(self, leases: Path) -> None:
        self._leases = leases
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._waiting: set[str] = set()

    def hold(self, allocation: str) -> None:
        """Opens the file, if it is not open. If a process has set a lease on it while vgpud did not run, a
        thread waits until the kernel breaks the lease. Until then, changes of the limits are refused.
        """
        with self._lock:
            if allocation in self._open or allocation in self._waiting:
                return
            try:
                self._open[allocation] = open_limits(self._leases / allocation)
            except BlockingIOError:
                self._waiting.add(allocation)
                threading.Thread(target=self._wait, args=(allocation,), name="limits", daemon=True).start()
            except OSError:  # the lease is missing or damaged: its next use reports that
                return

    def _wait(self, allocation: str) -> None:
        try:
            fd = open_limits(self._leases / allocation, waits=True)
        except OSError:
            fd = -1
        with self._lock:
            if fd >= 0 and allocation in self._waiting:
                self._open[allocation] = fd
                fd = -1
            self._waiting.discard(allocation)
        if fd >= 0:
            os.close(fd)

    def drop(self, allocation: str) -> None:
        """Closes the file of a lease that is removed. Idempotent."""
        with self._lock:
            self._waiting.discard(allocation)
            fd = self._open.pop(allocation, -1)
        if fd >= 0:
            os.close(fd)


class Libraries:
    """One descriptor for each library that tenants' programs load. Without it, the start of each such program
    would wait for a file lease (F_SETLEASE) that root in a container has set.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], int] = {}

    def hold(self, path: Path) -> None:
        """Opens the file, if it is not open. An upgrade may have replaced it."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # the mode reports a missing library, and the next allocation tries again
            return
        found = os.fstat(fd)
        if self._open.setdefault((found.st_dev, found.st_ino), fd) != fd:
            os.close(fd)
