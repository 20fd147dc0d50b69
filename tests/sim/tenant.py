"""A CUDA process on a simulated node that a test controls line by line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from tests.simnode import ROOT, SimNode


class Tenant:
    """`python -m tests.sim.cuda` on a node. `first` is its first line: "ready PID" or "error CODE"."""

    def __init__(self, node: SimNode, env: Mapping[str, str] | None = None) -> None:
        full = {"PYTHONPATH": str(ROOT), **(env or {})}
        self.process: subprocess.Popen[str] = node.start([sys.executable, "-m", "tests.sim.cuda"], full)
        self.first = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> str:
        """Sends one line. Returns the answer: "ok", figures, or "error CODE"."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.line()

    def do(self, code: str) -> str:
        """Runs one line of Python in the tenant. Returns the value that it assigns to `out`."""
        return self.say(f"do {code}")

    def write(self, value: int) -> str:
        """Writes a number to the start of the newest allocation."""
        return self.do(
            f"cu('cuMemcpyHtoD_v2', c.c_uint64(pointers[-1]), c.byref(c.c_int({value})), c.c_size_t(4))"
        )

    #: Reads the number at the start of the newest allocation.
    READ = (
        "b = c.c_int(); cu('cuMemcpyDtoH_v2', c.byref(b), c.c_uint64(pointers[-1]), c.c_size_t(4)); "
        "out = b.value"
    )

    def read(self) -> str:
        return self.do(self.READ)

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.wait()
