"""Speaks to one MPS control daemon, believing only what it reads back.

Facts (measured on nvidia-cuda-mps-control 535 to 615): refusals answer with exit status 0; a bad
value silently keeps the old one; `get_default_device_pinned_mem_limit` prints whole GiB, floored,
from 1 GiB up and MiB below; "Cannot find MPS control daemon process" with status 1 is the only
reliable sign that no daemon answers; a pipe path over about 100 bytes fails.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MIB, Percent

_MAX_PATH_BYTES = 90


@dataclass(frozen=True, slots=True)
class MpsControl:
    """`program` is nvidia-cuda-mps-control; `folder` holds the pipe and log folders."""

    program: str
    folder: Path
    timeout_seconds: float = 5.0

    @property
    def pipe(self) -> Path:
        return self.folder / "p"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def environment(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    def prepare(self) -> None:
        """Makes the folders; tenants of any uid must reach the pipes. Raises VgpuError(HELPER_FAILED)."""
        if len(bytes(self.pipe)) > _MAX_PATH_BYTES:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"the MPS pipe folder {self.pipe} is longer than {_MAX_PATH_BYTES} bytes",
                "set VGPUD_RUN_DIR to a shorter path",
            )
        for folder in (self.folder, self.pipe, self.log):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)

    def ask(self, command: str) -> str:
        """The daemon's answer to one command.

        Raises VgpuError: HELPER_FAILED when no daemon answers, HELPER_TIMEOUT when it is silent.
        """
        try:
            done = subprocess.run(
                [self.program],
                input=command + "\n",
                env={**os.environ, **self.environment()},
                capture_output=True,
                text=True,
                timeout=self.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise VgpuError(
                ErrorCode.HELPER_TIMEOUT,
                f"the MPS control daemon in {self.pipe} did not answer {command.split(maxsplit=1)[0]!r} "
                f"in {self.timeout_seconds:g} s",
                "see its log in " + str(self.log),
            ) from None
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"{self.program} cannot be run: {error.strerror}",
                "install NVIDIA's nvidia-cuda-mps package (it comes with the driver)",
            ) from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"the MPS control daemon in {self.pipe} does not answer: {said[-1] if said else 'no word'}",
                "see its log in " + str(self.log),
            )
        return done.stdout.strip()

    def answers(self) -> bool:
        try:
            self.ask("get_default_active_thread_percentage")
        except VgpuError:
            return False
        return True

    def set_default_share(self, share: Percent) -> None:
        """Raises VgpuError(MPS_REFUSED) unless it reads back as set."""
        self.ask(f"set_default_active_thread_percentage {share.value:g}")
        answer = self.ask("get_default_active_thread_percentage")
        number = _first_number(answer)
        if number is None or abs(number - share.value) > 0.05:
            raise _refused("default active thread percentage", f"{share.value:g}", answer)

    def set_default_memory(self, limit_bytes: int) -> None:
        """The default limit of device 0 of this one-device daemon, in whole MiB, checked by reading it back.

        Raises VgpuError(MPS_REFUSED).
        """
        megabytes = limit_bytes // MIB
        self.ask(f"set_default_device_pinned_mem_limit 0 {megabytes}M")
        answer = self.ask("get_default_device_pinned_mem_limit 0")
        if not answer.endswith(memory_as_printed(megabytes)):
            raise _refused("default device memory limit", f"{megabytes}M", answer)


def memory_as_printed(megabytes: int) -> str:
    """How the daemon prints a limit of that many MiB: floored GiB from 1 GiB up."""
    return f"{megabytes // 1024}G" if megabytes >= 1024 else f"{megabytes}M"


def _first_number(text: str) -> float | None:
    match = re.search(r"[0-9]+(\.[0-9]+)?", text)
    return float(match.group()) if match else None


def _refused(what: str, wanted: str, answer: str) -> VgpuError:
    return VgpuError(
        ErrorCode.MPS_REFUSED,
        f"the MPS control daemon did not take the {what} {wanted}: it reads back {answer!r}",
        "see the control daemon's log; its driver may be too old",
    )
