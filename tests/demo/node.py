"""One vgpud with its own folders, and vgpuctl connected to it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from tests import simnode
from tests.cgroups import clear, mount

ROOT, BUILD = simnode.ROOT, simnode.BUILD
POLICY = """version = 1
[[device]]
mode = "auto"
"""


class Daemon(Protocol):
    """The part of subprocess.Popen that the demo uses."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Command(Daemon, Protocol):
    """A process with pipes."""

    @property
    def stdin(self) -> IO[str] | None: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def communicate(self, words: str = ..., /, timeout: float = ...) -> tuple[str, str]: ...


class DemoNode:
    #: The command that starts the daemon, in the node's environment.
    command: Sequence[str] = (sys.executable, "-m", "vgpud.daemon")

    def __init__(self, policy: str = POLICY, environment: Mapping[str, str] = os.environ) -> None:
        # a short path, because the MPS pipes are Unix sockets, whose paths have at most 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="vgpud-"))
        self.folder.chmod(0o755)
        self.run_dir = self.folder / "run"
        (self.folder / "etc").mkdir()
        config = self.folder / "etc" / "vgpud.toml"
        config.write_text(policy)
        self.environment = {
            **environment,
            "VGPUD_RUN_DIR": str(self.run_dir),
            "VGPUD_ANY_RUN_DIR": "true",
            "VGPUD_STATE_DIR": str(self.folder / "state"),
            "VGPUD_CDI_DIR": str(self.folder / "cdi"),
            "VGPUD_CONFIG": str(config),
            "VGPUD_LIB_DIR": str(BUILD / "lib"),
            "VGPUD_ARBITER": str(BUILD / "bin" / "vgpu-arbiter"),
            "VGPUD_HOOK": str(BUILD / "bin" / "vgpu-hook"),
            "VGPUD_SUSPENDER": str(BUILD / "bin" / "vgpu-suspend"),
            "VGPUD_ENGINE_PROBE": str(BUILD / "bin" / "vgpu-engine-probe"),
            "VGPUD_GROUP": "",
            "VGPUD_CGROUP": self.folder.name,
            "VGPUD_SOCKET": str(self.run_dir / "admin.sock"),
        }
        self.log = self.folder / "vgpud.log"
        self.daemon: Daemon | None = None

    def start(self, timeout_seconds: float = 300, fault_point: str = "") -> float:
        """Starts the daemon, after an earlier one has been killed or stopped. Returns the seconds until the
        daemon serves. If it does not, raises RuntimeError with the end of the log.
        """
        if self.daemon is not None:  # a process that is being killed still accepts connections for a moment
            self.daemon.wait(timeout=timeout_seconds)
        began = time.monotonic()
        environment = {**self.environment, "VGPUD_FAULT_POINT": fault_point}
        with self.log.open("ab") as log:
            self.daemon = self.launch(environment, log.fileno())
        while time.monotonic() - began < timeout_seconds:
            if self.daemon.poll() is not None:
                break
            if (self.run_dir / "admin.sock").exists() and self.answers():
                return time.monotonic() - began
            time.sleep(0.01)
        raise RuntimeError(f"vgpud did not start:\n{self.log.read_text()[-4000:]}")

    def launch(self, environment: Mapping[str, str], log: int) -> Daemon:
        """Starts the daemon's process, which writes its log to the descriptor `log`."""
        return subprocess.Popen(self.command, env=environment, stderr=log, cwd=ROOT)

    def answers(self) -> bool:
        """Returns whether a living process listens. A child that a killed daemon was starting has its socket
        until the child's exec.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.run_dir / "admin.sock"))
            except OSError:
                return False
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return Path(f"/proc/{int.from_bytes(peer[:4], sys.byteorder)}").exists()

    def kill(self) -> None:
        """Kills the daemon by SIGKILL, as the kernel does when memory is short."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()

    def stop(self) -> int:
        assert self.daemon is not None
        self.daemon.terminate()
        return self.daemon.wait(timeout=300)

    def remove(self) -> None:
        top = mount()
        if top is not None and (top / self.folder.name).is_dir():
            clear(top / self.folder.name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def launch_ctl(self, arguments: Sequence[str]) -> Command:
        """Starts vgpuctl."""
        return subprocess.Popen(
            [sys.executable, "-m", "vgpud.ctl", *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        process = self.launch_ctl(arguments)
        said, errors = process.communicate(timeout=300)
        assert process.returncode is not None
        if check and process.returncode != 0:
            raise RuntimeError(f"vgpuctl {' '.join(arguments)}: {errors.strip()}")
        return subprocess.CompletedProcess(arguments, process.returncode, said, errors)

    def ctl_json(self, *arguments: str) -> Any:
        return json.loads(self.ctl(*arguments, "-o", "json").stdout)

    def tenant(self, options: list[str], command: list[str]) -> "Tenant":
        """Starts a program by `vgpuctl run` with these options."""
        return Tenant(self.launch_ctl(["run", *options, "--", *command]))


class Tenant:
    """The program of a tenant. It prints JSON lines, and ends when its standard input ends."""

    def __init__(self, process: Command) -> None:
        self.process = process

    def line(self) -> dict[str, Any]:
        """Returns the next line that the program prints. If it has ended, raises RuntimeError with its error
        output.
        """
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            _, errors = self.process.communicate(timeout=300)
            raise RuntimeError(f"the tenant ended with {self.process.returncode}: {errors.strip()}")
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> tuple[int, str]:
        """Closes standard input and waits. Returns the exit code and the rest of the output."""
        output, _ = self.process.communicate(timeout=300)
        assert self.process.returncode is not None
        return self.process.returncode, output
