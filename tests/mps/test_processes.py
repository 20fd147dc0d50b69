"""MPS control daemons and servers, found by /proc."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from vgpud.modes.mps.folders import DeviceFolder
from vgpud.modes.mps.processes import end_servers, of_lives, still_there
from vgpud.proc import aside

# ignores SIGTERM, and ends with its standard input
SERVES = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
sys.stdin.read()
"""


def server(folder: DeviceFolder) -> subprocess.Popen[str]:
    """Starts a process with the environment of one start of an MPS daemon. The process ends with its standard
    input.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES],
        env={"CUDA_MPS_PIPE_DIRECTORY": str(folder.life(1))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_the_end_of_mps_servers_is_awaited_for_a_bounded_time(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path)
    program = sys.executable
    ends, stays = server(folder), server(folder)
    known = of_lives(folder, program)
    assert {one.pid for one in known} == {ends.pid, stays.pid}
    assert ends.stdin is not None
    ends.stdin.close()
    os.waitid(os.P_PID, ends.pid, os.WEXITED | os.WNOWAIT)
    assert still_there(known, 0.1) == (stays.pid,), "it names the process that did not end"
    assert ends.wait() == 0
    with capture_logs() as lines:
        assert end_servers(folder, program) == (stays.pid,)
    assert [(line["audit"], line["server"]) for line in lines] == [("end MPS server", stays.pid)]
    assert still_there(known, 300) == ()
    stays.communicate()
    assert of_lives(folder, program) == ()


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_whose_exec_takes_time_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """During an exec the kernel shows an empty environment, or does not answer."""
    folder = DeviceFolder(tmp_path)
    in_exec = server(folder)
    left = 2

    def busy(pid: int, question: Callable[[], object]) -> object:
        nonlocal left
        answer = aside(pid, question)
        if pid == in_exec.pid and isinstance(answer, bytes) and left > 0:
            left -= 1
            if not answers:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            return b""
        return answer

    monkeypatch.setattr("vgpud.proc.aside", busy)
    try:
        assert [one.pid for one in of_lives(folder, sys.executable)] == [in_exec.pid]
    finally:
        in_exec.kill()
        in_exec.communicate()


def test_a_program_with_a_servers_environment_is_not_taken_for_a_server(tmp_path: Path) -> None:
    """An attack: a set-user-id program keeps the environment that its caller gave it."""
    folder = DeviceFolder(tmp_path)
    stranger = server(folder)
    try:
        assert end_servers(folder, "/usr/bin/nvidia-cuda-mps-control") == ()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate()


def test_a_server_whose_executable_was_replaced_is_recognised(tmp_path: Path) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", program)
    folder = DeviceFolder(tmp_path / "d")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder.life(3))}
    with subprocess.Popen([program, "60"], env=environment) as old:
        program.unlink()
        assert end_servers(folder, str(control)) == (old.pid,)
