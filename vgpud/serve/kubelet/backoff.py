"""How long a resource is offered from one card alone, after a pod that fitted none. Pure, but for the clock.

The scheduler knows a node's sum. A pod that fits the sum and no card fails at its admission, and its
controller makes another one at once: without a back-off, ten in a second.
"""

from dataclasses import dataclass

from vgpud import clock

_FIRST_SECONDS = 30.0
_MOST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Span:
    until_seconds: float
    seconds: float


class Backoff:
    """By the name of a resource. A span is twice as long as the one before, if that ended just now."""

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}

    def refused(self, resource: str) -> None:
        """What a pod was given of it came from several cards. Within a span it was offered before."""
        now, last = clock.now(), self._spans.get(resource)
        if last is not None and now < last.until_seconds:
            return
        again = last is not None and now < last.until_seconds + last.seconds
        seconds = min(last.seconds * 2, _MOST_SECONDS) if last is not None and again else _FIRST_SECONDS
        self._spans[resource] = _Span(now + seconds, seconds)

    def holds(self, resource: str) -> bool:
        span = self._spans.get(resource)
        return span is not None and clock.now() < span.until_seconds
