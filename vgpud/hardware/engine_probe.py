"""Asks vgpu-engine-probe (native/probe/engine.c) if the arbiter can preempt the tenants of a device (engine
`cut`).

The probe is a separate process, because a driver call that fails may never return.
"""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vgpud.model.engine import Engine, EngineVerdict
from vgpud.proc import has_exited

# The probe ends itself after 30 s (SECONDS_AT_MOST) by a signal. vgpud waits this long, in case the signal is
# not delivered.
_SECONDS = 35.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LONGEST_WHY = 300


class EngineProbe:
    """Runs the probe. A lock in `folder` keeps two probes from disturbing each other. The lock is the probe's
    standard input, so it is held until the probe has ended, even if vgpud is killed.
    """

    def __init__(self, program: Path, folder: Path, seconds: float = _SECONDS) -> None:
        self._program = program
        self._folder = folder
        self._seconds = seconds

    def ask(self, device_uuid: str, boot_id: str, driver_version: str) -> EngineVerdict:
        """Probes a device and returns the verdict. The call usually takes about a second. The call blocks for
        at most twice `seconds` plus _KILL_SECONDS: it waits for another probe, for this probe, and for the
        end of this probe if it is killed. If the probe does not answer, the verdict says that it failed.
        """
        answer: dict[str, Any] = {}
        try:
            with self._locked() as lock:
                answer, why = self._run(device_uuid, lock)
        except TimeoutError:
            why = f"another probe did not end within {self._seconds:g} seconds"
        except OSError as error:
            why = f"{self._program} does not start: {(error.strerror or str(error)).lower()}"
        return EngineVerdict(
            engine=Engine.CUT if answer.get("engine") == "cut" else Engine.GATE,
            why=" ".join(why.split())[:_LONGEST_WHY],
            boot_id=boot_id,
            driver_version=driver_version,
            failed=not answer,
            off_us=float(answer.get("off_us", 0)),
            on_us=float(answer.get("on_us", 0)),
            context_mib=int(answer.get("context_mib", 0)),
        )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Takes the probe's lock and yields its descriptor. Raises TimeoutError and OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + self._seconds
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise TimeoutError from None
                    time.sleep(_POLL_SECONDS)
            yield fd
        finally:
            os.close(fd)

    def _run(self, device_uuid: str, lock: int) -> tuple[dict[str, Any], str]:
        """Runs the probe. Returns its answer, empty if there is none, and the reason. Raises OSError."""
        environment = {
            **os.environ,
            "CUDA_CACHE_DISABLE": "1",  # the driver must not write a cache into a home folder
            # a folder without an MPS daemon, so that the probe does not become an MPS client
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder),
        }
        process = subprocess.Popen(
            [str(self._program), device_uuid],
            stdin=lock,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        pidfd = os.pidfd_open(process.pid)
        try:
            if not has_exited(pidfd, self._seconds):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not has_exited(pidfd, _KILL_SECONDS):
                    return (
                        {},
                        f"the probe hangs in the driver, and still runs {_KILL_SECONDS:g} seconds "
                        "after SIGKILL",
                    )
                process.communicate()
                return {}, f"the probe did not answer within {self._seconds:g} seconds, and was killed"
            output, errors = process.communicate()
        finally:
            os.close(pidfd)
        return _parsed(process.returncode, output, errors)


def _parsed(status: int, output: bytes, errors: bytes) -> tuple[dict[str, Any], str]:
    try:
        answer = json.loads(output)
        figures = {name: answer[name] for name in ("off_us", "on_us", "context_mib")}
        return {"engine": str(answer["engine"]), **figures}, str(answer["why"])
    except (ValueError, KeyError, TypeError):
        said = errors.decode(errors="replace").strip().splitlines()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return {}, f"the probe ended with {how}: {said[-1] if said else 'no output'}"
