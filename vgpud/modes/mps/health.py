"""Judges the health of one MPS control daemon by its checks. Pure: the time is a parameter."""

from dataclasses import dataclass, field
from enum import Enum, auto


class Verdict(Enum):
    FINE = auto()
    SAY = auto()  # the trouble is new: report it
    WAIT = auto()  # the trouble was reported, but is too recent for action
    END = auto()


@dataclass
class Health:
    """The health between two checks. All times are seconds of one clock."""

    _silent_since: float | None = None
    _faults: dict[int, float] = field(default_factory=dict)

    def answered(self) -> bool:
        """Records that the daemon answered. Returns True if it had not answered the check before."""
        was_silent = self._silent_since is not None
        self._silent_since = None
        return was_silent

    def silent(self, now: float, patience: float) -> Verdict:
        if self._silent_since is None:
            self._silent_since = now
            return Verdict.SAY
        return Verdict.END if now - self._silent_since >= patience else Verdict.WAIT

    def server(self, pid: int, state: str, now: float, patience: float) -> Verdict:
        """Judges a server by its state. A server leaves FAULT by itself when all clients that it had at the
        fault have ended.
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
