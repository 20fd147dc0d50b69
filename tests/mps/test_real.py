"""NVIDIA's control daemons of branches 535 and 550, which need no GPU, under vgpud's supervisor."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clock import until
from tests.conditions import needs
from tests.mps.conftest import UUID, Watched, audits, control_program, play, sits_silent, watched
from tests.otheruser import as_user
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import Percent
from vgpud.modes.mps.control import MpsControl
from vgpud.modes.mps.features import probe
from vgpud.modes.mps.rules import MpsLimits, MpsRules
from vgpud.modes.mps.silent import cut_silent

pytestmark = needs("debian-archive")


def settings(made: Watched) -> tuple[str, str]:
    return (
        made.says("get_default_device_pinned_mem_limit 0"),
        made.says("get_default_active_thread_percentage"),
    )


def test_a_real_daemon_has_its_limits_before_clients_are_admitted(real: Watched) -> None:
    seen: list[tuple[bool, str]] = []
    original = type(real.folder).open

    class Spying(type(real.folder)):  # type: ignore[misc]
        def open(self, life: Path) -> None:
            control = MpsControl(real.supervisor.charge.program, life, self.log)
            seen.append((self.pipe.exists(), control.ask("get_default_active_thread_percentage")))
            original(self, life)

    object.__setattr__(real.supervisor.charge, "folder", Spying(real.folder.path))

    async def work() -> None:
        await real.supervisor.up()
        assert seen == [(False, "33.3")]
        assert settings(real) == ("2G", "33.3")
        assert real.folder.pipe.resolve().stat().st_mode & 0o777 == 0o755
        await real.supervisor.down()
        assert not real.folder.pipes.exists()

    play(work)


def test_a_killed_real_daemon_is_restarted_with_all_limits(real: Watched) -> None:
    async def work() -> None:
        await real.supervisor.up()
        before = real.folder.pipe.resolve()
        stale = {path.name for path in before.iterdir()}
        first = real.kill()
        await until(lambda: real.deaths, "its death was not noticed")
        assert real.deaths == ["its MPS control daemon died and took its clients along"]
        await until(lambda: real.notices, "it did not come back")
        assert "with every limit in force" in real.notices[0]
        assert real.pid != first
        assert settings(real) == ("2G", "33.3")
        assert "control" in stale
        assert real.folder.pipe.resolve() != before
        assert not before.exists(), "the stale sockets and pid file are gone"

    play(work)


def test_a_killed_real_mps_daemon_without_tenants_is_not_restarted(real: Watched) -> None:
    async def work() -> None:
        await real.supervisor.up()
        real.limits = None
        real.kill()
        await until(lambda: real.deaths, "its death was not noticed")
        await asyncio.sleep(0.3)
        assert real.units.running(real.supervisor.name) is None
        with pytest.raises(ConnectionRefusedError):
            sits_silent(real.folder.pipe)

    play(work)


def test_a_restarted_vgpud_adopts_the_running_real_daemon(real: Watched, short_folder: Path) -> None:
    """After a kill or an upgrade of vgpud the daemon keeps running, and its limits are set again."""

    async def work() -> None:
        await real.supervisor.up()
        pid = real.pid
        real.says("set_default_active_thread_percentage 90")
        later = watched(real.supervisor.charge.program, short_folder)
        later.limits = MpsLimits(700, Percent(1000))
        await later.supervisor.up()
        assert later.pid == pid
        assert settings(later) == ("700M", "10.0")

    play(work)


def test_a_start_of_mps_that_is_cut_before_clients_were_admitted_is_finished(
    real: Watched, short_folder: Path
) -> None:
    async def work() -> None:
        await real.supervisor.up()
        pid = real.pid
        real.folder.close()
        later = watched(real.supervisor.charge.program, short_folder)
        await later.supervisor.up()
        assert (later.pid, settings(later)) == (pid, ("2G", "33.3"))

    play(work)


def test_limits_of_a_real_daemon_follow_its_tenants(real: Watched) -> None:
    async def work() -> None:
        await real.supervisor.up()
        real.limits = MpsLimits(512, Percent(50))
        await real.supervisor.limit()
        assert settings(real) == ("512M", "0.5")

    play(work)


BYSTANDER = """
import array, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as link:
    _, control, _, _ = link.recvmsg(1, socket.CMSG_SPACE(4))
print("has it", array.array("i", control[0][2])[0] > 0, flush=True)
time.sleep(600)
"""


@contextmanager
def bystander(passed: socket.socket) -> Iterator[subprocess.Popen[str]]:
    """A process of another user that has received a connection, as a message bus accepts any descriptor."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [*as_user(65534, 65534), sys.executable, "-c", BYSTANDER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            socket.send_fds(ours, [b"x"], [passed.fileno()])
            assert process.stdout is not None
            assert process.stdout.readline() == "has it True\n"
            yield process
        finally:
            process.kill()
            process.communicate()


