"""The chart on the front page agrees with the recorded figures."""

from tests.docs.chart import PICTURE, chart


def test_the_chart_is_what_the_recorded_figures_draw() -> None:
    assert PICTURE.read_text() == chart(), "run: python -m tests.docs.chart"
