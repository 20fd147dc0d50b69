from pathlib import Path

import pytest

from tests.native.harness import GIB, GID, UID, UUIDS
from tests.simnode import sim_node  # noqa: F401
from vgpud.lease import DeviceLimits, write_lease


@pytest.fixture
def lease(tmp_path: Path) -> Path:
    """A lease of 1 GiB on the first device of the fake driver. No arbiter serves it."""
    return write_lease(tmp_path, "a1", [DeviceLimits(UUIDS[0], GIB)], uid=UID, gid=GID)
