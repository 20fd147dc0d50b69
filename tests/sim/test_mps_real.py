"""Compares the simulated MPS control daemon with NVIDIA's: each line of input gives the same answer and
status.

NVIDIA's daemons from Debian (non-free nvidia-cuda-mps, branches 535 and 550) run without a GPU, but can start
no server.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.mps.conftest import control_program, short_folder
from tests.otheruser import as_user
from tests.simnode import SimNode

__all__ = ["short_folder"]

Make = Callable[..., SimNode]
Answer = tuple[str, int, str, str]
CONTROL = "nvidia-cuda-mps-control"
NOBODY = 65534

LINES = """
get_server_list
get_default_active_thread_percentage
set_default_active_thread_percentage 12.5
set_default_active_thread_percentage 0
set_default_active_thread_percentage 101
set_default_active_thread_percentage abc
set_default_active_thread_percentage -3
set_default_active_thread_percentage
set_default_active_thread_percentage 33.33
set_default_active_thread_percentage 50 60
get_default_device_pinned_mem_limit
get_default_device_pinned_mem_limit x
set_default_device_pinned_mem_limit
set_default_device_pinned_mem_limit 0
set_default_device_pinned_mem_limit 7 2G
get_default_device_pinned_mem_limit 7
get_default_client_priority
set_default_client_priority 1
get_default_client_priority
set_default_client_priority 7
set_default_client_priority
get_server_status 999
get_server_status
get_client_list 999
get_client_list
get_client_list abc
get_active_thread_percentage 999
get_active_thread_percentage
set_active_thread_percentage 999 10
set_active_thread_percentage 999
get_device_pinned_mem_limit 999 0
get_device_pinned_mem_limit 999
set_device_pinned_mem_limit 999 0 1G
terminate_client 999 1
terminate_client 999
terminate_client
shutdown_server 999
shutdown_server 999 -f
shutdown_server
ps
ps -p 999
get_device_client_list
get_device_client_list 999
start_server
start_server -uid
help
nonsense words here
 get_server_list
GET_SERVER_LIST
""".strip("\n").splitlines()
SIZES = (
    "4G",
    "4g",
    "4097M",
    "1023M",
    "1.5G",
    "-1M",
    "500K",
    "4194304K",
    "6143m",
    "0",
    "0M",
    "abc",
    "12345",
    "7",
)
for _size in SIZES:
    LINES += [f"set_default_device_pinned_mem_limit 0 {_size}", "get_default_device_pinned_mem_limit 0"]

OTHERS_LINES = """
get_server_list
get_default_active_thread_percentage
set_default_active_thread_percentage 10
set_default_device_pinned_mem_limit 0 1G
set_default_client_priority 1
set_active_thread_percentage 999 10
set_device_pinned_mem_limit 999 0 1G
shutdown_server 999
terminate_client 1 2
ps
quit
get_default_active_thread_percentage
""".strip("\n").splitlines()

#: lines whose answers differ between branches 535 and 550
BEFORE_550 = {"get_server_status 999", "get_server_status"}
ANYBODY_SETS_BEFORE_550 = {line for line in OTHERS_LINES if line.startswith("set_default_")}


class Daemon:
    """One MPS control daemon, simulated or NVIDIA's, in a folder of its own."""

    def __init__(self, program: str, folder: Path, env: Mapping[str, str]) -> None:
        folder.mkdir(mode=0o755)
        pipe, log = folder / "p", folder / "l"
        self.program = program
        self.env = {**env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        subprocess.run([program, "-d"], env=self.env, check=True, timeout=300)

    def hears(self, lines: list[str], before: tuple[str, ...] = ()) -> list[Answer]:
        """Sends each line to the daemon by a separate run of its control program."""
        return [self._line(line, before) for line in lines]

    def _line(self, line: str, before: tuple[str, ...]) -> Answer:
        done = subprocess.run(
            [*before, self.program],
            input=f"{line}\n",
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return line, done.returncode, done.stdout, done.stderr

    def quit(self) -> None:
        self._line("quit", ())


@needs("debian-archive", "root")
@pytest.mark.parametrize("branch", ["535", "550"])
def test_the_simulated_mps_daemon_answers_as_the_real_one(
    sim_node: Make, short_folder: Path, branch: str
) -> None:
    node = sim_node("h200x1")
    real = Daemon(control_program(branch), short_folder / "r", dict(os.environ))
    ours = Daemon(str(node.build / "sim/bin" / CONTROL), short_folder / "o", node.environment())
    try:
        old = BEFORE_550 if branch == "535" else set()
        compare(ours.hears(LINES), real.hears(LINES), old)
        other = tuple(as_user(NOBODY, NOBODY))
        old = ANYBODY_SETS_BEFORE_550 if branch == "535" else set()
        compare(ours.hears(OTHERS_LINES, other)[:-1], real.hears(OTHERS_LINES, other)[:-1], old)
    finally:
        real.quit()
        ours.quit()
    assert ours.hears(["get_server_list"]) == real.hears(["get_server_list"])  # no client is connected


def compare(ours: list[Answer], reals: list[Answer], apart: set[str]) -> None:
    assert [a for a in ours if a[0] not in apart] == [a for a in reals if a[0] not in apart]
    assert all(a != b for a, b in zip(ours, reals, strict=True) if a[0] in apart)
