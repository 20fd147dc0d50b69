"""Runs helpers as systemd units: the unit file has the command, the environment file its parameters.

A unit NAME.service must exist (a template serves NAME = PREFIX@INSTANCE) and have
`EnvironmentFile=-RUN_DIR/units/NAME.env`. `UnitSpec.argv` is ignored, because the unit has its own ExecStart.
"""

import asyncio
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import PidFd, Running, has_exited, look, open_pidfd, pin
from vgpud.units.base import UnitSpec, ask_until_answered, check_name, wait_ready, watch_exit

_COMMAND_SECONDS = 90.0  # timeout of systemctl: more than systemd's own limit for a start job
_KILL_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 1.0
_DONE = frozenset({0})
# accepted exit codes of systemctl stop; 5 means that the unit is not loaded, which counts as stopped
_GONE = frozenset({0, 5})
_UP = frozenset({"active", "reloading"})


class SystemdUnits:
    """Implements Units with systemd. `systemctl` is the program to call."""

    def __init__(self, run_dir: Path, systemctl: str = "systemctl") -> None:
        self._folder = run_dir / "units"
        self._systemctl = systemctl
        self._writing = threading.Lock()

    def start(self, spec: UnitSpec) -> Running:
        """Starts a helper: see Units.start. A helper that does not become ready is stopped."""
        running = self.running(spec.name)
        if running is None:
            spec.remove_leftovers()
            self._write_environment(spec)
            self._call("reset-failed", spec.name, allowed=None)
            self._call("start", spec.name)
        try:
            running = running or self.running(spec.name)
            if running is None:
                raise _failure(spec.name, f"helper {spec.name} ended at once")
            wait_ready(spec, lambda: _pin(running), lambda sentence: _failure(spec.name, sentence))
        except VgpuError:
            self.stop(spec.name, 0.0)
            raise
        return running

    def stop(self, name: str, grace_seconds: float) -> None:
        """Stops a helper: see Units.stop. systemd ends its descendants too (KillMode=control-group)."""
        try:
            running = self.running(name)
        except VgpuError:  # the kernel gives no answer about the helper, so systemd stops it without a check
            running = None
        self._call("stop", name, "--no-block", allowed=_GONE)
        pidfd = open_pidfd(running) if running is not None else None
        if running is not None and pidfd is not None:
            with pidfd:
                self._end(running, pidfd, grace_seconds)
        self._call("stop", name, allowed=_GONE)  # systemctl returns when the stop job is done
        self._environment(name).unlink(missing_ok=True)

    def _end(self, running: Running, pidfd: PidFd, grace_seconds: float) -> None:
        if has_exited(pidfd, grace_seconds):
            return
        self._call("kill", running.name, f"--signal={signal.SIGKILL.name}", allowed=None)
        if not has_exited(pidfd, _KILL_SECONDS):
            raise VgpuError(
                ErrorCode.HELPER_TIMEOUT,
                f"helper {running.name} (pid {running.pid}) still runs {_KILL_SECONDS:g} s after SIGKILL",
                "it hangs in the kernel: look in the kernel log",
            )

    def running(self, name: str) -> Running | None:
        """The running helper: see Units.running."""
        shown = self._call("show", name, "--property=ActiveState,MainPID")
        facts = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        pid = int(facts.get("MainPID", "0") or 0)
        if facts.get("ActiveState") not in _UP or not pid:
            return None
        stat = ask_until_answered(lambda: look(pid), name, _ANSWER_SECONDS)
        return Running(name, pid, stat.start_ticks) if stat is not None and stat.is_alive else None

    def list(self, prefix: str = "") -> tuple[Running, ...]:
        """The running helpers: see Units.list. Only units with an environment file are listed, because vgpud
        started these.
        """
        names = sorted(path.name.removesuffix(".env") for path in self._folder.glob("*.env"))
        found = (self.running(name) for name in names if name.startswith(prefix))
        return tuple(running for running in found if running is not None)

    def on_exit(self, name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls back at the helper's end: see Units.on_exit. A thread asks systemd, because it may be busy
        for seconds.
        """
        loop = asyncio.get_running_loop()
        undo: list[Callable[[], None]] = []  # functions that undo the watch; empty after they ran

        def look() -> None:
            loop.run_in_executor(None, self.running, name).add_done_callback(looked)

        def looked(answer: asyncio.Future[Running | None]) -> None:
            if not undo or answer.cancelled():
                return
            # systemctl failed, which proves nothing about the helper, so vgpud asks systemctl again
            if answer.exception() is not None:
                undo[:] = [loop.call_later(_LOOK_AGAIN_SECONDS, look).cancel]
            else:
                running = answer.result()
                undo[:] = [watch_exit(lambda: _pin(running), name, callback)]

        def take_back() -> None:
            while undo:
                undo.pop()()

        undo.append(lambda: None)
        look()
        return take_back

    def _environment(self, name: str) -> Path:
        return self._folder / f"{check_name(name)}.env"

    def _write_environment(self, spec: UnitSpec) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._environment(spec.name)
        lines = [f"{key}={_quoted(key, value)}\n" for key, value in spec.env.items()]
        temporary = path.with_suffix(".new")
        with self._writing:
            temporary.write_text("".join(lines))
            temporary.chmod(0o600)
            temporary.replace(path)

    def _call(self, verb: str, name: str, *options: str, allowed: frozenset[int] | None = _DONE) -> str:
        """Runs systemctl and returns its output. Exit codes in `allowed` count as success; None
        allows any.
        """
        argv = [self._systemctl, verb, *options, "--", f"{check_name(name)}.service"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        except OSError as error:
            raise _failure(name, f"cannot run {self._systemctl}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise VgpuError(
                ErrorCode.HELPER_TIMEOUT,
                f"systemctl {verb} {name} did not end within {_COMMAND_SECONDS:g} s",
                f"see `systemctl status {name}`",
            ) from error
        if allowed is not None and done.returncode not in allowed:
            lines = tuple(done.stderr.splitlines())
            raise _failure(name, f"systemctl {verb} {name} failed with {done.returncode}", lines)
        return done.stdout


def _pin(running: Running | None) -> PidFd | None:
    """Opens a pidfd of the helper; None if it has ended. Raises OSError if the kernel does not answer."""
    return pin(running.pid, running.start_ticks) if running is not None else None


def _quoted(key: str, value: str) -> str:
    r"""A line for EnvironmentFile= (systemd.exec(5)): the value is in double quotes, with \ before " \ $ and
    `.
    """
    if "\n" in value or "\0" in value:
        raise VgpuError(
            ErrorCode.BUG,
            f"the value of {key} contains a line break or a null byte",
            "report this with the journal of vgpud",
        )
    return '"' + "".join(f"\\{char}" if char in '"\\$`' else char for char in value) + '"'


def _failure(name: str, sentence: str, details: tuple[str, ...] = ()) -> VgpuError:
    return VgpuError(
        ErrorCode.HELPER_FAILED, sentence, f"see `systemctl status {name}` and its journal", details
    )
