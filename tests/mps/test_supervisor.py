"""The supervisor of an MPS daemon that hangs, is kept waiting, or has a server in a fault.

A script stands in for NVIDIA's control program, and a process that reads for its daemon.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clock import until
from tests.conditions import needs
from tests.lease.conftest import eventually
from tests.mps.conftest import UUID, Watched, audits, play, watched
from tests.mps.test_closed import held
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation
from vgpud.modes.base import Paths
from vgpud.modes.mps import MpsMode, MpsWorld
from vgpud.modes.mps.rules import MpsRules
from vgpud.modes.mps.silent import Peer, cut_silent
from vgpud.modes.mps.supervisor import Supervisor
from vgpud.proc import Running, read_stat

CONTROL = """#!/bin/sh
[ "$1" = -f ] && exec sleep 600
[ "$1" = -v ] && exit 0
[ -e "$D/hang" ] && exec sleep 600
# the commands that it knows: get_server_status set_default_device_pinned_mem_limit
read verb a b
case "$verb" in
get_server_list) cat "$D/servers" ;;
get_server_status) cat "$D/state" ;;
shutdown_server) echo "$a $b" >>"$D/ended"; : >"$D/servers" ;;
get_default_active_thread_percentage) echo 33.3 ;;
get_default_device_pinned_mem_limit) echo 2G ;;
get_active_thread_percentage) echo 33.3 ;;
get_device_pinned_mem_limit) echo 2G ;;
esac
"""
DAEMON = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as listener:
    for number in range(2):
        connection, _ = listener.accept()
        print(number, connection.recv(10), flush=True)
"""


@pytest.fixture
def scripted(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    program = short_folder / "control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("D", str(short_folder))
    (short_folder / "servers").write_text("7\n")
    (short_folder / "state").write_text("ACTIVE\n")
    made = watched(str(program), short_folder / "r", MpsRules(check_seconds=0.1, hang_seconds=0.3))
    waits(made, 60)
    return made


def waits(made: Watched, seconds: float) -> None:
    """Sets how long the supervisor waits for an answer."""
    made.supervisor.charge = replace(made.supervisor.charge, answer_seconds=seconds)


def test_an_mps_server_in_a_fault_is_reported_and_ended(
    scripted: Watched, short_folder: Path, logged: list[Any]
) -> None:
    async def work() -> None:
        await scripted.supervisor.up()
        assert scripted.notices == []
        (short_folder / "state").write_text("FAULT\n")
        await until((short_folder / "ended").exists, "the server was not ended")
        await until(lambda: len(scripted.notices) >= 2, "it was not said")
        assert (short_folder / "ended").read_text() == "7 -f\n"
        assert [notice.split(" in FAULT")[0] for notice in scripted.notices] == [
            "MPS server 7 is",
            "MPS server 7 stays",
        ]
        await until(lambda: audits(logged), "it was not recorded")
        await scripted.supervisor.down()

    play(work)
    assert audits(logged) == [("end MPS server", "vgpud", UUID)]


def test_a_hanging_mps_daemon_is_ended_and_its_restart_is_tried_until_it_succeeds(
    scripted: Watched, short_folder: Path, logged: list[Any]
) -> None:
    program, away = short_folder / "control", short_folder / "away"

    async def work() -> None:
        await scripted.supervisor.up()
        pid = scripted.pid
        (short_folder / "hang").touch()
        waits(scripted, 0.2)
        await until(lambda: scripted.notices, "it was not said")
        program.rename(away)
        (short_folder / "hang").unlink()
        waits(scripted, 60)
        failed = "mps_daemon_restart_failed"
        await until(lambda: any(line["event"] == failed for line in logged), "no start has failed")
        away.rename(program)
        await until(lambda: any("is back" in one for one in scripted.notices), "it was not brought back")
        assert scripted.pid != pid
        await scripted.supervisor.down()

    play(work)
    assert scripted.notices[0].startswith("its MPS control daemon does not answer: ")
    assert len(scripted.deaths) == 1
    told = [("end MPS daemon", "vgpud", UUID), ("start MPS daemon", "vgpud", UUID)]
    assert audits(logged) == told


def test_an_mps_daemon_that_answers_again_is_not_ended(scripted: Watched, short_folder: Path) -> None:
    async def work() -> None:
        await scripted.supervisor.up()
        pid = scripted.pid
        scripted.rules = MpsRules(check_seconds=0.1, hang_seconds=300)
        (short_folder / "hang").touch()
        waits(scripted, 0.2)
        await until(lambda: scripted.notices, "it was not said")
        (short_folder / "hang").unlink()
        waits(scripted, 60)
        await until(lambda: "answers again" in scripted.notices[-1], "it does not answer again")
        assert (scripted.pid, scripted.deaths) == (pid, [])
        await scripted.supervisor.down()

    play(work)


def test_a_release_is_not_refused_because_the_mps_daemon_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    async def hangs(_: Supervisor) -> None:
        raise VgpuError(ErrorCode.HELPER_TIMEOUT, "no answer", "")

    async def drop(_: Allocation) -> None:
        pass

    going, stays = held("a", 1), held("b", 1)
    world = MpsWorld(lambda _: (stays,), lambda _: MpsRules(), print, print, None)  # type: ignore[arg-type]
    leases = SimpleNamespace(walls=SimpleNamespace(drop=drop))
    paths = Paths(tmp_path, tmp_path, tmp_path / "libvgpu.so", tmp_path)
    monkeypatch.setattr(Supervisor, "limit", hangs)
    asyncio.run(MpsMode(None, None, world, paths, leases).detach(going, going.slices[0]))  # type: ignore[arg-type]
    (line,) = logged
    assert line["event"] == "mps_limits_not_lowered"
    assert line["why"] == "no answer (E602); the limits from before the release stay"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process that reads from one connection to the socket after the other, as a control daemon does."""
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        words = [sys.executable, "-c", DAEMON, str(listener.fileno())]
        with subprocess.Popen(
            words, pass_fds=[listener.fileno()], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            yield process, path
            process.kill()


@needs("ptrace")
def test_silent_connections_to_an_mps_daemon_are_cut_one_after_the_other(
    reader: tuple["subprocess.Popen[str]", Path],
) -> None:
    process, path = reader
    assert process.stdout is not None
    stat = read_stat(process.pid)
    assert stat is not None
    daemon = Running("mps", process.pid, stat.start_ticks)
    assert not cut_silent(daemon, 0.0), "a daemon that waits for no client has no silent connection"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.connect(str(path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
            second.connect(str(path))
            cut: Counter[Peer] = Counter()
            eventually(lambda: cut.update(cut_silent(daemon, 0.0)) or cut.total() == 2)
            assert process.stdout.read() == "0 b''\n1 b''\n"
    assert cut == {Peer(os.getpid(), os.getuid()): 2}
