"""The actions of `vgpuctl top` on the selected allocation. Each asks the operator for a confirmation
first.
"""

import threading
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from vgpud.api.client import Client
from vgpud.ctl.connect import connect
from vgpud.model.errors import VgpuError

_PATIENCE_SECONDS = 600.0


class Action(NamedTuple):
    """An action on an allocation. `question` and `done` are sentences that name the allocation."""

    question: str
    during: str
    work: Callable[[Client, str], str]


def _suspend(client: Client, allocation: str) -> str:
    client.suspend(allocation)
    return f"{allocation} is suspended"


def _resume(client: Client, allocation: str) -> str:
    client.resume(allocation)
    return f"{allocation} is resumed"


ACTIONS = {
    "s": Action("suspend {}?", "suspending {}; vgpud goes on with it if you leave", _suspend),
    "r": Action("resume {}?", "resuming {}; vgpud goes on with it if you leave", _resume),
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
