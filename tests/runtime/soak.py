"""Starts and ends containers in every way while vgpud is killed repeatedly, and reports what they leave
behind.

python -m tests.runtime.soak --starts 2000 --restart-every 50

Needs root and runc. Prints its progress, and at the end the leaks. Exit status 1 if there are any.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.demo.node import BUILD, DemoNode
from tests.e2e.conftest import node_maker
from tests.e2e.support import states
from tests.runtime.bundles import Runc, config
from tests.runtime.rootfs import make_rootfs

WANTS: tuple[dict[str, str], ...] = (
    {"memory": "1GiB"},
    {"memory": "1GiB", "isolation": "quota", "cores": "10"},
    {"memory": "2GiB", "isolation": "compute"},
    {"isolation": "hardware", "profile": "1g.18gb"},
    {"isolation": "device"},
    {"memory": "9999GiB"},  # a request that vgpud refuses
    {},
)
#: Four kinds of end: the container's init is killed, it exits, the container is deleted, or its runtime is
#: killed during the start.
ENDS = ("kill", "exit", "delete", "crash")
_LIVE = 6
_SETTLE_SECONDS = 30.0


@dataclass
class Soak:
    node: DemoNode
    runc: Runc
    rootfs: Path
    random: random.Random
    live: dict[str, int] = field(default_factory=dict)  # container -> pid of its init
    seen: Counter[str] = field(default_factory=Counter)

    def step(self, number: int) -> None:
        name = f"c{number}"
        want, end = self.random.choice(WANTS), self.random.choice(ENDS)
        command = ("sleep", "600") if end != "exit" else ("sh", "-c", ":")
        folder = self.runc.bundle(
            name,
            config(self.rootfs, *command, asks={f"vgpud.io/{key}": value for key, value in want.items()}),
        )
        pid_file = folder / "pid"
        words = ("run", "--detach", "--bundle", str(folder), "--pid-file", str(pid_file), name)
        if end == "crash":
            self._crash(words)
        elif self.runc.call(*words, check=False).returncode == 0:
            self.live[name] = int(pid_file.read_text())
            if end == "exit":
                self._end(name, end)
        self.seen[end] += 1
        while len(self.live) > _LIVE or (end == "crash" and self.live):
            self._end(self.random.choice(list(self.live)), self.random.choice(ENDS[:3]))
            if len(self.live) <= _LIVE:
                break
        if name not in self.live:
            self.runc.delete(name)
            shutil.rmtree(folder, ignore_errors=True)

    def _crash(self, words: tuple[str, ...]) -> None:
        """Kills the runtime at a random moment of the start."""
        quiet = subprocess.DEVNULL
        with subprocess.Popen(self.runc.command(*words), stdin=quiet, stdout=quiet, stderr=quiet) as start:
            time.sleep(self.random.uniform(0, 0.08))
            start.kill()

    def _end(self, name: str, how: str) -> None:
        pid = self.live.pop(name)
        if how == "kill":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.runc.delete(name)
        shutil.rmtree(self.runc.root / name, ignore_errors=True)

    def restart(self) -> None:
        """Kills vgpud while containers run. Some of them end while it is down."""
        self.node.kill()
        for name in list(self.live)[::2]:
            self._end(name, "kill")
        self.node.start()

    def leaked(self) -> dict[str, Any]:
        """Ends all containers and waits. Returns what is left after vgpud has had time to release it."""
        for name in list(self.live):
            self._end(name, "delete")
        end = time.monotonic() + _SETTLE_SECONDS
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def _left(self) -> dict[str, Any]:
        dump = subprocess.run(
            [
                BUILD / "bin" / "vgpu-sim",
                "state",
                "--json",
                "--state",
                self.node.environment["VGPU_SIM_STATE"],
            ],
            capture_output=True,
            check=True,
        )
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        found = {
            "allocations": list(states(self.node)),
            "leases": [path.name for path in (self.node.run_dir / "leases").iterdir()],
            "MPS folders": [str(path) for path in (self.node.run_dir / "mps").glob("*/tenants/*")],
            "specs": [path.name for path in (self.node.folder / "cdi").iterdir()],
            "instances": [i for d in json.loads(dump.stdout)["devices"] for i in d["gpu_instances"]],
            "mounts": [line for line in mounts if str(self.runc.root) in line or "/run/vgpu" in line],
        }
        return {kind: what for kind, what in found.items() if what}


def soak(folder: Path, starts: int, restart_every: int, seed: int = 0, told: bool = False) -> dict[str, Any]:
    """Runs the soak and returns the leaks: none is expected."""
    began = time.monotonic()
    with node_maker(folder) as make:
        node = make("h200x8")
        node.start()
        (folder / "runc").mkdir()
        runc = Runc(folder / "runc", node.run_dir)
        one = Soak(node, runc, make_rootfs(folder / "fs"), random.Random(seed))
        for number in range(1, starts + 1):
            one.step(number)
            if number % restart_every == 0:
                one.restart()
                if told:
                    print(f"{number} starts, {time.monotonic() - began:.0f} s, {dict(one.seen)}", flush=True)
        left = one.leaked()
        log = node.log.read_text()
        if told:
            said = ('"allocated"', "container_runtime_call_refused", '"released"')
            print({words: log.count(words) for words in said}, flush=True)
        if left and told:
            print(log[-6000:])
        return left


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=2000)
    parser.add_argument("--restart-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vgpud-soak") as folder:
        left = soak(Path(folder), arguments.starts, arguments.restart_every, arguments.seed, told=True)
    print(f"left: {left or 'nothing'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
