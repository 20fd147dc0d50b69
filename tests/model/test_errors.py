"""Errors quote texts of callers, and these texts can be long."""

import pytest

from vgpud.model.errors import ErrorCode, VgpuError


@pytest.mark.parametrize("characters", [10, 1000, 1_000_000])
def test_the_texts_of_an_error_are_bounded_whatever_they_quote(characters: int) -> None:
    """An attack: refusals that quote long texts fill the log."""
    error = VgpuError(ErrorCode.BAD_REQUEST, "x" * characters, "y" * characters)
    for text in (error.sentence, error.hint, str(error)):
        assert len(text) <= 1010
    assert error.sentence.startswith("x" * min(characters, 1000))
