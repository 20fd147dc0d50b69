"""A back-off after a pod that fitted no card: during it, a resource is offered from one card only. Pure
except for the clock.

The scheduler knows only the sum of a node's cards. A pod that fits the sum but no card fails at its
admission, and its controller creates another one at once: ten per second without a back-off.
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
    """The back-offs by resource name. A back-off is twice as long as the previous one if that has
    just ended.
    """

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}

    def refused(self, resource: str) -> None:
        """Records a pod whose ids came from several cards. It is ignored if it was scheduled before the
        present back-off.
        """
        now, last = clock.now(), self._spans.get(resource)
        if last is not None and now < last.until_seconds:
            return
        again = last is not None and now < last.until_seconds + last.seconds
        seconds = min(last.seconds * 2, _MOST_SECONDS) if last is not None and again else _FIRST_SECONDS
        self._spans[resource] = _Span(now + seconds, seconds)

    def holds(self, resource: str) -> bool:
        span = self._spans.get(resource)
        return span is not None and clock.now() < span.until_seconds
