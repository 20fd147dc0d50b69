"""Resets a GPU by nvidia-smi (nvidia-smi(1), --gpu-reset), because NVML has no call for it."""

import subprocess

from vgpud.model.errors import ErrorCode, VgpuError

PROGRAM = "nvidia-smi"
SECONDS = 120.0


def reset_device(uuid: str, program: str = PROGRAM) -> None:
    """Resets a device, which loses its memory. Precondition: no process uses the device.

    Raises VgpuError(RESET_NEEDED) with the message of nvidia-smi if the reset fails.
    """
    try:
        done = subprocess.run(
            [program, "--gpu-reset", "-i", uuid], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(uuid, str(error)) from error
    if done.returncode != 0:
        raise _failed(uuid, (done.stdout + done.stderr).strip())


def _failed(uuid: str, said: str) -> VgpuError:
    last = said.splitlines()[-1].strip() if said else "no output"
    return VgpuError(
        ErrorCode.RESET_NEEDED,
        f"nvidia-smi cannot reset device {uuid}: {last}",
        "stop the programs that hold the device (monitoring, persistence daemon), or reboot the node",
        tuple(said.splitlines()),
    )
