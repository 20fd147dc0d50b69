"""Finds the driver's libraries and programs that a container needs.

If NVIDIA's container toolkit is installed, `nvidia-ctk cdi generate` lists these files. Without the toolkit,
vgpud searches as the toolkit does (NVIDIA/nvidia-container-toolkit, pkg/nvcdi): the files named
lib*.so.VERSION beside libcuda.so.VERSION, the links to them, five programs, the GSP firmware. Each link
becomes a mount, so that no hook has to create it.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Edits, Mount

log = structlog.get_logger(__name__)

_CUDA = "libcuda.so.1"
_PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
_SECONDS = 20
_VERSIONED = re.compile(r"libcuda\.so\.(\d+(?:\.\d+)+)")
_CACHE = Path("/etc/ld.so.cache")
_FIRMWARE = (Path("/lib/firmware/nvidia"), Path("/usr/lib/firmware/nvidia"))
# The host's MPS pipe folder is not mounted: tenants of mode mps have pipe folders of their own, and other
# tenants need none.
_MPS_PIPES = "nvidia-mps"


@dataclass(frozen=True)
class DriverFiles:
    """What brings a driver into a container: mounts, and hooks in CDI's form ({hookName, path, args,
    env}).
    """

    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Mapping[str, Any], ...] = ()
    by_toolkit: bool = False

    @property
    def edits(self) -> Edits:
        return Edits(mounts=self.mounts)

    @property
    def own_folder(self) -> Path | None:
        """The folder of the driver's libraries, if vgpud has to add it to the configuration of the
        container's loader; None if a hook of NVIDIA's toolkit adds it, or there is no driver.
        """
        if self.by_toolkit:
            return None
        paths = (Path(mount.container_path) for mount in self.mounts)
        return next((path.parent for path in paths if path.name == _CUDA), None)


def find_driver(host_root: Path = Path("/")) -> DriverFiles:
    """The files of the driver that a container needs; empty if the host has no driver. Runs up to two
    programs, which takes time.
    """
    toolkit = shutil.which("nvidia-ctk")
    if toolkit is not None:
        try:
            return _by_toolkit(toolkit, host_root)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            why = f"{error}; vgpud searches the driver's files itself"
            log.warning(LogEvent.NVIDIA_CTK_FAILED, why=why)
    libcuda = _find_libcuda()
    if libcuda is None:
        return DriverFiles()
    version = _VERSIONED.fullmatch(libcuda.resolve().name)
    files = _libraries(libcuda, version[1] if version else None)
    programs = (shutil.which(name) for name in _PROGRAMS)
    mounts = [
        *files,
        *(Mount(path, f"/usr/bin/{Path(path).name}") for path in programs if path),
        *(_firmware(version[1]) if version else ()),
    ]
    return DriverFiles(tuple(mounts))


def driver_mark(host_root: Path = Path("/")) -> tuple[object, ...]:
    """A value that changes when the driver's files may have changed. It costs the read of one small file and
    a few calls of stat(2).
    """
    version = host_root / "proc/driver/nvidia/version"
    try:
        text = version.read_bytes()
    except OSError:
        text = b""
    return (_mark(_CACHE), text, *(_mark(folder / _CUDA) for folder in _library_path()))


def _mark(path: Path) -> tuple[str, int, int, int] | None:
    try:
        status = path.stat()
        name = os.path.realpath(path)
    except OSError:
        return None
    return name, status.st_ino, status.st_size, status.st_mtime_ns


def _library_path() -> list[Path]:
    """The folders of LD_LIBRARY_PATH in the order of ld.so(8). The daemon itself finds libnvidia-ml there, so
    the driver's libraries can be there too.
    """
    return [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _find_libcuda() -> Path | None:
    for folder in _library_path():
        if (folder / _CUDA).exists():
            return folder.resolve() / _CUDA
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig is None:
        return None
    listed = subprocess.run(
        [ldconfig, "-p"], capture_output=True, text=True, check=False, timeout=_SECONDS
    ).stdout
    machine = "x86-64" if os.uname().machine == "x86_64" else "AArch64"
    for line in listed.splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == _CUDA and machine in rest:
            found = Path(rest.rpartition("=> ")[2])
            return found.parent.resolve() / _CUDA
    return None


def _libraries(libcuda: Path, version: str | None) -> list[Mount]:
    """Mounts for each library of the driver, under its own name and under the name of every link to it in
    libcuda's folder.
    """
    folder = libcuda.parent
    if version is None:  # The libraries of the simulated node have no version in their names.
        wanted = {path.resolve() for path in (libcuda, folder / "libnvidia-ml.so.1") if path.exists()}
    else:
        wanted = {path.resolve() for path in folder.glob(f"lib*.so.{version}")}
    names = sorted(path for path in folder.glob("lib*.so*") if path.resolve() in wanted)
    return [Mount(str(path.resolve()), str(path)) for path in names]


def _firmware(version: str) -> Iterable[Mount]:
    for folder in _FIRMWARE:
        found = sorted((folder / version).glob("gsp*.bin"))
        if found:
            return [Mount(str(path), str(path)) for path in found]
    return ()


def _by_toolkit(program: str, host_root: Path) -> DriverFiles:
    # without the option --driver-root, the toolkit's own configuration names the root of the driver's files
    root = () if host_root == Path("/") else (f"--driver-root={host_root}",)
    done = subprocess.run(
        [program, "--quiet", "cdi", "generate", "--format=json", *root],
        capture_output=True,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    return toolkit_files(done.stdout)


def toolkit_files(spec: str) -> DriverFiles:
    """The driver files in the CDI spec that nvidia-ctk prints. Raises ValueError, KeyError or TypeError for
    an invalid spec.
    """
    edits = json.loads(spec)["containerEdits"]
    if not isinstance(edits, dict):
        raise TypeError("containerEdits is no object")
    paths = [(mount["hostPath"], mount["containerPath"]) for mount in edits.get("mounts") or ()]
    hooks = tuple(edits.get("hooks") or ())
    if not all(isinstance(path, str) for pair in paths for path in pair):
        raise TypeError("a mount without paths")
    if not all(isinstance(hook, dict) for hook in hooks):
        raise TypeError("a hook that is no object")
    mounts = tuple(Mount(*pair) for pair in paths if _MPS_PIPES not in pair[0])
    return DriverFiles(mounts, hooks, by_toolkit=True)