def test_a_silent_connection_passed_to_another_process_is_closed_and_the_process_lives(
    real: Watched, logged: list[Any]
) -> None:
    """An attack: a connection is passed to another user's process, so that vgpud would kill that process."""

    async def work() -> None:
        await real.supervisor.up()
        pid = real.pid
        silent = sits_silent(real.folder.pipe)
        with bystander(silent) as holder:
            silent.close()
            real.rules = MpsRules(check_seconds=0.2, hang_seconds=30)
            real.supervisor.watch()
            await until(lambda: "answers again" in "".join(real.notices[-1:]), "the daemon did not go on")
            assert holder.poll() is None, "no process is ended for what it has open"
        assert f"1 silent connections of uid {os.getuid()} kept" in "".join(real.notices)
        assert (real.pid, real.deaths) == (pid, [])

    play(work)
    assert audits(logged) == [("cut MPS connections", "vgpud", UUID)]


def test_many_silent_connections_are_closed_one_after_the_other(real: Watched) -> None:
    """In one check, if the daemon is quick to read the next one."""

    async def work() -> None:
        await real.supervisor.up()
        pid = real.pid
        silent = [sits_silent(real.folder.pipe) for _ in range(4)]
        real.rules = MpsRules(check_seconds=0.2, hang_seconds=30)
        real.supervisor.watch()
        await until(lambda: "answers again" in "".join(real.notices[-1:]), "the daemon did not go on")
        closed = [notice.split()[0] for notice in real.notices if " silent connections of uid" in notice]
        assert sum(map(int, closed)) == 4
        assert (real.pid, real.deaths) == (pid, [])
        for one in silent:
            one.close()

    play(work)


def test_connections_of_an_idle_daemon_stay_open(real: Watched) -> None:
    async def work() -> None:
        await real.supervisor.up()
        running = real.units.running(real.supervisor.name)
        assert running is not None
        assert not cut_silent(running, 1.0)
        assert real.supervisor.control().answers()

    play(work)


CONNECT = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])"
)


def connects(uid: int, path: Path) -> bool:
    """Returns whether a process of user `uid` can connect to the MPS daemon. It runs the system's Python,
    because a process of a user other than root lacks the capabilities with which the tests read this source
    tree.
    """
    words = [shutil.which("setpriv") or "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    done = subprocess.run(
        [*words, "--", "/usr/bin/python3", "-c", CONNECT, path / "control"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or "PermissionError" in done.stderr
    return done.returncode == 0


def test_only_root_and_tenants_can_connect_to_a_real_mps_daemon(real: Watched) -> None:
    async def work() -> None:
        real.tenants = frozenset({4001, 4002})
        await real.supervisor.up()
        assert [connects(uid, real.folder.pipe) for uid in (0, 4001, 4002, 4003)] == [True, True, True, False]
        real.tenants = frozenset({4003})
        await real.supervisor.limit()
        assert [connects(uid, real.folder.pipe) for uid in (4001, 4003)] == [False, True]

    play(work)


def test_limits_changed_by_another_user_are_set_again(real: Watched, logged: list[Any]) -> None:
    """An attack: any program that can connect to the daemon of branch 535 may change all tenants' limits.

    NVIDIA's daemon answers one program at a time, so the test asks only before and after the check.
    """

    async def work() -> None:
        await real.supervisor.up()
        real.says("set_default_active_thread_percentage 1")
        real.says("set_default_device_pinned_mem_limit 0 1M")
        real.rules = MpsRules(check_seconds=0.2)
        real.supervisor.watch()
        await until(lambda: real.notices, "it was not said")
        real.rules = MpsRules()
        real.supervisor.watch()
        assert "default active thread percentage '1.0' instead of 33.33" in real.notices[0]
        assert "default device pinned mem limit 0 '1M' instead of 3000M" in real.notices[0]
        assert settings(real) == ("2G", "33.3")

    play(work)
    assert audits(logged) == [("set MPS limits", "vgpud", UUID)]


def test_a_hanging_real_daemon_is_ended_and_restarted(real: Watched, logged: list[Any]) -> None:
    async def work() -> None:
        await real.supervisor.up()
        pid = real.pid
        os.kill(pid, signal.SIGSTOP)
        real.rules = MpsRules(check_seconds=0.2, hang_seconds=1)
        real.supervisor.watch()
        await until(lambda: any("is back" in notice for notice in real.notices), "it was not brought back")
        assert real.pid != pid
        assert settings(real) == ("2G", "33.3")
        assert len(real.deaths) == 1

    play(work)
    told = [("end MPS daemon", "vgpud", UUID), ("start MPS daemon", "vgpud", UUID)]
    assert audits(logged) == told


def test_the_control_programs_of_the_driver_branches_have_the_expected_features() -> None:
    found = {name: probe(control_program(name)) for name in ("535", "550")}
    assert [f.memory_limits and f.terminate and f.priority for f in found.values()] == [True, True]
    assert [f.server_status for f in found.values()] == [False, True]
    assert not any(f.multi_user or f.version for f in found.values())


def test_refusals_of_the_real_daemon_are_recognised(real: Watched) -> None:
    async def work() -> None:
        await real.supervisor.up()
        control = real.supervisor.control()
        assert control.servers() == ()
        assert control.clients() == ()
        with pytest.raises(VgpuError, match="Server 999 not found") as refused:
            control.terminate_client(999, 1)
        assert refused.value.code is ErrorCode.MPS_REFUSED
        control.set_default_priority(True)
        assert real.says("get_default_client_priority") == "1"

    play(work)
