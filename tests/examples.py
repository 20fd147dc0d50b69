"""The number of examples of a property test."""

from hypothesis import settings

USUAL = 50  # the number of examples of a property test that names none, in a run without --explore


def examples(usual: int) -> int:
    """Returns the number of examples for a property test. `./dev test --explore` multiplies it."""
    return usual * settings().max_examples // USUAL
