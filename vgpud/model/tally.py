"""The daemon's counters since its start."""

from collections import Counter
from dataclasses import dataclass, field

# Upper bounds, in seconds, of the histogram of the time that it takes to make an allocation. A slice in mode
# preload takes milliseconds, a MIG instance under load ten seconds.
BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Tally:
    """The counters. `made_buckets` has one count for each bound of BUCKETS_SECONDS, and one for longer times;
    the counts are not cumulative.
    """

    made: Counter[str] = field(default_factory=Counter)  # allocations made, by mode
    refused: Counter[str] = field(default_factory=Counter)  # requests refused, by the name of the error
    released: int = 0
    resized: int = 0
    failed: int = 0
    # suspensions by cause; only causes that are rules of the policy count
    suspended: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    # seconds from the time at which a tenant had work until it was resumed, summed up
    resume_waited_seconds: float = 0.0
    marked: Counter[str] = field(default_factory=Counter)  # allocations that got a mark, by kind of mark
    bypass_looks: int = 0
    stopped: int = 0  # marked allocations whose processes were ended as the policy demands
    # Moves by result: "done", or "back" if the move failed and was to be undone.
    moved: Counter[str] = field(default_factory=Counter)
    made_seconds: float = 0.0
    made_buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_SECONDS) + 1))
    reload_succeeded: bool = True
    reload_unix_seconds: float = 0.0  # time of the last successful reload of the policy, or of the start

    def took(self, seconds: float) -> None:
        """Counts how long it took to make one allocation."""
        at = next((i for i, bound in enumerate(BUCKETS_SECONDS) if seconds <= bound), len(BUCKETS_SECONDS))
        self.made_buckets[at] += 1
        self.made_seconds += seconds
