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


def monitor_nodes(device: Device, host_root: Path = Path("/")) -> tuple[DeviceNode, ...]:
    """The device nodes with which NVML reads a device and its MIG instances. CUDA does not start with them,
    because it needs /dev/nvidia-uvm.
    """
    paths = ["/dev/nvidiactl", *([f"/dev/nvidia{device.minor}"] if device.minor is not None else [])]
    nodes = [_node(path, host_root) for path in paths]
    if device.mig.current and (host_root / _DRIVER).is_dir():
        nodes.append(_capability_node("monitor", host_root / _DRIVER / "capabilities/mig/monitor", host_root))
    return tuple(nodes)


def _node(path: str, host_root: Path) -> DeviceNode:
    major, minor = device_numbers(host_root / path.removeprefix("/")) or (None, None)
    return DeviceNode(path, major, minor)


def device_numbers(path: Path) -> tuple[int, int] | None:
    """Major and minor number of a character device; None if there is none at `path`."""
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
    capabilities, gpu = host_root / _DRIVER / "capabilities", f"gpu{device.minor}"
    rests = (
        f"gi{mig.gpu_instance_id}/access",
        f"gi{mig.gpu_instance_id}/ci{mig.compute_instance_id}/access",
    )
    return [_capability_node(f"{gpu}/{rest}", capabilities / gpu / "mig" / rest, host_root) for rest in rests]


def _capability_node(name: str, own: Path, host_root: Path) -> DeviceNode:
    major, minor = _major_of("nvidia-caps", host_root), _capability_minor(name, own, host_root)
    return DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor)


def _capability_minor(name: str, own: Path, host_root: Path) -> int:
    """The minor number of a MIG capability's device node, from the capability's `own` file. If that file is
    absent, from the driver's table of all capabilities.
    """
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
