"""vgpud's daemons by fork from a process that has imported all of it: a start without 0.4 s of imports.

`start(environment, stderr)` is `Popen([python, "-m", "vgpud.daemon"], ...)`, as far as tests look at it. The
process is a child of the one that forks, whose command line and first environment are what /proc shows of it.
What the dynamic loader reads when a program starts must be the same for all (LD_LIBRARY_PATH, LD_PRELOAD): a
start with another needs a program of its own.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from tests.demo.node import ROOT

_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_MESSAGE = 1 << 18  # bytes; an environment fits


class Forked:
    """What the tests use of subprocess.Popen."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told  # its pid, and its exit status when it has ended
        self.pid = int(self._receive())
        self.returncode: int | None = None

    def _receive(self) -> bytes:
        word = self._told.recv(64)
        if not word:
            raise RuntimeError("the process that forks the tests' daemons has ended")
        return word

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(["vgpud"], timeout or 0)
        return status

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], (), (), timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._receive()))
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(environment: Mapping[str, str], stderr: int) -> Forked:
    """A daemon in this environment that writes its log to `stderr`, a descriptor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        loader = tuple(environment.get(name, "") for name in _LOADER)
        asked = json.dumps(dict(environment)).encode()
        socket.send_fds(_forker(loader), [asked], [theirs.fileno(), stderr])
    return Forked(ours)


@cache
def _forker(loader: tuple[str, ...]) -> socket.socket:
    """One for each test process; it ends with it, as its end of the connection then closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, **{n: v for n, v in zip(_LOADER, loader, strict=True) if v}}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.prepared", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
    atexit.register(_end, process, ours)
    return ours


def _end(process: "subprocess.Popen[bytes]", line: socket.socket) -> None:
    line.close()
    process.wait()


def _serve(line: socket.socket) -> int:
    """Forks until the test process has ended. Returns in each daemon, with its exit status."""
    from vgpud import daemon

    running: dict[int, socket.socket] = {}
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([line.fileno(), ended], (), ())[0]
        if ended in ready:
            os.read(ended, 4096)
            _tell(running)
        if line.fileno() not in ready:
            continue
        asked, fds, _, _ = socket.recv_fds(line, _MESSAGE, 2)
        if not asked:
            return 0
        tell = socket.socket(fileno=fds[0])
        if pid := os.fork():
            os.close(fds[1])
            tell.send(str(pid).encode())
            running[pid] = tell
            continue
        for other in (line, tell, *running.values()):
            other.close()
        os.close(ended)
        _become(json.loads(asked), fds[1], wake)
        return daemon.main()


def _tell(running: dict[int, socket.socket]) -> None:
    """The exit statuses of daemons that have ended to the tests that started them."""
    for pid, tell in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid), suppress(BrokenPipeError):
                tell.send(str(status).encode())


def _become(environment: dict[str, str], stderr: int, wake: int) -> None:
    """What exec would have done."""
    signal.set_wakeup_fd(-1)
    os.close(wake)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    sys.argv[:] = ["vgpud"]


if __name__ == "__main__":
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
