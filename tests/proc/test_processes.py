"""Processes are distinguished by their start time, and their end is recognised."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.e2e.support import eventually
from tests.fusefile import fuse_file
from vgpud.node.tenants.sight import visible_devices
from vgpud.proc import (
    arguments,
    count_users_by,
    environment,
    executable,
    has_ended,
    is_alive,
    is_ending,
    members_of,
    mount_namespace,
    pin,
    read_stat,
    session_members,
    start_ticks,
    uids,
)

# its main thread ends, and another thread runs until standard input is closed
LEADERLESS = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_is_recognised_only_by_its_own_start_time() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks + 1)
    assert pin(os.getpid(), ticks + 1) is None
    pinned = pin(os.getpid(), ticks)
    assert pinned is not None
    pinned.close()


def test_a_process_whose_main_thread_ended_is_ending_until_its_last_thread_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE)
    assert process.stdin is not None
    eventually(lambda: is_ending(process.pid), "its main thread ends")
    assert process.poll() is None
    assert not has_ended(process.pid)
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(process.pid) and has_ended(process.pid)
    process.wait()


def test_a_process_that_runs_or_was_reaped_is_not_reported_as_ended() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    for pid in (os.getpid(), child.pid):
        assert not is_ending(pid)
        assert not has_ended(pid)


def test_a_later_process_has_a_later_start_time_and_an_absent_one_has_none() -> None:
    assert start_ticks(2**22 + 1) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        assert ticks >= (start_ticks(os.getpid()) or 0) > 0
    finally:
        child.communicate(b"\n")


EXECS = """
import os, sys
os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)
uid = int(sys.argv[2])
os.setresuid(uid, uid, uid)  # the process cannot be dumped now: root owns its files in /proc
print(flush=True)
sys.stdin.readline()
os.execvp("sleep", ["sleep", "1000"])
"""


def pids_of_session(session: int) -> set[int]:
    with ExitStack() as opened:
        pidfds = [opened.enter_context(member).fileno() for member in session_members(session)]
        about = [Path(f"/proc/self/fdinfo/{pidfd}").read_text() for pidfd in pidfds]
    return {int(line.split()[1]) for text in about for line in text.splitlines() if line.startswith("Pid:")}


@needs("root", "fuse")
def test_a_process_whose_exec_hangs_delays_no_query_about_other_processes(tmp_path: Path) -> None:
    """An attack: an exec closes a file of the user's own file system, which does not answer."""
    with fuse_file(tmp_path / "mount", "flush") as file:
        words = [sys.executable, "-c", EXECS, str(file.path), "0"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        ticks = start_ticks(process.pid)
        assert ticks is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert file.asked()
        # fails with EBUSY if the kernel does not answer, which depends on its version
        with suppress(OSError):
            pin(process.pid, ticks)
        assert is_alive(process.pid, ticks), "no answer does not mean that it has ended"
        assert environment(process.pid)
        for question in (mount_namespace, arguments, uids, lambda pid: visible_devices(pid, ())):
            question(process.pid)
        with suppress(OSError):
            executable(process.pid)
        assert process.pid in pids_of_session(os.getsid(process.pid))
        own = start_ticks(os.getpid())
        assert own is not None and is_alive(os.getpid(), own)
    process.kill()
    process.communicate()
    eventually(lambda: not is_alive(process.pid, ticks), "its end is seen")


@needs("root", "fuse", "open-python")
def test_hanging_queries_about_a_users_subordinate_uids_are_bounded_like_those_about_its_uid(
    tmp_path: Path,
) -> None:
    # a user id that no other test uses, because abandoned queries count for 10 s
    user, first = 54_321, 1_000_000
    count_users_by(lambda uid: user if uid >= first else uid)
    processes = []
    before = threading.active_count()
    try:
        with fuse_file(tmp_path / "mount", "flush") as file:
            for number in range(8):
                uid = user if number < 2 else first + number
                words = [sys.executable, "-c", EXECS, str(file.path), str(uid)]
                process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                processes.append(process)
                assert process.stdin is not None and process.stdout is not None
                assert process.stdout.readline() == "\n"
                process.stdin.write("\n")
                process.stdin.flush()
                assert file.asked()
                assert read_stat(process.pid) is None
            assert threading.active_count() <= before + 4
            assert read_stat(os.getpid()) is not None
    finally:
        count_users_by(lambda uid: uid)
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("shape", ["deep", "wide"])
def test_only_a_bounded_number_of_subgroups_of_a_control_group_is_read(tmp_path: Path, shape: str) -> None:
    """An attack: a user makes groups without end in a control group that is delegated to it."""
    group = tmp_path
    for number in range(600):
        (group / "cgroup.procs").write_text("7\n0\n")
        (group / "cgroup.stat").touch()
        made = group / ("g" if shape == "deep" else f"g{number}")
        made.mkdir()
        if shape == "deep":
            group = made
        else:
            (made / "cgroup.procs").write_text(f"{number + 1}\n")
    found = members_of(tmp_path)
    assert found[0] == 7 and len(found) == 512
    assert members_of(tmp_path / "gone") == []
