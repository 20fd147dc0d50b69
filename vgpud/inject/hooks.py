"""The OCI hooks for containers in allocations. Each hook runs vgpu-hook (native/runtime/hook.c).

Source: runtime-spec, "POSIX-platform Hooks". Every hook sets its environment, because some runtimes would
otherwise pass the container's environment, in which the image controls LD_PRELOAD.
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
    """The hook program. `path` is vgpu-hook on the host, `run_dir` the folder of vgpud's sockets."""

    path: Path
    run_dir: Path

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def oci(self, *words: str) -> dict[str, Any]:
        """One hook in the form that config.json has for hooks."""
        return {
            "path": str(self.path),
            "args": [self.path.name, f"--run-dir={self.run_dir}", *words],
            "env": [_PATH],
            "timeout": _TIMEOUT_SECONDS,
        }

    def in_container(self, edits: Edits, driver: DriverFiles) -> list[dict[str, Any]]:
        """The createContainer hook, if one is needed. It refuses a container that was given another
        allocation too, adds the library to the image's /etc/ld.so.preload, and shows the driver's libraries
        in the folder that the image's C library searches.
        """
        env = dict(edits.env)
        library, allocation = env.get(PRELOAD), env.get(ALLOCATION)
        words = [] if allocation is None else [f"--allocation={allocation}"]
        words += [] if library is None else [f"--preload={library}"]
        if driver.own_folder is not None:
            words.append(f"--libraries={driver.own_folder}")
        return [self.oci("container", *words)] if words else []
