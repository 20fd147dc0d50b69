"""The actions of `vgpuctl top` on the selected allocation. Each asks the operator for a confirmation
first.
"""

import os
import signal
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from vgpud.api.client import Client
from vgpud.ctl.connect import connect
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted

_PATIENCE_SECONDS = 600.0


class Action(NamedTuple):
    """An action on an allocation. `question` and `during` have a place for the allocation's id. `work`
    returns a sentence on the result.
    """

    question: str
    during: str
    work: Callable[[Client, str], str]


def _suspend(client: Client, allocation: str) -> str:
    client.suspend(allocation)
    return f"{allocation} is suspended"


def _resume(client: Client, allocation: str) -> str:
    client.resume(allocation)
    return f"{allocation} is resumed"


def _pids(client: Client, allocation: str) -> frozenset[int]:
    return frozenset(one.pid for one in client.list_processes().processes if one.allocation_id == allocation)


def _kill(client: Client, allocation: str) -> str:
    """Ends the processes of an allocation by SIGTERM. Each pid is looked up again after its pidfd is
    opened, so that a reused pid gets no signal. Raises VgpuError(NOT_ALLOWED) for a process of another user.
    """
    ended = 0
    for pid in _pids(client, allocation):
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if pid in _pids(client, allocation):
                    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                    ended += 1
            except PermissionError:
                sentence = f"process {pid} of {allocation} belongs to another user"
                raise VgpuError(ErrorCode.NOT_ALLOWED, sentence, "call as root") from None
            finally:
                os.close(pidfd)
    return f"{counted(ended, 'process')} of {allocation} got SIGTERM"


ACTIONS = {
    "s": Action("suspend {}?", "suspending {}; vgpud goes on with it if you leave", _suspend),
    "r": Action("resume {}?", "resuming {}; vgpud goes on with it if you leave", _resume),
    "k": Action("end the processes of {} by SIGTERM?", "ending the processes of {}", _kill),
}


class Doing:
    """Runs one action at a time, in a separate thread. `said` is the line on the action's progress or
    result.
    """

    def __init__(self, arguments: Namespace) -> None:
        self._arguments = arguments
        self._thread: threading.Thread | None = None
        self.said = ""

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, action: Action, allocation: str) -> None:
        if self.is_busy:
            return
        self.said = action.during.format(allocation)
        self._thread = threading.Thread(target=self._run, args=(action, allocation), daemon=True)
        self._thread.start()

    def _run(self, action: Action, allocation: str) -> None:
        patient = Namespace(**{**vars(self._arguments), "timeout": _PATIENCE_SECONDS})
        try:
            with connect(patient) as client:
                self.said = action.work(client, allocation)
        except VgpuError as error:
            self.said = f"{error.sentence} (E{error.code.number})"
