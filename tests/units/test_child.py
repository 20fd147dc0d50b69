"""Helpers as detached child processes: another vgpud finds them again, they are ended reliably, and no other
process is mistaken for one.
"""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import clock
from tests.e2e.support import eventually as until
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import aside, has_exited, is_alive, parse_stat, read_stat
from vgpud.units import ChildUnits, Running, UnitSpec

SLEEP = ("/bin/sleep", "1000")
STUBBORN = ("/bin/sh", "-c", "trap '' TERM; echo deaf >ready; while :; do sleep 1; done")


def at_once() -> bool:
    """The readiness test of a helper that is ready once started."""
    return True


@pytest.fixture
def units(tmp_path: Path) -> Iterator[ChildUnits]:
    units = ChildUnits(tmp_path)
    yield units
    for running in units.list():
        units.stop(running.name, 0)


def test_a_helper_is_started_listed_and_stopped(units: ChildUnits) -> None:
    started = units.start(UnitSpec("vgpud-mps@GPU-1", SLEEP, at_once))
    units.start(UnitSpec("vgpud-arbiter", SLEEP, at_once))
    assert units.running("vgpud-mps@GPU-1") == started
    assert [r.name for r in units.list()] == ["vgpud-arbiter", "vgpud-mps@GPU-1"]
    assert [r.name for r in units.list("vgpud-mps@")] == ["vgpud-mps@GPU-1"]
    units.stop("vgpud-mps@GPU-1", 5)
    assert units.running("vgpud-mps@GPU-1") is None
    assert not is_alive(started.pid, started.start_ticks)
    units.stop("vgpud-mps@GPU-1", 5)
    assert [r.name for r in units.list()] == ["vgpud-arbiter"]


def test_a_start_of_a_running_helper_does_nothing_and_one_of_a_dead_helper_restarts_it(
    units: ChildUnits,
) -> None:
    spec = UnitSpec("helper", SLEEP, at_once)
    first = units.start(spec)
    assert units.start(UnitSpec("helper", ("/bin/sleep", "2000"), at_once)) == first
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: units.running("helper") is None)
    assert units.start(spec).pid != first.pid


def test_helpers_that_have_ended_are_reaped(units: ChildUnits) -> None:
    running = units.start(UnitSpec("helper", SLEEP, at_once))
    os.kill(running.pid, signal.SIGKILL)
    until(lambda: units.running("helper") is None)
    until(lambda: units.running("helper") is None and read_stat(running.pid) is None)


