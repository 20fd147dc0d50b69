"""The hooks that containers of allocations carry; vgpu-hook (native/runtime/hook.c) is behind each.

Sources: runtime-spec, "POSIX-platform Hooks". Every hook has an environment of its own: where it has
none, some runtimes give it the container's, whose LD_PRELOAD is the image's word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgpud.inject.driver import DriverFiles
from vgpud.model.tenancy import Edits

_PATH = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT_SECONDS = 30
PRELOAD = "LD_PRELOAD"
ALLOCATION = "VGPU_ALLOCATION"


@dataclass(frozen=True)
class HookProgram:
    """Where vgpu-hook is on the host, and the folder of vgpud's sockets."""

    path: Path
    run_dir: Path

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def oci(self, *words: str) -> dict[str, Any]:
        """One hook as config.json has it."""
        return {
            "path": str(self.path),
            "args": [self.path.name, f"--run-dir={self.run_dir}", *words],
            "env": [_PATH],
            "timeout": _TIMEOUT_SECONDS,
        }

    def in_container(self, edits: Edits, driver: DriverFiles) -> list[dict[str, Any]]:
        """createContainer: what is to be merged with the image's own files, and whether it is alone there."""
        env = dict(edits.env)
        library, allocation = env.get(PRELOAD), env.get(ALLOCATION)
        words = [] if allocation is None else [f"--allocation={allocation}"]
        words += [] if library is None else [f"--preload={library}"]
        if driver.own_folder is not None:
            words.append(f"--libraries={driver.own_folder}")
        return [self.oci("container", *words)] if words else []
