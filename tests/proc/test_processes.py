"""Processes told apart by their start, and those that end."""

import os
import subprocess
import sys
import time

from vgpud.proc import has_ended, is_ending, start_ticks

# its main thread ends, another one goes on until the input is closed
LEADERLESS = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_is_ending_and_has_not_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE)
    assert process.stdin is not None
    end = time.monotonic() + 20
    while not is_ending(process.pid):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    assert not has_ended(process.pid)
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(process.pid) and has_ended(process.pid)
    process.wait()


def test_a_process_that_runs_or_cannot_be_seen_has_not_ended() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    for pid in (os.getpid(), child.pid):
        assert not is_ending(pid)
        assert not has_ended(pid)


def test_start_ticks_tell_processes_of_one_pid_apart() -> None:
    assert start_ticks(2**22 + 1) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        assert ticks >= (start_ticks(os.getpid()) or 0) > 0
    finally:
        child.communicate(b"\n")
