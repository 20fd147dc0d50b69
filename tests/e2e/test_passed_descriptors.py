"""A caller passes sockets that linger for an hour, and closes its own copies. The kernel drops them within
vgpud's own receive or close.
"""

import signal
import socket
import sys
from contextlib import ExitStack
from functools import partial

import pytest

from tests import oldkernel
from tests.e2e.conftest import NodeMaker
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


@pytest.mark.parametrize("before", [[], oldkernel.words()], ids=["kernel", "kernel before 6.16"])
def test_lingering_sockets_that_a_caller_passes_do_not_stop_vgpud(
    make_node: NodeMaker, before: list[str]
) -> None:
    """Each connection has some that vgpud drops when it receives, and some when it closes."""
    node = make_node()
    node.command = [*before, sys.executable, "-m", "vgpud.daemon"]
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
