"""A daemon in its own folders, timed until READY, as systemd would receive it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.demo.node import ROOT, DemoNode
from tests.e2e.conftest import end_helpers

POLICY = """version = 1
[[device]]
mode = "auto"
[device.preload]
max_tenants = 1024
"""


class BenchNode(DemoNode):
    """The demo's node with a timer, reads of /proc, and room for a thousand tenants."""

    def __init__(self, policy: str = POLICY) -> None:
        super().__init__(policy)

    def until_ready(self, timeout_seconds: float = 60) -> float:
        """Returns the seconds from the fork to READY=1 on the notify socket. If that does not come, raises
        RuntimeError with the end of the log.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            address = self.folder / "notify"
            address.unlink(missing_ok=True)
            notified.bind(str(address))
            notified.settimeout(0.2)
            environment = {**self.environment, "NOTIFY_SOCKET": str(address)}
            began = time.monotonic()
            with self.log.open("ab") as log:
                self.daemon = subprocess.Popen(
                    [sys.executable, "-m", "vgpud.daemon"], env=environment, stderr=log, cwd=ROOT
                )
            while time.monotonic() - began < timeout_seconds and self.daemon.poll() is None:
                try:
                    if b"READY=1" in notified.recv(4096):
                        return time.monotonic() - began
                except TimeoutError:
                    continue
        raise RuntimeError(f"vgpud is not ready:\n{self.log.read_text()[-4000:]}")

    @property
    def ledger(self) -> Path:
        return self.folder / "state" / "ledger.db"

    @property
    def tenant_socket(self) -> Path:
        return self.run_dir / "vgpud.sock"

    @property
    def pid(self) -> int:
        assert self.daemon is not None
        return self.daemon.pid

    def resident_mib(self) -> float:
        """VmRSS of /proc/PID/status, in MiB."""
        for text in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if text.startswith("VmRSS:"):
                return int(text.split()[1]) / 1024
        raise RuntimeError("the daemon is gone")

    def cpu_seconds(self) -> float:
        """The processor time so far, user and system: fields 14 and 15 of /proc/PID/stat (proc(5))."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def run_seconds(self) -> float:
        """Run time of the process's threads, to the nanosecond: schedstat's first field (sched-stats.rst)."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def end(self) -> None:
        """Ends the daemon and removes its folders, also after a failure."""
        if self.daemon is not None and self.daemon.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
        end_helpers(self)  # the arbiter, which outlives the daemon
        shutil.rmtree(self.folder, ignore_errors=True)
