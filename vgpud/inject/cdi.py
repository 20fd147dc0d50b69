"""Writes CDI spec files: one for each allocation, and one for each claim with monitors.

Source: the Container Device Interface specification 1.1.0 (cncf-tags/container-device-interface, SPEC.md):
fields, the minimum version that each field needs, and the folders that runtimes read. A spec declares the
lowest version that has its fields, so that old runtimes accept it. Files are written under a temporary name
and renamed, so that no runtime reads a partial file.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import PRELOAD, HookProgram
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, DeviceNode, Edits, Mount

KIND = "vgpud.io/vgpu"
MONITOR_KIND = "vgpud.io/monitor"  # devices that NVML can read and that CUDA cannot use
_PREFIX = "vgpud.io-vgpu_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*[A-Za-z0-9]")
_WRITE_NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_TOP_KEYS = {"cdiVersion", "kind", "devices", "containerEdits"}
_EDIT_KEYS = {"env", "deviceNodes", "mounts", "hooks"}
_HOOK_NAMES = {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
_NO_DRIVER = DriverFiles()


def spec_path(folder: Path, allocation_id: str) -> Path:
    return folder / f"{_PREFIX}{allocation_id}.json"


def build_spec(
    allocation: Allocation, driver: DriverFiles = _NO_DRIVER, hook: HookProgram | None = None
) -> dict[str, Any]:
    """The spec of an allocation, as plain JSON data.

    With a hook program, libvgpu is added to the container's /etc/ld.so.preload, beside the image's entries.
    Without a hook program, LD_PRELOAD is set to libvgpu and the image's value is lost.
    """
    edits = allocation.edits
    hooks = [*driver.hooks]
    if hook is not None and allocation.request.by_kubelet:
        # This hook binds the allocation to the container, because the kubelet does not report when containers
        # start or end, nor their control groups.
        hooks.append({"hookName": "createRuntime", **hook.oci("bind", allocation.id)})
    if hook is not None:
        hooks += [{"hookName": "createContainer", **one} for one in hook.in_container(edits, driver)]
    body: dict[str, Any] = {}
    env = [f"{key}={value}" for key, value in edits.env if hook is None or key != PRELOAD]
    nodes = _nodes(edits.device_nodes)
    mounts = [_mount(mount) for mount in driver.mounts + edits.mounts]
    for key, entries in (("env", env), ("deviceNodes", nodes), ("mounts", mounts), ("hooks", hooks)):
        if entries:
            body[key] = entries
    return {
        # a device name that starts with a digit needs version 0.5.0; all other fields that are used need at
        # most 0.3.0
        "cdiVersion": "0.5.0" if allocation.id[:1].isdigit() else "0.3.0",
        "kind": KIND,
        "devices": [{"name": allocation.id, "containerEdits": body}],
    }


def spec_text(allocation: Allocation, driver: DriverFiles, hook: HookProgram | None) -> str:
    """The content of an allocation's spec file."""
    return json.dumps(build_spec(allocation, driver, hook))


def monitor_path(folder: Path, claim: str) -> Path:
    return folder / f"vgpud.io-monitor_{claim}.json"


def monitor_text(
    devices: Mapping[str, Sequence[DeviceNode]], driver: DriverFiles, hook: HookProgram | None
) -> str:
    """The content of a spec with monitors: CDI devices that NVML can read and that CUDA cannot use. `devices`
    has the device nodes of each monitor by name. A monitor also gets the driver's files.
    """
    hooks = [*driver.hooks]
    if hook is not None:
        hooks += [{"hookName": "createContainer", **one} for one in hook.in_container(Edits(), driver)]
    common: dict[str, Any] = {}
    for key, entries in (("mounts", [_mount(mount) for mount in driver.mounts]), ("hooks", hooks)):
        if entries:
            common[key] = entries
    void = ["NVIDIA_VISIBLE_DEVICES=void"]  # tells NVIDIA's own container runtime to add no devices
    named = [
        {"name": name, "containerEdits": {"env": void, "deviceNodes": _nodes(nodes)}}
        for name, nodes in devices.items()
    ]
    spec = {"cdiVersion": "0.5.0", "kind": MONITOR_KIND, "devices": named}
    return json.dumps({**spec, "containerEdits": common} if common else spec)


def _nodes(nodes: Sequence[DeviceNode]) -> list[dict[str, Any]]:
    """The spec's entries for device nodes. The entries contain the major and minor numbers, so that a node
    need not exist on the host. Nodes without numbers are left out.
    """
    return [
        {
            "path": node.path,
            "type": "c",
            "major": node.major,
            "minor": node.minor,
            "permissions": node.permissions,
        }
        for node in nodes
        if node.major is not None and node.minor is not None
    ]


