"""Passes the measured memory of a CUDA context on each device from lease to lease.

A tenant's process reads this size from NVML, whose start takes some milliseconds (6 to 24 on an H200, driver
580). With the size in its lease the process need not wait. The first size of a device is the engine probe's.
Tenants write these sizes and may lie, so the smallest one counts: a process corrects a size that is too small
when NVML answers, but a size that is too large would refuse requests of others.
"""

import contextlib
import os
import struct
from pathlib import Path

from vgpud import lease_layout as layout
from vgpud.lease.pages import read_limits
from vgpud.lease.usage import open_usage
from vgpud.model.errors import VgpuError

# accepted context sizes; measured are 518 MiB on an H200, 348 MiB under MPS, tens of MiB on small cards
_PLAUSIBLE_MIB = range(16, 4097)
_WORDS = struct.Struct(f"<{layout.MAX_DEVICES}I")


class ContextCosts:
    """MiB of a context, by the UUID of the device or MIG instance that leases name. Kept as long as vgpud
    runs.
    """

    def __init__(self) -> None:
        self._mib: dict[str, int] = {}

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._mib

    def note(self, uuid: str, mib: int) -> None:
        """Records the size of a context on a device, if it is plausible. The smallest size counts."""
        if mib in _PLAUSIBLE_MIB:
            self._mib[uuid] = min(mib, self._mib.get(uuid, mib))

    def learn(self, folder: Path) -> None:
        """Records the context sizes that processes of this lease measured. Skips a lease that cannot be
        read."""
        with contextlib.suppress(VgpuError, OSError):
            for device, mib in zip(read_limits(folder).devices, _read(folder), strict=False):
                self.note(device.uuid, mib)

    def seed(self, folder: Path) -> None:
        """Writes the known context sizes to a lease, for devices that its processes have not measured yet.
        Skips a lease that cannot be read or written.
        """
        with contextlib.suppress(VgpuError, OSError):
            known = [self._mib.get(device.uuid, 0) for device in read_limits(folder).devices]
            found = _read(folder)
            if not any(known):
                return
            words = [own or told for own, told in zip(found, known, strict=False)]
            fd = open_usage(folder, os.O_WRONLY)
            try:
                os.pwrite(fd, struct.pack(f"<{len(words)}I", *words), layout.USAGE_CONTEXT_MIB)
            finally:
                os.close(fd)


def _read(folder: Path) -> tuple[int, ...]:
    fd = open_usage(folder)
    try:
        raw = os.pread(fd, _WORDS.size, layout.USAGE_CONTEXT_MIB)
    finally:
        os.close(fd)
    return _WORDS.unpack(raw.ljust(_WORDS.size, b"\0"))
