"""Helpers as systemd units, with a fake systemctl, and the choice between units and child processes."""

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import eventually
from tests.units.test_child import at_once
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import is_alive
from vgpud.units import ChildUnits, SystemdUnits, UnitSpec, choose_units

# the part of systemctl(1) that vgpud calls; here a unit is a folder with a pid file
SYSTEMCTL = r"""#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$*" >>calls
verb=$1
for unit; do :; done
case $verb in
start)
    [ -e fail ] && { echo "Job for $unit failed" >&2; exit 1; }
    [ -e dies ] && exit 0
    sh -c "$(cat exec)" >/dev/null 2>&1 &
    echo $! >"$unit.pid" ;;
stop)
    [ -e "$unit.pid" ] || [ -e installed ] || exit 5
    [ -e "$unit.pid" ] && kill "$(cat "$unit.pid")" 2>/dev/null
    exit 0 ;;
kill)
    kill -KILL "$(cat "$unit.pid")" ;;
show)
    while [ -e hold ]; do sleep 0.01; done
    [ -e refuses ] && exit 1
    pid=$(cat "$unit.pid" 2>/dev/null || echo 0)
    if kill -0 "$pid" 2>/dev/null && [ "$pid" != 0 ]; then state=active; else state=inactive pid=0; fi
    echo "MainPID=$pid"
    echo "ActiveState=$state" ;;
reset-failed) exit 1 ;;
*) exit 64 ;;
esac
"""
NAME = "vgpud-mps@GPU-1"


@pytest.fixture
def systemd(tmp_path: Path) -> Path:
    folder = tmp_path / "systemd"
    folder.mkdir()
    (folder / "systemctl").write_text(SYSTEMCTL)
    (folder / "systemctl").chmod(0o755)
    (folder / "exec").write_text("exec sleep 1000")
    (folder / "installed").touch()
    return folder


@pytest.fixture
def units(systemd: Path, tmp_path: Path) -> Iterator[SystemdUnits]:
    yield SystemdUnits(tmp_path, str(systemd / "systemctl"))
    for pid_file in systemd.glob("*.pid"):
        try:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_a_helper_is_started_listed_and_stopped(units: SystemdUnits, tmp_path: Path) -> None:
    started = units.start(UnitSpec(NAME, ("nvidia-cuda-mps-control", "-f"), at_once, env={"A": "1"}))
    assert units.start(UnitSpec(NAME, ("other",), at_once)) == started
    assert units.running(NAME) == started
    assert units.list("vgpud-mps@") == (started,)
    assert units.list("vgpud-arbiter") == ()
    units.stop(NAME, 10)
    assert units.running(NAME) is None
    assert not is_alive(started.pid, started.start_ticks)
    assert list((tmp_path / "units").iterdir()) == []
    units.stop(NAME, 10)


def test_systemctl_is_called_with_the_documented_arguments(units: SystemdUnits, systemd: Path) -> None:
    units.start(UnitSpec(NAME, ("x",), at_once))
    assert (systemd / "calls").read_text().splitlines() == [
        f"show --property=ActiveState,MainPID -- {NAME}.service",
        f"reset-failed -- {NAME}.service",
        f"start -- {NAME}.service",
        f"show --property=ActiveState,MainPID -- {NAME}.service",
    ]


def test_the_environment_file_of_a_unit_is_written_as_systemd_reads_it(
    units: SystemdUnits, tmp_path: Path
) -> None:
    units.start(UnitSpec(NAME, ("x",), at_once, env={"PLAIN": "/run/x", "ODD": 'a "b" $c \\ `d`'}))
    path = tmp_path / f"units/{NAME}.env"
    assert path.read_text() == 'PLAIN="/run/x"\nODD="a \\"b\\" \\$c \\\\ \\`d\\`"\n'
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(VgpuError, match="line break"):
        units.start(UnitSpec("other", ("x",), at_once, env={"A": "1\n2"}))


def test_a_unit_that_ignores_sigterm_is_killed(units: SystemdUnits, systemd: Path) -> None:
    ready = systemd / "ready"
    (systemd / "exec").write_text(f"trap '' TERM; echo >{ready}; while :; do sleep 0.1; done")
    running = units.start(UnitSpec(NAME, ("x",), ready=ready.exists))
    units.stop(NAME, 0.2)
    assert not is_alive(running.pid, running.start_ticks)
    assert f"kill --signal=SIGKILL -- {NAME}.service" in (systemd / "calls").read_text()


