"""Finds the device nodes that a process can open, because a restore opens the nodes of the new device inside
the process.

A container has only the nodes of its own devices, in a separate mount namespace and behind a device cgroup,
and the driver cannot add nodes (ai-dynamo/snapshot issue 379).
"""

from collections.abc import Iterable
from pathlib import Path

from vgpud.hardware.nodes import device_numbers
from vgpud.model.device import Device
from vgpud.proc import aside

_PROC = Path("/proc")


def visible_devices(
    pid: int, devices: Iterable[Device], host_root: Path = Path("/"), proc: Path = _PROC
) -> frozenset[str]:
    """UUIDs of the devices whose node is the same for the process and the host. These are all devices for a
    process in vgpud's mount namespace, and none for an ended process, or if the kernel does not answer: the
    process may be in an exec or in a mount namespace that a file system of its user's delays.
    """
    known = tuple(devices)
    try:
        return aside(pid, lambda: _visible(pid, known, host_root, proc))
    except OSError:
        return frozenset()


def _visible(pid: int, known: tuple[Device, ...], host_root: Path, proc: Path) -> frozenset[str]:
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
