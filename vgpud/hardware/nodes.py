"""Lists the device nodes that a tenant of a device, or of one of its MIG instances, needs.

Paths and layouts: NVIDIA's MIG User Guide, "Device Nodes and Capabilities". The numbers of the nodes under
/dev/nvidia-caps come from the driver's files, not from the nodes, which need not exist on the host yet.
"""

import os
import stat
from pathlib import Path

from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import DeviceNode, MigSlice

_COMMON = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_DRIVER = Path("proc/driver/nvidia")
_MINORS = Path("proc/driver/nvidia-caps/mig-minors")


def device_nodes(device: Device, mig: MigSlice | None, host_root: Path = Path("/")) -> tuple[DeviceNode, ...]:
    """The device nodes of a device. With `mig`, the two capability nodes of that instance are included.

    Without an NVIDIA kernel driver (the simulated node) no capability nodes are listed. Raises
    VgpuError(NVML_FAILED) if the driver is loaded but does not list the instance, VgpuError(BUG) for a `mig`
    that has not been created yet.
    """
    paths = [f"/dev/nvidia{device.minor}"] if device.minor is not None else []
    nodes = [_node(path, host_root) for path in (*paths, *_COMMON)]
    if mig is not None and (host_root / _DRIVER).is_dir():
        nodes += _capability_nodes(device, mig, host_root)
    return tuple(nodes)


def _node(path: str, host_root: Path) -> DeviceNode:
    major, minor = device_numbers(host_root / path.removeprefix("/")) or (None, None)
    return DeviceNode(path, major, minor)


def device_numbers(path: Path) -> tuple[int, int] | None:
    """Major and minor number of a character device; None if the device node does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def _capability_nodes(device: Device, mig: MigSlice, host_root: Path) -> list[DeviceNode]:
    if mig.gpu_instance_id is None or mig.compute_instance_id is None or device.minor is None:
        raise VgpuError(
            ErrorCode.BUG,
            f"a MIG instance of {device.uuid} without ids has no device nodes",
            "report this with the log of vgpud",
        )
    instance = f"gpu{device.minor}/gi{mig.gpu_instance_id}"
    major = _major_of("nvidia-caps", host_root)
    names = (f"{instance}/access", f"{instance}/ci{mig.compute_instance_id}/access")
    minors = [_capability_minor(name, host_root) for name in names]
    return [DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor) for minor in minors]


def _capability_minor(name: str, host_root: Path) -> int:
    """The minor number of a MIG capability's device node, from the capability's own file. If that file is
    absent, from the driver's table of all capabilities.
    """
    gpu, rest = name.split("/", 1)
    own = host_root / _DRIVER / "capabilities" / gpu / "mig" / rest
    for line in _lines(own):
        key, _, value = line.partition(":")
        if key.strip() == "DeviceFileMinor" and value.strip().isdigit():
            return int(value)
    for line in _lines(host_root / _MINORS):
        key, _, value = line.strip().rpartition(" ")
        if key == name and value.isdigit():
            return int(value)
    raise VgpuError(
        ErrorCode.NVML_FAILED,
        f"the driver has no capability {name}",
        f"look for {own}; the instance may be gone",
    )


def _major_of(driver: str, host_root: Path) -> int | None:
    """The major number of a driver's device nodes, from /proc/devices (proc(5)), whose lines are a number and
    a name.
    """
    for line in _lines(host_root / "proc/devices"):
        fields = line.split()
        if len(fields) == 2 and fields[1] == driver:
            return int(fields[0])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
