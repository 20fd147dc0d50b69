"""Fixtures: vgpuctl as users run it, in a process of its own, and a server on a Unix socket."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import prepared
from tests.ctl.daemon import Daemon

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "vgpud.ctl")
Done = subprocess.CompletedProcess[str]
Ctl = Callable[..., Done]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    # a Unix socket's path has at most 107 bytes, and pytest's folders may be longer
    with tempfile.TemporaryDirectory(prefix="ctl") as folder:
        server = Daemon(Path(folder) / "vgpud.sock")
        server.start()
        yield server
        server.stop()


#: lets a program that starts with a minimal environment measure its coverage, if the test is measured
MEASURED = {name: text for name, text in os.environ.items() if name.startswith("COVERAGE_")}


def environment(socket: Path | None = None) -> dict[str, str]:
    """A minimal environment, so that variables of the test's caller have no effect."""
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    return base if socket is None else {**base, "VGPUD_SOCKET": str(socket)}


@pytest.fixture
def ctl(daemon: Daemon) -> Ctl:
    def run(*arguments: str, env: dict[str, str] | None = None, words: str = "") -> Done:
        process = prepared.ctl(arguments, {**environment(daemon.socket), **(env or {})}, {})
        said, errors = process.communicate(words, timeout=300)
        return subprocess.CompletedProcess(arguments, process.wait(), said, errors)

    return run


@pytest.fixture
def main(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Runs vgpuctl within this process, which is faster."""
    from vgpud.ctl.main import main as entry

    monkeypatch.setenv("VGPUD_SOCKET", str(daemon.socket))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        code = entry(arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run
