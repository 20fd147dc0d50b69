"""Starts vgpud and vgpuctl by a fork of a process that has imported all modules, which saves the import time.

`daemon(...)` replaces `Popen([python, "-m", "vgpud.daemon"], ...)`, and `ctl(...)` the same for `vgpud.ctl`.
The new process is a child of the forking process, and /proc shows the latter's command line and environment.
The dynamic loader reads LD_LIBRARY_PATH and LD_PRELOAD only when a program starts, so each value of them
has its own forking process.
"""

import atexit
import ctypes
import gc
import json
import logging
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import NoReturn, TextIO

# not from tests.simnode, which imports pytest: each fork would copy its page tables
ROOT = Path(__file__).parents[1]

_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")
# gRPC reads these variables when it is imported. vgpuctl sets them before its own import of gRPC. Without
# them `vgpuctl run` may print an error: during its exec the kernel refuses (EAGAIN) a thread that gRPC
# starts.
_GRPC = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
# SIGKILL leaves no time to write coverage. A process whose coverage is measured catches this signal, writes
# its counts and kills itself.
_COUNTED_KILL = signal.SIGRTMIN + 9
_COUNTED_KILL_SECONDS = 20
User = tuple[int, int, Sequence[int]]  # uid, gid, supplementary groups
_MESSAGE = 1 << 18  # bytes of a message; large enough for an environment
# linux/prctl.h and linux/capability.h
_PR_SET_KEEPCAPS, _CAPABILITY_VERSION_3, _DAC_READ_SEARCH = 8, 0x20080522, 1 << 2


class Forked:
    """The part of subprocess.Popen that the tests use."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told  # a connection that receives the pid, and at the end the exit status
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
        if self.returncode is None and _readable((self._told.fileno(),), timeout):
            self.returncode = os.waitstatus_to_exitcode(int(self._receive()))
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if number == signal.SIGKILL and _catches(self.pid, _COUNTED_KILL):
            self._send(_COUNTED_KILL)
            self._look(_COUNTED_KILL_SECONDS)
        self._send(number)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(
                ProcessLookupError
            ):  # the process has ended, and its exit status has not arrived yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _catches(pid: int, number: int) -> bool:
    """Has the process a handler for this signal (proc(5), SigCgt)? An exec removes the handler."""
    try:
        words = Path(f"/proc/{pid}/status").read_text().split()
    except OSError:
        return False
    return bool(int(words[words.index("SigCgt:") + 1], 16) >> (number - 1) & 1)


class Command(Forked):
    """A process with pipes, and its standard error in a file or a pipe."""

    def __init__(self, told: socket.socket, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        super().__init__(told)
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def communicate(self, words: str = "", /, timeout: float | None = None) -> tuple[str, str]:
        """Writes `words`, closes standard input and waits for the end. Returns the output that was not read
        yet, and closes its files: a worker has at most some thousand descriptors.
        """
        with suppress(BrokenPipeError):
            self.stdin.write(words)
            self.stdin.close()
        said = [""]
        reader = Thread(target=lambda: said.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(["vgpuctl"], timeout or 0)
        self.wait(timeout)
        with self.stdout, self.stderr:
            if self.stderr.seekable():
                self.stderr.seek(0)
            return "".join(said), self.stderr.read()


def daemon(environment: Mapping[str, str], stderr: int, *arguments: str) -> Forked:
    """Starts a daemon with this environment that writes its log to the descriptor `stderr`."""
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is wanted
        return program("vgpud.daemon", arguments, environment, nothing.fileno(), stderr)


def program(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    stderr: int,
    stdout: int = 1,
) -> Forked:
    """Starts a module of vgpud with these descriptors as its standard files."""
    return Forked(_fork(module, arguments, environment, (stdin, stdout, stderr)))


def ended_daemon(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a daemon until it ends by itself. Returns its exit code and its standard error."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        code = daemon(environment, errors.fileno(), *arguments).wait(300)
        errors.seek(0)
        return subprocess.CompletedProcess(["vgpud", *arguments], code, "", errors.read())


def ctl(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    loader: Mapping[str, str] | None = None,
    *,
    pipe: bool = False,
    user: User | None = None,
) -> Command:
    """Starts vgpuctl. Its standard error is a file, or a pipe on request. The forking process is that of
    `loader` if given, because vgpuctl itself loads no library of a node.
    """
    stdin, ours = os.pipe()
    theirs, stdout = os.pipe()
    if pipe:
        reader, stderr = os.pipe()
        errors: TextIO = os.fdopen(reader)
    else:
        errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - as long as the process
        stderr = os.dup(errors.fileno())
    told = _fork("vgpud.ctl.main", arguments, environment, (stdin, stdout, stderr), loader, user)
    for number in (stdin, stdout, stderr):
        os.close(number)
    return Command(told, os.fdopen(ours, "w"), os.fdopen(theirs), errors)


def _fork(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: tuple[int, int, int],
    loader: Mapping[str, str] | None = None,
    user: User | None = None,
) -> socket.socket:
    """Forks a process with `files` as its standard input, output and error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        asked = json.dumps([module, list(arguments), dict(environment), str(ROOT), user]).encode()
        line = _line(environment if loader is None else loader)
        socket.send_fds(line, [asked], [theirs.fileno(), *files])
    return ours


def line_to(environment: Mapping[str, str]) -> int:
    """A descriptor by which other programs start vgpuctl (tests/docs/vgpuctl.py)."""
    return _line(environment).fileno()


