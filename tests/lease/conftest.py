import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.native.harness import ARBITER, GIB, GID, UID, UUIDS, Tenant
from tests.simnode import end
from vgpud import lease_layout as layout
from vgpud.lease import ArbiterClient, DeviceLimits, Usage, read_usage, write_lease


def eventually(holds: Callable[[], bool], seconds: float = 300) -> None:
    """Polls until `holds` is true. The bound only ends a test that would never end."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


@dataclass
class Node:
    """A run directory with one arbiter and its leases."""

    run_dir: Path
    program: Path = ARBITER
    before: Sequence[str] = ()  # a command that runs the arbiter
    arbiter: "subprocess.Popen[bytes] | None" = None
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    @property
    def client(self) -> ArbiterClient:
        return ArbiterClient(self.run_dir / "arbiter" / "control.sock")

    def start_arbiter(self) -> None:
        command = [*self.before, str(self.program), "--run-dir", str(self.run_dir), "--foreground"]
        self.arbiter = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        eventually(self.client.ready)

    def kill_arbiter(self) -> None:
        assert self.arbiter is not None
        self.arbiter.kill()
        self.arbiter.wait()

    def lease(self, name: str = "a1", memory_bytes: int = GIB, serve: bool = True) -> Path:
        folder = write_lease(
            self.run_dir / "leases", name, [DeviceLimits(UUIDS[0], memory_bytes)], uid=UID, gid=GID
        )
        if serve:
            self.client.add(name)
            # the arbiter answers before it has bound the socket if the file system makes it wait
            eventually((folder / layout.ARBITER_SOCKET).exists)
        return folder

    def tenant(self, lease: Path, *command: str | Path, **env: str) -> "subprocess.Popen[str]":
        process = Tenant(lease).start(*command, **env)
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            end(process)
        if self.arbiter is not None:
            end(self.arbiter)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "leases").mkdir()
    node = Node(tmp_path)
    node.start_arbiter()
    yield node
    node.end()


def used(usage: Usage) -> int:
    meter = usage.device(0)
    return meter.used_bytes + meter.context_bytes


def lease_used(folder: Path) -> int:
    return used(read_usage(folder))
