"""A short run of the storm in tests/e2e/pool_storm.py."""

from pathlib import Path

import pytest

from tests.conditions import needs
from tests.e2e.pool_storm import run


@needs("driver-580")
@pytest.mark.parametrize("evictable", [False, True])
def test_no_memory_is_lost_when_tenants_are_suspended_moved_and_killed_at_random(
    tmp_path: Path, evictable: bool
) -> None:
    done = run(tmp_path, cycles=14, seed=5, cut_share=0.2, evictable=evictable).done
    assert sum(done.values()) == 14
    assert any("vgpud killed" in verb for verb in done)
