"""A simulated node: where its parts are, how it is made, and the environment of the programs inside it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgpu_sim import profile as profiles

#: The library that stands for the driver's control device in programs without a CUDA driver.
CONTROL_DEVICE = "libvgpu-sim-rm.so"


class NodeError(RuntimeError):
    """Raised if vgpu-simctl fails or is missing, or if no node or no command is given."""


@dataclass(frozen=True)
class Tree:
    """The folders of the built simulator, and the folders of its profiles."""

    lib: Path
    bin: Path
    simctl: Path
    profiles: tuple[Path, ...]


def find_tree() -> Tree:
    """Finds the build of the simulator that this package belongs to.

    The build writes `location.json` beside this file. VGPU_SIM_PREFIX and VGPU_SIM_PROFILES replace its
    values for an installed package. Raises NodeError if there is neither the file nor the variable.
    """
    built: dict[str, str] = {}
    file = Path(__file__).with_name("location.json")
    if file.exists():
        built = json.loads(file.read_text())
    prefix = os.environ.get("VGPU_SIM_PREFIX", built.get("prefix"))
    if prefix is None:
        raise NodeError("the simulator is not built: run ./dev build, or set VGPU_SIM_PREFIX")
    root = Path(prefix)
    profiles_dir = os.environ.get("VGPU_SIM_PROFILES", built.get("profiles", str(root / "profiles")))
    return Tree(root / "lib", root / "bin", root / "bin" / "vgpu-simctl", (Path(profiles_dir),))


@dataclass(frozen=True)
class Node:
    """One simulated node: its state file, and the built simulator that serves it."""

    state: Path
    tree: Tree

    @property
    def host_root(self) -> Path:
        return Path(f"{self.state}.root")

    def control(self, *words: str, text: str | None = None) -> str:
        """Runs vgpu-simctl on this node. Raises NodeError with the program's error output."""
        try:
            done = subprocess.run(
                [str(self.tree.simctl), str(self.state), *words],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as exc:
            raise NodeError(f"cannot run {self.tree.simctl}: {exc.strerror}") from exc
        if done.returncode != 0:
            raise NodeError(
                done.stderr.strip().removeprefix("vgpu-simctl: ") or f"vgpu-simctl ended {done.returncode}"
            )
        return done.stdout

    def create(self, name: str, seed: str = "", driver: str = "") -> None:
        """Makes the node from a profile. A node of the same name is replaced: its state file gets a new
        inode.

        `driver` is a driver branch. If it is empty, the branch is that of VGPU_SIM_DRIVER or else of the
        profile. Raises NodeError, and ProfileError.
        """
        branch = driver or os.environ.get("VGPU_SIM_DRIVER", "")
        loaded = profiles.with_driver(profiles.load(name, list(self.tree.profiles)), branch)
        text = profiles.flatten(loaded, seed)
        shutil.rmtree(self.host_root, ignore_errors=True)
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.control("create", text=text)

    def driver_root(self) -> Path:
        """Completes the host root to that of a host with the driver, for tools that take a driver root: the
        libraries under their versioned names, the links to them, the programs, and the device nodes if the
        caller may make them. Returns the root. Raises NodeError if the node's state cannot be read.
        """
        found = self.dump()
        folder = self.host_root / f"usr/lib/{os.uname().machine}-linux-gnu"
        programs = self.host_root / "usr/bin"
        for made in (folder, programs, self.host_root / "dev/nvidia-caps"):
            made.mkdir(parents=True, exist_ok=True)
        for name in ("libcuda.so", "libnvidia-ml.so"):
            versioned = f"{name}.{found['driver_version']}"
            shutil.copy(self.tree.lib / f"{name}.1", folder / versioned)
            for link, target in ((f"{name}.1", versioned), (name, f"{name}.1")):
                (folder / link).unlink(missing_ok=True)
                (folder / link).symlink_to(target)
        for program in self.tree.bin.glob("nvidia-*"):
            shutil.copy(program, programs)
        nodes = {f"nvidia{one['index']}": (195, one["index"]) for one in found["devices"]}
        nodes |= {"nvidiactl": (195, 255), "nvidia-uvm": (238, 0), "nvidia-uvm-tools": (238, 1)}
        capabilities = self.host_root / "proc/driver/nvidia/capabilities"
        for file in (*capabilities.glob("mig/*"), *capabilities.glob("**/access")):
            minor = int(file.read_text().split()[1])  # DeviceFileMinor: N
            nodes[f"nvidia-caps/nvidia-cap{minor}"] = (241, minor)
        for name, numbers in nodes.items():
            with suppress(FileExistsError, PermissionError):
                os.mknod(self.host_root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
        return self.host_root

    def dump(self) -> dict[str, Any]:
        """Returns devices, instances, processes and faults as `vgpu-simctl dump` prints them, in bytes and
        nanoseconds. Raises NodeError.
        """
        state: dict[str, Any] = json.loads(self.control("dump"))
        return state

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns `base` with the variables that put a program inside the node."""
        env = dict(base)
        env["VGPU_SIM_STATE"] = str(self.state)
        env["VGPUD_HOST_ROOT"] = str(self.host_root)
        env["LD_LIBRARY_PATH"] = _first(self.tree.lib, base.get("LD_LIBRARY_PATH"))
        env["PATH"] = _first(self.tree.bin, base.get("PATH", os.defpath))
        env["LD_PRELOAD"] = _first(self.tree.lib / CONTROL_DEVICE, base.get("LD_PRELOAD"))
        return env


def _first(path: Path, rest: str | None) -> str:
    return f"{path}:{rest}" if rest else str(path)
