"""The interface to helper processes, and functions that its two implementations share."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.proc import PidFd, Running, has_exited

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,199}")
_FIRST_POLL_SECONDS = 0.005
_LAST_POLL_SECONDS = 0.1
_LOOK_AGAIN_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class UnitSpec:
    """What is needed to start a helper. `argv` is its command line, which stays in the foreground; `env` is
    added to a small fixed environment.

    `ready` is called until it returns True. `files`, which the helper creates, are removed before the start,
    so that leftovers of an earlier run are not mistaken for the new ones.
    """

    name: str
    argv: tuple[str, ...]
    ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_seconds: float = 10.0
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)

    def remove_leftovers(self) -> None:
        """Removes leftovers of an earlier run. Precondition: the helper does not run."""
        for path in self.files:
            if not path.is_dir():
                path.unlink(missing_ok=True)


class Units(Protocol):
    """Helper processes by name. Thread-safe. All methods except `on_exit` block, so an event loop's thread
    must not call them.
    """

    def start(self, spec: UnitSpec) -> Running:
        """Starts the helper and waits until it is ready. If the helper is running already, it is returned
        unchanged.

        Raises VgpuError: HELPER_FAILED (with the end of its log in the details), HELPER_TIMEOUT.
        """

    def stop(self, name: str, grace_seconds: float) -> None:
        """Stops the helper by SIGTERM, and by SIGKILL after the grace period. Idempotent.

        Raises VgpuError(HELPER_TIMEOUT) if even SIGKILL does not end the helper.
        """

    def running(self, name: str) -> Running | None:
        """The running helper with this name; None if there is none."""

    def list(self, prefix: str = "") -> tuple[Running, ...]:
        """The running helpers whose names begin with `prefix`, by name."""

    def on_exit(self, name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls `callback(name)` in the running event loop when the helper ends, or soon after this call if
        it has ended already.

        Returns a function that cancels the callback.
        """


def check_name(name: str) -> str:
    """Returns `name`. Raises VgpuError(BUG) if it is not safe as a file name and unit name."""
    if _NAME.fullmatch(name) is None:
        raise VgpuError(ErrorCode.BUG, f"bad helper name {name!r}", "report this with the log of vgpud")
    return name


def ask_until_answered(question: Callable[[], T], name: str, seconds: float) -> T:
    """Asks the kernel `question` about the helper, and asks again after an OSError.

    An OSError says nothing about the helper. A question about a process that is in exec waits until the exec
    is done. On a busy host the process may get no processor meanwhile, so the question is given up. Raises
    VgpuError(HELPER_TIMEOUT) after `seconds`.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return question()
        except OSError as error:
            if time.monotonic() >= until:
                raise VgpuError(
                    ErrorCode.HELPER_TIMEOUT,
                    f"helper {name}: the kernel did not report its state within {seconds:g} s: "
                    f"{error.strerror}",
                    "try again when the host is less busy",
                ) from error
        time.sleep(_LAST_POLL_SECONDS)


def wait_ready(spec: UnitSpec, pin: Callable[[], PidFd | None], failed: Callable[[str], VgpuError]) -> None:
    """Waits until the helper is ready. If the helper ends before, raises the error that `failed` returns.

    `pin` returns a pidfd of the helper, or None if it has ended; it raises OSError if the kernel gives no
    answer. Raises VgpuError(HELPER_TIMEOUT) after `spec.ready_seconds`.
    """
    until = time.monotonic() + spec.ready_seconds
    pause = _FIRST_POLL_SECONDS
    pidfd = ask_until_answered(pin, spec.name, spec.ready_seconds)
    if pidfd is None:
        raise failed(f"helper {spec.name} ended at once")
    with pidfd:
        while not spec.ready():
            if has_exited(pidfd, pause):
                raise failed(f"helper {spec.name} ended before it was ready")
            if time.monotonic() >= until:
                raise VgpuError(
                    ErrorCode.HELPER_TIMEOUT,
                    f"helper {spec.name} was not ready within {spec.ready_seconds:g} s",
                    "look in its log for what it waits for",
                )
            pause = min(2 * pause, _LAST_POLL_SECONDS)


def watch_exit(
    pin: Callable[[], PidFd | None], name: str, callback: Callable[[str], None]
) -> Callable[[], None]:
    """Calls `callback` when the helper ends: watches its pidfd in the event loop's selector. See
    Units.on_exit, and wait_ready for `pin`.
    """
    loop = asyncio.get_running_loop()
    undo: list[Callable[[], None]] = []

    def watch() -> None:
        try:
            pidfd = pin()
        except OSError:  # a missing answer of the kernel does not prove that the helper has ended
            undo[:] = [loop.call_later(_LOOK_AGAIN_SECONDS, watch).cancel]
        else:
            undo[:] = [_watch(loop, pidfd, name, callback)]

    def take_back() -> None:
        undo[0]()

    watch()
    return take_back


def _watch(
    loop: asyncio.AbstractEventLoop, pidfd: PidFd | None, name: str, callback: Callable[[str], None]
) -> Callable[[], None]:
    if pidfd is None:
        return loop.call_soon(callback, name).cancel

    def forget() -> None:
        if not pidfd.closed:
            loop.remove_reader(pidfd)
            pidfd.close()

    def gone() -> None:
        forget()
        callback(name)

    loop.add_reader(pidfd, gone)
    return forget