def test_a_unit_that_fails_to_start_is_an_error(units: SystemdUnits, systemd: Path) -> None:
    (systemd / "fail").touch()
    with pytest.raises(VgpuError) as caught:
        units.start(UnitSpec(NAME, ("x",), at_once))
    assert caught.value.code is ErrorCode.HELPER_FAILED
    assert caught.value.details == (f"Job for {NAME}.service failed",)


def test_a_unit_that_ends_at_once_is_an_error(units: SystemdUnits, systemd: Path) -> None:
    (systemd / "dies").touch()
    with pytest.raises(VgpuError, match="ended at once"):
        units.start(UnitSpec(NAME, ("x",), at_once))


def test_a_unit_that_is_not_ready_in_time_is_stopped(units: SystemdUnits) -> None:
    with pytest.raises(VgpuError) as caught:
        units.start(UnitSpec(NAME, ("x",), ready=lambda: False, ready_seconds=0.1))
    assert caught.value.code is ErrorCode.HELPER_TIMEOUT
    assert units.running(NAME) is None


def test_a_started_unit_about_whose_process_the_kernel_does_not_answer_is_stopped(
    units: SystemdUnits, systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr("vgpud.units.system._ANSWER_SECONDS", 0.0)
    with monkeypatch.context() as busy:
        busy.setattr("vgpud.proc.aside", no_answer)
        with pytest.raises(VgpuError) as caught:
            units.start(UnitSpec(NAME, ("x",), at_once))
    assert caught.value.code is ErrorCode.HELPER_TIMEOUT
    assert f"stop -- {NAME}.service" in (systemd / "calls").read_text().splitlines()


def test_stopping_a_unit_that_is_not_installed_succeeds(units: SystemdUnits, systemd: Path) -> None:
    (systemd / "installed").unlink()
    units.stop(NAME, 1)


def test_a_missing_systemctl_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VgpuError) as caught:
        SystemdUnits(tmp_path, str(tmp_path / "absent")).start(UnitSpec(NAME, ("x",), at_once))
    assert caught.value.code is ErrorCode.HELPER_FAILED


def test_the_exit_of_a_unit_is_reported(units: SystemdUnits) -> None:
    async def scenario() -> str:
        running = units.start(UnitSpec(NAME, ("x",), at_once))
        told: asyncio.Queue[str] = asyncio.Queue()
        units.on_exit(NAME, told.put_nowait)
        os.kill(running.pid, signal.SIGKILL)
        return await asyncio.wait_for(told.get(), 300)

    assert asyncio.run(scenario()) == NAME


def test_units_of_systemd_are_used_only_if_systemd_started_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> type:
        return type(choose_units(tmp_path, booted=tmp_path))

    monkeypatch.delenv("INVOCATION_ID", raising=False)
    monkeypatch.delenv("SYSTEMD_EXEC_PID", raising=False)
    assert chosen() is ChildUnits
    monkeypatch.setenv("INVOCATION_ID", "0" * 32)  # a desktop's shells may have it, too
    assert chosen() is ChildUnits
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getppid()))
    assert chosen() is ChildUnits
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert chosen() is SystemdUnits
    assert isinstance(choose_units(tmp_path, booted=tmp_path / "absent"), ChildUnits)


@pytest.mark.parametrize("taken_back", [False, True])
def test_vgpud_does_not_wait_for_systemd_to_report_the_exit_of_a_unit(
    units: SystemdUnits, systemd: Path, monkeypatch: pytest.MonkeyPatch, taken_back: bool
) -> None:
    """vgpud asks systemd while it is busy. Then systemd fails to answer, and then the helper ends."""
    monkeypatch.setattr("vgpud.units.system._LOOK_AGAIN_SECONDS", 0.01)
    running = units.start(UnitSpec(NAME, ("x",), at_once))
    (systemd / "hold").touch()
    release = threading.Timer(60, (systemd / "hold").unlink)
    release.start()

    async def work() -> None:
        told: list[str] = []
        forget = units.on_exit(NAME, told.append)
        assert (systemd / "hold").exists(), "the event loop waited for systemd"
        (systemd / "refuses").touch()
        release.cancel()
        (systemd / "hold").unlink()
        await asyncio.sleep(0.2)
        assert told == [], "no answer is not the end of the helper"
        (systemd / "refuses").unlink()
        await asyncio.sleep(0.2)
        if taken_back:
            forget()
        os.kill(running.pid, signal.SIGKILL)
        if taken_back:
            await asyncio.sleep(0.2)
            assert told == []
        else:
            await asyncio.to_thread(eventually, lambda: told == [NAME], "its exit is reported")

    asyncio.run(work())