def _mount(mount: Mount) -> dict[str, Any]:
    access = "ro" if mount.read_only else "rw"
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": [access, "nosuid", "nodev", "rbind"],
    }


def validate(spec: Mapping[str, Any]) -> None:
    """Checks the fields of a spec that vgpud writes, by the CDI specification, because runtimes ignore a file
    with a mistake. Raises VgpuError(CDI_FAILED).
    """
    problems = [f"unknown field {key!r}" for key in spec.keys() - _TOP_KEYS]
    if spec.get("kind") not in (KIND, MONITOR_KIND):
        problems.append(f"kind is {spec.get('kind')!r}")
    devices: Sequence[Mapping[str, Any]] = spec.get("devices") or ()
    if not devices:
        problems.append("no devices")
    for device in devices:
        if not _NAME.fullmatch(str(device.get("name", ""))):
            problems.append(f"bad device name {device.get('name')!r}")
        problems += _edit_problems(device.get("containerEdits") or {})
    problems += _edit_problems(spec["containerEdits"]) if "containerEdits" in spec else []
    if problems:
        raise VgpuError(
            ErrorCode.CDI_FAILED,
            f"the CDI spec is not valid: {'; '.join(problems)}",
            "this is a bug in vgpud; please report it",
        )


def _edit_problems(edits: Mapping[str, Any]) -> list[str]:
    problems = [f"unknown edit {key!r}" for key in edits.keys() - _EDIT_KEYS]
    if not edits:
        problems.append("a device without edits")
    problems += [f"bad env {entry!r}" for entry in edits.get("env", ()) if "=" not in entry[1:]]
    problems += [f"bad device node {node!r}" for node in edits.get("deviceNodes", ()) if not node.get("path")]
    problems += [
        f"bad mount {mount!r}"
        for mount in edits.get("mounts", ())
        if not (mount.get("hostPath") and mount.get("containerPath"))
    ]
    problems += [f"bad hook {hook!r}" for hook in edits.get("hooks", ()) if not _is_hook(hook)]
    return problems


def _is_hook(hook: Mapping[str, Any]) -> bool:
    return hook.get("hookName") in _HOOK_NAMES and str(hook.get("path", "")).startswith("/")


def write_spec(
    folder: Path,
    allocation: Allocation,
    driver: DriverFiles = _NO_DRIVER,
    hook: HookProgram | None = None,
) -> Path:
    """Writes the allocation's spec. Raises VgpuError(CDI_FAILED)."""
    path = spec_path(folder, allocation.id)
    write_text(path, spec_text(allocation, driver, hook))
    return path


def write_text(path: Path, text: str) -> None:
    """Writes a spec, reads the file back, and checks it. Raises VgpuError(CDI_FAILED)."""
    folder = path.parent
    # runtimes read only *.json and *.yaml, so they ignore the temporary file
    temporary = folder / f".{path.name}.tmp"
    try:
        try:
            descriptor = os.open(temporary, _WRITE_NEW, 0o644)
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
            descriptor = os.open(temporary, _WRITE_NEW, 0o644)
        with os.fdopen(descriptor, "w+", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)  # sets the mode independently of the umask
            file.write(text)
            file.seek(0)
            validate(json.loads(file.read()))
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise VgpuError(
            ErrorCode.CDI_FAILED,
            f"the CDI spec {path} cannot be written: {error.strerror}",
            "check the folder's rights and free space, or set VGPUD_CDI_DIR",
        ) from error


def has_text(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def remove_spec(path: Path) -> None:
    """Removes a spec if it exists. Raises VgpuError(CDI_FAILED) if the file cannot be removed."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise VgpuError(
            ErrorCode.CDI_FAILED,
            f"the CDI spec {path} cannot be removed: {error.strerror}",
            "check the folder's rights, or remove the file by hand: its devices may be wrong",
        ) from error


def list_specs(folder: Path) -> frozenset[str]:
    """The ids of allocations that have a spec in the folder. Temporary files of interrupted writes are
    removed.
    """
    for left in folder.glob(f".{_PREFIX}*.json.tmp"):
        with suppress(OSError):
            left.unlink()
    return frozenset(
        path.name.removeprefix(_PREFIX).removesuffix(".json") for path in folder.glob(f"{_PREFIX}*.json")
    )
