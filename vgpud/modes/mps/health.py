"""Judges the health of one daemon from its checks: pure, the time is a parameter."""

from dataclasses import dataclass, field
from enum import Enum, auto


class Verdict(Enum):
    FINE = auto()
    SAY = auto()  # it is new
    WAIT = auto()  # it is known, and not old enough
    END = auto()


@dataclass
class Health:
    """All times in seconds of one clock."""

    _silent_since: float | None = None
    _faults: dict[int, float] = field(default_factory=dict)

    def answered(self) -> bool:
        """True if it did not the last time."""
        was_silent = self._silent_since is not None
        self._silent_since = None
        return was_silent

    def silent(self, now: float, patience: float) -> Verdict:
        if self._silent_since is None:
            self._silent_since = now
            return Verdict.SAY
        return Verdict.END if now - self._silent_since >= patience else Verdict.WAIT

    def server(self, pid: int, state: str, now: float, patience: float) -> Verdict:
        """A server leaves FAULT by itself once all clients of that time have ended."""
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
