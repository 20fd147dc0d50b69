"""Fixtures: a GPU node with the door for remote slices (vgpud-remote)."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NodeMaker, make_node, node_maker  # noqa: F401
from tests.remote.node import RemoteNode


@pytest.fixture
def remote(make_node: NodeMaker) -> Iterator[RemoteNode]:  # noqa: F811
    made = RemoteNode(make_node())
    yield made
    made.close()


@pytest.fixture
def short(make_node: NodeMaker) -> Iterator[RemoteNode]:  # noqa: F811
    """A node on which the session of a disconnected client ends after a tenth of a second."""
    made = RemoteNode(make_node(), 'grace = "100ms"\nmax_sessions_per_user = 2')
    yield made
    made.close()
