"""Names the processes that use a device, for the error that refuses a change of the device."""

from collections.abc import Iterable
from pathlib import Path

from vgpud.model.device import DeviceProcess
from vgpud.model.errors import ErrorCode, VgpuError

_SHOWN = 4


def command(pid: int) -> str:
    """The process's command name (proc(5), comm); "?" if it has ended or cannot be read."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "?"
    except OSError:
        return "?"


def in_use(what: str, processes: Iterable[DeviceProcess]) -> VgpuError:
    """The error DEVICE_IN_USE. Its details name all processes that use the device."""
    pids = sorted({process.pid for process in processes})
    names = [f"{pid} ({command(pid)})" for pid in pids]
    if not names:
        return VgpuError(
            ErrorCode.DEVICE_IN_USE,
            f"{what} is in use, and nvml names no process that uses it",
            "a persistence or monitoring daemon may hold it: see `fuser -v /dev/nvidia*`",
        )
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    noun = "process" if len(names) == 1 else f"{len(names)} processes"
    return VgpuError(
        ErrorCode.DEVICE_IN_USE,
        f"{what} is in use by {noun} {shown}",
        "end what uses it, then try again",
        tuple(f"process {name}" for name in names),
    )
