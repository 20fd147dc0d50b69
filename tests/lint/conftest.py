"""Syntax trees of all modules, which the tests of a file share."""

import gc
from collections.abc import Iterator

import pytest

from tests.lint.test_house import tree


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Disables garbage collection, which would go through all trees again and again. Parsing then takes a
    quarter of the time. Drops the trees after the last test of a file.
    """
    gc.disable()
    yield
    tree.cache_clear()
    gc.enable()
