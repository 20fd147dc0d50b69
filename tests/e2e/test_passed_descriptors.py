"""Callers pass sockets whose last close hangs: they linger for an hour, or hold a file of the caller's own
file system. The caller closes its own copies, so that the kernel closes the sockets with the last copy of the
caller's connection.
"""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests import oldkernel
from tests.conditions import needs
from tests.e2e.conftest import NodeMaker
from tests.fusefile import never_written_back
from tests.lease.conftest import eventually
from tests.lingering import kernel_refuses_descriptors, lingering, passes
from vgpud.serve.runtime_wire import REQUEST

WORDS = {
    "ro.sock": b"PRI * HTTP/2.0\r\n",
    "vgpud.sock": b"PRI * HTTP/2.0\r\n",
    "metrics.sock": b"GET /metrics",
    "runtime.sock": bytes(REQUEST.size - 1),
}


def has_ended(line: socket.socket) -> bool:
    try:
        return line.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


KERNELS = pytest.mark.parametrize("before", [[], oldkernel.words()], ids=["kernel", "kernel before 6.16"])


@KERNELS
def test_passed_sockets_with_a_long_linger_time_do_not_stop_vgpud(
    make_node: NodeMaker, before: list[str]
) -> None:
    """Each connection passes several sockets. vgpud drops some of them when it receives the message, and the
    others when it closes the connection.
    """
    node = make_node()
    if before:
        node.command = [*before, *node.command]
    node.start()
    eventually(lambda: all((node.run_dir / door).exists() for door in WORDS))
    assert node.daemon is not None
    took, lines = set(), []
    with ExitStack() as stack:
        node.daemon.send_signal(signal.SIGSTOP)
        for door, word in WORDS.items():
            for _ in range(3):
                line = stack.enter_context(socket.socket(socket.AF_UNIX))
                line.connect(str(node.run_dir / door))
                line.setblocking(False)
                for _ in range(4):
                    if passes(line, word, stack.enter_context(lingering())):
                        took.add(door)
                lines.append(line)
        node.daemon.send_signal(signal.SIGCONT)
        node.ctl("status")
        for line in lines:
            line.shutdown(socket.SHUT_WR)
            eventually(partial(has_ended, line))
        node.ctl("status")
        node.stop()
    refuses = kernel_refuses_descriptors() and not before
    assert took == ({"runtime.sock"} if refuses else WORDS.keys())


@needs("root", "fuse")
def test_a_vgpud_that_fails_early_closes_no_descriptors_passed_through_systemds_socket(
    make_node: NodeMaker, tmp_path: Path
) -> None:
    node = make_node()
    command = f"export LISTEN_PID=$$; exec {sys.executable} -m vgpud.daemon 3<&0"
    named = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "runtime", "VGPUD_NVML_DEADLINE_SECONDS": "wrong"}
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        caller.connect(str(tmp_path / "s"))
        with never_written_back(tmp_path / "mount", 1) as (sockets, file):
            assert passes(caller, b"x", next(sockets))
            with (tmp_path / "log").open("w") as log:  # the keeper has it, too
                done = subprocess.run(
                    ["sh", "-c", command],
                    stdin=listener.fileno(),
                    env={**node.environment, **named},
                    stderr=log,
                    check=False,
                )
            assert "NVML_DEADLINE_SECONDS" in (tmp_path / "log").read_text()
            assert done.returncode == 78
            caller.setblocking(False)
            eventually(partial(has_ended, caller))  # vgpud has accepted the connection
            assert file.asked()  # the close waits, in the keeper
    eventually(lambda: helpers_of(node.run_dir) == [])  # the keeper has ended


def helpers_of(folder: Path) -> list[int]:
    """The keeper and receiver processes of the node whose sockets are in `folder`."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            name = (one / "cmdline").read_bytes().split(b"\0")[0]
            if (
                name in (b"vgpu-keeper", b"vgpu-receiver")
                and os.fsencode(folder) in (one / "environ").read_bytes()
            ):
                found.append(int(one.name))
        except OSError:
            continue
    return found


@needs("root", "fuse")
@KERNELS
def test_a_passed_file_whose_close_hangs_delays_neither_vgpud_nor_its_end(
    make_node: NodeMaker, tmp_path: Path, before: list[str]
) -> None:
    node = make_node()
    if before:
        node.command = [*before, *node.command]
    node.start()
    eventually(lambda: all((node.run_dir / door).exists() for door in WORDS))
    refuses = kernel_refuses_descriptors() and not before
    assert node.daemon is not None
    with ExitStack() as stack:
        sockets, file = stack.enter_context(never_written_back(tmp_path / "mount", 4 * len(WORDS)))

        def attack() -> None:
            took = set()
            for door, word in WORDS.items():
                line = stack.enter_context(socket.socket(socket.AF_UNIX))
                line.connect(str(node.run_dir / door))
                if passes(line, word, next(sockets)):
                    took.add(door)
            assert took == ({"runtime.sock"} if refuses else WORDS.keys())

        node.daemon.send_signal(signal.SIGSTOP)
        attack()
        node.daemon.send_signal(signal.SIGCONT)
        assert file.asked()  # a close waits
        node.ctl("status")
        # Each daemon ends while the attack's sockets are in its queues. Before it ends it may have accepted
        # these connections or not. The second daemon has never accepted a connection of `runtime.sock`.
        for end in (node.kill, node.kill, node.stop):
            node.daemon.send_signal(signal.SIGSTOP)
            attack()
            if end == node.stop:
                node.daemon.send_signal(signal.SIGCONT)
            end()
            node.start()
            node.ctl("status")
    node.stop()
    eventually(lambda: not helpers_of(node.run_dir))
