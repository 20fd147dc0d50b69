"""OCI bundles for runc, without a container engine."""

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.demo.node import BUILD

FRONT = BUILD / "bin" / "vgpu-runtime"
CGROUPS = "vgpud-test"
NAMESPACES = ("mount", "pid", "ipc", "uts", "network")


def config(
    rootfs: Path, *command: str, asks: Mapping[str, str] | None = None, host_pids: bool = False
) -> dict[str, Any]:
    """A config.json with these annotations. Its process is root in namespaces of its own. With `host_pids` it
    has the host's pid namespace.
    """
    proc: dict[str, Any] = {"destination": "/proc", "type": "proc", "source": "proc"}
    if host_pids:  # with the host's pid namespace, the kernel refuses to mount a new /proc
        proc = {"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]}
    namespaces = [n for n in NAMESPACES if not (host_pids and n == "pid")]
    return {
        "ociVersion": "1.0.2",
        "annotations": dict(asks or {}),
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(command),
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"],
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs), "readonly": False},
        # runc makes device nodes in /dev, and the tests share the root file system
        "mounts": [proc, {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}],
        "linux": {"namespaces": [{"type": n} for n in namespaces]},
    }


class Runc:
    """runc with its own state folder, called through vgpu-runtime."""

    def __init__(self, root: Path, run_dir: Path, *more: str) -> None:
        self.root = root
        self._made: list[str] = []
        self._front = [str(FRONT), f"--vgpu-run-dir={run_dir}", *more, "--root", str(root / "state")]

    def bundle(self, name: str, spec: dict[str, Any]) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        spec["linux"]["cgroupsPath"] = f"/{CGROUPS}/{self._cgroup(name)}"
        (folder / "config.json").write_text(json.dumps(spec))
        return folder

    def command(self, *words: str) -> list[str]:
        return [*self._front, *words]

    def call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Calls runc without pipes, because a container that keeps running would hold them open."""
        with (self.root / "output").open("w+") as output:
            done = subprocess.run(
                self.command(*words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=300,
                check=False,
            )
            output.seek(0)
            said = output.read()
        if check:
            assert done.returncode == 0, f"runc {' '.join(words)}: {said}"
        return subprocess.CompletedProcess(done.args, done.returncode, said, "")

    def run(self, name: str, spec: dict[str, Any]) -> int:
        """Starts a container that keeps running. Returns the pid of its init."""
        folder = self.bundle(name, spec)
        self._made.append(name)
        pid_file = folder / "pid"
        self.call("run", "--detach", "--bundle", str(folder), "--pid-file", str(pid_file), name)
        return int(pid_file.read_text())

    def clear(self) -> None:
        for name in self._made:
            self.delete(name)

    def delete(self, name: str) -> None:
        """Deletes the container, and the cgroup that a killed runtime has left."""
        self.call("delete", "--force", name, check=False)
        for pattern in (CGROUPS, f"*/{CGROUPS}"):
            for folder in Path("/sys/fs/cgroup").glob(f"{pattern}/{self._cgroup(name)}"):
                with suppress(OSError):
                    folder.rmdir()

    def _cgroup(self, name: str) -> str:
        return f"{os.getpid()}-{self.root.name}-{name}"
