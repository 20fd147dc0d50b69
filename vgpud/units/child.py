"""Helpers as detached children, for a vgpud that systemd does not run: in a container, on a laptop, in a
test.

Each has a session of its own, its output in a log file, and a pid file that it writes itself before it
becomes the helper. Until then its standard input is the locked file of its name. So another caller, even a
new vgpud after a kill -9 of this one, finds either no helper or a complete pid file.
"""

import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import (
    Running,
    has_exited,
    is_alive,
    open_pidfd,
    parse_stat,
    read_stat,
    session_members,
)
from vgpud.units.base import UnitSpec, check_name, wait_ready, watch_exit

_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD")
_LOG_LINES = 5
_KILL_SECONDS = 10.0
# $0 is the pid file, "$@" the helper; the first line of /proc/PID/stat has the start time, which exec does
# not change
_LAUNCHER = 'read -r stat <"/proc/$$/stat" && printf "%s\\n" "$stat" >"$0" && exec "$@" </dev/null'


class ChildUnits:
    """See Units. Files are in `run_dir`/units: NAME.pid, NAME.log, NAME.lock."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "units"
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._children_lock = threading.Lock()

    def start(self, spec: UnitSpec) -> Running:
        """See Units.start. Stops a helper that does not become ready in time."""
        with self._locked(spec.name) as lock:
            running = self._find(spec.name)
            if running is None:
                spec.remove_leftovers()
                running = self._spawn(spec, lock)
        try:
            wait_ready(spec, running, lambda sentence: self._failure(spec.name, sentence))
        except VgpuError:
            self.stop(spec.name, 0.0)
            raise
        return running

    def stop(self, name: str, grace_seconds: float) -> None:
        """See Units.stop. Kills the helper's descendants in its session too."""
        with self._locked(name):
            running = self._find(name)
            if running is not None:
                self._end(running, grace_seconds)
            self._path(name, "pid").unlink(missing_ok=True)

    def running(self, name: str) -> Running | None:
        """See Units.running."""
        with self._locked(name):
            return self._find(name)

    def list(self, prefix: str = "") -> tuple[Running, ...]:
        """See Units.list."""
        if not self._folder.is_dir():
            return ()
        names = sorted(path.name.removesuffix(".pid") for path in self._folder.glob("*.pid"))
        found = (self.running(name) for name in names if name.startswith(prefix))
        return tuple(running for running in found if running is not None)

    def on_exit(self, name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """See Units.on_exit."""

        def gone(name: str) -> None:
            self._reap()
            callback(name)

        return watch_exit(self._find(name), name, gone)

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{check_name(name)}.{suffix}"

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """Locks the helper's name between threads and processes. Only closing unlocks: LOCK_UN would also
        remove the child's lock.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
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
        env = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        pid_file = self._path(spec.name, "pid")
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
        with self._children_lock:
            self._children[child.pid] = child
        stat = read_stat(child.pid)  # a child that is not reaped yet keeps its entry
        if stat is None:
            raise self._failure(spec.name, f"helper {spec.name} ended at once")
        return Running(spec.name, child.pid, stat.start_ticks)

    def _end(self, running: Running, grace_seconds: float) -> None:
        pidfd = open_pidfd(running)
        if pidfd is None:
            return
        left_behind = [*session_members(running.pid)]
        with pidfd:
            pidfd.send(signal.SIGTERM)
            if not has_exited(pidfd, grace_seconds):
                pidfd.send(signal.SIGKILL)
                if not has_exited(pidfd, _KILL_SECONDS):
                    raise VgpuError(
                        ErrorCode.HELPER_TIMEOUT,
                        f"helper {running.name} (pid {running.pid}) survives SIGKILL by {_KILL_SECONDS:g} s",
                        "it hangs in the kernel: look in the kernel log",
                    )
        for member in left_behind:
            member_fd = open_pidfd(member)
            if member_fd is not None:
                with member_fd:
                    member_fd.send(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        with self._children_lock:
            for pid in [pid for pid, child in self._children.items() if child.poll() is not None]:
                del self._children[pid]

    def _failure(self, name: str, sentence: str) -> VgpuError:
        path = self._path(name, "log")
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.exists() else []
        return VgpuError(ErrorCode.HELPER_FAILED, sentence, f"see {path}", tuple(lines))
