"""A short run of the soak. `python -m tests.runtime.soak` runs it for longer."""

from pathlib import Path

from tests.conditions import needs
from tests.runtime.soak import soak


@needs("runc", "root")
def test_forty_containers_leave_nothing_behind(tmp_path: Path) -> None:
    assert soak(tmp_path, starts=40, restart_every=10, seed=7) == {}
