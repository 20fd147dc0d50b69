"""How many examples a property test tries."""

from hypothesis import settings

_USUAL = 100  # the usual number of hypothesis, in a run without --explore


def examples(usual: int) -> int:
    """The number of examples; `./dev test --explore` multiplies it as it multiplies that of every other
    property.
    """
    return usual * settings().max_examples // _USUAL
