"""Runs helpers as detached children, for a vgpud that systemd does not run: in a container, on a laptop, in a
test.

Each helper has its own session, its output in a log file, and a pid file that it writes itself before it
executes the helper's program. Until then its standard input is the locked file of its name. So another
caller, even a new vgpud after a kill -9 of this one, finds either no helper or a complete pid file.
"""

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import (
    PidFd,
    Running,
    has_exited,
    is_alive,
    parse_stat,
    pin,
    session_members,
)
from vgpud.units.base import UnitSpec, ask_until_answered, check_name, wait_ready, watch_exit

_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD")
_LOG_LINES = 5
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.01
# Shell code of the launcher: $0 is the pid file, "$@" the helper's command. The first line of /proc/PID/stat
# has the start time, which exec does not change.
_LAUNCHER = 'read -r stat <"/proc/$$/stat" && printf "%s\\n" "$stat" >"$0" && exec "$@" </dev/null'


class ChildUnits:
    """Implements Units with child processes. The files are in `run_dir`/units: NAME.pid, NAME.log,
    NAME.lock.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "units"
        self._children: dict[Running, subprocess.Popen[bytes]] = {}
        self._children_lock = threading.Lock()

    def start(self, spec: UnitSpec) -> Running:
        """Starts a helper: see Units.start. A helper that does not become ready in time is stopped."""
        with self._locked(spec.name) as lock:
            running = self._find(spec.name)
            if running is None:
                spec.remove_leftovers()
                running = self._spawn(spec, lock)
        try:
            wait_ready(spec, lambda: self._pin(running), lambda sentence: self._failure(spec.name, sentence))
        except VgpuError:
            self.stop(spec.name, 0.0)
            raise
        return running

    def stop(self, name: str, grace_seconds: float) -> None:
        """Stops a helper: see Units.stop. Its descendants in its session are killed too."""
        with self._locked(name):
            running = self._find(name)
            if running is not None:
                self._end(running, grace_seconds)
            self._path(name, "pid").unlink(missing_ok=True)

    def running(self, name: str) -> Running | None:
        """The running helper: see Units.running."""
        with self._locked(name):
            return self._find(name)

    def list(self, prefix: str = "") -> tuple[Running, ...]:
        """The running helpers: see Units.list."""
        if not self._folder.is_dir():
            return ()
        names = sorted(path.name.removesuffix(".pid") for path in self._folder.glob("*.pid"))
        found = (self.running(name) for name in names if name.startswith(prefix))
        return tuple(running for running in found if running is not None)

    def on_exit(self, name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls back at the helper's end: see Units.on_exit."""

        def gone(name: str) -> None:
            self._reap()
            callback(name)

        running = self._find(name)
        return watch_exit(lambda: self._pin(running) if running is not None else None, name, gone)

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{check_name(name)}.{suffix}"

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """Locks a helper's name against other threads and processes. The lock is released only by closing the
        file: LOCK_UN would also remove the child's lock.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._path(name, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _find(self, name: str) -> Running | None:
        self._reap()
        try:
            stat = parse_stat(self._path(name, "pid").read_bytes())
        except FileNotFoundError:
            return None
        if stat is None or not is_alive(stat.pid, stat.start_ticks):
            return None
        return Running(name, stat.pid, stat.start_ticks)

    def _spawn(self, spec: UnitSpec, lock: int) -> Running:
        """Starts a child and returns it once its pid file is complete. The kernel is asked nothing about the
        child: on a busy host it might not answer while the child is in exec (see ask_until_answered).
        """
        env = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        pid_file = self._path(spec.name, "pid")
        pid_file.unlink(missing_ok=True)
        with self._path(spec.name, "log").open("ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCHER, str(pid_file), *spec.argv],
                stdin=lock,
                stdout=output,
                stderr=output,
                env={**env, **spec.env},
                cwd="/",
                start_new_session=True,
            )
        try:
            running = self._registered(spec, child)
        except BaseException:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_KILL_SECONDS)
            raise
        with self._children_lock:
            self._children[running] = child
        return running

    def _registered(self, spec: UnitSpec, child: subprocess.Popen[bytes]) -> Running:
        """Waits until the child has written its pid file, up to `ready_seconds`."""
        pid_file, until = self._path(spec.name, "pid"), time.monotonic() + spec.ready_seconds
        while True:
            line = pid_file.read_bytes() if pid_file.exists() else b""
            stat = parse_stat(line) if line.endswith(b"\n") else None
            if stat is not None:
                return Running(spec.name, child.pid, stat.start_ticks)
            try:
                child.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if time.monotonic() < until:
                    continue
                raise VgpuError(
                    ErrorCode.HELPER_TIMEOUT,
                    f"helper {spec.name} was not started within {spec.ready_seconds:g} s",
                    "try again when the host is less busy",
                ) from None
            raise self._failure(spec.name, f"helper {spec.name} ended at once")

    def _pin(self, running: Running) -> PidFd | None:
        """Opens a pidfd of the helper; None if it has ended. Raises OSError if the kernel does not answer.

        The pid of a child that is not reaped cannot belong to a later process, so nothing else is asked.
        """
        with self._children_lock:
            child = self._children.get(running)
            if child is not None and child.poll() is None:
                return PidFd(os.pidfd_open(running.pid))
        return pin(running.pid, running.start_ticks)

    def _end(self, running: Running, grace_seconds: float) -> None:
        pidfd = ask_until_answered(lambda: self._pin(running), running.name, _KILL_SECONDS)
        if pidfd is None:
            return
        with pidfd, ExitStack() as opened:
            left_behind = [opened.enter_context(member) for member in session_members(running.pid)]
            pidfd.send(signal.SIGTERM)
            if not has_exited(pidfd, grace_seconds):
                pidfd.send(signal.SIGKILL)
                if not has_exited(pidfd, _KILL_SECONDS):
                    raise VgpuError(
                        ErrorCode.HELPER_TIMEOUT,
                        f"helper {running.name} (pid {running.pid}) still runs {_KILL_SECONDS:g} s "
                        "after SIGKILL",
                        "it hangs in the kernel: look in the kernel log",
                    )
            for member in left_behind:
                member.send(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        with self._children_lock:
            for ended in [one for one, child in self._children.items() if child.poll() is not None]:
                del self._children[ended]

    def _failure(self, name: str, sentence: str) -> VgpuError:
        path = self._path(name, "log")
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.exists() else []
        return VgpuError(ErrorCode.HELPER_FAILED, sentence, f"see {path}", tuple(lines))
