"""The number of examples of a property test."""

from hypothesis import settings

USUAL = 50  # examples of a property that names no number, in a run without --explore


def examples(usual: int) -> int:
    """Returns the number of examples for a test. `./dev test --explore` multiplies it like that of every
    other property.
    """
    return usual * settings().max_examples // USUAL
