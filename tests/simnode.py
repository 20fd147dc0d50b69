"""A simulated node for tests of any room: `sim_node` makes one in `tmp_path`.

In a room's conftest: `from tests.simnode import sim_node  # noqa: F401`, then

    def test_x(sim_node):
        node = sim_node("h200x8")
        node.python("import pynvml; pynvml.nvmlInit()")
        node.environment()       # for subprocesses of your own

The tree must be built (`./dev build`): VGPU_BUILD_DIR names the build folder, default build/native. A missing
build fails the test, so no test is left out silently.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("VGPU_BUILD_DIR", ROOT / "build" / "native")).absolute()
TIMEOUT_SECONDS = 300


def build_dir() -> Path:
    """The build folder. Fails the test if the simulator is not built there."""
    build = BUILD
    parts = ["sim/lib/libcuda.so.1", "sim/lib/libnvidia-ml.so.1", "sim/bin/vgpu-simctl"]
    missing = [part for part in parts if not (build / part).exists()]
    if missing:
        pytest.fail(f"{build} has no {missing[0]}: run ./dev build, or set VGPU_BUILD_DIR")
    return build


@cache
def simulator(module: str) -> ModuleType:
    """Imports a module of the built `vgpu-sim`, so tests can call it without starting a program."""
    sys.path.insert(0, str(build_dir() / "sim" / "python"))
    return importlib.import_module(f"vgpu_sim.{module}")


def create(state: Path, profile: str, seed: str = "", driver: str = "") -> Any:
    """Makes a simulated node. Returns a vgpu_sim.node.Node."""
    parts = simulator("node")
    node = parts.Node(state, parts.find_tree())
    node.create(profile, seed, driver)
    return node


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that may run: vgpu-spin, vgpu-probe and vgpu-arbiter by SIGTERM, at which they write
    their coverage; others, which may block that signal, by SIGKILL.
    """
    program = Path(str(process.args[0] if isinstance(process.args, list | tuple) else process.args)).name
    counts = program.startswith(("vgpu-spin", "vgpu-probe", "vgpu-arbiter"))
    for number in (signal.SIGTERM, signal.SIGCONT) if counts else (signal.SIGKILL,):
        process.send_signal(number)
    process.communicate()


def simulate(state: Path | str, *words: str) -> str:
    """Runs `vgpu-sim WORDS` on the node of this state and returns its output. Raises CalledProcessError if it
    fails.
    """
    said, errors = io.StringIO(), io.StringIO()
    asked = [words[0], "--state", str(state), *words[1:]]
    with redirect_stdout(said), redirect_stderr(errors):
        code = simulator("cli").main(asked)
    if code != 0:
        raise subprocess.CalledProcessError(code, ["vgpu-sim", *asked], said.getvalue(), errors.getvalue())
    return said.getvalue()


@dataclass
class SimNode:
    """One simulated node: its state file, and functions that run programs on it."""

    state: Path
    build: Path
    profile: str
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def host_root(self) -> Path:
        """The folder that stands for the host's root. /proc/driver/nvidia is below it."""
        return Path(f"{self.state}.root")

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a program on the node: this process's environment without variables of CUDA,
        NVIDIA and the simulator, the node's variables, and `extra`.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "VGPU_SIM_", "NVIDIA_"))}
        rest = env.get("LD_LIBRARY_PATH")
        env["VGPU_SIM_STATE"] = str(self.state)
        env["VGPUD_HOST_ROOT"] = str(self.host_root)
        env["LD_LIBRARY_PATH"] = f"{self.build / 'sim' / 'lib'}" + (f":{rest}" if rest else "")
        env["PATH"] = f"{self.build / 'sim' / 'bin'}:{env.get('PATH', os.defpath)}"
        env["LD_PRELOAD"] = str(self.build / "sim" / "lib" / "libvgpu-sim-rm.so")
        env["CUDA_MPS_PIPE_DIRECTORY"] = str(self.state.parent / "no-mps")
        env.update(extra or {})
        return env

    def sim(self, *words: str) -> str:
        """Runs `vgpu-sim WORDS` on this node and returns its output. Raises CalledProcessError if it
        fails.
        """
        return simulate(self.state, *words)

    def dump(self) -> dict[str, Any]:
        """The state of the node as `vgpu-sim state --json` prints it (bytes, nanoseconds), without starting
        that program.
        """
        simctl = [str(self.build / "sim" / "bin" / "vgpu-simctl"), str(self.state), "dump"]
        done = subprocess.run(simctl, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        state: dict[str, Any] = json.loads(done.stdout)
        return state

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program on the node to its end. With `check` a failure fails the test."""
        done = subprocess.run(
            list(argv),
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{argv[0]} ended {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def python(self, code: str, env: Mapping[str, str] | None = None) -> str:
        """Runs Python code on the node and returns its output."""
        return self.run([sys.executable, "-c", code], env).stdout

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a program on the node with pipes. It is killed when the test ends."""
        process = subprocess.Popen(
            list(argv),
            env=self.environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def stop(self) -> None:
        """Ends the programs that `start` started."""
        for process in self.running:
            end(process)
        self.running.clear()


@pytest.fixture
def sim_node(tmp_path: Path) -> Iterator[Callable[..., SimNode]]:
    """Makes nodes: `sim_node(profile="h200x8", seed="", driver="")` -> SimNode."""
    nodes: list[SimNode] = []

    def make(profile: str = "h200x8", seed: str = "", driver: str = "") -> SimNode:
        node = SimNode(tmp_path / f"node{len(nodes)}", build_dir(), profile)
        create(node.state, profile, seed, driver)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.stop()
