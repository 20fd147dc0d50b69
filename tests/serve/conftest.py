from collections.abc import Iterator

import pytest

from tests.serve.live import Live
from vgpud.api.client import Client


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live()
    yield made
    made.close()


@pytest.fixture
def admin(live: Live) -> Iterator[Client]:
    with Client(live.admin, 300) as client:
        yield client


@pytest.fixture
def tenant(live: Live) -> Iterator[Client]:
    with Client(live.tenant, 300) as client:
        yield client


@pytest.fixture
def reader(live: Live) -> Iterator[Client]:
    with Client(live.ro, 300) as client:
        yield client
