"""Reads whether a card needs a repair: the recovery action that NVML asks for, and memory that is remapped.

Sources: nvml.h (nvmlDeviceGpuRecoveryAction_t, nvmlDeviceGetRemappedRows), nvidia-ml-py 13.615 (bus reset,
system reboot, bank remapping), NVIDIA's "GPU Memory Error Management", "Error Recovery and Response Flags": a
card whose rows wait for a reset can take new work; after a failed remapping the card is to be replaced. Bank
remapping was not tried on a card.
"""

from dataclasses import dataclass
from typing import Any

from vgpud.hardware.compute import Handle
from vgpud.hardware.nvml import Nvml

# Field numbers for nvmlDeviceGetFieldValues.
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_PENDING_BANKS = 307  # NVML_FI_DEV_PENDING_BANK_REMAPPING

_ACTIONS = {
    1: "a reset of the device",
    2: "a reboot of the node",
    3: "a drain of its peer-to-peer traffic",
    4: "a drain of its peer-to-peer traffic and a reset of the device",
    5: "a recovery of its IMEX domain",
    6: "a reset of its PCIe bus",
    7: "a reboot of the node",
}


@dataclass(frozen=True, slots=True)
class Repair:
    """The repair that a device needs. `ailment` is why the device should get no work; `notice` is what its
    next reset repairs. Both are empty if nothing is wrong.
    """

    ailment: str = ""
    notice: str = ""


def asked_for(action: int) -> str:
    """A sentence that names the recovery action; empty for action 0 (none)."""
    return f"NVML asks for {_ACTIONS.get(action, f'recovery action {action}')}" if action else ""


def read_repair(nvml: Nvml, handle: Handle, uuid: str) -> Repair:
    """Reads the repair that a device needs. A query that the driver or the card does not support counts as no
    fault.
    """
    action, banks = _fields(nvml, handle, (RECOVERY_ACTION, _PENDING_BANKS))
    if action is not None:
        nvml.fatal.note(uuid, bool(action))
    rows = nvml.call("nvmlDeviceGetRemappedRows", handle)
    failed = rows is not None and bool(rows[3])
    ailments = [
        asked_for(action or 0),
        nvml.fatal.get(uuid),
        "a remapping of its memory failed: replace the card" if failed else "",
    ]
    pending = [
        name for name, is_pending in (("rows", rows is not None and rows[2]), ("banks", banks)) if is_pending
    ]
    notice = f"{' and '.join(pending)} of its memory are remapped at its next reset" if pending else ""
    return Repair("; ".join(filter(None, ailments)), notice)


def _fields(nvml: Nvml, handle: Handle, numbers: tuple[int, ...]) -> list[int | None]:
    """The values of NVML fields, in order; None for a field that the driver does not have."""
    values: Any = nvml.call("nvmlDeviceGetFieldValues", handle, list(numbers))
    if values is None:
        return [None] * len(numbers)
    return [int(value.value.uiVal) if value.nvmlReturn == 0 else None for value in values]
