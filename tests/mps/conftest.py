"""MPS control daemons for the tests: NVIDIA's of branches 535 and 550, which start without a GPU, and the
simulator's.
"""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.conditions import unmet
from tests.sim import outside
from tests.simnode import build_dir
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import Percent
from vgpud.modes.mps.features import probe
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.modes.mps.rules import MpsLimits, MpsRules
from vgpud.modes.mps.supervisor import Charge, Supervisor
from vgpud.units import ChildUnits

UUID = "GPU-00000000-1111-2222-3333-444444444444"


def control_program(branch: str) -> str:
    """The path of NVIDIA's MPS control daemon of a driver branch."""
    folder = outside.mps(branch)
    if folder is None:
        unmet("debian-archive", outside.why[f"mps-{branch}"])
    return str(folder / "nvidia-cuda-mps-control")


@pytest.fixture(params=outside.SUITES)
def real_control(request: pytest.FixtureRequest) -> str:
    return control_program(request.param)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, because the paths of the pipes' Unix sockets have at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="mps") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@dataclass
class Watched:
    """A supervisor of one MPS daemon, and the reports that it has made."""

    supervisor: Supervisor
    units: ChildUnits
    folder: DeviceFolder
    limits: MpsLimits | None
    rules: MpsRules
    tenants: frozenset[int] = frozenset()
    deaths: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        running = self.units.running(self.supervisor.name)
        assert running is not None
        return running.pid

    def kill(self) -> int:
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def says(self, command: str) -> str:
        return self.supervisor.control().ask(command)


def watched(program: str, run_dir: Path, rules: MpsRules | None = None) -> Watched:
    units = ChildUnits(run_dir)
    folder = DeviceFolder.of(run_dir, UUID)
    made = Watched(None, units, folder, MpsLimits(3000, Percent(3333)), rules or MpsRules())  # type: ignore[arg-type]
    made.supervisor = Supervisor(
        Charge(
            device_uuid=UUID,
            program=program,
            folder=folder,
            features=lambda: probe(program),
            rules=lambda: made.rules,
            limits=lambda: made.limits,
            tenants=lambda: made.tenants,
            died=made.deaths.append,
            notice=lambda sentence, **_: made.notices.append(sentence),
            answer_seconds=1.0,
        ),
        units,
    )
    return made


@pytest.fixture
def real(real_control: str, short_folder: Path) -> Iterator[Watched]:
    """NVIDIA's daemon under a supervisor. All processes of the daemon are stopped after the test."""
    made = watched(real_control, short_folder)
    yield made
    stop(made)


def stop(made: Watched) -> None:
    try:
        made.units.stop(made.supervisor.name, 0.0)
    except VgpuError as error:
        pytest.fail(str(error))


def sits_silent(path: Path) -> socket.socket:
    """Opens a connection that sends nothing, as every tenant can."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(str(path / "control"))
    return made


@pytest.fixture(scope="session")
def guard() -> Path:
    library = build_dir() / "lib" / "libvgpu-guard.so"
    assert library.exists(), "the guard is not built: run ./dev build"
    return library


def play(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


def audits(logged: list[Any]) -> list[tuple[Any, ...]]:
    """Change, door and device of each line of the audit trail. Asserts that every line has a reason."""
    lines = [line for line in logged if "audit" in line]
    assert all(line["reason"] for line in lines)
    return [(line["audit"], line["door"], line.get("device")) for line in lines]
