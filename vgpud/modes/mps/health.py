"""Judges the health of one daemon by its checks: pure, the time is a parameter."""

from dataclasses import dataclass, field
from enum import Enum, auto


class Verdict(Enum):
    FINE = auto()
    SAY = auto()  # report it: it is new
    WAIT = auto()  # it was reported, and is not old enough for action
    END = auto()


@dataclass
class Health:
    """The state between checks. All times are seconds of one clock."""

    _silent_since: float | None = None
    _faults: dict[int, float] = field(default_factory=dict)

    def answered(self) -> bool:
        """Records an answer. True if the check before had none."""
        was_silent = self._silent_since is not None
        self._silent_since = None
        return was_silent

    def silent(self, now: float, patience: float) -> Verdict:
        if self._silent_since is None:
            self._silent_since = now
            return Verdict.SAY
        return Verdict.END if now - self._silent_since >= patience else Verdict.WAIT

    def server(self, pid: int, state: str, now: float, patience: float) -> Verdict:
        """Judges a server's state. A server leaves FAULT by itself when all clients of that time
        have ended.
        """
        if state != "FAULT":
            self._faults.pop(pid, None)
            return Verdict.FINE
        since = self._faults.setdefault(pid, now)
        if since == now:
            return Verdict.SAY
        if now - since < patience:
            return Verdict.WAIT
        self._faults.pop(pid)
        return Verdict.END