def _line(environment: Mapping[str, str]) -> socket.socket:
    return _forker(tuple(environment.get(name, "") for name in _LOADER))


@cache
def _forker(loader: tuple[str, ...]) -> socket.socket:
    """Returns the connection to the forking process for these loader variables. Each test process has one
    forking process for each value of them, which ends when the test process closes the connection.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, **_GRPC, **{n: v for n, v in zip(_LOADER, loader, strict=True) if v}}
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
    line.shutdown(socket.SHUT_RDWR)  # shutdown and not only close, because other programs may hold the socket
    line.close()
    process.wait()


def _import_all() -> None:
    """Imports all modules, fills the caches of what each start does, and exempts their objects from garbage
    collection, so forks need not copy their pages.
    """
    gc.disable()  # a collection would visit the modules, which live to the end
    from vgpud import ctl, daemon  # noqa: F401
    from vgpud.remote import accept, door, entry, session  # noqa: F401

    for module in pkgutil.iter_modules(ctl.__path__, "vgpud.ctl."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for name in ("vgpud.api.client", "grpc._channel", "grpc.aio"):
        import_module(name)
    from tests.planner.cards import H200_PROFILES
    from vgpud.ctl.parse import parse
    from vgpud.hardware.compute import presumed, with_compute
    from vgpud.model.errors import VgpuError
    from vgpud.planner.geometry import geometry_for
    from vgpud.policy.load import load
    from vgpud.serve.documents import adapter
    from vgpud.serve.dra.prepared import Prepared
    from vgpud.serve.kubelet.holds import Hold
    from vgpud.settings import load_settings

    parse(["ls"])
    for kind in (Hold, Prepared):
        adapter(kind)
    # the profiles as vgpud reads them on a simulated node, whose NVML names them without "MIG "
    bare = [replace(one, name=one.name.removeprefix("MIG "), compute=()) for one in H200_PROFILES]
    geometry_for(tuple(with_compute(one, presumed(one)) for one in sorted(bare, key=lambda one: one.id)))
    with suppress(VgpuError):  # the environment of the tests' own process may be invalid for vgpud
        load(load_settings().policy_paths())
    gc.collect()
    gc.freeze()
    gc.enable()


def _readable(descriptors: Iterable[int], timeout_seconds: float | None = None) -> set[int]:
    """The descriptors that can be read, after a wait for the first one. select(2) takes no descriptor above
    1023.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return {ready for ready, _ in waiting.poll(None if timeout_seconds is None else timeout_seconds * 1000)}


def _serve(line: socket.socket) -> int:
    """Forks on request until the test process has ended."""
    _import_all()
    running: dict[int, socket.socket] = {}
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = _readable((line.fileno(), ended))
        if ended in ready:
            os.read(ended, 4096)
            _tell(running)
        if line.fileno() not in ready:
            continue
        asked, fds, _, _ = socket.recv_fds(line, _MESSAGE, 4)
        if not asked:
            return 0
        tell = socket.socket(fileno=fds[0])
        if pid := os.fork():
            for fd in fds[1:]:
                os.close(fd)
            tell.send(str(pid).encode())
            running[pid] = tell
            continue
        for other in (line, tell, *running.values()):
            other.close()
        os.close(ended)
        os.close(wake)
        module, arguments, environment, folder, user = json.loads(asked)
        os.chdir(folder)
        if user is not None:
            _change_user(*user)
        _become(module, arguments, environment, fds[1:])


def _tell(running: dict[int, socket.socket]) -> None:
    """Sends the exit statuses of ended programs to the tests that started them."""
    for pid, tell in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid), suppress(BrokenPipeError):
                tell.send(str(status).encode())


def _change_user(uid: int, gid: int, groups: list[int]) -> None:
    """Does what the command of otheruser.as_user does, except that an exec drops the capability."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    kept = libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # the effective, permitted and inheritable capabilities, by their lower and their upper 32 bits
    only = (ctypes.c_uint32 * 6)(_DAC_READ_SEARCH, _DAC_READ_SEARCH, 0, 0, 0, 0)
    if kept != 0 or libc.capset(header, only) != 0:
        raise OSError(ctypes.get_errno(), "cannot keep CAP_DAC_READ_SEARCH")


def _count_when_killed() -> None:
    """Lets the process write its coverage before it is killed by a test, or by itself (a fault point)."""
    from coverage import Coverage

    kill, counting = os.kill, Coverage.current()
    assert counting is not None

    def counted_kill(pid: int, number: int) -> None:
        if (pid, number) == (os.getpid(), signal.SIGKILL):
            counting.stop()
            counting.save()
        kill(pid, number)

    os.kill = counted_kill
    signal.signal(_COUNTED_KILL, lambda *_: counted_kill(os.getpid(), signal.SIGKILL))


def _become(module: str, arguments: list[str], environment: dict[str, str], files: list[int]) -> NoReturn:
    """Does in this process what an exec of the module would do, and calls its main(). Skips the interpreter's
    teardown, which would copy all imported pages.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: PTH123, SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    sys.argv[:] = [module.split(".")[1], *arguments]
    # /proc/self/environ shows the forking process's environment
    first = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    import_module("vgpud.ctl.run").initial_environment = lambda: first  # type: ignore[attr-defined]
    if "coverage" in sys.modules:
        _count_when_killed()
    code = 1
    try:
        code = import_module(module).main()
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
