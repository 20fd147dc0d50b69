"""A whole vgpud on a simulated node, with MIG through its API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker, node_maker


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as make:
        yield make


@pytest.fixture
def node(make_node: NodeMaker) -> DemoNode:
    """A node with eight simulated H200 and mode auto. It is not started."""
    return make_node()
