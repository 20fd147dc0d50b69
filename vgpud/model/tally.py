"""Counters of the daemon since its start."""

from collections import Counter
from dataclasses import dataclass, field

# upper bounds in seconds: a preload slice takes milliseconds, a MIG instance under load ten seconds
BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Tally:
    """Counters of one daemon; `made_buckets` has one count for each interval of BUCKETS_SECONDS, not
    cumulative.
    """

    made: Counter[str] = field(default_factory=Counter)  # allocations, by mode
    refused: Counter[str] = field(default_factory=Counter)  # requests, by the error's name
    released: int = 0
    resized: int = 0
    failed: int = 0
    suspended: Counter[str] = field(
        default_factory=Counter
    )  # number by cause, for causes that are rules of the policy
    resumed: Counter[str] = field(default_factory=Counter)
    resume_waited_seconds: float = 0.0  # seconds from the wish to work until the resume was complete
    marked: Counter[str] = field(default_factory=Counter)  # allocations, by the mark's kind
    bypass_looks: int = 0
    stopped: int = 0  # marked allocations that the policy ended
    # moves by result: "done", or "back" if the tenant is on the old device again
    moved: Counter[str] = field(default_factory=Counter)
    made_seconds: float = 0.0
    made_buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_SECONDS) + 1))
    reload_succeeded: bool = True
    reload_unix_seconds: float = 0.0  # of the last successful reload, or of the start

    def took(self, seconds: float) -> None:
        """Counts the duration of one allocation."""
        at = next((i for i, bound in enumerate(BUCKETS_SECONDS) if seconds <= bound), len(BUCKETS_SECONDS))
        self.made_buckets[at] += 1
        self.made_seconds += seconds
