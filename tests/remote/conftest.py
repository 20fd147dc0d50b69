"""A GPU node with a door for remote slices."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NodeMaker, make_node, node_maker  # noqa: F401
from tests.remote.node import RemoteNode


@pytest.fixture
def remote(make_node: NodeMaker) -> Iterator[RemoteNode]:  # noqa: F811
    made = RemoteNode(make_node())
    yield made
    made.close()
