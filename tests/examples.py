"""How many examples a property test tries."""

from hypothesis import settings

_USUAL = 100  # of hypothesis, and of a run that does not explore


def examples(usual: int) -> int:
    """So many; `./dev test --explore` tries as many times more as it does of every other property."""
    return usual * settings().max_examples // _USUAL
