"""Reads and writes the folder <run>/engines: for each device the file that the arbiter reads, and the probe's
verdict.

The file `UUID` names the engine in force; its first line, `cut` or `gate`, is read by native/arbiter/cut.c. A
device without the file has the gate. The file `UUID.probe` is the probe's verdict. Both files are replaced
atomically.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from vgpud.model.engine import Engine, EngineChoice, EngineReason, EngineVerdict
from vgpud.model.errors import ErrorCode, VgpuError

_LARGEST_BYTES = 4096


class EngineFiles:
    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "engines"

    def chosen(self, device_uuid: str) -> EngineChoice | None:
        """The engine in force on a device; None if it has no valid file."""
        lines = self._read(device_uuid).splitlines()
        try:
            engine, reason, why = lines[:3]
            return EngineChoice(Engine(engine), EngineReason(reason), why)
        except ValueError:
            return None

    def choose(self, device_uuid: str, choice: EngineChoice) -> None:
        """Writes the engine in force on a device. Raises VgpuError(HELPER_FAILED)."""
        self._write(device_uuid, f"{choice.engine}\n{choice.reason}\n{choice.why}\n")

    def forget(self, device_uuid: str) -> None:
        (self.folder / device_uuid).unlink(missing_ok=True)

    def verdict(self, device_uuid: str) -> EngineVerdict | None:
        try:
            words = json.loads(self._read(f"{device_uuid}.probe"))
            return EngineVerdict(**{**words, "engine": Engine(words["engine"])})
        except (ValueError, TypeError, KeyError):
            return None

    def keep(self, device_uuid: str, verdict: EngineVerdict) -> None:
        """Writes the probe's verdict on a device. Raises VgpuError(HELPER_FAILED)."""
        self._write(f"{device_uuid}.probe", json.dumps(asdict(verdict)) + "\n")

    def _read(self, name: str) -> str:
        try:
            with (self.folder / name).open(encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_BYTES)
        except OSError:
            return ""

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f".{name}.new"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            new.write_text(text)
            os.replace(new, self.folder / name)  # noqa: PTH105 - atomic
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"{self.folder / name} cannot be written: {(error.strerror or str(error)).lower()}",
                "check the rights and free space of the run folder (VGPUD_RUN_DIR)",
            ) from None