def test_concurrent_starts_of_one_helper_make_a_single_process(tmp_path: Path) -> None:
    many = [ChildUnits(tmp_path) for _ in range(3)]
    found: list[Running] = []
    threads = [
        threading.Thread(target=lambda u=u: found.append(u.start(UnitSpec("helper", SLEEP, at_once))))
        for u in many
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len(set(found)) == 1
    many[0].stop("helper", 5)


def test_the_environment_of_a_helper_has_only_the_requested_variables(
    units: ChildUnits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    out = tmp_path / "out"
    units.start(
        UnitSpec(
            "helper",
            ("/bin/sh", "-c", f"env >{out}.new; mv {out}.new {out}; exec sleep 1000"),
            env={"CUDA_MPS_PIPE_DIRECTORY": "/run/a b"},
            ready=out.exists,
        )
    )
    lines = out.read_text().splitlines()
    assert "CUDA_MPS_PIPE_DIRECTORY=/run/a b" in lines
    assert not [line for line in lines if line.startswith("NOTIFY_SOCKET")]


def test_a_ready_file_of_an_earlier_helper_does_not_count(units: ChildUnits, tmp_path: Path) -> None:
    ready, other = tmp_path / "socket", tmp_path / "other"
    ready.write_text("old")
    other.write_text("old")
    units.start(
        UnitSpec(
            "helper",
            ("/bin/sh", "-c", f"echo new >{ready}; exec sleep 1000"),
            ready=ready.exists,
            files=(ready, other, tmp_path),
        )
    )
    until(lambda: ready.read_text() == "new\n")
    assert not other.exists()


def test_a_start_waits_until_the_helper_is_ready(units: ChildUnits) -> None:
    answers = iter([False, False, True])
    units.start(UnitSpec("helper", SLEEP, ready=lambda: next(answers)))
    assert list(answers) == []


def test_a_helper_that_is_not_ready_in_time_is_stopped(units: ChildUnits) -> None:
    with pytest.raises(VgpuError) as caught:
        units.start(UnitSpec("helper", SLEEP, ready=lambda: False, ready_seconds=0.1))
    assert caught.value.code is ErrorCode.HELPER_TIMEOUT
    assert units.list() == ()


def test_a_helper_that_ends_before_it_is_ready_is_an_error_with_its_log(units: ChildUnits) -> None:
    with pytest.raises(VgpuError) as caught:
        command = ("/bin/sh", "-c", "echo no gpu here >&2; exit 3")
        units.start(UnitSpec("helper", command, ready=Path("/nonexistent/socket").exists))
    assert caught.value.code is ErrorCode.HELPER_FAILED
    assert caught.value.details == ("no gpu here",)
    assert units.running("helper") is None


def test_the_start_of_a_helper_whose_program_is_absent_is_an_error(units: ChildUnits) -> None:
    with pytest.raises(VgpuError) as caught:
        units.start(UnitSpec("helper", ("/nonexistent/program",), ready=Path("/nonexistent/socket").exists))
    assert caught.value.code is ErrorCode.HELPER_FAILED
    assert "/nonexistent/program" in caught.value.details[-1]


def test_a_helper_that_ignores_sigterm_is_killed(units: ChildUnits, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = STUBBORN[2].replace("ready", str(ready))
    running = units.start(UnitSpec("helper", (*STUBBORN[:2], script), ready=ready.exists))
    units.stop("helper", 0.2)
    assert not is_alive(running.pid, running.start_ticks)


def test_a_helper_that_ends_on_sigterm_may_clean_up(units: ChildUnits, tmp_path: Path) -> None:
    ready, cleaned = tmp_path / "ready", tmp_path / "cleaned"
    script = f"trap 'echo >{cleaned}; exit' TERM; echo >{ready}; while :; do sleep 0.05; done"
    units.start(UnitSpec("helper", ("/bin/sh", "-c", script), ready=ready.exists))
    units.stop("helper", 30)
    assert cleaned.exists()


def test_a_process_with_the_reused_pid_of_a_helper_is_not_taken_for_the_helper(
    units: ChildUnits, tmp_path: Path
) -> None:
    with subprocess.Popen(SLEEP) as stranger:
        line = Path(f"/proc/{stranger.pid}/stat").read_text()
        fields = line.split()
        fields[21] = str(int(fields[21]) - 1)
        (tmp_path / "units").mkdir()
        (tmp_path / "units/helper.pid").write_text(" ".join(fields))
        assert units.running("helper") is None
        units.stop("helper", 0)
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("text", ["", "12", "garbage (x) S", "1 (a) S 1 1 x" + " 0" * 30])
def test_a_damaged_pid_file_is_no_helper(units: ChildUnits, tmp_path: Path, text: str) -> None:
    (tmp_path / "units").mkdir()
    (tmp_path / "units/helper.pid").write_text(text)
    assert units.running("helper") is None
    assert units.start(UnitSpec("helper", SLEEP, at_once)).pid > 0


def test_the_stat_line_of_a_command_with_spaces_and_brackets_is_parsed() -> None:
    stat = parse_stat(b"42 (a) b ( c) S 1 42 42 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 9876 1 2")
    assert stat is not None
    assert (stat.pid, stat.state, stat.start_ticks) == (42, "S", 9876)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", "x\n"])
def test_invalid_unit_names_are_refused(units: ChildUnits, name: str) -> None:
    with pytest.raises(VgpuError) as caught:
        UnitSpec(name, SLEEP, at_once)
    assert caught.value.code is ErrorCode.BUG
    with pytest.raises(VgpuError):
        units.stop(name, 0)


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from vgpud.units import ChildUnits, UnitSpec
units = ChildUnits(Path(sys.argv[1]))
if sys.argv[2] == "while-starting":
    import subprocess
    popen = subprocess.Popen
    def spawn_and_die(*args, **kwargs):
        popen(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    subprocess.Popen = spawn_and_die
units.start(UnitSpec("helper", ("/bin/sleep", "1000"), lambda: True))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["while-starting", "after"])
def test_a_helper_outlives_kill_9_of_vgpud_and_is_found_again(
    units: ChildUnits, tmp_path: Path, moment: str
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    running = units.running("helper")
    assert running is not None
    assert units.start(UnitSpec("helper", SLEEP, at_once)) == running
    units.stop("helper", 5)
    assert not is_alive(running.pid, running.start_ticks)


def test_the_exit_callback_of_a_helper_is_called_once(units: ChildUnits) -> None:
    async def scenario() -> list[str]:
        running = units.start(UnitSpec("helper", SLEEP, at_once))
        told: asyncio.Queue[str] = asyncio.Queue()
        units.on_exit("helper", told.put_nowait)
        os.kill(running.pid, signal.SIGKILL)
        names = [await asyncio.wait_for(told.get(), 300)]
        assert read_stat(running.pid) is None, "a zombie is left"
        units.on_exit("helper", told.put_nowait)  # the helper has ended before the callback is registered
        names.append(await asyncio.wait_for(told.get(), 300))
        assert told.empty()
        return names

    assert asyncio.run(scenario()) == ["helper", "helper"]


class BusyKernel:
    """A kernel that does not answer the next `left` queries about processes, as on a busy host while a helper
    is in exec.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        monkeypatch.setattr("vgpud.proc.aside", self.aside)

    def aside(self, pid: int, question: Callable[[], object]) -> object:
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return aside(pid, question)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> BusyKernel:
    return BusyKernel(monkeypatch)


@pytest.mark.parametrize("unanswered", [0, sys.maxsize])
def test_descendants_of_a_helper_end_with_it(
    units: ChildUnits, tmp_path: Path, kernel: BusyKernel, unanswered: int
) -> None:
    pid_file = tmp_path / "server"
    script = f"sleep 1000 & echo $! >{pid_file}.new; mv {pid_file}.new {pid_file}; wait"
    units.start(UnitSpec("helper", ("/bin/sh", "-c", script), ready=pid_file.exists))
    server = os.pidfd_open(int(pid_file.read_text()))
    try:
        kernel.left = unanswered
        units.stop("helper", 5)
        assert has_exited(server, 30)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(server, signal.SIGKILL)
        os.close(server)


def test_a_helper_is_started_and_stopped_while_queries_about_processes_fail(
    units: ChildUnits, kernel: BusyKernel
) -> None:
    kernel.left = sys.maxsize
    running = units.start(UnitSpec("helper", SLEEP, at_once))
    pidfd = os.pidfd_open(running.pid)
    try:
        assert units.running("helper") == running
        assert not has_exited(pidfd)
        units.stop("helper", 5)
        assert has_exited(pidfd)
    finally:
        os.close(pidfd)
    kernel.left = 0
    assert units.running("helper") is None


def test_vgpud_asks_the_kernel_about_a_helper_of_an_earlier_vgpud_until_the_kernel_answers(
    units: ChildUnits, tmp_path: Path, kernel: BusyKernel
) -> None:
    spec = UnitSpec("helper", SLEEP, at_once)
    running, later = units.start(spec), ChildUnits(tmp_path)
    for left in range(4):
        kernel.left = left
        assert later.start(spec) == running
    assert is_alive(running.pid, running.start_ticks)
    kernel.left = 3
    later.stop("helper", 5)
    assert not is_alive(running.pid, running.start_ticks)


def test_a_helper_keeps_its_pid_file_while_the_kernel_does_not_answer_about_it(
    units: ChildUnits, tmp_path: Path, kernel: BusyKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgpud.units.child._KILL_SECONDS", 0.0)
    running = units.start(UnitSpec("helper", SLEEP, at_once))
    kernel.left = sys.maxsize
    with pytest.raises(VgpuError) as caught:
        ChildUnits(tmp_path).stop("helper", 0)
    assert caught.value.code is ErrorCode.HELPER_TIMEOUT
    kernel.left = 0
    monkeypatch.undo()
    assert units.running("helper") == running


def test_a_helper_is_not_reported_as_ended_while_the_kernel_does_not_answer(
    units: ChildUnits, tmp_path: Path, kernel: BusyKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgpud.units.base._LOOK_AGAIN_SECONDS", 0.01)
    running = units.start(UnitSpec("helper", SLEEP, at_once))

    async def scenario() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        kernel.left = 6
        ChildUnits(tmp_path).on_exit("helper", told.put_nowait)
        await clock.until(lambda: not kernel.left)
        assert told.empty()
        os.kill(running.pid, signal.SIGKILL)
        assert await asyncio.wait_for(told.get(), 300) == "helper"

    asyncio.run(scenario())


def test_a_helper_that_does_not_call_exec_in_time_is_ended(
    units: ChildUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper's shell is stopped before it has written its pid file, as if it got no processor time."""
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def record(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        children.append(popen(words, **options))
        return children[-1]

    monkeypatch.setattr("vgpud.units.child._LAUNCHER", "kill -STOP $$")
    monkeypatch.setattr(subprocess, "Popen", record)
    with pytest.raises(VgpuError) as caught:
        units.start(UnitSpec("helper", SLEEP, at_once, ready_seconds=0.1))
    assert caught.value.code is ErrorCode.HELPER_TIMEOUT
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    assert units.list() == ()


def test_the_exit_callback_of_a_helper_can_be_cancelled(units: ChildUnits) -> None:
    async def scenario() -> list[str]:
        told: list[str] = []
        units.start(UnitSpec("helper", SLEEP, at_once))
        units.start(UnitSpec("other", SLEEP, at_once))
        cancel = units.on_exit("helper", told.append)
        gone = asyncio.Event()
        units.on_exit("other", lambda _name: gone.set())
        cancel()
        cancel()
        units.stop("helper", 5)
        units.stop("other", 5)
        await asyncio.wait_for(gone.wait(), 300)
        return told

    assert asyncio.run(scenario()) == []
