"""Which device nodes a process can open: a restore opens those of the new device inside the process.

A container has the nodes of its own devices only, in a mount namespace of its own and behind a device
cgroup, and what it does not have the driver cannot give it (ai-dynamo/snapshot issue 379).
"""

from collections.abc import Iterable
from pathlib import Path

from vgpud.hardware.nodes import device_numbers
from vgpud.model.device import Device

_PROC = Path("/proc")


def visible_devices(
    pid: int, devices: Iterable[Device], host_root: Path = Path("/"), proc: Path = _PROC
) -> frozenset[str]:
    """UUIDs of those whose node the process sees as the host does; all of them for a process that shares
    our mounts, none for one that has gone."""
    known = tuple(devices)
    try:
        if (proc / f"{pid}/ns/mnt").readlink() == (proc / "self/ns/mnt").readlink():
            return frozenset(device.uuid for device in known)
    except OSError:
        return frozenset()
    seen = set()
    for device in known:
        name = f"dev/nvidia{device.minor}"
        there = device_numbers(proc / f"{pid}/root" / name)
        if there is not None and there == device_numbers(host_root / name):
            seen.add(device.uuid)
    return frozenset(seen)
